//! Whatever numbers are in the published files, the planner has a plan for them or says why not, in bounded time.

use cluster::Workload;
use planner::{EncodingRule, KvLayout, ObjectiveKind, Problem, Settings, SlotRule, solve};
use proptest::prelude::*;
use protocol::plan_files::{ClusterFile, ModelShapeFile, PlannerFile, ProfilesFile, WorkloadFile};

const FILES: [&str; 4] = [
    include_str!("../../docs/examples/cluster.json"),
    include_str!("../../docs/examples/model.json"),
    include_str!("../../docs/examples/profiles.json"),
    include_str!("../../docs/examples/workload.toml"),
];

/// Numbers that a file should not have, or hardly ever has.
const ODD: [&str; 11] =
    ["0", "1", "-1", "1e-300", "1e300", "4294967295", "18446744073709551615", "0.5", "1e12", "1000", "1e-9"];

/// A problem of the texts of four files, if they are files of their kinds.
fn problem_of([cluster, model, profiles, workload]: [&str; 4]) -> Option<Problem> {
    let cluster = ClusterFile::from_json(cluster).ok()?;
    Some(Problem {
        model: ModelShapeFile::from_json(model).ok()?.shape().ok()?,
        devices: cluster.devices(),
        profiles: ProfilesFile::from_json(profiles).ok()?.profiles().ok()?,
        links: cluster.links(),
        workload: Workload::from(&WorkloadFile::from_toml(workload).ok()?),
    })
}

/// As `shoal plan` plans.
fn settings(objective: ObjectiveKind) -> Settings {
    Settings {
        objective,
        prefill_chunk: 256,
        kv_layout: KvLayout::PerSlot { n_ubatch: 256 },
        slots: if objective == ObjectiveKind::Queue { SlotRule::Either } else { SlotRule::MostTokens },
        encoding: EncodingRule::WhereItBinds,
        simulated_seeds: vec![1],
        ..Settings::default()
    }
}

/// `text` with its `nth` number replaced.
fn with_number(text: &str, nth: usize, value: &str) -> String {
    let is_number = |at: usize| {
        let before = at.checked_sub(1).map_or(b' ', |b| text.as_bytes()[b]);
        text.as_bytes()[at].is_ascii_digit() && !before.is_ascii_alphanumeric() && !b"._-/".contains(&before)
    };
    let starts: Vec<usize> = (0..text.len()).filter(|&at| is_number(at)).collect();
    let start = starts[nth % starts.len()];
    let end = text[start..].find(|c: char| !c.is_ascii_digit() && c != '.').map_or(text.len(), |e| start + e);
    format!("{}{value}{}", &text[..start], &text[end..])
}

#[test]
fn the_published_files_are_a_problem_with_a_plan() {
    let problem = problem_of(FILES).unwrap();
    assert!(!solve(&problem, &settings(ObjectiveKind::Els)).unwrap().plan.replicas.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_numbers_are_in_the_files_there_is_a_plan_or_a_reason(
        changes in prop::collection::vec((0_usize..4, any::<usize>(), 0..ODD.len()), 1..4), objective in 0_usize..4
    ) {
        let mut texts = FILES.map(str::to_owned);
        for &(file, nth, value) in &changes {
            texts[file] = with_number(&texts[file], nth, ODD[value]);
        }
        let Some(problem) = problem_of(texts.each_ref().map(String::as_str)) else { return Ok(()) };
        match solve(&problem, &settings(ObjectiveKind::ALL[objective])) {
            Ok(solution) => prop_assert!(!solution.plan.replicas.is_empty()),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}
