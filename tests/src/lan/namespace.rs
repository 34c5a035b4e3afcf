//! A network namespace: made, entered by a thread, searched for processes, deleted.
//!
//! It must not know what is built inside.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::process::signal;

/// Where `ip netns` keeps namespaces.
const FOLDER: &str = "/run/netns";

/// Tells of a process that it was started to run in a namespace, also before it has entered.
pub(super) const MARK: &str = "SHOAL_LAN_HOST";

/// How long killed processes may take to be gone.
const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// How long a process may be in the midst of becoming another program.
const EXEC_DEADLINE: Duration = Duration::from_secs(5);

/// A network namespace with a name, deleted with all processes in it when dropped.
#[derive(Debug)]
pub(super) struct Namespace {
    path: PathBuf,
}

impl Namespace {
    /// Makes one with its loopback interface up.
    pub(super) fn create(name: &str) -> Result<Self> {
        let output = Command::new("ip").args(["netns", "add", name]).output().context("starting ip")?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ip netns add {name}: {}", complaint.trim());
        let namespace = Self { path: Path::new(FOLDER).join(name) };
        namespace.inside(|| super::tools::ip("link set lo up"))??;
        Ok(namespace)
    }

    /// The file that stands for it.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Its name, for `ip` to find.
    pub(super) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Runs `work` on a thread inside. Sockets that it opens, and threads and processes that it starts, stay inside.
    pub(super) fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let file = File::open(&self.path).with_context(|| format!("opening {}", self.path.display()))?;
        let outcome = std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
                Ok::<T, rustix::io::Errno>(work())
            });
            thread.join()
        });
        match outcome {
            Ok(result) => result.with_context(|| format!("entering {}", self.path.display())),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// The processes inside or about to be, without this one and zombies.
    pub(super) fn processes(&self) -> Result<Vec<u32>> {
        processes_in(&self.path)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Nobody can be told any more; what stays behind is the next Lan's to remove.
        let _ = delete(&self.path);
    }
}

/// Deletes the namespaces whose name is left over, with the processes in them.
pub(super) fn remove_leftovers(is_left_over: impl Fn(&str) -> bool) -> Result<()> {
    let Ok(entries) = fs::read_dir(FOLDER) else { return Ok(()) };
    for entry in entries.filter_map(Result::ok) {
        if is_left_over(&entry.file_name().to_string_lossy()) {
            // Another process may be removing the same; gone is gone.
            delete(&entry.path()).or_else(|e| if entry.path().exists() { Err(e) } else { Ok(()) })?;
        }
    }
    Ok(())
}

fn delete(path: &Path) -> Result<()> {
    kill_all(path)?;
    let name = path.file_name().unwrap_or_default();
    let output = Command::new("ip").args(["netns", "del"]).arg(name).output().context("starting ip")?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "deleting {}: {}", path.display(), complaint.trim());
    Ok(())
}

fn kill_all(path: &Path) -> Result<()> {
    let start = Instant::now();
    loop {
        let processes = processes_in(path)?;
        if processes.is_empty() {
            return Ok(());
        }
        for pid in processes {
            // It may have ended in between.
            let _ = signal(pid, "KILL");
        }
        if start.elapsed() > KILL_DEADLINE {
            bail!("processes in {} outlive SIGKILL for {KILL_DEADLINE:?}", path.display());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn processes_in(path: &Path) -> Result<Vec<u32>> {
    let wanted = fs::metadata(path).with_context(|| format!("looking at {}", path.display()))?;
    let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mark = format!("{MARK}={}", path.file_name().unwrap_or_default().to_string_lossy());
    let inside = |pid: &u32| {
        // Zombies and processes that have just ended have no namespace to look at.
        let namespace = fs::metadata(format!("/proc/{pid}/ns/net"));
        namespace.is_ok_and(|found| (found.dev(), found.ino()) == (wanted.dev(), wanted.ino()))
            || environment_of(*pid).split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes())
    };
    Ok(pids.filter(|&pid| pid != std::process::id()).filter(inside).collect())
}

/// What a process was started with; nothing if there is no such process or it is a zombie. In the midst of becoming
/// another program a process shows none either, so a child that shows none is asked again.
fn environment_of(pid: u32) -> Vec<u8> {
    let start = Instant::now();
    loop {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        if !environment.is_empty() || start.elapsed() > EXEC_DEADLINE || !is_running_child(pid) {
            return environment;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a process was started by this one and has not ended.
fn is_running_child(pid: u32) -> bool {
    // PID (NAME) STATE PARENT ..., where the name may hold anything.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let running = fields.next().is_some_and(|state| state != "Z" && state != "X");
    running && fields.next().and_then(|parent| parent.parse().ok()) == Some(std::process::id())
}
