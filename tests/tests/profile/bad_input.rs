//! What cannot be measured, said before anything is.

use crate::profiling::Cache;

#[test]
fn a_device_that_is_not_there_is_named_with_those_that_are() {
    let refused = Cache::new().run(&["--device", "CUDA7"]).unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let words = refused.words();
    assert!(words.contains("\"CUDA7\"") && words.contains("CPU"), "{words}");
}

#[test]
fn a_model_whose_blocks_do_not_fit_is_refused_with_the_bytes() {
    let refused = Cache::new().run(&["--reserve", "1000000GiB"]).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let words = refused.words();
    for part in ["does not fit CPU", "its weights are", "0 B are available", "kept in reserve"] {
        assert!(words.contains(part), "{part}: {words}");
    }
}

#[test]
fn an_amount_of_memory_that_is_none_is_refused() {
    let refused = Cache::new().run(&["--reserve", "two bananas"]).unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(refused.words().contains("two bananas"), "{}", refused.words());
}
