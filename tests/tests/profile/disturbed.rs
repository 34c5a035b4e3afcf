//! Measurements that are broken off.

use tests::process::signal;

use crate::profiling::Cache;

#[test]
fn a_measurement_whose_process_dies_is_recorded_and_the_rest_goes_on() {
    let cache = Cache::new();
    let mut running = cache.start(&[]).unwrap();
    // Once it has measured, it is no longer on its way to where it could.
    running.wait_for(r#"decode at depth 0","done":1,"#).unwrap();
    signal(running.worker().expect("a measuring process"), "KILL").unwrap();
    let finished = running.finish().unwrap();
    assert!(finished.status.success(), "{}", finished.words());
    let profile = finished.profile().unwrap();
    let failures = profile["measured"]["failures"].as_array().unwrap();
    let killed = failures.iter().filter(|failure| failure["reason"].as_str().unwrap().contains("signal 9"));
    assert_eq!(killed.count(), 1, "{failures:?}");
    assert!(profile["cpu"]["blocks"][0]["decode"]["rows"].as_array().unwrap().len() >= 5);
}

#[test]
fn an_interrupted_profile_keeps_its_samples_and_goes_on_from_there() {
    let cache = Cache::new();
    let mut running = cache.start(&[]).unwrap();
    running.wait_for("CPU: head").unwrap();
    running.interrupt().unwrap();
    let interrupted = running.finish().unwrap();
    assert_eq!(interrupted.status.code(), Some(1), "{}", interrupted.words());
    assert!(interrupted.words().contains("what was measured is kept in"), "{}", interrupted.words());
    assert!(interrupted.stdout.is_empty());
    let kept: Vec<_> = std::fs::read_dir(cache.profiles()).unwrap().collect();
    assert_eq!(kept.len(), 1, "{kept:?}");

    let resumed = cache.run(&[]).unwrap();
    assert!(resumed.status.success(), "{}", resumed.words());
    assert!(!resumed.words().contains("decode at depth"), "measured before: {}", resumed.words());
    let profile = resumed.profile().unwrap();
    assert!(profile["cpu"]["blocks"][0]["decode"]["ms"].as_array().is_some());
    let kept: Vec<_> =
        std::fs::read_dir(cache.profiles()).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(kept.len(), 1, "samples are not kept beside the finished profile: {kept:?}");
}
