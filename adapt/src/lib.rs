//! When what is asked for has left what was planned, which roles would serve it better, and whether another plan pays for its
//! reload.
//!
//! It is asked with numbers and answers with numbers; it counts nothing, starts nothing and knows no clock: times are handed in.
//! What replicas would do is found out in the planner's simulator, so a decision here and a plan are judged by one yardstick.
#![forbid(unsafe_code)]

mod outlook;
mod reload;
mod roles;
mod tuning;
mod watcher;

pub use outlook::{Outlook, outlook};
pub use reload::{Payoff, Reload, weigh};
pub use roles::{Flip, RoleChoice, Runner, Situation, Speed, Waiting, choose_roles};
pub use tuning::Tuning;
pub use watcher::{Cause, Line, Outcome, Quantity, Watcher};
