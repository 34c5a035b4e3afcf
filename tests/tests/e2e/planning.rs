//! The planner's commands, as a user runs them: on the published examples, and on input that cannot be planned.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tests::process::shoal_binary;

fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/examples").join(name);
    path.to_str().unwrap().to_owned()
}

/// Exit code, standard output and standard error.
fn shoal(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(shoal_binary().unwrap()).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// The options that name the example problem, with one file replaced.
fn problem(replaced: &str, by: Option<&Path>) -> Vec<String> {
    let files = [
        ("--cluster", "cluster.json"),
        ("--model", "model.json"),
        ("--workload", "workload.toml"),
        ("--profiles", "profiles.json"),
    ];
    let file = |(option, name): (&str, &str)| {
        let path = if option == replaced { by.map(|path| path.to_str().unwrap().to_owned()) } else { None };
        [option.to_owned(), path.unwrap_or_else(|| example(name))]
    };
    files.into_iter().flat_map(file).collect()
}

fn run(command: &str, problem: &[String], more: &[&str]) -> (i32, String, String) {
    let all = [&[command][..], &problem.iter().map(String::as_str).collect::<Vec<_>>(), more].concat();
    shoal(&all)
}

/// An example with something replaced where it comes first.
fn changed(folder: &Path, name: &str, from: &str, to: &str) -> PathBuf {
    let text = fs::read_to_string(example(name)).unwrap();
    assert!(text.contains(from), "{name} has no {from}");
    let path = folder.join(name);
    fs::write(&path, text.replacen(from, to, 1)).unwrap();
    path
}

#[test]
fn the_examples_are_planned_drawn_and_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let (plan, svg) = (folder.path().join("plan.json"), folder.path().join("plan.svg"));
    let files = problem("", None);
    let more = ["--json", "--compare", "-o", plan.to_str().unwrap(), "--svg", svg.to_str().unwrap()];
    let (code, stdout, stderr) = run("plan", &files, &more);
    assert_eq!(code, 0, "{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(report["method"], "exact");
    let compared = report["comparison"].as_array().unwrap();
    assert_eq!(compared.len(), 4);
    assert!(!report["changes"].as_array().unwrap().is_empty());
    let written: Value = serde_json::from_str(&fs::read_to_string(&plan).unwrap()).unwrap();
    assert_eq!(written, report["plan"]);
    assert!(fs::read_to_string(&svg).unwrap().starts_with("<svg "));

    let (code, stdout, stderr) = run(
        "simulate",
        &files,
        &["--plan", plan.to_str().unwrap(), "--trace", &example("trace.jsonl"), "--json"],
    );
    assert_eq!(code, 0, "{stderr}");
    let outcome: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(outcome["requests"], 40);
    assert!(outcome["wait_s"]["max"].as_f64().unwrap() >= outcome["wait_s"]["mean"].as_f64().unwrap());
    let decoded: u64 =
        outcome["replicas"].as_array().unwrap().iter().map(|r| r["requests_decoded"].as_u64().unwrap()).sum();
    assert_eq!(decoded, 40);
}

#[test]
fn tables_for_people_name_devices_masters_and_limits() {
    let files = problem("", None);
    let (code, stdout, stderr) = run("plan", &files, &["--quick"]);
    assert_eq!(code, 0, "{stderr}");
    for word in ["role", "G-C", "limited by", "*", "TTFT", "next best"] {
        assert!(stdout.contains(word), "no {word} in:\n{stdout}");
    }
    let (code, stdout, stderr) = run("simulate", &files, &["--plan", &example("plan.json")]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("waiting for a slot") && stdout.contains("computing"), "{stdout}");
}

#[test]
fn a_node_can_be_left_out_and_a_node_that_is_not_there_is_bad_usage() {
    let files = problem("", None);
    let (code, stdout, stderr) = run("plan", &files, &["--exclude", "studio", "--quick", "--json"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(!stdout.contains("\"studio\""), "{stdout}");
    let (code, _, stderr) = run("plan", &files, &["--exclude", "stduio"]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("stduio") && stderr.contains("mini-1"), "{stderr}");
}

#[test]
fn what_cannot_be_planned_is_said_with_its_file_and_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("--workload", "workload.toml", "slot_context = 8192", "slot_context = 16000000", "slot context of"),
        (
            "--workload",
            "workload.toml",
            "min_tokens_per_second = 7",
            "min_tokens_per_second = 900",
            "900.0 tok/s",
        ),
        ("--workload", "workload.toml", "poisson_ms = 2500", "poisson_ms = 0", "time between requests"),
        ("--workload", "workload.toml", "prompt =", "prmopt =", "prmopt"),
        ("--cluster", "cluster.json", "\"mbit_per_s\": 420", "\"mbit_per_s\": 0", "laptop"),
        ("--profiles", "profiles.json", "\"b6767\"", "\"b1\"", "b1"),
        ("--profiles", "profiles.json", "0.1061", "0.0", "workstation/gpu"),
        (
            "--profiles",
            "profiles.json",
            "\"device\": \"studio\"",
            "\"device\": \"stduio\"",
            "studio has no profile",
        ),
        ("--model", "model.json", "\"full\"", "\"recurrent\"", "no curve"),
        ("--model", "model.json", "\"count\": 48", "\"count\": 4800", "at most"),
    ];
    for (option, name, from, to, said) in cases {
        let path = changed(folder.path(), name, from, to);
        let (code, _, stderr) = run("plan", &problem(option, Some(&path)), &["--quick"]);
        assert_eq!(code, 1, "{to}: {stderr}");
        assert!(stderr.contains(said), "{to}: {stderr}");
    }
    let missing = folder.path().join("nowhere.json");
    let (code, _, stderr) = run("plan", &problem("--cluster", Some(&missing)), &[]);
    assert_eq!(code, 1);
    assert!(stderr.contains("nowhere.json"), "{stderr}");
}

#[test]
fn a_model_file_is_planned_as_its_description_is() {
    let folder = tempfile::tempdir().unwrap();
    let (code, described, stderr) = shoal(&["slice", "info", "SmolLM2", "--json"]);
    assert_eq!(code, 0, "{stderr}");
    let description = folder.path().join("smollm2.json");
    fs::write(&description, described).unwrap();
    let dense = folder.path().join("dense.json");
    let profiles = fs::read_to_string(example("profiles.json")).unwrap();
    fs::write(&dense, profiles.replace("mixture_of_experts", "dense")).unwrap();
    let mut files = problem("--profiles", Some(&dense));
    let mut plan = |model: &str| {
        let at = files.iter().position(|file| file == "--model").unwrap();
        files[at + 1] = model.to_owned();
        let (code, stdout, stderr) = run("plan", &files, &["--quick", "--json", "--objective", "els"]);
        assert_eq!(code, 0, "{stderr}");
        let report: Value = serde_json::from_str(&stdout).unwrap();
        report["plan"].clone()
    };
    assert_eq!(plan("SmolLM2"), plan(description.to_str().unwrap()));
}
