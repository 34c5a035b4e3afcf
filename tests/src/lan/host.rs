//! A host of a Lan: where commands run, and what addresses it has.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cluster::Bytes;

use super::cgroup::Cgroup;
use super::delay::Mac;
use super::namespace::{MARK, Namespace};
use super::traffic::Egress;
use crate::process::{signal, state_of};

/// Joins the groups named before `--`, then becomes the command inside the network namespace `$1`. It stays one
/// process throughout, so the child's id is the command's. Unlike `ip netns exec` this leaves `/sys` as it is.
const ENTER: &str = r#"
namespace=$1; shift
while [ "$1" != -- ]; do echo 0 >"$1" || exit 126; shift; done; shift
exec nsenter --net="$namespace" -- "$@""#;

/// How often `freeze` looks for processes that were started while it stopped others.
const FREEZE_ROUNDS: u32 = 100;

/// An interface on one of the Lan's networks.
#[derive(Debug)]
pub(super) struct Port {
    /// Its name in the host.
    pub(super) interface: String,
    /// Its other end's name in the switch.
    pub(super) switch_port: String,
    /// Which network.
    pub(super) network: usize,
    pub(super) mac: Mac,
    pub(super) v4: Ipv4Addr,
    pub(super) v6: Ipv6Addr,
    pub(super) egress: Mutex<Egress>,
}

/// A host: a network namespace with interfaces, and processes that may be limited.
#[derive(Debug)]
pub struct Host {
    pub(super) name: String,
    /// Before `cgroup`, so that its processes are gone when the group is removed.
    pub(super) namespace: Namespace,
    pub(super) cgroup: Mutex<Cgroup>,
    pub(super) ports: Vec<Port>,
    /// The networks' names, by number.
    pub(super) networks: Vec<String>,
    pub(super) islands: Vec<IpAddr>,
}

impl Host {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its IPv4 address on its first network.
    pub fn address(&self) -> IpAddr {
        self.ports.first().map_or(Ipv4Addr::LOCALHOST.into(), |port| port.v4.into())
    }

    /// Its IPv6 address on its first network.
    pub fn address6(&self) -> IpAddr {
        self.ports.first().map_or(Ipv6Addr::LOCALHOST.into(), |port| port.v6.into())
    }

    /// Its IPv4 address on a network.
    pub fn address_on(&self, network: &str) -> Result<IpAddr> {
        let port =
            self.ports.iter().find(|port| self.networks.get(port.network).is_some_and(|n| n == network));
        port.map(|port| port.v4.into()).with_context(|| format!("{} is not on network {network}", self.name))
    }

    /// All addresses that were given to it: of its networks in order, IPv4 before IPv6, then those that nobody
    /// reaches. The kernel adds a link-local one to every interface.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let reached = self.ports.iter().flat_map(|port| [IpAddr::from(port.v4), IpAddr::from(port.v6)]);
        reached.chain(self.islands.iter().copied()).collect()
    }

    /// A command that will run in the host, under its limits. The child's id is that of `program`; turn it into
    /// tokio's with `tokio::process::Command::from`. What still runs when the Lan is dropped is killed.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("sh");
        command.env(MARK, self.namespace.name());
        command.args(["-c", ENTER, "sh"]).arg(self.namespace.path());
        command.args(self.cgroup().member_files()).arg("--").arg(program);
        command
    }

    /// Runs `work` on a thread in the host. Sockets that it opens stay in the host wherever they are used afterwards,
    /// and so do threads that it starts; a tokio runtime must be built and run inside.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.namespace.inside(work)
    }

    /// The processes that run in it.
    pub fn processes(&self) -> Result<Vec<u32>> {
        self.namespace.processes()
    }

    /// Stops every process in it (SIGSTOP), as when a machine hangs: connections stay open, and nothing answers. A
    /// single process is stopped with [`signal`].
    pub fn freeze(&self) -> Result<()> {
        for _ in 0..FREEZE_ROUNDS {
            let running =
                self.processes()?.into_iter().filter(|&pid| state_of(pid).is_some_and(|state| state != 'T'));
            let running: Vec<u32> = running.collect();
            if running.is_empty() {
                return Ok(());
            }
            for pid in running {
                // It may have ended in between.
                let _ = signal(pid, "STOP");
            }
        }
        bail!("{} still has running processes after {FREEZE_ROUNDS} rounds of SIGSTOP", self.name)
    }

    /// Lets every process in it go on.
    pub fn thaw(&self) -> Result<()> {
        for pid in self.processes()? {
            // It may have been killed in between.
            let _ = signal(pid, "CONT");
        }
        Ok(())
    }

    /// Limits its processes together to the time of `cores` cores. An error if no such controller is available.
    pub fn limit_cpu(&self, cores: f64) -> Result<()> {
        let mut cgroup = self.cgroup();
        cgroup.prepare_cpu()?;
        cgroup.limit_cpu(cores)?;
        cgroup.adopt(&self.processes()?)
    }

    /// Limits the memory of its processes together; what exceeds it is killed. An error if no such controller is
    /// available.
    pub fn limit_memory(&self, limit: Bytes) -> Result<()> {
        let mut cgroup = self.cgroup();
        cgroup.prepare_memory()?;
        cgroup.limit_memory(limit)?;
        cgroup.adopt(&self.processes()?)
    }

    /// Processor time that its processes used since [`Self::limit_cpu`] was first called.
    pub fn cpu_time(&self) -> Result<Duration> {
        self.cgroup().cpu_time()
    }

    /// How many times [`Self::limit_cpu`] stopped a process, at most once in 20 ms.
    pub fn throttled_periods(&self) -> Result<u64> {
        self.cgroup().throttled_periods()
    }

    /// How many processes [`Self::limit_memory`] killed.
    pub fn memory_kills(&self) -> Result<u64> {
        self.cgroup().memory_kills()
    }

    fn cgroup(&self) -> MutexGuard<'_, Cgroup> {
        self.cgroup.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
