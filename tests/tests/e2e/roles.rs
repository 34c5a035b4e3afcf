//! A replica that computes prompts and one that answers, cut differently, behind one API: what clients see while requests change
//! hands, roles flip, and stages of either are killed, which is the whole model's text.

use std::time::Duration;

use futures::StreamExt;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tests::chat::EventStream;
use tests::cluster::Cluster;
use tests::hand_off::{Question, ask, expected, measure, questions};
use tests::models::{SMOLLM2, model_path};
use tests::process::eventually;
use tests::reference::Reference;
use tests::server::{READY_DEADLINE, Server, sample};

use crate::replicas::kill_stages;

const SOON: Duration = Duration::from_secs(20);

/// Three stages that compute prompts, two that answer.
const ROLES: &[&str] = &[
    "--replicas",
    "2",
    "--roles",
    "prefill,decode",
    "--cuts",
    "10,20",
    "--cuts",
    "14",
    "--slots",
    "4",
    "--ctx",
    "512",
    "--threads",
    "1",
];

async fn with_roles() -> Server {
    let server = Server::start("SmolLM2", ROLES).await.unwrap();
    eventually("both replicas", READY_DEADLINE, async || server.ready_replicas(2).await).await.unwrap();
    server
}

fn asked(n: usize) -> (Vec<Question>, Vec<String>) {
    let questions = questions(n);
    let mut reference = Reference::load(&model_path(SMOLLM2).unwrap()).unwrap();
    let expected = expected(&mut reference, &questions).unwrap();
    (questions, expected)
}

async fn outcome(server: &Server, outcome: &str) -> f64 {
    let name = format!("shoal_hand_offs_total{{outcome=\"{outcome}\"}}");
    sample(&server.metrics().await.unwrap(), &name).unwrap_or(0.0)
}

/// Waits until no slot of either replica is taken.
async fn idle(server: &Server) {
    let idle = async || {
        let metrics = server.metrics().await.ok()?;
        let slots =
            |replica: usize| sample(&metrics, &format!("shoal_active_slots{{replica=\"{replica}\"}}"));
        (slots(0)? + slots(1)? == 0.0).then_some(())
    };
    eventually("all slots to be free", SOON, idle).await.unwrap();
}

#[tokio::test]
async fn prompts_computed_by_one_replica_and_answered_by_another_give_the_whole_models_text() {
    let (questions, expected) = asked(24);
    let server = with_roles().await;
    let figures = measure(&server, (&questions, &expected), 8).await.unwrap();
    eprintln!("{figures:?}");
    // Of the others computing again was faster.
    assert!(figures.exact == 24 && figures.moved > 12.0, "{figures:?}");
    assert!(figures.excess().abs() < 0.02, "{:.2} % more bytes than tokens have", figures.excess() * 100.0);
    idle(&server).await;
    let metrics = server.metrics().await.unwrap();
    let drawn = |replica: usize| {
        sample(&metrics, &format!("shoal_engine_generated_tokens_total{{replica=\"{replica}\"}}")).unwrap()
    };
    assert_eq!(drawn(0), 24.0, "the first tokens, and no others");
    let held_anew = sample(&metrics, "shoal_held_slots{replica=\"0\"}");
    assert_eq!(held_anew, Some(0.0));
}

#[tokio::test]
async fn roles_flip_while_requests_run_and_nobody_notices() {
    let (questions, expected) = asked(48);
    let cluster = Cluster::new().unwrap();
    let server = cluster.serve("SmolLM2", ROLES).await.unwrap();
    eventually("both replicas", READY_DEADLINE, async || server.ready_replicas(2).await).await.unwrap();
    let flipping = async {
        for roles in
            [["decode", "prefill"], ["mixed", "mixed"], ["prefill", "decode"], ["prefill", "prefill"]]
                .iter()
                .cycle()
        {
            tokio::time::sleep(Duration::from_millis(700)).await;
            for (replica, role) in roles.iter().enumerate() {
                set_role(&cluster, &server, replica, role).await;
            }
        }
    };
    let answers = tokio::select! {
        answers = ask(&server, &questions, 8) => answers.unwrap(),
        () = flipping => unreachable!("it goes on for ever"),
    };
    for ((asked, expected), answer) in questions.iter().zip(&expected).zip(&answers) {
        assert_eq!(&answer.text, expected, "{asked:?}");
    }
    let moved = outcome(&server, "moved").await;
    assert!(moved > 0.0, "nothing changed hands");
    assert_eq!(sample(&server.metrics().await.unwrap(), "shoal_replays_total"), Some(0.0));
    idle(&server).await;
}

async fn set_role(cluster: &Cluster, server: &Server, replica: usize, role: &str) {
    let url = server.url(&format!("/admin/v1/replicas/{replica}/role"));
    let request = server.client().post(url).bearer_auth(cluster.admin_key().unwrap());
    let reply = request.json(&json!({ "role": role })).send().await.unwrap();
    assert_eq!(reply.status(), StatusCode::OK);
    let replica: Value = reply.json().await.unwrap();
    assert_eq!(replica["role"], role);
}

#[tokio::test]
async fn case_1_stages_of_either_replica_are_killed_while_requests_change_hands() {
    let (questions, expected) = asked(60);
    let server = with_roles().await;
    let (answering, killing) = (ask(&server, &questions, 8), kill_stages(&server, 3));
    tokio::pin!(answering, killing);
    let mut killed = None;
    let answers = loop {
        tokio::select! {
            answers = &mut answering => break answers.unwrap(),
            kills = &mut killing, if killed.is_none() => killed = Some(kills),
        }
    };
    for ((asked, expected), answer) in questions.iter().zip(&expected).zip(&answers) {
        assert_eq!(&answer.text, expected, "{asked:?}");
    }
    let metrics = server.metrics().await.unwrap();
    let replays = sample(&metrics, "shoal_replays_total").unwrap();
    let moved = outcome(&server, "moved").await;
    assert!(moved > 0.0 && replays > 0.0, "{moved} changed hands, {replays} were sent again");
}

#[tokio::test]
async fn clients_that_leave_while_their_requests_change_hands_leave_no_slot_taken() {
    let server = with_roles().await;
    let leaving = questions(24).into_iter().enumerate().map(|(i, asked)| {
        let server = &server;
        async move {
            let body =
                json!({ "prompt": asked.prompt, "temperature": 0, "max_tokens": 200, "ignore_eos": true });
            let mut stream = EventStream::open(server, "/v1/completions", body).await.unwrap();
            // The first token comes from one replica, the second from the other.
            for _ in 0..=i % 3 {
                stream.next_json().await.unwrap().unwrap();
            }
        }
    });
    futures::stream::iter(leaving).buffer_unordered(6).collect::<Vec<_>>().await;
    idle(&server).await;
    let (questions, expected) = asked(4);
    let answers = ask(&server, &questions, 4).await.unwrap();
    assert!(answers.iter().zip(&expected).all(|(answer, expected)| answer.text == *expected));
}
