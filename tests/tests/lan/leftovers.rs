//! What is left in the system by a Lan that was dropped, by one that panicked, and by one whose process crashed.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cluster::Bytes;
use tests::lan::Lan;
use tests::process::is_alive;

/// Namespaces and control groups whose names say that a process made them.
fn made_by(pid: u32) -> Vec<PathBuf> {
    let mark = format!("shoal-lan-{pid}-");
    let mut found = Vec::new();
    search(Path::new("/run/netns"), &mark, &mut found);
    search(Path::new("/sys/fs/cgroup"), &mark, &mut found);
    found
}

fn search(folder: &Path, mark: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        if entry.file_name().to_string_lossy().starts_with(mark) {
            found.push(entry.path());
        } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            search(&entry.path(), mark, found);
        }
    }
}

/// Sets every limit that can be set here, so that there are control groups to remove.
fn limit(lan: &Lan) {
    let _ = lan.host("a").limit_cpu(0.5);
    let _ = lan.host("a").limit_memory(Bytes(1 << 30));
}

#[test]
fn a_dropped_lan_leaves_nothing_not_even_after_a_panic() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    limit(&lan);
    let mut child = lan.host("a").command("sleep").arg("1000").spawn().unwrap();
    assert!(!made_by(std::process::id()).is_empty());
    let panicked = std::thread::spawn(move || -> () {
        let _in_use = lan;
        // As a failing test does, but without the message.
        std::panic::resume_unwind(Box::new("a panic"));
    });
    let panicked = panicked.join();
    assert!(panicked.is_err());
    assert_eq!(made_by(std::process::id()), Vec::<PathBuf>::new());
    assert!(!child.wait().unwrap().success());
}

#[test]
fn what_a_crashed_run_left_is_removed_by_the_next() {
    if Lan::with_hosts(&["a"]).build_or_skip().unwrap().is_none() {
        return;
    }
    let mut crashing = Command::new(std::env::current_exe().unwrap());
    crashing.args(["--ignored", "--exact", "leftovers::a_run_that_crashes", "--nocapture"]);
    let mut crashing = crashing.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut printed = String::new();
    // The orphan holds no end of this pipe, so it is at its end when the process is.
    crashing.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    let status = crashing.wait().unwrap();
    let orphan = printed.split_once("orphan=").expect("the child got to its crash").1;
    let orphan = orphan.split_whitespace().next().unwrap().parse().unwrap();

    assert!(!status.success());
    assert!(!made_by(crashing.id()).is_empty(), "a crash leaves something, or there is nothing to test");
    assert!(is_alive(orphan));
    let lan = Lan::with_hosts(&["a"]).build().unwrap();
    assert_eq!(made_by(crashing.id()), Vec::<PathBuf>::new());
    assert!(!is_alive(orphan));
    drop(lan);
}

#[test]
#[ignore = "started by the test of what a crashed run left"]
fn a_run_that_crashes() {
    let lan = Lan::with_hosts(&["a", "b"]).build().unwrap();
    limit(&lan);
    let mut command = lan.host("a").command("sleep");
    let orphan = command.arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    println!("orphan={}", orphan.id());
    std::process::abort();
}
