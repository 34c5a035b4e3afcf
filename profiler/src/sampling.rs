//! How often each measurement is taken: in rounds over all of them, so that whatever else the host does meets all alike, until
//! each is settled or the time is up.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use cluster::LayerRange;
use protocol::plan_files::MeasuredPartEntry;
use serde::{Deserialize, Serialize};

use crate::session::{Session, SessionError};
use crate::statistics::Quartiles;
use crate::wire::{Command, Outcome};

/// Samples of a settled measurement, at least.
const FEW: usize = 7;

/// Samples of any measurement, even where there is no time for more.
pub(crate) const LEAST: usize = 3;

/// Samples of one that never settles.
const MOST: usize = 41;

/// A measurement is settled once the error of its median, judged by the quartiles and the number of samples, is below this share.
const SETTLED: f64 = 0.01;

/// Half of a measurement's samples in a band wider than this share of the median mark it.
const NOISY: f64 = 0.1;

/// What is measured. Equal points of one processor are measured once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Point {
    pub(crate) part: MeasuredPartEntry,
    pub(crate) layers: Option<LayerRange>,
    pub(crate) rows: u32,
    pub(crate) depth: u32,
}

impl std::fmt::Display for Point {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { part, layers, rows, depth } = self;
        let name = match part {
            MeasuredPartEntry::Decode => "decode",
            MeasuredPartEntry::Prefill => "prefill",
            MeasuredPartEntry::Head => "decode with the head",
            MeasuredPartEntry::WithoutHead => "decode beside the head",
            MeasuredPartEntry::Embedding => "embedding look-up",
            MeasuredPartEntry::Hop => "hop",
        };
        write!(f, "{name} of {rows} rows")?;
        if let Some(layers) = layers {
            write!(f, " through blocks {layers} at depth {depth}")?;
        }
        Ok(())
    }
}

/// A measurement and what came of it.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    pub(crate) point: Point,
    /// Which session carries it out, and how.
    pub(crate) session: usize,
    pub(crate) command: Command,
    pub(crate) samples: Vec<f64>,
    pub(crate) failure: Option<String>,
    is_warm: bool,
}

impl Item {
    pub(crate) fn new(point: Point, session: usize, command: Command) -> Self {
        Self { point, session, command, samples: Vec::new(), failure: None, is_warm: false }
    }

    /// The same in another session.
    pub(crate) fn in_session(self, session: usize) -> Self {
        Self { session, ..self }
    }

    /// Whether it needs no more samples: the error of a median of n is about the quartiles' distance over √n.
    fn is_settled(&self) -> bool {
        let n = self.samples.len();
        if self.failure.is_some() || n >= MOST {
            return true;
        }
        let quartiles = Quartiles::of(&self.samples);
        n >= FEW && quartiles.spread() <= SETTLED * quartiles.median * (n as f64).sqrt()
    }

    /// Whether the time being up does not matter to it.
    fn is_wanting(&self) -> bool {
        self.failure.is_none() && self.samples.len() < LEAST
    }
}

/// Whether samples differ much.
pub(crate) fn is_noisy(samples: &[f64]) -> bool {
    let quartiles = Quartiles::of(samples);
    quartiles.spread() > NOISY * quartiles.median
}

/// Told how many of how many samples are there; `Break` stops.
pub(crate) type GoOn<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// Samples all items. A measurement that fails is given up; where its process died, the rest goes on in a new one. Breaks
/// off when told to; the samples so far are kept.
pub(crate) fn sample(
    sessions: &mut [Session<'_>],
    items: &mut [Item],
    budget: Duration,
    go_on: &mut GoOn<'_>,
) -> ControlFlow<()> {
    let start = Instant::now();
    for round in 0.. {
        let is_late = start.elapsed() >= budget;
        let is_open = |item: &Item| if is_late { item.is_wanting() } else { !item.is_settled() };
        let mut open: Vec<usize> = (0..items.len()).filter(|i| is_open(&items[*i])).collect();
        if open.is_empty() {
            break;
        }
        // Now from the one end, now from the other, so that none profits from its place.
        if round % 2 == 1 {
            open.reverse();
        }
        for i in open {
            let done: usize = items
                .iter()
                .map(|item| if item.is_settled() { FEW } else { item.samples.len().min(FEW) })
                .sum();
            go_on(done as u64, (items.len() * FEW) as u64)?;
            take(sessions, items, i);
        }
    }
    ControlFlow::Continue(())
}

fn take(sessions: &mut [Session<'_>], items: &mut [Item], i: usize) {
    let item = &mut items[i];
    let Some(session) = sessions.get_mut(item.session) else { return };
    let mut outcome = session.ask(&item.command);
    if !item.is_warm && outcome.is_ok() {
        item.is_warm = true;
        outcome = session.ask(&item.command);
    }
    match outcome.map(|reply| reply.outcome) {
        Ok(Outcome::Took { ms }) => item.samples.push(ms),
        Ok(_) => item.failure = Some("the measuring process gave no time".to_owned()),
        Err(SessionError::Failed(reason)) => item.failure = Some(reason),
        Err(SessionError::Unable(reason)) => {
            let number = item.session;
            for item in items.iter_mut().filter(|item| item.session == number && item.is_wanting()) {
                item.failure = Some(reason.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(samples: &[f64]) -> Item {
        let point = Point { part: MeasuredPartEntry::Hop, layers: None, rows: 1, depth: 0 };
        Item { samples: samples.to_vec(), ..Item::new(point, 0, Command::Hop { rows: 1 }) }
    }

    #[test]
    fn a_measurement_is_settled_when_it_is_steady_or_has_been_tried_often() {
        assert!(!item(&[1.0; 6]).is_settled());
        assert!(item(&[1.0; 7]).is_settled());
        let wide: Vec<f64> = (0..12).map(|i| 1.0 + f64::from(i % 2) * 0.5).collect();
        assert!(!item(&wide).is_settled() && is_noisy(&wide));
        assert!(item(&wide.repeat(4)).is_settled());
    }
}
