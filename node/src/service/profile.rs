//! Profiles that this node measures for others, by the command that a user would give. What it says on the way is passed on,
//! and so is the profile at the end, in which devices have this node's name before theirs.

use std::pin::Pin;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use cluster::NodeId;
use futures::Stream;
use protocol::node::check_profile_request;
use protocol::plan_files::{PlannerFile, ProfilesFile};
use protocol::v1;
use protocol::v1::profile_event::Event;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;

use crate::agent::WorkerCommand;

/// A profile of a model with many types of blocks has some hundred kilobytes.
const LARGEST_PROFILE: u64 = 16 << 20;

/// Longest line that is passed on.
const LONGEST_LINE: u64 = 4096;

/// Between the request to stop, after which the command saves what it has, and the end of patience.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// Words not yet taken by the connection; then the command waits.
const QUEUE: usize = 16;

/// Measures profiles, one at a time: two would measure each other.
pub(super) struct ProfileHost {
    command: WorkerCommand,
    name: NodeId,
    turn: Arc<Semaphore>,
}

/// What a profile's measurement says. Dropping it stops the measurement.
pub(crate) struct ProfileEvents {
    events: mpsc::Receiver<Result<v1::ProfileEvent, Status>>,
    _wanted: DropGuard,
}

impl Stream for ProfileEvents {
    type Item = Result<v1::ProfileEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.poll_recv(cx)
    }
}

impl ProfileHost {
    /// Measures by `command`, for a node called `name`.
    pub(super) fn new(command: WorkerCommand, name: NodeId) -> Self {
        Self { command, name, turn: Arc::new(Semaphore::new(1)) }
    }

    /// Begins to measure.
    pub(super) fn run(&self, request: v1::ProfileRequest) -> Result<ProfileEvents, Status> {
        check_profile_request(&request).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let busy = |_| Status::resource_exhausted("this node is measuring a profile already");
        let turn = Arc::clone(&self.turn).try_acquire_owned().map_err(busy)?;
        let child = spawn(&self.command, &request)
            .map_err(|error| Status::internal(format!("starting the profiler: {error}")))?;
        let (sender, events) = mpsc::channel(QUEUE);
        let wanted = CancellationToken::new();
        let run = Run { name: self.name.clone(), events: sender, wanted: wanted.clone(), _turn: turn };
        // It ends with the child, which ends when it is not wanted.
        tokio::spawn(run.live(child));
        Ok(ProfileEvents { events, _wanted: wanted.drop_guard() })
    }
}

fn spawn(command: &WorkerCommand, request: &v1::ProfileRequest) -> std::io::Result<Child> {
    let mut process = Command::new(&command.program);
    process.args(&command.args).arg("--json").arg("--model").arg(&request.model);
    if !request.device.is_empty() {
        process.arg("--device").arg(&request.device);
    }
    if request.seconds > 0 {
        process.arg("--seconds").arg(request.seconds.to_string());
    }
    process.envs(command.env.iter().map(|(name, value)| (name, value)));
    process.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    // Ctrl-C goes to the whole foreground group: the node alone decides when it stops.
    #[cfg(unix)]
    process.process_group(0);
    process.spawn()
}

/// One measurement.
struct Run {
    name: NodeId,
    events: mpsc::Sender<Result<v1::ProfileEvent, Status>>,
    wanted: CancellationToken,
    _turn: OwnedSemaphorePermit,
}

impl Run {
    async fn live(self, mut child: Child) {
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else { return };
        let outcome = tokio::select! {
            () = self.wanted.cancelled() => return stop(child).await,
            outcome = self.measure(&mut child, stdout, stderr) => outcome,
        };
        let last = outcome.map(|profile| v1::ProfileEvent { event: Some(Event::Profile(profile)) });
        // Whoever asked may have gone.
        let _ = self.events.send(last).await;
    }

    async fn measure(
        &self,
        child: &mut Child,
        stdout: impl AsyncRead + Unpin,
        stderr: impl AsyncRead + Unpin,
    ) -> Result<String, Status> {
        let mut profile = String::new();
        let mut limited = stdout.take(LARGEST_PROFILE);
        let (read, last_line) = tokio::join!(limited.read_to_string(&mut profile), self.pass_on(stderr));
        read.map_err(|error| Status::internal(format!("reading the profile: {error}")))?;
        let status = child.wait().await.map_err(|error| Status::internal(error.to_string()))?;
        check_exit(status, &last_line)?;
        self.name_devices(&profile).map_err(|error| {
            Status::internal(format!("the profiler printed something that is no profile: {error}"))
        })
    }

    /// Passes lines on, and gives the last one.
    async fn pass_on(&self, stderr: impl AsyncRead + Unpin) -> String {
        let mut reader = BufReader::new(stderr);
        let (mut line, mut last) = (Vec::new(), String::new());
        loop {
            line.clear();
            match (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line).await {
                Ok(0) | Err(_) => return last,
                Ok(_) => {}
            }
            let text = String::from_utf8_lossy(&line).trim().to_owned();
            if !text.is_empty() {
                last.clone_from(&text);
                let event = v1::ProfileEvent { event: Some(Event::Progress(text)) };
                let _ = self.events.send(Ok(event)).await;
            }
        }
    }

    /// Puts the node's name in front of each device's, in place of the host's, as the cluster file has it.
    fn name_devices(&self, profile: &str) -> Result<String, String> {
        let mut file = ProfilesFile::from_json(profile).map_err(|error| error.to_string())?;
        for entry in &mut file.profiles {
            let device = entry.device.rsplit('/').next().unwrap_or_default();
            entry.device = format!("{}/{device}", self.name);
        }
        serde_json::to_string(&file).map_err(|error| error.to_string())
    }
}

fn check_exit(status: ExitStatus, last_line: &str) -> Result<(), Status> {
    if status.success() {
        return Ok(());
    }
    let reason = last_line.strip_prefix("error: ").unwrap_or(last_line);
    let message = format!("the profile was not measured ({status}): {reason}");
    // 2 is for what is asked wrongly, as in every command.
    Err(if status.code() == Some(2) { Status::invalid_argument(message) } else { Status::aborted(message) })
}

/// Lets the command save what it has measured, and ends it if that takes too long.
async fn stop(mut child: Child) {
    #[cfg(unix)]
    if let Some(pid) = child.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed())) {
        // An error says that it has gone.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
    }
    if cfg!(not(unix)) || tokio::time::timeout(STOP_GRACE, child.wait()).await.is_err() {
        let _ = child.kill().await;
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    const PROFILE: &str = r#"{"version": 1, "profiles": []}"#;

    fn host(script: &str) -> ProfileHost {
        let args = vec!["-c".into(), script.into(), "profile".into()];
        let command = WorkerCommand { program: "/bin/sh".into(), args, env: Vec::new() };
        ProfileHost::new(command, NodeId("desk".into()))
    }

    fn request() -> v1::ProfileRequest {
        v1::ProfileRequest { model: "m".into(), device: "CPU".into(), seconds: 3 }
    }

    async fn events(host: &ProfileHost) -> Vec<Result<Event, Status>> {
        let events = host.run(request()).unwrap().map(|event| event.map(|event| event.event.unwrap()));
        tokio::time::timeout(Duration::from_secs(60), events.collect()).await.unwrap()
    }

    #[tokio::test]
    async fn progress_is_passed_on_and_the_profile_comes_last() {
        let events = events(&host(&format!("echo \"$@\" >&2; echo '{PROFILE}'"))).await;
        let [Ok(Event::Progress(said)), Ok(Event::Profile(profile))] = events.as_slice() else {
            panic!("{events:?}")
        };
        assert_eq!(said, "--json --model m --device CPU --seconds 3");
        assert!(ProfilesFile::from_json(profile).unwrap().profiles.is_empty());
    }

    #[tokio::test]
    async fn a_profile_that_fails_says_why_by_what_it_said_last() {
        let failed = events(&host("echo 'error: no model' >&2; exit 2")).await;
        let status = failed.last().unwrap().as_ref().unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().ends_with(": no model"), "{status}");
        let garbled = events(&host("echo hello")).await;
        assert!(garbled.last().unwrap().as_ref().unwrap_err().message().contains("no profile"));
    }

    #[tokio::test]
    async fn one_profile_is_measured_at_a_time_and_one_that_is_not_wanted_is_asked_to_stop() {
        let folder = tempfile::tempdir().unwrap();
        let saved = folder.path().join("saved");
        let script = "trap 'echo x > \"$SAVED\"; exit 130' INT; echo up >&2; while :; do sleep 0.05; done";
        let mut host = host(script);
        host.command.env.push(("SAVED".into(), saved.clone().into()));
        let mut first = host.run(request()).unwrap();
        assert!(first.next().await.unwrap().is_ok());
        assert_eq!(host.run(request()).err().unwrap().code(), tonic::Code::ResourceExhausted);
        drop(first);
        let stopped = async {
            while host.run(request()).is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), stopped).await.unwrap();
        assert!(saved.is_file(), "it was killed rather than asked");
    }
}
