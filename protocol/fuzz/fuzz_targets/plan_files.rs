//! Any text as each of the planner's files: read as far as the cluster's nouns, and what was read is written and read again.
//! Nothing may panic, hang, or take memory that the text does not justify.
//!
//! The first byte says which kind of file it is. Where its highest bit is set, the published example of that kind is damaged
//! where the rest of the input says, so that the depths are reached without a corpus.
#![no_main]

use cluster::Workload;
use libfuzzer_sys::fuzz_target;
use protocol::plan_files::{
    ClusterFile, ModelShapeFile, PlanFile, PlanFileError, PlannerFile, ProfilesFile, WorkloadFile, read_trace,
};

const EXAMPLES: [&str; 6] = [
    include_str!("../../../docs/examples/cluster.json"),
    include_str!("../../../docs/examples/model.json"),
    include_str!("../../../docs/examples/plan.json"),
    include_str!("../../../docs/examples/profiles.json"),
    include_str!("../../../docs/examples/workload.toml"),
    include_str!("../../../docs/examples/trace.jsonl"),
];

fuzz_target!(|input: &[u8]| {
    let Some((&first, rest)) = input.split_first() else { return };
    let kind = usize::from(first & 0x7f) % EXAMPLES.len();
    let text = if first & 0x80 == 0 { rest.to_vec() } else { damaged(EXAMPLES[kind], rest) };
    let Ok(text) = String::from_utf8(text) else { return };
    // What cannot be read is refused in words.
    if let Err(error) = read(kind, &text) {
        assert!(!error.to_string().is_empty());
    }
});

/// Each five bytes of `damage` are an offset, a length, a number of bytes to put there instead, and one of them.
fn damaged(example: &str, damage: &[u8]) -> Vec<u8> {
    let mut bytes = example.as_bytes().to_vec();
    for change in damage.chunks_exact(5) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % bytes.len();
        let end = (at + usize::from(change[2] % 16)).min(bytes.len());
        let instead = std::iter::repeat_n(change[4], usize::from(change[3] % 16));
        bytes.splice(at..end, instead);
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}

fn read(kind: usize, text: &str) -> Result<(), PlanFileError> {
    match kind {
        0 => {
            let file = ClusterFile::from_json(text)?;
            let (devices, links) = (file.devices(), file.links());
            assert_eq!(ClusterFile::new(&devices, &links).devices(), devices);
        }
        1 => {
            let shape = ModelShapeFile::from_json(text)?.shape()?;
            let again = ModelShapeFile::new("again".to_owned(), &shape).shape()?;
            assert_eq!(again, shape);
        }
        2 => {
            let plan = PlanFile::from_json(text)?.plan()?;
            assert_eq!(PlanFile::new(&plan).plan()?, plan);
        }
        3 => {
            let profiles = ProfilesFile::from_json(text)?.profiles()?;
            assert_eq!(ProfilesFile::new(&profiles).profiles()?, profiles);
        }
        4 => {
            for file in [WorkloadFile::from_json(text), WorkloadFile::from_toml(text)].into_iter().flatten() {
                let _ = Workload::from(&file);
            }
            WorkloadFile::from_toml(text)?;
        }
        _ => drop(read_trace(text)?),
    }
    Ok(())
}
