//! What a profile holds.

use serde_json::Value;

use crate::profiling::Cache;

fn numbers(of: &Value) -> Vec<f64> {
    of.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

#[test]
fn a_profile_has_curves_memory_and_everything_that_was_measured() {
    let cache = Cache::new();
    let file = cache.path().join("out.json");
    let first = cache.run(&["-o", file.to_str().unwrap()]).unwrap();
    assert!(first.status.success(), "{}", first.words());
    let profile = first.profile().unwrap();
    let block = &profile["cpu"]["blocks"][0];
    for curve in [&block["decode"], &block["prefill"], &profile["cpu"]["head"], &profile["embedding"]] {
        let times = numbers(&curve["ms"]);
        assert!(!times.is_empty() && times.iter().all(|ms| *ms > 0.0), "{curve}");
    }
    assert_eq!(block["decode"]["rows"], serde_json::json!([1, 2, 4, 8, 16, 32]));
    assert!(profile["hop_overhead_ms"].as_f64().unwrap() > 0.0);
    assert!(profile["memory"]["row_bytes"].as_u64().unwrap() > 0);
    let measured = &profile["measured"];
    let parts: Vec<&str> =
        measured["measurements"].as_array().unwrap().iter().map(|m| m["part"].as_str().unwrap()).collect();
    for part in ["decode", "prefill", "head", "without_head", "embedding", "hop"] {
        assert!(parts.contains(&part), "{part} is missing");
    }
    assert!(measured["peak_resident_bytes"].as_u64().unwrap() > 1 << 20);
    assert_eq!(measured["failures"], serde_json::json!([]));
    assert_eq!(std::fs::read_to_string(file).unwrap(), first.stdout);

    let kept = cache.run(&[]).unwrap();
    assert_eq!(kept.stdout, first.stdout, "a second run prints what the first has kept");
    assert!(!kept.words().contains("decode"), "and measures nothing: {}", kept.words());
}
