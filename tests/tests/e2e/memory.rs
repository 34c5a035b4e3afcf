//! A stage process holds its slice's share, and says so truthfully.

use std::fs;

use tests::server::Server;

/// Resident bytes of a process as the kernel counts them.
fn resident(pid: u32) -> f64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    let pages: f64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096.0
}

#[tokio::test]
async fn the_start_up_table_states_each_stages_memory_within_fifteen_percent() {
    let server = Server::start("SmolLM2", &["--stages", "3", "--slots", "4", "--ctx", "2048", "--json"])
        .await
        .unwrap();
    let event = server
        .log()
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find(|event| event["event"] == "ready")
        .expect("a ready event");
    let stages = event["stages"].as_array().unwrap();
    assert_eq!(stages.len(), 3);
    for stage in stages {
        let pid = stage["pid"].as_u64().unwrap() as u32;
        let estimate = stage["estimated_bytes"].as_f64().unwrap();
        let ratio = resident(pid) / estimate;
        assert!((0.85..=1.15).contains(&ratio), "resident / estimate = {ratio:.3} for {stage}");
    }
}
