//! Stopping processes, and limiting what they may use.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use cluster::Bytes;
use tests::lan::{Host, Lan, LimitsUnavailable, skip};
use tests::process::{signal, state_of};

/// Longer than an answer takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// Whether a limit was set; says why not where the controller is not there.
fn limited(outcome: anyhow::Result<()>) -> bool {
    match outcome {
        Ok(()) => true,
        Err(error) => match error.downcast_ref::<LimitsUnavailable>() {
            Some(reason) => {
                skip(&reason.to_string());
                false
            }
            None => panic!("{error:#}"),
        },
    }
}

/// A process that answers each line with the same.
struct Echo {
    child: Child,
    answers: mpsc::Receiver<String>,
}

impl Echo {
    fn start(host: &Host) -> Self {
        let mut command = host.command("cat");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { child, answers }
    }

    fn ask(&mut self) {
        writeln!(self.child.stdin.as_ref().unwrap(), "ping").unwrap();
    }

    fn answers(&self) -> bool {
        self.answers.recv_timeout(PATIENCE).is_ok()
    }

    fn is_silent(&self) -> bool {
        self.answers.recv_timeout(Duration::from_millis(150)) == Err(RecvTimeoutError::Timeout)
    }
}

#[test]
fn a_frozen_host_answers_only_after_it_is_thawed() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    let (a, b) = (lan.host("a"), lan.host("b"));
    let (mut frozen, mut other) = (Echo::start(a), Echo::start(b));
    frozen.ask();
    assert!(frozen.answers());

    a.freeze().unwrap();
    assert_eq!(state_of(frozen.child.id()), Some('T'));
    frozen.ask();
    other.ask();
    assert!(frozen.is_silent() && other.answers());
    a.thaw().unwrap();
    assert!(frozen.answers());

    // The same for a single process.
    signal(frozen.child.id(), "STOP").unwrap();
    frozen.ask();
    assert!(frozen.is_silent());
    signal(frozen.child.id(), "CONT").unwrap();
    assert!(frozen.answers());
}

#[test]
fn a_host_with_a_fifth_of_a_core_uses_no_more() {
    const CORES: f64 = 0.2;
    let Some(lan) = Lan::with_hosts(&["a"]).build_or_skip().unwrap() else { return };
    let a = lan.host("a");
    let busy = || a.command("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
    // Processes that run already come under the limit as well.
    let mut before = busy();
    let is_limited = limited(a.limit_cpu(CORES));
    let mut after = busy();
    if is_limited {
        wait_for_the_limit(a, CORES);
    }
    drop(lan);
    let ends = [&mut before, &mut after].map(|child| child.wait().unwrap().signal());
    assert_eq!(ends, [Some(9), Some(9)]);
}

/// Watches a host that has more to do than it may, until its limit has shown.
fn wait_for_the_limit(host: &Host, cores: f64) {
    let begun = Instant::now();
    let mut shown = false;
    while !shown {
        let (used, throttled) = (host.cpu_time().unwrap(), host.throttled_periods().unwrap());
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(500));
        let (used, elapsed) = (host.cpu_time().unwrap() - used, start.elapsed());
        let allowed = elapsed.mul_f64(cores) + Duration::from_millis(20);
        assert!(used <= allowed, "{used:?} of processor time in {elapsed:?}");
        // Others on the machine may leave the host less than the limit; then it has not shown yet.
        shown = host.throttled_periods().unwrap() > throttled;
        assert!(shown || begun.elapsed() < PATIENCE, "the limit never bit");
    }
}

#[test]
fn a_process_that_exceeds_its_hosts_memory_is_killed() {
    let Some(lan) = Lan::with_hosts(&["a", "b"]).build_or_skip().unwrap() else { return };
    let a = lan.host("a");
    if !limited(a.limit_memory(Bytes(64 << 20))) {
        return;
    }
    // `tail` keeps a line until it ends, and this one never does; so it stops at a size that only a limit undercuts.
    let hog = |host: &Host| {
        host.command("sh").args(["-c", "head -c 200000000 /dev/zero | tail >/dev/null"]).output()
    };
    let unlimited = hog(lan.host("b")).unwrap();
    assert!(unlimited.status.success());
    let killed = hog(a).unwrap();
    assert_eq!(killed.status.code(), Some(128 + 9), "tail is killed, which the shell reports");
    assert!(a.memory_kills().unwrap() >= 1);
}
