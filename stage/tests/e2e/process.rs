//! Workers as processes of their own: how they start and end, what they weigh, and what becomes of a replica whose
//! stage is killed or frozen.
//!
//! The worker's process is this very test binary, run as the ignored test `worker_process`.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use protocol::tls::ClusterCa;
use protocol::v1;
use protocol::worker::{WorkerConfig, WorkerHello};
use tokio::time::Instant;

use crate::replica::{PATIENCE, Replica, SHAPE, Shape, configs, greedy};
use crate::whole::{Slices, Whole, prompts};

#[test]
#[ignore = "what the other tests start"]
fn worker_process() {
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    stage::run_worker().unwrap();
}

struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    address: SocketAddr,
}

impl Process {
    fn start(config: &WorkerConfig) -> Self {
        let mut child = Self::spawn();
        let mut stdin = child.stdin.take().unwrap();
        writeln!(stdin, "{}", config.to_line().unwrap()).unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // The test harness writes around it.
        let hello = lines.map(Result::unwrap).find(|line| line.starts_with('{')).expect("a hello");
        let port = WorkerHello::from_line(&hello).unwrap().port;
        Self { child, stdin: Some(stdin), address: ([127, 0, 0, 1], port).into() }
    }

    fn spawn() -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::worker_process", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap()
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    fn wait(&mut self, limit: Duration) -> Option<std::process::ExitStatus> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn start(slices: &Slices, shape: Shape) -> (Replica, Vec<Process>, Vec<WorkerConfig>, ClusterCa) {
    let ca = ClusterCa::new().unwrap();
    let configs = configs(slices, &[&[0], &[1], &[2]], shape, &ca);
    link(configs, ca, shape).await
}

async fn link(
    configs: Vec<WorkerConfig>,
    ca: ClusterCa,
    shape: Shape,
) -> (Replica, Vec<Process>, Vec<WorkerConfig>, ClusterCa) {
    let processes: Vec<Process> = configs.iter().map(Process::start).collect();
    let addresses = processes.iter().map(|process| process.address).collect();
    (Replica::link(addresses, &ca, shape).await, processes, configs, ca)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_holds_about_what_it_says() {
    let slices = Slices::cut(&[10, 20]);
    let (replica, _processes, ..) = start(&slices, Shape { n_ctx: 2048, ..SHAPE }).await;
    for stage in 0..3 {
        let memory = replica.status(stage).await.memory.unwrap();
        let said = memory.weights + memory.cache + memory.compute + memory.runtime;
        let ratio = memory.resident as f64 / said as f64;
        println!("stage {stage}: {memory:?}, resident/said = {ratio:.3}");
        assert!((0.85..=1.15).contains(&ratio), "stage {stage} holds {ratio:.3} of what it says: {memory:?}");
        assert!(memory.weights > 10 << 20 && memory.cache > 10 << 20, "{memory:?}");
    }
}

/// Field case 1.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_stage_is_noticed_and_replaced() {
    let slices = Slices::cut(&[10, 20]);
    let mut whole = Whole::load(&slices, SHAPE.n_ctx);
    let prompt = prompts(&whole, 1).remove(0);
    let expected = whole.greedy(&prompt, 12);
    let (mut replica, mut processes, configs, _ca) = start(&slices, SHAPE).await;
    let mut request = greedy(&prompt, 200);
    request.ignore_eos = true;
    let mut running = replica.start(request).await.unwrap();
    running.until_tokens(3).await;
    processes[1].signal("-KILL");
    let since = Instant::now();
    let failed = running.rest().await.unwrap().failed.unwrap();
    assert!(since.elapsed() < Duration::from_secs(5), "noticed after {:?}", since.elapsed());
    assert_eq!(failed.kind(), v1::FailureKind::ReplicaLost, "{failed:?}");

    processes[1] = Process::start(&configs[1]);
    replica.addresses[1] = processes[1].address;
    replica.wait_for(1, |status| status.state() == v1::LoadState::Loaded).await;
    replica.relink().await.unwrap();
    assert_eq!(replica.generate(&prompt, 12).await.unwrap().tokens, expected);
}

/// Field cases 5 and 6.
#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_stage_is_noticed_by_deadline_and_does_not_serve_when_it_thaws() {
    let slices = Slices::cut(&[10, 20]);
    let whole = Whole::load(&slices, SHAPE.n_ctx);
    let prompt = prompts(&whole, 1).remove(0);
    let (mut replica, processes, configs, _ca) = start(&slices, SHAPE).await;
    let mut request = greedy(&prompt, 200);
    request.ignore_eos = true;
    let mut running = replica.start(request).await.unwrap();
    running.until_tokens(3).await;
    processes[1].signal("-STOP");
    let since = Instant::now();
    let failed = running.rest().await.unwrap().failed.unwrap();
    // Keepalive takes 2.75 s at most; the rest is for a busy machine.
    assert!(since.elapsed() < Duration::from_secs(5), "noticed after {:?}", since.elapsed());
    assert_eq!(failed.kind(), v1::FailureKind::ReplicaLost, "{failed:?}");
    let upstream = replica.wait_for(0, |status| !status.link_failure.is_empty()).await;
    assert!(upstream.link_failure.contains("link from stage 0"), "{}", upstream.link_failure);

    // Another takes its place while it is frozen, and it thaws into a replica that has moved on.
    let substitute = Process::start(&configs[1]);
    let frozen = std::mem::replace(&mut replica.addresses[1], substitute.address);
    replica.wait_for(1, |status| status.state() == v1::LoadState::Loaded).await;
    replica.relink().await.unwrap();
    processes[1].signal("-CONT");
    let answer = replica.generate(&prompt, 12).await.unwrap();
    assert_eq!(answer.finished.unwrap().generated_tokens as usize, answer.tokens.len());
    replica.addresses[1] = frozen;
    assert_eq!(replica.status(1).await.epoch, 1, "it is where it was, and nobody listens to it");
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_does_not_come_back_in_time_fails_its_requests() {
    let slices = Slices::cut(&[10, 20]);
    let ca = ClusterCa::new().unwrap();
    let mut configs = configs(&slices, &[&[0], &[1], &[2]], SHAPE, &ca);
    // Sooner than keepalive.
    configs[2].step_deadline_secs = 1;
    let (replica, processes, ..) = link(configs, ca, SHAPE).await;
    let mut request = greedy(&[1, 2, 3], 200);
    request.ignore_eos = true;
    let mut running = replica.start(request).await.unwrap();
    running.until_tokens(3).await;
    processes[1].signal("-STOP");
    let failed = running.rest().await.unwrap().failed.unwrap();
    assert_eq!(failed.kind(), v1::FailureKind::ReplicaLost);
    assert!(failed.message.contains("came back within 1 s"), "{}", failed.message);
}

/// What travels is never waited for without end, and is not needed.
#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_stage_killed_while_its_keys_and_values_are_fetched_leaves_the_text_as_it_is() {
    let (one, other) = (Slices::cut(&[10, 20]), Slices::cut(&[15]));
    let mut whole = Whole::load(&one, SHAPE.n_ctx);
    let prompt = prompts(&whole, 4).remove(3);
    let expected = whole.greedy(&prompt, 12);
    let ca = ClusterCa::new().unwrap();
    let configs_of = |slices, stages| configs(slices, stages, SHAPE, &ca);
    let processes: Vec<_> = configs_of(&one, &[&[0], &[1], &[2]]).iter().map(Process::start).collect();
    let decoding: Vec<_> = configs_of(&other, &[&[0], &[1]]).iter().map(Process::start).collect();
    let addresses = |processes: &[Process]| processes.iter().map(|process| process.address).collect();
    let mut prefill = Replica::link(addresses(&processes), &ca, SHAPE).await;
    let mut decode = Replica::link(addresses(&decoding), &ca, SHAPE).await;
    (prefill.blocks, decode.blocks) = (vec![(0, 10), (10, 20), (20, 30)], vec![(0, 15), (15, 30)]);
    prefill.relink().await.unwrap();
    decode.relink().await.unwrap();
    let held = v1::GenerateRequest { hold_ms: 60_000, ..greedy(&prompt, 12) };
    let mut first = prefill.start(held).await.unwrap();
    let held = first.until_held().await;
    let tokens = first.answer.tokens.clone();
    // Frozen, it takes the connection and says nothing: both stages of the other replica wait for it.
    processes[1].signal("-STOP");
    let request = crate::hand_off::go_on(&prompt, &tokens, (12, held));
    let mut second = decode.start(request).await.unwrap();
    assert!(second.next().await.unwrap(), "it has started");
    processes[1].signal("-KILL");
    let since = Instant::now();
    let answer = second.rest().await.unwrap();
    assert!(since.elapsed() < Duration::from_secs(15), "given up after {:?}", since.elapsed());
    assert_eq!([&tokens[..], &answer.tokens].concat(), expected);
    let failure = answer.handed_over.unwrap().failure;
    // Those of the killed stage are missed: the others give theirs out although they have heard of its end.
    assert!(failure.contains("blocks 10..15") || failure.contains("blocks 15..20"), "{failure}");
    assert_eq!(decode.generate(&prompt, 12).await.unwrap().tokens, expected, "and so does the next");
}

#[test]
fn a_worker_ends_with_its_stdin() {
    let slices = Slices::cut(&[15]);
    let config = configs(&slices, &[&[0], &[1]], SHAPE, &ClusterCa::new().unwrap()).remove(1);
    let mut process = Process::start(&config);
    drop(process.stdin.take());
    assert!(process.wait(Duration::from_secs(5)).is_some(), "it lives on without its agent");
}

#[cfg(unix)]
#[test]
fn a_worker_swallows_interrupts() {
    let slices = Slices::cut(&[15]);
    let config = configs(&slices, &[&[0], &[1]], SHAPE, &ClusterCa::new().unwrap()).remove(1);
    let mut process = Process::start(&config);
    for _ in 0..3 {
        process.signal("-INT");
    }
    assert!(process.wait(Duration::from_millis(300)).is_none(), "an interrupt ended it");
}

#[test]
fn a_worker_refuses_a_configuration_of_another_version() {
    let mut child = Process::spawn();
    writeln!(child.stdin.take().unwrap(), "{{\"version\":99}}").unwrap();
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(!status.success());
            return;
        }
        assert!(Instant::now() < deadline, "it runs with a configuration it cannot read");
        std::thread::sleep(Duration::from_millis(10));
    }
}
