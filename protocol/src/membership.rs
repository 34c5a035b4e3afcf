//! What a node and the orchestrator say to each other about membership, checked: who asks, what was decided, what a member
//! tells of itself.

use std::time::{Duration, SystemTime};

use cluster::{Bytes, LayerRange, NodeId};
use uuid::Uuid;

use crate::certify::{LARGEST_REQUEST, Validity};
use crate::node::{Address, BadMessage, Build, check_addresses, check_name, check_text, limit};
use crate::v1;

/// Stages that one node tells of.
const MOST_RUNNING: usize = 64;

/// Certificates are a kilobyte.
const LARGEST_PEM: usize = 32 << 10;

/// Who wants to join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Newcomer {
    /// Its id, the same over restarts.
    pub id: Uuid,
    /// What it would like to be called.
    pub name: NodeId,
    /// What it runs.
    pub build: Build,
    /// PKCS #10, DER; its signature is not checked yet.
    pub certificate_request: Vec<u8>,
}

/// What makes a newcomer a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// What it is called.
    pub name: NodeId,
    /// Its certificate.
    pub cert_pem: String,
    /// Where the orchestrator is.
    pub orchestrators: Vec<Address>,
    /// Of the certificate, to the second.
    pub validity: Validity,
}

/// A stage that a node runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningStage {
    /// The model's name.
    pub model: String,
    /// Its place in the chain …
    pub stage: u32,
    /// … of so many.
    pub n_stages: u32,
    /// Its blocks.
    pub layers: LayerRange,
}

/// A member's sign of life.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Heartbeat {
    /// Of the host.
    pub memory_available: Bytes,
    /// What it runs for others.
    pub running: Vec<RunningStage>,
}

impl Newcomer {
    /// Checks a received one.
    pub fn check(newcomer: Option<v1::Newcomer>) -> Result<Self, BadMessage> {
        const WHAT: &str = "a newcomer";
        let missing = |field| BadMessage::Missing { what: WHAT, field };
        let v1::Newcomer { id, name, build, certificate_request } =
            newcomer.ok_or(BadMessage::Missing { what: "a request", field: "a newcomer" })?;
        limit(WHAT, "bytes of certificate request", certificate_request.len(), LARGEST_REQUEST)?;
        Ok(Self {
            id: check_id(WHAT, &id)?,
            name: check_name(&name)?,
            build: Build::check(build.ok_or_else(|| missing("its build"))?)?,
            certificate_request: certificate_request.into(),
        })
    }
}

/// Ids are UUIDs, and none is the nil one.
fn check_id(what: &'static str, id: &str) -> Result<Uuid, BadMessage> {
    let bad = || BadMessage::Other { what, reason: "its id is no UUID".to_owned() };
    Uuid::try_parse(id).ok().filter(|id| !id.is_nil()).ok_or_else(bad)
}

impl From<Newcomer> for v1::Newcomer {
    fn from(newcomer: Newcomer) -> Self {
        let Newcomer { id, name, build, certificate_request } = newcomer;
        Self {
            id: id.to_string(),
            name: name.0,
            build: Some(build.into()),
            certificate_request: certificate_request.into(),
        }
    }
}

impl Admission {
    /// Checks a received one, but for its certificates.
    pub fn check(admission: v1::Admission) -> Result<Self, BadMessage> {
        const WHAT: &str = "an admission";
        let v1::Admission { name, certificate_pem, orchestrators, issued, expires } = admission;
        limit(WHAT, "bytes of certificate", certificate_pem.len(), LARGEST_PEM)?;
        let backwards =
            || BadMessage::Other { what: WHAT, reason: "its certificate ends before it begins".into() };
        let life = expires.checked_sub(issued).filter(|&life| life > 0).ok_or_else(backwards)?;
        let issued = from_unix(issued).ok_or_else(backwards)?;
        Ok(Self {
            name: check_name(&name)?,
            cert_pem: certificate_pem,
            orchestrators: check_addresses(WHAT, &orchestrators)?,
            validity: Validity {
                issued,
                expires: issued.checked_add(Duration::from_secs(life)).ok_or_else(backwards)?,
            },
        })
    }
}

impl From<Admission> for v1::Admission {
    fn from(admission: Admission) -> Self {
        let Admission { name, cert_pem, orchestrators, validity } = admission;
        Self {
            name: name.0,
            certificate_pem: cert_pem,
            orchestrators: orchestrators.iter().map(ToString::to_string).collect(),
            issued: to_unix(validity.issued),
            expires: to_unix(validity.expires),
        }
    }
}

/// Seconds since 1970, 0 before.
pub fn to_unix(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A point in time, if the clock can tell it.
pub fn from_unix(seconds: u64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

impl Heartbeat {
    /// Checks a received one.
    pub fn check(heartbeat: v1::Heartbeat) -> Result<Self, BadMessage> {
        let v1::Heartbeat { memory_available, running } = heartbeat;
        limit("a heartbeat", "running stages", running.len(), MOST_RUNNING)?;
        let running = running.into_iter().map(RunningStage::check).collect::<Result<_, _>>()?;
        Ok(Self { memory_available: Bytes(memory_available), running })
    }
}

impl From<Heartbeat> for v1::Heartbeat {
    fn from(heartbeat: Heartbeat) -> Self {
        let running = heartbeat.running.into_iter().map(Into::into).collect();
        Self { memory_available: heartbeat.memory_available.0, running }
    }
}

impl RunningStage {
    fn check(stage: v1::RunningStage) -> Result<Self, BadMessage> {
        const WHAT: &str = "a running stage";
        let v1::RunningStage { model, stage, n_stages, first_block, end_block } = stage;
        let layers = LayerRange::new(first_block, end_block)
            .map_err(|error| BadMessage::Other { what: WHAT, reason: error.to_string() })?;
        Ok(Self { model: check_text(WHAT, model)?, stage, n_stages, layers })
    }
}

impl From<RunningStage> for v1::RunningStage {
    fn from(running: RunningStage) -> Self {
        let RunningStage { model, stage, n_stages, layers } = running;
        Self { model, stage, n_stages, first_block: layers.start(), end_block: layers.end() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::certify::MemberKey;

    fn newcomer() -> Newcomer {
        Newcomer {
            id: Uuid::from_u128(7),
            name: NodeId("desk".into()),
            build: Build { version: "0.1.0".into(), llama_cpp: "b1".into(), features: vec!["cuda".into()] },
            certificate_request: MemberKey::generate().unwrap().request().to_vec(),
        }
    }

    fn admission() -> Admission {
        Admission {
            name: NodeId("desk".into()),
            cert_pem: "a".into(),
            orchestrators: vec![Address::parse("10.0.0.1:8471").unwrap()],
            validity: Validity::starting(from_unix(1_800_000_000).unwrap(), Duration::from_secs(60)),
        }
    }

    #[test]
    fn what_is_said_survives_the_wire() {
        let newcomer = newcomer();
        assert_eq!(Newcomer::check(Some(newcomer.clone().into())), Ok(newcomer));
        assert_eq!(Admission::check(admission().into()), Ok(admission()));
        let layers = LayerRange::new(3, 9).unwrap();
        let running = RunningStage { model: "m".into(), stage: 1, n_stages: 2, layers };
        let heartbeat = Heartbeat { memory_available: Bytes(5), running: vec![running] };
        assert_eq!(Heartbeat::check(heartbeat.clone().into()), Ok(heartbeat));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let broken = |change: fn(&mut v1::Newcomer)| {
            let mut newcomer = newcomer().into();
            change(&mut newcomer);
            Newcomer::check(Some(newcomer)).unwrap_err().to_string()
        };
        assert!(broken(|n| n.id = "7".into()).contains("no UUID"));
        assert!(broken(|n| n.id = Uuid::nil().to_string()).contains("no UUID"));
        assert!(broken(|n| n.name = "a b".into()).contains("a b"));
        assert!(broken(|n| n.build = None).contains("its build"));
        assert!(broken(|n| n.certificate_request = vec![0; 9000].into()).contains("9000"));
        assert!(Newcomer::check(None).is_err());
        let mut backwards = v1::Admission::from(admission());
        backwards.expires = backwards.issued;
        assert!(Admission::check(backwards).is_err());
    }

    proptest! {
        #[test]
        fn garbled_admissions_never_panic(
            garble in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut bytes = v1::Admission::from(admission()).encode_to_vec();
            for (at, byte) in garble {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let _ = v1::Admission::decode(&bytes[..]).map(Admission::check);
        }

        #[test]
        fn any_numbers_are_an_admission_or_refused(issued in any::<u64>(), expires in any::<u64>()) {
            let _ = Admission::check(v1::Admission { issued, expires, ..admission().into() });
        }
    }
}
