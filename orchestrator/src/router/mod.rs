//! Who serves a request: policies that choose among the replicas that can.
//!
//! A request is bound to a replica when it comes, and waits in that replica's line until a slot is free, exactly as the
//! planner's simulator has it, so that what is predicted of a plan is what the plan does. Lines differ in more than their
//! length: replicas have unequal slots and speeds, prompts unequal lengths. So the default counts a line in predicted
//! seconds of work; a trial in the simulator showed 10 to 30 times longer waits where requests are merely counted.
//!
//! A policy is pure: it sees what the [desk](crate::desk) computed of each replica, and says which. It has no clock, does no
//! I/O, and can be run in the simulator as it is. It is never asked where nothing can serve, and what it says of replicas that
//! are not in its views does not exist. One policy, one file.
//!
//! Where the decode phase of a request has a replica of its own, requests wait for decode slots in one central line, and
//! [`Policy::decode`] is asked when the head of that line can choose among several.

mod jsq;
mod jsq_count;
mod jsq_tokens;
mod prefix_affinity;
#[cfg(test)]
mod properties;
mod random;
mod round_robin;

use std::fmt;
use std::str::FromStr;

pub use jsq::ShortestWork;
pub use jsq_count::ShortestCount;
pub use jsq_tokens::ShortestTokens;
pub use prefix_affinity::{MOST_IMBALANCE_SECONDS, MOST_IMBALANCE_SHARE, PrefixAffinity};
pub use random::Random;
pub use round_robin::RoundRobin;

/// A replica that could take a request that has just come, as this request would see it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ReplicaView {
    /// Its number.
    pub replica: usize,
    /// Requests there whose prompts are not computed yet.
    pub waiting: usize,
    /// Requests that hold a slot.
    pub held: usize,
    /// Its slots.
    pub slots: usize,
    /// Seconds of work before this request would start.
    pub backlog: f64,
    /// Seconds from its start to its first token.
    pub service: f64,
    /// Seconds from its first token to its last, beside those that run there then; nothing where others decode.
    pub decode: f64,
    /// Tokens of all requests there, waiting and running: prompts and expected answers.
    pub tokens: u64,
    /// Tokens of the request's prompt whose KV it is believed to hold.
    pub prefix: u32,
}

impl ReplicaView {
    /// Predicted seconds until this request would have its last token.
    pub fn work(&self) -> f64 {
        self.backlog + self.service + self.decode
    }
}

/// A replica with a free slot that could decode the request at the head of the central line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeView {
    /// Its number.
    pub replica: usize,
    /// Free slots, at least one.
    pub free: usize,
    /// Requests that hold a slot.
    pub held: usize,
    /// Tokens per second that the request would see.
    pub speed: f64,
}

/// Chooses replicas. Views come in the replicas' order and are never empty; an index out of range counts as the last.
pub trait Policy: fmt::Debug + Send {
    /// Which of the views takes a request that has just come.
    fn place(&mut self, views: &[ReplicaView]) -> usize;

    /// Which of the views decodes the request at the head of the central line: the fastest, unless a policy knows better.
    fn decode(&mut self, views: &[DecodeView]) -> usize {
        least(views, |view| (-view.speed, view.held))
    }
}

/// The index of the view with the smallest value, the first among equals.
fn least<T, V: PartialOrd>(views: &[T], value: impl Fn(&T) -> V) -> usize {
    (1..views.len()).fold(0, |a, b| if value(&views[b]) < value(&views[a]) { b } else { a })
}

/// The policies, by the names that users give.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PolicyName {
    /// [`ShortestWork`].
    #[default]
    Jsq,
    /// [`ShortestCount`].
    JsqCount,
    /// [`ShortestTokens`].
    JsqTokens,
    /// [`RoundRobin`].
    RoundRobin,
    /// [`Random`].
    Random,
    /// [`PrefixAffinity`].
    PrefixAffinity,
}

/// There is no policy of this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no policy {0:?}; there are jsq, jsq-count, jsq-tokens, round-robin, random and prefix-affinity"
)]
pub struct UnknownPolicy(String);

impl PolicyName {
    /// All of them, the default first.
    pub const ALL: [Self; 6] =
        [Self::Jsq, Self::JsqCount, Self::JsqTokens, Self::RoundRobin, Self::Random, Self::PrefixAffinity];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Jsq => "jsq",
            Self::JsqCount => "jsq-count",
            Self::JsqTokens => "jsq-tokens",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::PrefixAffinity => "prefix-affinity",
        }
    }

    /// A policy of this name. The seed is for the one that draws.
    pub fn policy(self, seed: u64) -> Box<dyn Policy> {
        match self {
            Self::Jsq => Box::new(ShortestWork),
            Self::JsqCount => Box::new(ShortestCount),
            Self::JsqTokens => Box::new(ShortestTokens),
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::Random => Box::new(Random::new(seed)),
            Self::PrefixAffinity => Box::new(PrefixAffinity),
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}
