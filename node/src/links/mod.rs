//! Links between nodes: what they can do, measured by the nodes themselves over the connections that frames use.
//!
//! A link is measured from its sending end: the sender dials the peer as a stage dials the next one, and streams frames of
//! noise whose arrival the peer confirms one by one. The peer's clock times the stream, the sender's the round
//! trips; they are never compared. What a link can do is decided by two measurements that agree, taken at different times
//! over different connections (field case 28): one alone may have met a cold path, or somebody else's traffic.
//!
//! | file | is |
//! | --- | --- |
//! | `probe` | the peer's end |
//! | `measure` | the sender's end: one measurement of one link |
//! | `steady` | from arrivals to a rate, without the stream's start |
//! | `rounds` | which pairs measure at the same time |
//! | `settle` | from several measurements to what is believed |
//! | `survey` | all links of a cluster |
//! | `ring` | the links of one replica, and what they foretell for its frames |
//! | `watch` | when to measure them again |
//! | `watcher` | measures them then |

mod measure;
mod probe;
mod ring;
mod rounds;
mod settle;
mod steady;
mod survey;
mod watch;
mod watcher;

pub(crate) use measure::measure;
pub(crate) use probe::ProbeService;
pub use ring::{Ring, RingFrames, UnknownLink};
pub use settle::SettledLink;
pub use survey::{LinkOutcome, Scope, SurveyProgress, survey};
pub use watcher::{RingNews, RingNodes, RingOutlook, RingWatcher, SurveyCause, SurveyedLink};

/// The value below or at which a share of the sorted samples lies; zero of none.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((share * last as f64).ceil() as usize).copied().unwrap_or(0.0)
}

fn sorted(mut samples: Vec<f64>) -> Vec<f64> {
    samples.sort_by(f64::total_cmp);
    samples
}
