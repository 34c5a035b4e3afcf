//! This host: whether the model can be read and would fit, and whether its disk has room.

use std::path::Path;

use anyhow::Result;
use cluster::Bytes;
use gguf::cut::{CutOptions, Uncertified};
use node::{Layout, MemoryCheck, ReplicaPlan, ReplicaRequest, available_memory};

use super::DoctorArgs;
use super::checks::Findings;
use crate::cli::Globals;
use crate::commands::model;

const HERE: &str = "this host";

/// Less free disk than this is soon none.
pub(super) const LITTLE_DISK: Bytes = Bytes::from_mib(2048);

/// Less than this is none: slices leave as much.
pub(super) const NO_DISK: Bytes = Bytes::from_mib(64);

/// As `shoal serve` has them unless it is told otherwise.
const SLOTS: u32 = 4;
const PREFILL_CHUNK: u32 = 512;

/// What a stage of the model to be served needs, of the largest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Need {
    /// To run.
    pub(super) memory: Bytes,
    /// On the disk, if the node has no copy of the model.
    pub(super) disk: Bytes,
}

/// Looks. What the model needs, if one is to be served.
pub(super) fn look(args: &DoctorArgs, globals: &Globals, findings: &mut Findings) -> Result<Option<Need>> {
    let folders = model::folders(globals)?;
    let need = args.model.as_ref().and_then(|name| {
        let opened = model::open(name, &folders);
        let opened = opened.map_err(|error| {
            (format!("{error:#}"), "give the path of a .gguf file, or its name in the models folder")
        });
        let planned = opened.and_then(|model| {
            let name = model.name();
            let plan = ReplicaPlan::new(model, &request(args.stages));
            plan.map(|plan| (name, plan))
                .map_err(|error| (error.to_string(), "other --stages, or another model"))
        });
        match planned {
            Ok((name, plan)) => Some(needs(args, (&name, &plan), findings)),
            Err(failure) => {
                findings.fail(HERE, "model", failure);
                None
            }
        }
    });
    look_at_disk(HERE, Space::of(&folders.slices()), need.filter(|_| args.stages == 1), findings);
    Ok(need)
}

fn request(stages: u32) -> ReplicaRequest {
    ReplicaRequest {
        layout: Layout::Stages(stages),
        gpu_layers: Vec::new(),
        slots: SLOTS,
        n_ctx: None,
        prefill_chunk: PREFILL_CHUNK,
        options: CutOptions { uncertified: Uncertified::Allow },
        replicas_here: 1,
        memory_check: MemoryCheck::Elsewhere,
        memory_costs: None,
    }
}

fn needs(args: &DoctorArgs, (name, plan): (&str, &ReplicaPlan), findings: &mut Findings) -> Need {
    let largest = |amounts: &mut dyn Iterator<Item = Bytes>| amounts.max().unwrap_or(Bytes::ZERO);
    let memory = largest(&mut plan.predicted().iter().map(|memory| memory.total()));
    let disk = largest(&mut plan.stages().iter().map(|stage| stage.weights));
    let (blocks, stages) = (plan.model().shape().n_layer(), args.stages);
    findings.ok(
        HERE,
        "model",
        format!(
            "{name} can be read: {blocks} blocks; the largest of {stages} stages needs {memory} of memory"
        ),
    );
    if args.stages == 1 {
        let available = available_memory();
        let found = format!("{available} are available, and the model needs {memory}");
        if available < memory {
            findings.warn(
                HERE,
                "memory",
                (found, "run it on several nodes, or with less context (--ctx) or fewer --slots"),
            );
        } else {
            findings.ok(HERE, "memory", found);
        }
    }
    Need { memory, disk }
}

/// Of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Space {
    pub(super) free: Bytes,
    pub(super) total: Bytes,
}

impl Space {
    /// Of the disk that a folder is on, or will be.
    fn of(folder: &Path) -> Option<Self> {
        let there = folder.ancestors().find(|folder| folder.exists())?;
        node::disk_space(there).map(|(free, total)| Self { free, total })
    }
}

/// Whether slices have room.
pub(super) fn look_at_disk(subject: &str, space: Option<Space>, need: Option<Need>, findings: &mut Findings) {
    const CHECK: &str = "disk";
    const FREE_SOME: &str = "free some space, or set SHOAL_CACHE to a folder on another disk";
    let Some(Space { free, total }) = space else {
        return findings.warn(subject, CHECK, ("its free space cannot be found out".to_owned(), FREE_SOME));
    };
    let found = format!("{free} of {total} are free for slices");
    match need.map(|need| need.disk) {
        Some(disk) if free < disk + NO_DISK => {
            findings.warn(subject, CHECK, (format!("{found}, and a stage's slice takes {disk}"), FREE_SOME));
        }
        _ if free < NO_DISK => findings.fail(subject, CHECK, (found, FREE_SOME)),
        _ if free < LITTLE_DISK => findings.warn(subject, CHECK, (found, FREE_SOME)),
        _ => findings.ok(subject, CHECK, found),
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::Verdict;
    use super::*;

    #[test]
    fn a_disk_is_judged_by_what_is_free_and_what_is_needed() {
        let verdict = |free: Bytes, need: Option<u64>| {
            let mut findings = Findings::default();
            let need = need.map(|gib| Need { memory: Bytes::ZERO, disk: Bytes::from_mib(gib << 10) });
            look_at_disk("x", Some(Space { free, total: Bytes::from_mib(1 << 20) }), need, &mut findings);
            findings.checks()[0].verdict
        };
        assert_eq!(verdict(Bytes::from_mib(10), None), Verdict::Fail);
        assert_eq!(verdict(Bytes::from_mib(1000), None), Verdict::Warn);
        assert_eq!(verdict(Bytes::from_mib(5000), None), Verdict::Ok);
        assert_eq!(verdict(Bytes::from_mib(5000), Some(4)), Verdict::Ok);
        assert_eq!(verdict(Bytes::from_mib(5000), Some(5)), Verdict::Warn);
    }
}
