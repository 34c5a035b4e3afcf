//! How soon and how readily anything is changed.

use std::time::Duration;

use crate::outlook::Outlook;

/// Choices, each with its reason.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// A quantity has left the planned range when it is so many times what was planned, or that part of it.
    pub leaves_at: f64,
    /// It is back in the range when it is less than that.
    pub returns_at: f64,
    /// It must be outside for so long.
    pub dwell: Duration,
    /// After a decision, nothing is decided for so long.
    pub rest: Duration,
    /// The share of what is now that a change must save.
    pub margin: f64,
    /// The seconds that it must save, however little there is to save.
    pub least_gain_s: f64,
}

impl Tuning {
    /// Seconds that a change must save of what is now.
    pub(crate) fn needed_s(&self, now: &Outlook) -> f64 {
        (self.margin * now.seconds()).max(self.least_gain_s)
    }
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            // Twenty requests that come at random are 1.5 times as many as in the mean once in fifty looks.
            leaves_at: 1.5,
            returns_at: 1.25,
            // So that one burst is over before it is answered.
            dwell: Duration::from_secs(10),
            // Longer than answers take to move to where they belong.
            rest: Duration::from_secs(30),
            // The simulator is within a tenth of what is measured.
            margin: 0.2,
            // Less than anybody notices.
            least_gain_s: 0.5,
        }
    }
}
