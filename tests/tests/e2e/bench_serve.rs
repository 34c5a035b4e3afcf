//! `shoal bench serve` against a real `shoal serve`.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tests::process::{shoal_binary, signal};
use tests::server::Server;

async fn bench(args: &[&str]) -> Output {
    let (binary, args) =
        (shoal_binary().unwrap(), args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>());
    let run = move || Command::new(binary).args(["bench", "serve"]).args(args).output().unwrap();
    tokio::task::spawn_blocking(run).await.unwrap()
}

/// A value with every number that a clock has made replaced.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), shape(value))).collect(),
        Value::Array(items) => items.iter().map(shape).collect(),
        Value::Number(number) if number.is_f64() => "measured".into(),
        other => other.clone(),
    }
}

#[tokio::test]
async fn counts_add_up_and_two_servers_are_compared() {
    let server =
        Server::start("glassllm", &["--slots", "2", "--ctx", "128", "--threads", "1"]).await.unwrap();
    let (url, folder) = (server.url(""), tempfile::TempDir::new().unwrap());
    let svg = folder.path().join("plot.svg");
    let output = bench(&[
        &url,
        "--vs",
        &url,
        "--rounds",
        "2",
        "--concurrency",
        "3",
        "--requests",
        "6",
        "--warmup",
        "1",
        "-m",
        "glassllm",
        "--prompt-tokens",
        "20",
        "--max-tokens",
        "5",
        "--endpoint",
        "completions",
        "--body",
        "{\"ignore_eos\": true}",
        "--slo-ttft-ms",
        "100000",
        "--json",
        "--svg",
        svg.to_str().unwrap(),
    ])
    .await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let mut report: Value = serde_json::from_str(&text).unwrap();
    for side in report["servers"].as_array_mut().unwrap() {
        assert_eq!(side["url"].take(), url.as_str());
        assert!(side["client"]["late_ms"]["count"].take().as_u64().unwrap() > 0);
        // How much of a prompt a slot holds by chance depends on which requests met.
        assert!(side["cached_tokens"].take().is_u64());
    }
    insta::assert_json_snapshot!(shape(&report));
    assert!(std::fs::read_to_string(svg).unwrap().contains("Time to first token"));

    let text =
        bench(&[&url, "--requests", "2", "--warmup", "0", "--max-tokens", "3", "--prompt-tokens", "9"]).await;
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("2 answered, 0 failed") && text.contains("wait in the queue"), "{text}");
}

#[tokio::test]
async fn ctrl_c_ends_a_run_with_what_was_measured_so_far() {
    let server =
        Server::start("glassllm", &["--slots", "2", "--ctx", "128", "--threads", "1"]).await.unwrap();
    let mut child = Command::new(shoal_binary().unwrap())
        .args([
            "bench",
            "serve",
            &server.url(""),
            "--duration",
            "3600",
            "--max-tokens",
            "4",
            "--prompt-tokens",
            "9",
            "--json",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let told = BufReader::new(child.stderr.take().unwrap())
        .lines()
        .map(Result::unwrap)
        .find(|line| line == &server.url(""));
    assert!(told.is_some(), "it tells when it begins to measure");
    signal(child.id(), "INT").unwrap();
    let output = tokio::task::spawn_blocking(|| child.wait_with_output().unwrap()).await.unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["is_interrupted"], true);
    assert!(report["servers"][0]["unfinished"].as_u64().unwrap() <= 1, "one request at once: {report}");
}

#[tokio::test]
async fn what_cannot_be_measured_is_refused_with_a_reason() {
    let folder = tempfile::TempDir::new().unwrap();
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "\n").unwrap();
    let empty = empty.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 7] = [
        (&["127.0.0.1:1"], 1, "no server answers at http://127.0.0.1:1/v1/models"),
        (&["ftp://host"], 2, "not the address of a server"),
        (&["--rate", "0"], 2, "not a rate"),
        (&["--rate", "inf"], 2, "not a rate"),
        (&["--prompts", empty], 2, "no prompt"),
        (&["--trace", empty], 2, "no request"),
        (&["--body", "[]"], 2, "not a JSON object"),
    ];
    for (args, code, reason) in cases {
        let output = bench(args).await;
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {words}");
        assert!(words.contains(reason), "{args:?}: {words}");
    }
}
