//! Plans carried out on nodes that joined: applied, kept, taken back, and made anew when nodes leave and come back.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tests::chat::EventStream;
use tests::cluster::Cluster;
use tests::models::{SMOLLM2, model_path};
use tests::node::Node;
use tests::process::{eventually, signal};
use tests::reference::Reference;
use tests::server::{READY_DEADLINE, Server};

const SOON: Duration = Duration::from_secs(60);

/// What a replica of these stages is in a plan: first and end block by node.
fn replica(slots: u32, stages: &[(&str, u32, u32)]) -> Value {
    let stage = |&(device, start, end): &(&str, u32, u32)| json!({ "device": device, "start": start, "end": end, "gpu_blocks": 0 });
    json!({ "role": "mixed", "slots": slots, "stages": stages.iter().map(stage).collect::<Vec<_>>() })
}

fn plan(replicas: &[Value]) -> Value {
    json!({ "objective": "by hand", "model": "SmolLM2-135M-Instruct.Q4_1", "replicas": replicas })
}

fn launch(cluster: &Cluster, args: &[&str]) -> Server {
    let own = cluster.serve_args();
    let common = ["--cluster", "--ctx", "512", "--threads", "1"];
    let args: Vec<&str> = own.iter().map(String::as_str).chain(common).chain(args.iter().copied()).collect();
    Server::launch("SmolLM2", &args).unwrap()
}

async fn is_up(server: &Server) {
    eventually("the API", SOON, async || server.ready().await.ok()).await.unwrap();
}

/// A cluster with three nodes whose orchestrator was started with a plan of two replicas: a and b, and c.
struct Three {
    cluster: Cluster,
    server: Server,
    nodes: Vec<Node>,
}

impl Three {
    async fn start(args: &[&str]) -> Self {
        let cluster = Cluster::new().unwrap();
        let file = cluster.folder().join("plan.json");
        let first = plan(&[replica(2, &[("a", 0, 14), ("b", 14, 30)]), replica(2, &[("c", 0, 30)])]);
        std::fs::write(&file, first.to_string()).unwrap();
        let server = launch(&cluster, &[&["--plan", file.to_str().unwrap()], args].concat());
        is_up(&server).await;
        let mut nodes = Vec::new();
        for name in ["a", "b", "c"] {
            nodes.push(cluster.join(name).await.unwrap());
        }
        let three = Self { cluster, server, nodes };
        three.reached().await;
        three
    }

    async fn deployment(&self) -> Option<Value> {
        self.cluster.admin(&self.server, "/admin/v1/deployment").await.ok()
    }

    /// Waits until all is as is desired.
    async fn reached(&self) -> Value {
        self.until("the plan to be carried out", |now| now["reached"] == true).await
    }

    async fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let seen = eventually(what, READY_DEADLINE, async || self.deployment().await.filter(&wanted)).await;
        match seen {
            Ok(seen) => seen,
            Err(error) => {
                panic!("{error}: {:#}\n{}", self.deployment().await.unwrap_or_default(), self.server.log())
            }
        }
    }

    async fn post(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        let request = self.server.client().post(self.server.url(path)).json(body);
        let reply = request.bearer_auth(self.cluster.admin_key().unwrap()).send().await.unwrap();
        (reply.status(), reply.json().await.unwrap())
    }

    /// Adds a plan and applies it; its id, and the steps that were announced.
    async fn apply(&self, plan: &Value) -> (u64, Vec<Value>) {
        let (status, added) = self.post("/admin/v1/plans", plan).await;
        assert_eq!(status, StatusCode::CREATED, "{added}");
        let id = added["id"].as_u64().unwrap();
        let (status, applied) = self.post(&format!("/admin/v1/plans/{id}/apply"), &json!({})).await;
        assert_eq!(status, StatusCode::OK, "{applied}");
        (id, applied["steps"].as_array().unwrap().clone())
    }

    async fn kinds_of_events(&self) -> Vec<String> {
        let events = self.cluster.admin(&self.server, "/admin/v1/events").await.unwrap();
        let events = events["data"].as_array().unwrap();
        events.iter().map(|event| event["kind"].as_str().unwrap().to_owned()).collect()
    }

    fn workers(&self) -> Vec<Vec<u32>> {
        self.nodes.iter().map(Node::workers).collect()
    }
}

fn acts(steps: &[Value]) -> Vec<&str> {
    steps.iter().map(|step| step["act"].as_str().unwrap()).collect()
}

/// The greedy answer to a prompt, over a stream.
async fn text(server: &Server, prompt: &str) -> String {
    let body = json!({ "prompt": prompt, "temperature": 0, "max_tokens": 24 });
    EventStream::open(server, "/v1/completions", body).await.unwrap().text().await.unwrap().0
}

const PROMPT: &str = "The capital of France is";

fn expected() -> String {
    Reference::load(&model_path(SMOLLM2).unwrap()).unwrap().greedy_text(PROMPT, 24).unwrap()
}

#[tokio::test]
async fn a_plan_that_keeps_a_replica_leaves_its_stages_alone_and_can_be_taken_back() {
    let expected = expected();
    let three = Three::start(&[]).await;
    let (server, first) = (&three.server, three.workers());
    assert_eq!(first.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 1]);
    assert_eq!(text(server, PROMPT).await, expected);

    // Dry: it says what it would do, and does nothing.
    let second = plan(&[replica(3, &[("c", 0, 30)]), replica(2, &[("a", 0, 14), ("b", 14, 30)])]);
    let (_, added) = three.post("/admin/v1/plans", &second).await;
    let path = format!("/admin/v1/plans/{}/apply?dry_run=true", added["id"]);
    let (status, dry) = three.post(&path, &json!({})).await;
    assert_eq!((status, &dry["decision"]), (StatusCode::OK, &Value::Null));
    assert_eq!(acts(dry["steps"].as_array().unwrap()), ["start", "drain", "stop"]);

    // A generation that runs on the old one meanwhile is not disturbed.
    let mut long = json!({ "prompt": PROMPT, "temperature": 0, "max_tokens": 400, "ignore_eos": true });
    let running: Vec<_> =
        futures::future::join_all((0..4).map(|_| EventStream::open(server, "/v1/completions", long.clone())))
            .await;
    let (id, steps) = three.apply(&second).await;
    assert_eq!(acts(&steps), ["start", "drain", "stop"]);
    let texts = futures::future::join_all(running.into_iter().map(|stream| stream.unwrap().text())).await;
    let texts: Vec<String> = texts.into_iter().map(|text| text.unwrap().0).collect();
    assert!(texts.iter().all(|text| *text == texts[0] && text.starts_with(&expected)), "{texts:?}");
    let now = three.reached().await;
    assert_eq!(now["plan"], id);
    let slots: Vec<&Value> = now["replicas"].as_array().unwrap().iter().map(|one| &one["slots"]).collect();
    assert_eq!(slots, [2, 3]);
    let workers = three.workers();
    assert_eq!(workers[..2], first[..2], "stages of the kept replica were restarted");
    assert_ne!(workers[2], first[2]);

    // Another role loads nothing.
    let mut third = second.clone();
    third["replicas"][1]["role"] = "decode".into();
    let (_, steps) = three.apply(&third).await;
    assert_eq!(acts(&steps), ["role"]);
    let now = three.reached().await;
    assert_eq!(now["replicas"][0]["role"], "decode");
    assert_eq!(three.workers(), workers);

    for _ in 0..2 {
        // Back and forth: the plan before the present one.
        let (status, _) = three.post("/admin/v1/plans/rollback", &json!({})).await;
        assert_eq!(status, StatusCode::OK);
        three.reached().await;
    }
    assert_eq!(three.deployment().await.unwrap()["history"].as_array().unwrap().len(), 5);
    assert_eq!(three.workers(), workers);
    long["max_tokens"] = 24.into();
    assert_eq!(text(server, PROMPT).await, expected);
    let kinds = three.kinds_of_events().await;
    for kind in [
        "plan_made",
        "plan_desired",
        "plan_reached",
        "replica_started",
        "replica_serves",
        "replica_drained",
        "replica_stopped",
        "replica_role",
    ] {
        assert!(kinds.iter().any(|one| one == kind), "{kind} is missing in {kinds:?}");
    }

    // What cannot be is refused with every fault, and changes nothing.
    let broken = plan(&[replica(0, &[("a", 0, 14), ("nowhere", 13, 29)])]);
    let (status, refused) = three.post("/admin/v1/plans", &broken).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(refused["error"]["faults"].as_array().unwrap().len(), 4, "{refused}");
    let mut other = second.clone();
    other["model"] = "whale".into();
    assert_eq!(three.post("/admin/v1/plans", &other).await.0, StatusCode::BAD_REQUEST);
    assert_eq!(three.workers(), workers);
}

#[tokio::test]
async fn the_loss_of_a_node_makes_a_plan_of_the_others_and_its_return_the_old_one() {
    let expected = expected();
    let mut three = Three::start(&["--replan-after", "1s"]).await;
    let before = three.workers();
    signal(three.nodes[1].pid(), "KILL").unwrap();
    // The other replica serves on, from the first moment.
    assert_eq!(text(&three.server, PROMPT).await, expected);
    let mended = |now: &Value| now["reached"] == true && now["plan"] == 2;
    let now = three.until("a plan without b", mended).await;
    let stages = |now: &Value| -> Vec<String> {
        let all =
            now["replicas"].as_array().unwrap().iter().flat_map(|one| one["stages"].as_array().unwrap());
        let mut all: Vec<String> = all
            .map(|stage| {
                format!("{}{}-{}", stage["node"].as_str().unwrap(), stage["first_block"], stage["end_block"])
            })
            .collect();
        all.sort();
        all
    };
    assert_eq!(stages(&now), ["a0-30", "c0-30"]);
    assert_eq!(three.workers()[2], before[2], "the replica that was whole was restarted");
    for _ in 0..4 {
        assert_eq!(text(&three.server, PROMPT).await, expected);
    }

    three.nodes[1] = three.cluster.join("b").await.unwrap();
    let whole = |now: &Value| now["reached"] == true && now["plan"] == 1;
    let now = three.until("the first plan again", whole).await;
    assert_eq!(stages(&now), ["a0-14", "b14-30", "c0-30"]);
    assert_eq!(three.workers()[2], before[2]);
    assert_eq!(text(&three.server, PROMPT).await, expected);
    assert!(three.kinds_of_events().await.iter().any(|kind| kind == "replanned"));
}

#[tokio::test]
async fn where_plans_are_only_proposed_nothing_changes_until_one_is_applied() {
    let three = Three::start(&["--replan-after", "1s", "--plan-mode", "propose"]).await;
    signal(three.nodes[0].pid(), "KILL").unwrap();
    let proposed = eventually("a proposal", READY_DEADLINE, async || {
        let plans = three.cluster.admin(&three.server, "/admin/v1/plans").await.ok()?;
        plans["data"].as_array()?.iter().find(|plan| plan["origin"] == "replanned").cloned()
    });
    let proposed = proposed.await.unwrap();
    assert_eq!(proposed["desired"], false);
    assert_eq!(three.deployment().await.unwrap()["plan"], 1);
    let (status, _) = three.post(&format!("/admin/v1/plans/{}/apply", proposed["id"]), &json!({})).await;
    assert_eq!(status, StatusCode::OK);
    let now = three.reached().await;
    assert_eq!(now["plan"], proposed["id"]);
}

#[tokio::test]
async fn an_orchestrator_that_was_killed_and_is_started_again_serves_the_desired_plan_with_the_stages_that_were_kept()
 {
    let expected = expected();
    let mut three = Three::start(&[]).await;
    let epochs = async |three: &Three| -> Vec<u64> {
        let (_, ready) = three.server.ready().await.unwrap();
        ready["replicas"].as_array().unwrap().iter().map(|one| one["epoch"].as_u64().unwrap()).collect()
    };
    let second = plan(&[replica(2, &[("b", 0, 30)]), replica(2, &[("c", 0, 30)])]);
    let (id, _) = three.apply(&second).await;
    three.reached().await;
    let (before, workers) = (epochs(&three).await, three.workers());
    assert_eq!(workers.iter().map(Vec::len).collect::<Vec<_>>(), [0, 1, 1]);
    signal(three.server.pid(), "KILL").unwrap();
    three.server.wait_exit(SOON).await.unwrap();
    three.server = launch(&three.cluster, &[]);
    is_up(&three.server).await;
    let now = three.reached().await;
    assert_eq!(now["plan"], id);
    let after = epochs(&three).await;
    assert!(after.iter().min() > before.iter().max(), "{before:?}, then {after:?}");
    assert_eq!(text(&three.server, PROMPT).await, expected);
    assert_eq!(three.workers(), workers, "stages were loaded again");

    // One that is stopped in order stops its stages.
    assert!(three.server.interrupt(SOON).await.unwrap().success());
    assert!(three.workers().iter().all(Vec::is_empty));
}
