//! The agent with real child processes and real TLS, but stages that are answered for by this test: what a worker is
//! for the agent is a process that greets, and an address that answers `Status` and `Link`.

#![cfg(unix)]

use std::process::Command;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use cluster::{Epoch, LayerRange, Load};
use gguf::cut::CutOptions;
use protocol::listen::{FrameSizes, TlsIncoming, server};
use protocol::v1;
use protocol::v1::stage_server::{Stage as StageRpc, StageServer};
use protocol::v1::{
    ForwardReply, Frame, LinkReply, LinkRequest, LoadState, MemoryReport, StatusReply, StatusRequest,
};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::model_file::ModelFile;
use crate::test_model;

/// Generous: test machines are busy. Nothing is asserted about how long things took.
const DEADLINE: Duration = Duration::from_secs(60);

/// What the fake stages do, and what was done to them.
#[derive(Default)]
struct Script {
    /// The stage fails to load.
    bad: Option<u32>,
    /// The stage does not answer.
    frozen: Option<u32>,
    /// The stage says that its link broke in the epoch.
    broken: Option<(u32, u64)>,
    /// The stage refuses to be linked.
    unlinkable: Option<u32>,
    /// Stage, epoch and next of every link.
    links: Vec<(u32, u64, String)>,
}

#[derive(Clone)]
struct FakeStage {
    stage: u32,
    script: Arc<Mutex<Script>>,
}

impl FakeStage {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }
}

#[tonic::async_trait]
impl StageRpc for FakeStage {
    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        if self.script().frozen == Some(self.stage) {
            std::future::pending::<()>().await;
        }
        let script = self.script();
        let broken = script.broken.filter(|(stage, _)| *stage == self.stage);
        let bad = script.bad == Some(self.stage);
        Ok(Response::new(StatusReply {
            state: if bad { LoadState::Failed } else { LoadState::Loaded }.into(),
            failure: if bad { "tensor x is damaged".to_owned() } else { String::new() },
            memory: Some(MemoryReport { weights: 1, cache: 2, compute: 3, runtime: 4, resident: 10 }),
            epoch: broken.map_or(0, |(_, epoch)| epoch),
            step_times: vec![v1::StepTimes {
                steps: 7,
                rows: 7,
                from_rows: 1,
                time_ms: 14.0,
                ..Default::default()
            }],
            link_failure: if broken.is_some() { "reset".to_owned() } else { String::new() },
            ..StatusReply::default()
        }))
    }

    async fn link(&self, request: Request<LinkRequest>) -> Result<Response<LinkReply>, Status> {
        let LinkRequest { epoch, next, .. } = request.into_inner();
        let mut script = self.script();
        if script.unlinkable == Some(self.stage) {
            return Err(Status::failed_precondition("not now"));
        }
        script.links.push((self.stage, epoch, next));
        Ok(Response::new(LinkReply {}))
    }

    type ForwardStream = tokio_stream::Empty<Result<ForwardReply, Status>>;

    async fn forward(&self, _: Request<Streaming<Frame>>) -> Result<Response<Self::ForwardStream>, Status> {
        Err(Status::unimplemented("no frames here"))
    }
}

/// Two fake stages and what is needed to run an agent for them.
struct Fixture {
    ca: ClusterCa,
    script: Arc<Mutex<Script>>,
    addresses: Vec<SocketAddr>,
    _servers: Vec<AbortOnDropHandle<()>>,
    folder: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Self {
        let ca = ClusterCa::new().unwrap();
        let script = Arc::new(Mutex::new(Script::default()));
        let (mut addresses, mut servers) = (Vec::new(), Vec::new());
        for stage in 0..2 {
            let identity = ca.issue("fake").unwrap();
            let incoming = TlsIncoming::bind(([127, 0, 0, 1], 0).into(), &identity).await.unwrap();
            addresses.push(incoming.local_addr());
            let fake = FakeStage { stage, script: Arc::clone(&script) };
            let serving = server(FrameSizes::for_rows(1, 1)).add_service(StageServer::new(fake));
            servers.push(AbortOnDropHandle::new(tokio::spawn(async move {
                serving.serve_with_incoming(incoming).await.unwrap();
            })));
        }
        Self { ca, script, addresses, _servers: servers, folder: tempfile::tempdir().unwrap() }
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    /// A shell that greets as the stage it is told to be, and then does `afterwards`.
    fn worker(&self, afterwards: &str) -> WorkerCommand {
        let [first, second] = [0, 1].map(|i| self.addresses[i].port());
        let greet = format!(
            r#"read -r line; case "$line" in *'"stage":0,'*) port={first};; *) port={second};; esac
               echo "{{\"version\":{},\"port\":$port}}""#,
            protocol::worker::VERSION
        );
        WorkerCommand {
            program: "/bin/sh".into(),
            args: vec!["-c".into(), format!("{greet}\n{afterwards}").into()],
            env: Vec::new(),
        }
    }

    fn start(&self, command: WorkerCommand) -> Agent {
        let model = ModelFile::open(&test_model::write(self.folder.path())).unwrap();
        let ranges = LayerRange::from_cuts(&[2], test_model::N_LAYER).unwrap();
        let stages = ranges.into_iter().map(|layers| PreparedStage {
            layers,
            gpu_layers: 0,
            path: "slice.gguf".into(),
            predicted: StageMemory::default(),
        });
        let replica = PreparedReplica {
            model: "tiny".to_owned(),
            model_hash: ModelHash([0; 32]),
            options: CutOptions::default(),
            shape: model.shape().clone(),
            stages: stages.collect(),
            embedding: "embedding.gguf".into(),
            load: Load { slots: 1, n_ctx: 64, n_ubatch: 16 },
            prefill_chunk: 16,
            pins: Vec::new(),
        };
        let settings = WorkerSettings {
            threads: Some(1),
            micro_batches: 1,
            queue_limit: 1,
            encoding: RowEncoding::F32,
            keep: Duration::ZERO,
        };
        let loading = ReplicaState::Loading { progress: 0.0, waiting_for: String::new() };
        let outlook = Outlook::new(watch::Sender::new(loading));
        let config = ReplicaConfig {
            command,
            replica,
            settings,
            emulations: Vec::new(),
            profiles: Vec::new(),
            beside: 0,
            turns: Arc::new(TurnsFile::new().unwrap()),
        };
        Agent::start(config, &self.ca, outlook).unwrap()
    }
}

/// Waits for a worker's end that comes with the agent's.
const UNTIL_STDIN_ENDS: &str = "exec cat > /dev/null";

async fn wait_for(agent: &Agent, wanted: impl Fn(&ReplicaState) -> bool) -> ReplicaState {
    let mut state = agent.state();
    let seen = tokio::time::timeout(DEADLINE, state.wait_for(wanted)).await;
    seen.unwrap_or_else(|_| panic!("still {:?}", agent.state().borrow())).unwrap().clone()
}

fn is_epoch(state: &ReplicaState, wanted: u64) -> bool {
    matches!(state, ReplicaState::Ready { epoch, .. } if *epoch == Epoch(wanted))
}

fn down_with(state: &ReplicaState, part: &str) -> bool {
    matches!(state, ReplicaState::Down { reason } if reason.contains(part))
}

fn signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

fn exists(pid: u32) -> bool {
    Command::new("kill").args(["-0", &pid.to_string()]).output().unwrap().status.success()
}

#[tokio::test]
async fn stages_are_linked_from_the_master_down_and_then_serve() {
    let fixture = Fixture::new().await;
    let agent = fixture.start(fixture.worker(UNTIL_STDIN_ENDS));
    let reports = tokio::time::timeout(DEADLINE, agent.ready()).await.unwrap().unwrap();
    assert_eq!(reports.iter().map(|report| report.resident).collect::<Vec<_>>(), [Bytes(10); 2]);
    assert!(reports.iter().all(|report| report.pid > 0 && report.estimated.total() == Bytes(10)));
    let [first, second] = [0, 1].map(|i| fixture.addresses[i].to_string());
    assert_eq!(fixture.script().links, [(1, 1, first), (0, 1, second)]);
    let ReplicaState::Ready { master, .. } = agent.state().borrow().clone() else { panic!("not ready") };
    assert_eq!(master, fixture.addresses[1]);
    agent.shutdown().await;
    assert!(reports.iter().all(|report| !exists(report.pid)), "a worker outlived its agent");
}

#[tokio::test]
async fn what_the_stages_do_is_told_while_they_serve() {
    let fixture = Fixture::new().await;
    let agent = fixture.start(fixture.worker(UNTIL_STDIN_ENDS));
    let mut observations = agent.observations();
    let seen = tokio::time::timeout(
        DEADLINE,
        observations
            .wait_for(|stages| stages.len() == 2 && stages.iter().all(|stage| !stage.steps.is_empty())),
    );
    let seen = seen.await.unwrap().unwrap().clone();
    for (index, stage) in (0..).zip(&seen) {
        assert_eq!((stage.stage, stage.resident), (StageIndex(index), Bytes(10)));
        assert_eq!(stage.steps[0].totals.steps, 7);
    }
    agent.shutdown().await;
}

// Field cases 1 and 4.
#[tokio::test]
async fn a_killed_worker_is_replaced_and_all_stages_join_a_new_epoch() {
    let fixture = Fixture::new().await;
    let agent = fixture.start(fixture.worker(UNTIL_STDIN_ENDS));
    let before = agent.ready().await.unwrap();
    signal(before[0].pid, "-KILL");
    wait_for(&agent, |state| matches!(state, ReplicaState::Down { .. })).await;
    wait_for(&agent, |state| down_with(state, "stage 0 was lost: the worker was ended by signal 9")).await;
    wait_for(&agent, |state| is_epoch(state, 2)).await;
    let links: Vec<(u32, u64)> =
        fixture.script().links.iter().map(|(stage, epoch, _)| (*stage, *epoch)).collect();
    assert_eq!(links, [(1, 1), (0, 1), (1, 2), (0, 2)]);
    let after = agent.reports().borrow().clone();
    assert_eq!((after[1].pid, after[0].pid == before[0].pid), (before[1].pid, false));
    agent.shutdown().await;
}

// Field case 5.
#[tokio::test]
async fn a_frozen_stage_is_lost_by_its_deadline() {
    let fixture = Fixture::new().await;
    let agent = fixture.start(fixture.worker(UNTIL_STDIN_ENDS));
    let before = agent.ready().await.unwrap();
    fixture.script().frozen = Some(1);
    let down = wait_for(&agent, |state| matches!(state, ReplicaState::Down { .. })).await;
    let ReplicaState::Down { reason } = down else { unreachable!() };
    assert!(reason.contains("stage 1") && reason.contains("did not answer for 2.25 s"), "{reason}");
    fixture.script().frozen = None;
    wait_for(&agent, |state| is_epoch(state, 2)).await;
    assert!(!exists(before[1].pid), "the frozen worker was left behind");
    agent.shutdown().await;
}

#[tokio::test]
async fn a_load_that_fails_is_given_up_with_its_reason() {
    let fixture = Fixture::new().await;
    fixture.script().bad = Some(1);
    let agent = fixture.start(fixture.worker(UNTIL_STDIN_ENDS));
    let error = tokio::time::timeout(DEADLINE, agent.ready()).await.unwrap().unwrap_err();
    assert!(error.reason.contains("stage 1") && error.reason.contains("tensor x is damaged"), "{error}");
    let down =
        wait_for(&agent, |s| matches!(s, ReplicaState::Down { reason } if reason.contains("given up"))).await;
    assert!(matches!(down, ReplicaState::Down { reason } if reason.contains("tensor x is damaged")));
    agent.shutdown().await;
}

// Field case 6.
#[tokio::test]
async fn a_broken_link_makes_a_new_epoch() {
    let fixture = Fixture::new().await;
    let agent = fixture.start(fixture.worker(UNTIL_STDIN_ENDS));
    agent.ready().await.unwrap();
    fixture.script().broken = Some((0, 1));
    wait_for(&agent, |state| is_epoch(state, 2)).await;
    agent.shutdown().await;
}

#[tokio::test]
async fn a_stage_that_answers_but_cannot_be_linked_gets_a_new_worker() {
    let fixture = Fixture::new().await;
    fixture.script().unlinkable = Some(0);
    let agent = fixture.start(fixture.worker(UNTIL_STDIN_ENDS));
    let lost =
        |s: &ReplicaState| matches!(s, ReplicaState::Down { reason } if reason.contains("stage 0 was lost"));
    wait_for(&agent, lost).await;
    fixture.script().unlinkable = None;
    wait_for(&agent, |state| matches!(state, ReplicaState::Ready { .. })).await;
    agent.shutdown().await;
}

#[tokio::test]
async fn a_worker_that_does_not_stop_is_killed() {
    let fixture = Fixture::new().await;
    let agent = fixture.start(fixture.worker("exec sleep 1000"));
    let reports = agent.ready().await.unwrap();
    agent.shutdown().await;
    assert!(reports.iter().all(|report| !exists(report.pid)));
}

#[tokio::test]
async fn workers_end_with_a_dropped_agent() {
    let fixture = Fixture::new().await;
    let agent = fixture.start(fixture.worker(UNTIL_STDIN_ENDS));
    let reports = agent.ready().await.unwrap();
    drop(agent);
    let gone = async {
        while reports.iter().any(|report| exists(report.pid)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, gone).await.unwrap();
}

#[tokio::test]
async fn a_worker_that_ends_before_it_listens_says_why() {
    let fixture = Fixture::new().await;
    let command = WorkerCommand {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), "echo 'error: no such option' >&2; exit 2".into()],
        env: Vec::new(),
    };
    let agent = fixture.start(command);
    let lost = |s: &ReplicaState| matches!(s, ReplicaState::Down { .. });
    let ReplicaState::Down { reason } = wait_for(&agent, lost).await else { unreachable!() };
    assert!(reason.contains("exited with code 2; it said: error: no such option"), "{reason}");
    agent.shutdown().await;
}

// Field case 16.
#[tokio::test]
async fn a_worker_of_another_version_is_refused_with_both_numbers() {
    let fixture = Fixture::new().await;
    let command = WorkerCommand {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), r#"echo '{"version":77,"port":1}'; exec cat > /dev/null"#.into()],
        env: Vec::new(),
    };
    let agent = fixture.start(command);
    let lost = |s: &ReplicaState| matches!(s, ReplicaState::Down { .. });
    let ReplicaState::Down { reason } = wait_for(&agent, lost).await else { unreachable!() };
    assert!(reason.contains("77") && reason.contains(&protocol::worker::VERSION.to_string()), "{reason}");
    agent.shutdown().await;
}
