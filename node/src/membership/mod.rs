//! How this host becomes and stays a member of a cluster: the identity that it keeps, joining with a token or by asking,
//! and attending, which renews its certificate.
//!
//! It trusts an orchestrator by the fingerprint of its CA, which a token carries or a person compares, and sends nothing
//! secret before. What the node does for the cluster is not decided here.

mod attend;
mod join;
mod leave;
mod state;

pub use attend::{Attendance, AttendanceError, AttendanceNews};
pub use join::{Applicant, Found, JoinError, JoinNews, find_cluster, join, wait_for_admission};
pub use leave::{LeaveError, Left, leave};
pub use state::{Membership, MembershipError, NodeState};
