//! The planner's files come from outside: whatever is in them, reading them gives a value or an error, and never a panic.

use cluster::Workload;
use proptest::prelude::*;
use protocol::plan_files::{
    ClusterFile, ModelShapeFile, PlanFile, PlannerFile, ProfilesFile, WorkloadFile, read_trace,
};

const CLUSTER: &str = include_str!("../../docs/examples/cluster.json");
const MODEL: &str = include_str!("../../docs/examples/model.json");
const PLAN: &str = include_str!("../../docs/examples/plan.json");
const PROFILES: &str = include_str!("../../docs/examples/profiles.json");
const TRACE: &str = include_str!("../../docs/examples/trace.jsonl");
const WORKLOAD: &str = include_str!("../../docs/examples/workload.toml");

/// Reads text as every kind of file, as far as the cluster's nouns.
fn read_all(text: &str) {
    if let Ok(file) = ClusterFile::from_json(text) {
        assert_eq!(ClusterFile::new(&file.devices(), &file.links()).devices(), file.devices());
    }
    if let Ok(shape) = ModelShapeFile::from_json(text).and_then(|file| file.shape()) {
        assert_eq!(ModelShapeFile::new("again".to_owned(), &shape).shape().ok(), Some(shape));
    }
    if let Ok(plan) = PlanFile::from_json(text).and_then(|file| file.plan()) {
        assert_eq!(PlanFile::new(&plan).plan().ok(), Some(plan));
    }
    if let Ok(profiles) = ProfilesFile::from_json(text).and_then(|file| file.profiles()) {
        assert_eq!(ProfilesFile::new(&profiles).profiles().ok(), Some(profiles));
    }
    let workloads = [WorkloadFile::from_json(text), WorkloadFile::from_toml(text)];
    for file in workloads.into_iter().flatten() {
        let _ = Workload::from(&file);
    }
    let _ = read_trace(text);
}

/// A number, or anything else, that a file might have where another was.
fn other_value() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<f64>().prop_filter("JSON has no such numbers", |n| n.is_finite()).prop_map(|n| n.to_string()),
        any::<u64>().prop_map(|n| n.to_string()),
        Just("-1".to_owned()),
        Just("1e308".to_owned()),
        Just("4294967296".to_owned()),
        Just("null".to_owned()),
        Just("[]".to_owned()),
        Just("{}".to_owned()),
        Just("\"\"".to_owned()),
    ]
}

/// `text` with its `nth` number replaced.
fn with_number(text: &str, nth: usize, value: &str) -> String {
    let mut starts = Vec::new();
    let bytes = text.as_bytes();
    for at in 0..bytes.len() {
        let before = at.checked_sub(1).map_or(b' ', |b| bytes[b]);
        if bytes[at].is_ascii_digit() && !before.is_ascii_alphanumeric() && !b"._".contains(&before) {
            starts.push(at);
        }
    }
    let Some(&start) = starts.get(nth % starts.len().max(1)) else { return text.to_owned() };
    let end = text[start..].find(|c: char| !c.is_ascii_digit() && c != '.').map_or(text.len(), |e| start + e);
    format!("{}{value}{}", &text[..start], &text[end..])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_text_is_read_or_refused(text in ".{0,300}") {
        read_all(&text);
    }

    #[test]
    fn files_with_other_numbers_are_read_or_refused(
        which in 0_usize..6, changes in prop::collection::vec((any::<usize>(), other_value()), 1..4)
    ) {
        let mut text = [CLUSTER, MODEL, PLAN, PROFILES, TRACE, WORKLOAD][which].to_owned();
        for (nth, value) in changes {
            text = with_number(&text, nth, &value);
        }
        read_all(&text);
    }

    #[test]
    fn files_with_pieces_missing_or_doubled_are_read_or_refused(
        which in 0_usize..6, from: prop::sample::Index, to: prop::sample::Index, doubled: bool
    ) {
        let text = [CLUSTER, MODEL, PLAN, PROFILES, TRACE, WORKLOAD][which];
        let (a, b) = (from.index(text.len()), to.index(text.len()));
        let (a, b) = (a.min(b), a.max(b));
        prop_assume!(text.is_char_boundary(a) && text.is_char_boundary(b));
        let piece = if doubled { &text[a..b] } else { "" };
        read_all(&format!("{}{piece}{piece}{}", &text[..a], &text[b..]));
    }
}

#[test]
fn the_examples_are_what_the_formats_are() {
    assert!(ClusterFile::from_json(CLUSTER).is_ok());
    assert!(ModelShapeFile::from_json(MODEL).unwrap().shape().is_ok());
    assert!(PlanFile::from_json(PLAN).unwrap().plan().is_ok());
    assert!(ProfilesFile::from_json(PROFILES).unwrap().profiles().is_ok());
    assert!(WorkloadFile::from_toml(WORKLOAD).is_ok());
    assert!(read_trace(TRACE).unwrap().len() > 10);
}
