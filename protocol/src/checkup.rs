//! What `shoal doctor` asks nodes, checked: how a host is, and whether small and large packets pass between two.

use std::time::{Duration, SystemTime};

use cluster::{Bytes, Millis};
use tonic::transport::Channel;

use crate::node::{Address, BadMessage, clean_text};
use crate::tls::describe_status;
use crate::v1;
use crate::v1::checkup_client::CheckupClient;

/// Bytes of an echo: many packets of any size that a network has, and no load.
pub const ECHO_BYTES: usize = 32 << 10;

/// Within which an echo comes back: a busy host on a slow link needs a fraction of it.
pub const ECHO_DEADLINE: Duration = Duration::from_secs(3);

/// How a host is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Examination {
    /// By its clock.
    pub clock: SystemTime,
    /// Of the disk that its slices are on: what is free, and all.
    pub disk: Option<(Bytes, Bytes)>,
}

/// A path from one node to another.
#[derive(Debug, Clone, PartialEq)]
pub struct PathFacts {
    /// At which the other was reached.
    pub address: Address,
    /// What large packets took there and back, or why they did not come back.
    pub echo: Result<Millis, String>,
}

impl Examination {
    /// Checks a received one.
    pub fn check(examination: v1::Examination) -> Result<Self, BadMessage> {
        const WHAT: &str = "an examination";
        let v1::Examination { clock_ms, disk_free, disk_total } = examination;
        let clock = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(clock_ms));
        let clock = clock
            .ok_or_else(|| BadMessage::Other { what: WHAT, reason: format!("{clock_ms} ms is no time") })?;
        if disk_free > disk_total {
            let reason = format!("{disk_free} of {disk_total} bytes cannot be free");
            return Err(BadMessage::Other { what: WHAT, reason });
        }
        let disk = (disk_total > 0).then_some((Bytes(disk_free), Bytes(disk_total)));
        Ok(Self { clock, disk })
    }
}

impl From<Examination> for v1::Examination {
    fn from(Examination { clock, disk }: Examination) -> Self {
        let since = clock.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (free, total) = disk.unwrap_or((Bytes::ZERO, Bytes::ZERO));
        let clock_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        Self { clock_ms, disk_free: free.0, disk_total: total.0 }
    }
}

impl PathFacts {
    /// Checks a received one.
    pub fn check(reply: v1::TryPathReply) -> Result<Self, BadMessage> {
        use v1::try_path_reply::Echo;
        const WHAT: &str = "a path";
        let echo = match reply.echo.ok_or(BadMessage::Missing { what: WHAT, field: "its echo" })? {
            Echo::EchoMs(ms) if ms.is_finite() && ms >= 0.0 => Ok(Millis(ms)),
            Echo::EchoMs(got) => {
                return Err(BadMessage::Number { what: WHAT, field: "its time", got, wanted: "a time" });
            }
            Echo::EchoFailure(reason) => Err(clean_text(&reason)),
        };
        Ok(Self { address: Address::parse(&reply.address)?, echo })
    }
}

impl From<PathFacts> for v1::TryPathReply {
    fn from(PathFacts { address, echo }: PathFacts) -> Self {
        use v1::try_path_reply::Echo;
        let echo = match echo {
            Ok(time) => Echo::EchoMs(time.0),
            Err(reason) => Echo::EchoFailure(clean_text(&reason)),
        };
        Self { address: address.to_string(), echo: Some(echo) }
    }
}

/// Sends large packets to a node and gets them back: what that took, or why they did not come.
pub async fn echo(channel: Channel) -> Result<Millis, String> {
    let begun = std::time::Instant::now();
    let data: bytes::Bytes = vec![0x5A; ECHO_BYTES].into();
    let mut client = CheckupClient::new(channel);
    let call = client.echo(v1::EchoMessage { data: data.clone() });
    let answer = tokio::time::timeout(ECHO_DEADLINE, call).await;
    let late = |_| format!("{} KiB did not come back within {} s", ECHO_BYTES >> 10, ECHO_DEADLINE.as_secs());
    let answer = answer.map_err(late)?.map_err(|status| describe_status(&status))?;
    if answer.into_inner().data != data {
        return Err("other bytes came back".to_owned());
    }
    Ok(Millis(begun.elapsed().as_secs_f64() * 1e3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_found_survives_the_wire_and_nonsense_does_not() {
        let clock = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        for disk in [None, Some((Bytes(1), Bytes(2)))] {
            let examination = Examination { clock, disk };
            assert_eq!(Examination::check(examination.clone().into()), Ok(examination));
        }
        let more = v1::Examination { disk_free: 3, disk_total: 2, clock_ms: 1 };
        assert!(Examination::check(more).unwrap_err().to_string().contains("3 of 2"));
        let endless = v1::Examination { clock_ms: u64::MAX, ..Default::default() };
        let _ = Examination::check(endless);
        let address = Address::parse("10.0.0.1:8470").unwrap();
        for echo in [Ok(Millis(1.5)), Err("lost".to_owned())] {
            let path = PathFacts { address: address.clone(), echo };
            assert_eq!(PathFacts::check(path.clone().into()), Ok(path));
        }
        let nan = v1::try_path_reply::Echo::EchoMs(f64::NAN);
        let reply = v1::TryPathReply { address: address.to_string(), echo: Some(nan) };
        assert!(PathFacts::check(reply).is_err() && PathFacts::check(v1::TryPathReply::default()).is_err());
    }
}
