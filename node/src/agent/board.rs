//! What is known of each stage, and what follows for the replica. No I/O, no clock.

use std::net::SocketAddr;

use cluster::{Epoch, ReplicaState, StageIndex, StageReport};

use crate::client::NodeClient;

/// A stage, as its keeper last saw it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum StagePhase {
    /// A worker is being started or loads.
    Starting {
        /// Loaded share of its weights, 0 to 1.
        progress: f32,
        /// What its node does before, such as receiving its slice.
        preparing: Option<String>,
        /// Why the worker before it was lost, if one was.
        lost: Option<String>,
    },
    /// Its worker can be linked.
    Loaded(LoadedStage),
    /// No further worker will be started.
    GivenUp {
        /// Why.
        reason: String,
    },
}

/// A stage whose worker holds its weights.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LoadedStage {
    /// Counts the stage's workers, so that a new one is told from the one that was linked.
    pub(super) incarnation: u64,
    /// Where this process reaches it.
    pub(super) address: SocketAddr,
    /// The node that runs it for the agent.
    pub(super) node: Option<NodeClient>,
    /// What it says of itself.
    pub(super) report: StageReport,
    /// Its link to the next stage broke, in this epoch.
    pub(super) broken_link: Option<(Epoch, String)>,
}

/// The stages that form the current epoch.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Linked {
    pub(super) epoch: Epoch,
    pub(super) incarnations: Vec<u64>,
}

/// What follows from the phases of all stages.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Assessment {
    /// Nothing to do but wait and say so.
    Wait(ReplicaState),
    /// All stages are loaded and not linked, or no longer; the reason why no longer.
    Link { stages: Vec<LoadedStage>, lost: Option<String> },
    /// All stages are loaded and linked.
    Serving,
}

/// Looks at all stages.
pub(super) fn assess(phases: &[StagePhase], linked: Option<&Linked>) -> Assessment {
    if let Some(reason) = first_trouble(phases) {
        return Assessment::Wait(ReplicaState::Down { reason });
    }
    let loaded: Vec<LoadedStage> = phases.iter().filter_map(as_loaded).cloned().collect();
    if loaded.len() < phases.len() {
        return Assessment::Wait(loading(phases));
    }
    let Some(linked) = linked else { return Assessment::Link { stages: loaded, lost: None } };
    let lost = broken_link(&loaded, linked.epoch);
    let same = loaded.iter().map(|stage| stage.incarnation).eq(linked.incarnations.iter().copied());
    if same && lost.is_none() { Assessment::Serving } else { Assessment::Link { stages: loaded, lost } }
}

fn as_loaded(phase: &StagePhase) -> Option<&LoadedStage> {
    match phase {
        StagePhase::Loaded(stage) => Some(stage),
        StagePhase::Starting { .. } | StagePhase::GivenUp { .. } => None,
    }
}

/// The reason why the replica is down: a stage that was given up, else one that was lost.
fn first_trouble(phases: &[StagePhase]) -> Option<String> {
    let given_up = phases.iter().enumerate().find_map(|(i, phase)| match phase {
        StagePhase::GivenUp { reason } => Some(format!("{} was given up: {reason}", index(i))),
        StagePhase::Starting { .. } | StagePhase::Loaded(_) => None,
    });
    given_up.or_else(|| {
        phases.iter().enumerate().find_map(|(i, phase)| match phase {
            StagePhase::Starting { lost: Some(reason), progress, preparing } => {
                let done = match preparing {
                    Some(preparing) if *progress == 0.0 => preparing.clone(),
                    _ => format!("{} % loaded", (progress * 100.0) as u32),
                };
                Some(format!("{} was lost: {reason}; it is being restarted, {done}", index(i)))
            }
            StagePhase::Starting { lost: None, .. } | StagePhase::Loaded(_) | StagePhase::GivenUp { .. } => {
                None
            }
        })
    })
}

fn loading(phases: &[StagePhase]) -> ReplicaState {
    let share = |phase: &StagePhase| match phase {
        StagePhase::Starting { progress, .. } => *progress,
        StagePhase::Loaded(_) => 1.0,
        StagePhase::GivenUp { .. } => 0.0,
    };
    let progress = phases.iter().map(share).sum::<f32>() / phases.len().max(1) as f32;
    let waiting: Vec<String> = phases
        .iter()
        .enumerate()
        .filter(|(_, phase)| as_loaded(phase).is_none())
        .map(|(i, phase)| match phase {
            StagePhase::Starting { preparing: Some(preparing), progress, .. } if *progress == 0.0 => {
                format!("{} ({preparing})", index(i))
            }
            _ => index(i).to_string(),
        })
        .collect();
    ReplicaState::Loading { progress, waiting_for: format!("{} to load", waiting.join(", ")) }
}

fn broken_link(loaded: &[LoadedStage], epoch: Epoch) -> Option<String> {
    loaded.iter().enumerate().find_map(|(i, stage)| match &stage.broken_link {
        Some((broken_in, reason)) if *broken_in == epoch => {
            Some(format!("the link of {} broke: {reason}", index(i)))
        }
        Some(_) | None => None,
    })
}

fn index(i: usize) -> StageIndex {
    StageIndex(i as u32)
}

#[cfg(test)]
mod tests {
    use cluster::{Bytes, LayerRange, StageMemory};

    use super::*;

    fn loaded(incarnation: u64) -> StagePhase {
        let report = StageReport {
            stage: StageIndex(0),
            layers: LayerRange::new(0, 1).unwrap(),
            gpu_layers: 0,
            node: None,
            pid: 1,
            threads: 1,
            estimated: StageMemory::default(),
            resident: Bytes::ZERO,
        };
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        StagePhase::Loaded(LoadedStage { incarnation, address, node: None, report, broken_link: None })
    }

    fn starting(progress: f32, lost: Option<&str>) -> StagePhase {
        StagePhase::Starting { progress, preparing: None, lost: lost.map(str::to_owned) }
    }

    fn linked(incarnations: &[u64]) -> Linked {
        Linked { epoch: Epoch(7), incarnations: incarnations.to_vec() }
    }

    #[test]
    fn a_replica_loads_until_every_stage_has() {
        let Assessment::Wait(ReplicaState::Loading { progress, waiting_for }) =
            assess(&[loaded(1), starting(0.5, None)], None)
        else {
            panic!("not loading");
        };
        assert_eq!((progress, waiting_for.as_str()), (0.75, "stage 1 to load"));
    }

    #[test]
    fn what_a_node_does_before_a_stage_loads_is_told() {
        let receiving = |progress, lost: Option<&str>| {
            let preparing = Some("receiving slice 10-20: 34.0 MiB of 80.0 MiB".to_owned());
            StagePhase::Starting { progress, preparing, lost: lost.map(str::to_owned) }
        };
        let waiting = |phases: &[StagePhase]| match assess(phases, None) {
            Assessment::Wait(ReplicaState::Loading { waiting_for, .. }) => waiting_for,
            Assessment::Wait(ReplicaState::Down { reason }) => reason,
            other => panic!("{other:?}"),
        };
        let text = waiting(&[loaded(1), receiving(0.0, None)]);
        assert_eq!(text, "stage 1 (receiving slice 10-20: 34.0 MiB of 80.0 MiB) to load");
        assert_eq!(waiting(&[loaded(1), receiving(0.5, None)]), "stage 1 to load");
        assert!(
            waiting(&[receiving(0.0, Some("x"))])
                .ends_with("restarted, receiving slice 10-20: 34.0 MiB of 80.0 MiB")
        );
        assert!(waiting(&[receiving(0.5, Some("x"))]).ends_with("50 % loaded"));
    }

    #[test]
    fn loaded_stages_are_linked_once() {
        let stages = [loaded(1), loaded(2)];
        assert!(matches!(assess(&stages, None), Assessment::Link { lost: None, .. }));
        assert!(matches!(assess(&stages, Some(&linked(&[1, 2]))), Assessment::Serving));
    }

    #[test]
    fn a_new_worker_makes_a_new_epoch_even_if_its_loss_went_unseen() {
        let stages = [loaded(1), loaded(3)];
        assert!(matches!(assess(&stages, Some(&linked(&[1, 2]))), Assessment::Link { .. }));
    }

    #[test]
    fn a_lost_stage_takes_the_replica_down_with_the_reason() {
        let stages = [loaded(1), starting(0.0, Some("was ended by signal 9"))];
        let Assessment::Wait(ReplicaState::Down { reason }) = assess(&stages, Some(&linked(&[1, 2]))) else {
            panic!("not down");
        };
        assert!(reason.contains("stage 1 was lost: was ended by signal 9"), "{reason}");
    }

    #[test]
    fn a_stage_that_was_given_up_outweighs_one_that_is_restarted() {
        let stages = [starting(0.0, Some("x")), StagePhase::GivenUp { reason: "no memory".to_owned() }];
        let Assessment::Wait(ReplicaState::Down { reason }) = assess(&stages, None) else {
            panic!("not down")
        };
        assert_eq!(reason, "stage 1 was given up: no memory");
    }

    #[test]
    fn only_a_link_that_broke_in_this_epoch_counts() {
        let with_break = |epoch| {
            let StagePhase::Loaded(mut stage) = loaded(1) else { unreachable!() };
            stage.broken_link = Some((Epoch(epoch), "reset".to_owned()));
            [StagePhase::Loaded(stage)]
        };
        assert!(matches!(assess(&with_break(6), Some(&linked(&[1]))), Assessment::Serving));
        let Assessment::Link { lost: Some(reason), .. } = assess(&with_break(7), Some(&linked(&[1]))) else {
            panic!("served over a broken link");
        };
        assert_eq!(reason, "the link of stage 0 broke: reset");
    }
}
