//! What a caller sees of a search, and how it ends one. The planner has no clock: it says what is done of how much, and
//! asks whether to go on, between two pieces of work that take milliseconds.

use std::fmt;
use std::ops::ControlFlow;

/// What a search is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Laying out every group of devices.
    Groups,
    /// Putting groups together.
    Plans,
    /// Simulating plans.
    Simulations,
    /// The genetic search's generations.
    Generations,
    /// Judging plans in worlds where measurements are wrong.
    Worlds,
    /// Planning again with one thing changed.
    Changes,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Groups => "laying out groups of devices",
            Self::Plans => "putting groups together",
            Self::Simulations => "simulating plans",
            Self::Generations => "searching groupings",
            Self::Worlds => "planning for wrong measurements",
            Self::Changes => "looking for what would help",
        })
    }
}

/// How far a search is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub work: Work,
    /// How much of it is done. It may end before the total is reached.
    pub done: u64,
    /// How much there is at most.
    pub total: u64,
}

/// Sees progress, and may end the search. It is asked by one thread at a time.
pub trait Watch: Sync {
    /// `Break` ends the search.
    fn progress(&self, progress: Progress) -> ControlFlow<()>;
}

/// Looks away.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn progress(&self, _: Progress) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// The search was ended by whoever watches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stopped;

/// Says how far the search is.
pub(crate) fn show(watch: &dyn Watch, work: Work, (done, total): (usize, usize)) -> Result<(), Stopped> {
    match watch.progress(Progress { work, done: done as u64, total: total as u64 }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Stopped),
    }
}
