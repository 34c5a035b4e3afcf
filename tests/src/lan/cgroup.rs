//! Limits of processor time and memory for the processes of a host, in control groups of version 1 or 2, whichever the
//! controller is mounted with. They are made below the group that this process runs in, so whatever limits it still
//! holds. It must not know hosts or networks.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cluster::Bytes;

/// How often the share of a processor is given out anew. Shorter than the kernel's 100 ms, so that a limited host is
/// slow all the time rather than stopped now and then.
const PERIOD: Duration = Duration::from_millis(20);

/// How long a group may take to lose its last, killed process.
const REMOVE_TRIES: u32 = 400;

/// Limits cannot be set here.
#[derive(Debug, thiserror::Error)]
#[error("the cgroup controller {controller} is not available: {why}")]
pub struct LimitsUnavailable {
    controller: &'static str,
    why: String,
}

/// What can be limited or counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Controller {
    /// Processor time, limited.
    Cpu,
    /// Processor time, counted; version 2 counts with `cpu`.
    CpuAccounting,
    /// Memory.
    Memory,
}

impl Controller {
    const ALL: [Self; 3] = [Self::Cpu, Self::CpuAccounting, Self::Memory];

    fn name(self, version: Version) -> &'static str {
        match (self, version) {
            (Self::Cpu, _) | (Self::CpuAccounting, Version::V2) => "cpu",
            (Self::CpuAccounting, Version::V1) => "cpuacct",
            (Self::Memory, _) => "memory",
        }
    }

    fn unavailable(self, why: String) -> LimitsUnavailable {
        LimitsUnavailable { controller: self.name(Version::V1), why }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// A group's folder in one controller's hierarchy.
#[derive(Debug, Clone)]
struct Folder {
    path: PathBuf,
    version: Version,
}

/// The groups of one host, made when first needed and removed when dropped; its processes must be gone by then.
#[derive(Debug)]
pub(super) struct Cgroup {
    name: String,
    folders: BTreeMap<Controller, Folder>,
}

impl Cgroup {
    /// Makes nothing yet.
    pub(super) fn new(name: String) -> Self {
        Self { name, folders: BTreeMap::new() }
    }

    /// The files to which a process writes to become a member.
    pub(super) fn member_files(&self) -> impl Iterator<Item = PathBuf> {
        self.folders.values().map(|folder| folder.path.join("cgroup.procs"))
    }

    /// Moves processes in; those that have ended are passed over.
    pub(super) fn adopt(&self, processes: &[u32]) -> Result<()> {
        for file in self.member_files() {
            for pid in processes {
                let moved = fs::write(&file, pid.to_string());
                if Path::new(&format!("/proc/{pid}")).exists() {
                    moved.with_context(|| format!("moving process {pid} into {}", file.display()))?;
                }
            }
        }
        Ok(())
    }

    /// Limits processor time to that of `cores` cores.
    pub(super) fn limit_cpu(&mut self, cores: f64) -> Result<()> {
        let quota = (PERIOD.as_micros() as f64 * cores) as u64;
        // The kernel's smallest quota.
        ensure!(quota >= 1000, "{cores} cores are too few to give out every {PERIOD:?}");
        let period = PERIOD.as_micros();
        let folder = self.folder(Controller::Cpu)?;
        match folder.version {
            Version::V1 => {
                folder.write("cpu.cfs_period_us", &period.to_string())?;
                folder.write("cpu.cfs_quota_us", &quota.to_string())
            }
            Version::V2 => folder.write("cpu.max", &format!("{quota} {period}")),
        }
    }

    /// Limits memory; what exceeds it is killed.
    pub(super) fn limit_memory(&mut self, limit: Bytes) -> Result<()> {
        let folder = self.folder(Controller::Memory)?;
        let value = limit.0.to_string();
        match folder.version {
            Version::V1 => {
                folder.write("memory.limit_in_bytes", &value)?;
                // Not there where the kernel does not count swap; then nothing is swapped out on its account.
                folder.write_if_there("memory.memsw.limit_in_bytes", &value)
            }
            Version::V2 => {
                folder.write("memory.max", &value)?;
                folder.write_if_there("memory.swap.max", "0")
            }
        }
    }

    /// Processor time used since this was first asked for.
    pub(super) fn cpu_time(&mut self) -> Result<Duration> {
        let folder = self.folder(Controller::CpuAccounting)?;
        match folder.version {
            Version::V1 => Ok(Duration::from_nanos(number(&folder.read("cpuacct.usage")?)?)),
            Version::V2 => Ok(Duration::from_micros(folder.entry("cpu.stat", "usage_usec")?)),
        }
    }

    /// In how many periods the processor limit stopped a process.
    pub(super) fn throttled_periods(&mut self) -> Result<u64> {
        self.folder(Controller::Cpu)?.entry("cpu.stat", "nr_throttled")
    }

    /// How many processes the memory limit killed.
    pub(super) fn memory_kills(&mut self) -> Result<u64> {
        let folder = self.folder(Controller::Memory)?;
        match folder.version {
            Version::V1 => folder.entry("memory.oom_control", "oom_kill"),
            Version::V2 => folder.entry("memory.events", "oom_kill"),
        }
    }

    /// Makes what is missing for processor time to be limited and counted.
    pub(super) fn prepare_cpu(&mut self) -> Result<()> {
        self.folder(Controller::Cpu)?;
        self.folder(Controller::CpuAccounting).map(drop)
    }

    /// Makes what is missing for memory to be limited.
    pub(super) fn prepare_memory(&mut self) -> Result<()> {
        self.folder(Controller::Memory).map(drop)
    }

    fn folder(&mut self, controller: Controller) -> Result<Folder> {
        if let Some(folder) = self.folders.get(&controller) {
            return Ok(folder.clone());
        }
        let parent = parent_of_new_groups(controller)?;
        let folder = Folder { path: parent.path.join(&self.name), version: parent.version };
        fs::create_dir_all(&folder.path)
            .map_err(|error| controller.unavailable(format!("making {}: {error}", folder.path.display())))?;
        self.folders.insert(controller, folder.clone());
        Ok(folder)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for folder in self.folders.values() {
            // Nobody can be told any more; what stays behind is the next Lan's to remove.
            let _ = remove(&folder.path);
        }
    }
}

impl Folder {
    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.path.join(file);
        fs::write(&path, value).with_context(|| format!("writing {value} to {}", path.display()))
    }

    fn write_if_there(&self, file: &str, value: &str) -> Result<()> {
        if self.path.join(file).exists() { self.write(file, value) } else { Ok(()) }
    }

    fn read(&self, file: &str) -> Result<String> {
        let path = self.path.join(file);
        fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    }

    /// The number after `key` in a file of lines `KEY NUMBER`.
    fn entry(&self, file: &str, key: &str) -> Result<u64> {
        let text = self.read(file)?;
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        number(value.with_context(|| format!("{} says nothing of {key}", self.path.join(file).display()))?)
    }
}

/// Removes groups whose name is left over, in every hierarchy.
pub(super) fn remove_leftovers(is_left_over: impl Fn(&str) -> bool) {
    let mut seen = Vec::new();
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    for controller in Controller::ALL {
        let found = mount_of(controller, &mounts).map(|folder| folder.path);
        let Some(mount) = found.filter(|path| !seen.contains(path)) else { continue };
        remove_below(&mount, &is_left_over);
        seen.push(mount);
    }
}

fn remove_below(folder: &Path, is_left_over: &impl Fn(&str) -> bool) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let folders = entries.filter_map(Result::ok).filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir()));
    for entry in folders {
        if is_left_over(&entry.file_name().to_string_lossy()) {
            // Another process may be removing the same, and a group with a process in it costs nothing but its name.
            let _ = remove(&entry.path());
        } else {
            remove_below(&entry.path(), is_left_over);
        }
    }
}

fn remove(path: &Path) -> Result<()> {
    for _ in 0..REMOVE_TRIES {
        match fs::remove_dir(path) {
            Err(error) if path.exists() && error.kind() == std::io::ErrorKind::ResourceBusy => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) if path.exists() => return Err(error.into()),
            _ => return Ok(()),
        }
    }
    bail!("{} still has processes", path.display())
}

/// The folder in which a group with a controller can be made.
fn parent_of_new_groups(controller: Controller) -> Result<Folder> {
    let mounts = fs::read_to_string("/proc/mounts").context("reading /proc/mounts")?;
    let Some(mount) = mount_of(controller, &mounts) else {
        return Err(controller.unavailable("no hierarchy is mounted with it".to_owned()).into());
    };
    let own = fs::read_to_string("/proc/self/cgroup").context("reading /proc/self/cgroup")?;
    let own = own_path(controller, mount.version, &own).unwrap_or("/");
    // In a container the path may be that of the host, while the mount shows the container's part only.
    let inside = mount.path.join(own.trim_start_matches('/'));
    let own = if inside.is_dir() { inside } else { mount.path.clone() };
    match mount.version {
        Version::V1 => Ok(Folder { path: own, version: Version::V1 }),
        Version::V2 => Ok(Folder { path: delegating(controller, &own, &mount.path)?, version: Version::V2 }),
    }
}

/// In version 2 a group with processes of its own cannot hand controllers down, except at the root. Where this
/// process's group cannot, its parent does: it hands down to this group already.
fn delegating(controller: Controller, own: &Path, mount: &Path) -> Result<PathBuf, LimitsUnavailable> {
    let name = controller.name(Version::V2);
    let file = own.join("cgroup.subtree_control");
    let enabled = fs::write(&file, format!("+{name}"));
    let Err(error) = enabled else { return Ok(own.to_owned()) };
    let parent = own.parent().filter(|_| own != mount);
    let listed = |path: &Path| {
        let text = fs::read_to_string(path.join("cgroup.subtree_control")).unwrap_or_default();
        text.split_whitespace().any(|word| word == name)
    };
    parent.filter(|path| listed(path)).map(Path::to_owned).ok_or_else(|| {
        controller
            .unavailable(format!("{} cannot hand it down ({error}), nor does its parent", own.display()))
    })
}

/// Where a controller is mounted: its own hierarchy of version 1, or else that of version 2 if it has the controller.
fn mount_of(controller: Controller, mounts: &str) -> Option<Folder> {
    let fields = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        Some((fields.next()?, fields.next()?, fields.next()?))
    });
    let v1 = fields.clone().find(|(_, kind, options)| {
        *kind == "cgroup" && options.split(',').any(|option| option == controller.name(Version::V1))
    });
    if let Some((path, ..)) = v1 {
        return Some(Folder { path: path.into(), version: Version::V1 });
    }
    let (path, ..) = fields.clone().find(|(_, kind, _)| *kind == "cgroup2")?;
    let listed = fs::read_to_string(Path::new(path).join("cgroup.controllers")).unwrap_or_default();
    let has_it = listed.split_whitespace().any(|word| word == controller.name(Version::V2));
    has_it.then(|| Folder { path: path.into(), version: Version::V2 })
}

/// This process's group in a hierarchy, from `/proc/self/cgroup`: lines `NUMBER:CONTROLLERS:PATH`.
fn own_path(controller: Controller, version: Version, groups: &str) -> Option<&str> {
    groups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let wanted = match version {
            Version::V1 => controllers.split(',').any(|name| name == controller.name(version)),
            Version::V2 => controllers.is_empty(),
        };
        wanted.then_some(path)
    })
}

fn number(text: &str) -> Result<u64> {
    text.trim().parse().with_context(|| format!("{:?} is no number", text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
        cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n\
        cgroup2 /nowhere/unified cgroup2 rw,relatime 0 0\n";

    #[test]
    fn controllers_mounted_together_are_found_by_their_own_name() {
        for controller in [Controller::Cpu, Controller::CpuAccounting] {
            let found = mount_of(controller, MOUNTS).unwrap();
            assert_eq!(
                (found.path.to_str(), found.version),
                (Some("/sys/fs/cgroup/cpu,cpuacct"), Version::V1)
            );
        }
    }

    #[test]
    fn a_controller_that_no_hierarchy_has_is_not_found() {
        assert!(mount_of(Controller::Memory, MOUNTS).is_none());
    }

    #[test]
    fn version_2_is_used_for_what_it_has() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("cgroup.controllers"), "cpuset memory pids\n").unwrap();
        let mounts = format!("cgroup2 {} cgroup2 rw 0 0\n", folder.path().display());
        let found = mount_of(Controller::Memory, &mounts).unwrap();
        assert_eq!((found.path.as_path(), found.version), (folder.path(), Version::V2));
        assert!(mount_of(Controller::Cpu, &mounts).is_none());
    }

    #[test]
    fn ones_own_group_is_read_from_the_line_of_the_hierarchy() {
        let groups = "4:memory:/a/b\n2:cpu,cpuacct:/c\n0::/d\n";
        assert_eq!(own_path(Controller::Memory, Version::V1, groups), Some("/a/b"));
        assert_eq!(own_path(Controller::CpuAccounting, Version::V1, groups), Some("/c"));
        assert_eq!(own_path(Controller::Cpu, Version::V2, groups), Some("/d"));
    }
}
