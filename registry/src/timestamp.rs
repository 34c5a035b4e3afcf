//! Points in time as they are kept and shown.

use std::fmt;
use std::time::{Duration, SystemTime};

use protocol::membership::{from_unix, to_unix};
use serde::{Serialize, Serializer};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// By this host's clock.
    pub fn now() -> Self {
        SystemTime::now().into()
    }

    /// So much later.
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration.as_secs()))
    }

    /// For arithmetic; far beyond any calendar it is the epoch.
    pub fn system(self) -> SystemTime {
        from_unix(self.0).unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// How it lies to another one, for people: "in 3 h", "5 min ago".
    pub fn relative_to(self, now: Self) -> String {
        let (seconds, future) = if self >= now { (self.0 - now.0, true) } else { (now.0 - self.0, false) };
        let amount = match seconds {
            0..120 => format!("{seconds} s"),
            120..7200 => format!("{} min", seconds / 60),
            7200..172_800 => format!("{} h", seconds / 3600),
            _ => format!("{} days", seconds / 86_400),
        };
        if future { format!("in {amount}") } else { format!("{amount} ago") }
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        Self(to_unix(time))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = i64::try_from(self.0).ok().and_then(|at| OffsetDateTime::from_unix_timestamp(at).ok());
        match time.and_then(|time| time.format(&Rfc3339).ok()) {
            Some(text) => f.write_str(&text),
            None => write!(f, "{} s after 1970", self.0),
        }
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_shown_as_programs_and_people_read_it() {
        let at = Timestamp(1_800_000_000);
        assert_eq!(at.to_string(), "2027-01-15T08:00:00Z");
        assert_eq!(at.relative_to(Timestamp(at.0 - 3 * 3600)), "in 3 h");
        assert_eq!(at.relative_to(Timestamp(at.0 + 300)), "5 min ago");
        assert_eq!(at.relative_to(Timestamp(at.0 + 30 * 86_400)), "30 days ago");
        assert_eq!(Timestamp(u64::MAX).to_string(), format!("{} s after 1970", u64::MAX));
    }
}
