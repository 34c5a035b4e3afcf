//! `shoal bench testbed`, as a user runs it: a few requests through emulated devices. Whether a run agrees with its simulation is not
//! asserted here: a test shares the machine with others.

use std::fs;
use std::process::Command;

use serde_json::Value;
use tests::process::shoal_binary;

/// Exit code, standard output and standard error.
fn test_bed(args: &[&str]) -> (i32, String, String) {
    let all = [&["bench", "testbed"][..], args].concat();
    let output = Command::new(shoal_binary().unwrap()).args(all).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_plan_is_run_beside_its_simulation_and_not_run_again() {
    let folder = tempfile::tempdir().unwrap();
    let (results, page) = (folder.path().join("results.json"), folder.path().join("page.md"));
    let (results_at, page_at) = (results.to_str().unwrap(), page.to_str().unwrap());
    // One prefill replica of two stages, and three that decode.
    let few =
        ["--config", "5", "--plans", "els", "--requests", "3", "--time-scale", "0.05", "--model", "glassllm"];
    let args = [&few[..], &["--output", results_at, "--json"]].concat();
    let (code, stdout, stderr) = test_bed(&args);
    assert_eq!(code, 0, "{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let run = &report["runs"][0];
    assert_eq!(run["number"], 5);
    assert_eq!(run["objective"], "els");
    for side in ["simulated", "measured"] {
        for figure in ["ttft_s", "tpot_s", "end_s"] {
            assert!(run[side][figure].as_f64().unwrap() > 0.0, "{side} {figure}: {run}");
        }
    }
    assert_eq!(serde_json::from_str::<Value>(&fs::read_to_string(&results).unwrap()).unwrap(), report);
    // It is not run again, but shown and written.
    let args = [&few[..], &["--output", results_at, "--markdown", page_at]].concat();
    let (code, stdout, stderr) = test_bed(&args);
    assert_eq!(code, 0, "{stderr}");
    assert!(!stderr.contains("5:"), "{stderr}");
    assert!(stdout.contains("of 1 runs agree"), "{stdout}");
    assert!(fs::read_to_string(&page).unwrap().contains("8 devices, gpt-oss-20b, LZByteDance, 1 s"));
    // Nor are its results mixed with those of another load.
    let (code, _, stderr) = test_bed(&[&args[..], &["--seed", "7"]].concat());
    assert_eq!(code, 1);
    assert!(stderr.contains("seed 101"), "{stderr}");
}

#[test]
fn what_cannot_be_run_is_bad_usage() {
    for args in [&["--config", "13"][..], &["--time-scale", "0"], &["--plans", "best"], &["--requests", "0"]]
    {
        assert_eq!(test_bed(args).0, 2, "{args:?}");
    }
}
