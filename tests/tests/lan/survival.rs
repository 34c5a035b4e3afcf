//! Deployments whose hosts, links, stages and orchestrator fail under load. `cargo run --release -p tests --example zero_lost` is the long
//! version.

use std::time::Duration;

use tests::survival::{Course, Exam, Fault, hosts, run};

/// Every answer is the whole model's although this happens, and soon all is as before.
fn nothing_is_lost(seed: u64, faults: &[Fault]) {
    let Some(lan) = hosts().build_or_skip().unwrap() else { return };
    let course = Course { seed, requests: 60, faults: faults.to_vec(), within: Duration::from_secs(3) };
    let report = run(&course, &Exam::new(12).unwrap(), &lan).unwrap();
    eprintln!("{report}");
    assert_eq!(report.breaches(), Vec::<String>::new());
}

#[test]
fn case_5_requests_survive_a_frozen_host_and_a_killed_master_of_a_deployment() {
    nothing_is_lost(1, &[Fault::FrozenHost, Fault::KilledMaster]);
}

#[test]
fn case_6_requests_survive_a_link_of_a_deployment_that_is_cut_and_restored_and_a_killed_stage() {
    nothing_is_lost(2, &[Fault::CutLink, Fault::KilledStage]);
}

#[test]
fn an_orchestrator_that_is_killed_under_load_serves_soon_after_its_return_with_the_stages_that_were_loaded() {
    let Some(lan) = hosts().build_or_skip().unwrap() else { return };
    let exam = Exam::new(12).unwrap();
    let report = tests::restart::run(60, Duration::from_secs(5), &exam, &lan).unwrap();
    eprintln!("{report}");
    assert_eq!(report.breaches(), Vec::<String>::new());
}
