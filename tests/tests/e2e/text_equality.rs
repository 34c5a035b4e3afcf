//! The pipeline gives exactly the whole model's text.

use std::sync::Arc;

use futures::StreamExt;
use serde_json::json;
use tests::chat::EventStream;
use tests::models::{SMOLLM2, model_path};
use tests::reference::Reference;
use tests::server::Server;

const PROMPTS: [&str; 20] = [
    "The capital of France is",
    "Once upon a time, there was a small",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "Dear Sir or Madam,",
    "1, 2, 3, 5, 8, 13,",
    "To make a cup of tea, first",
    "The quick brown fox",
    "In 1969, humans first",
    "SELECT name FROM users WHERE",
    "The mitochondria is",
    "Shall I compare thee to",
    "A good team needs",
    "The opposite of hot is",
    "List of planets: Mercury,",
    "My favourite season is winter because",
    "An LLM can be split over several machines by",
    "Photosynthesis turns",
    "Le chat est sur la",
];

#[tokio::test]
async fn twenty_prompts_four_at_a_time_over_three_stages_give_the_whole_models_text() {
    let mut reference = Reference::load(&model_path(SMOLLM2).unwrap()).unwrap();
    let server = Arc::new(
        // Three slots for four requests at once: slots are reused and requests wait.
        Server::start("SmolLM2", &["--stages", "3", "--slots", "3", "--ctx", "512"]).await.unwrap(),
    );
    let answers: Vec<(usize, String)> = futures::stream::iter(PROMPTS.iter().enumerate())
        .map(|(i, prompt)| {
            let server = Arc::clone(&server);
            async move {
                let tokens = 24 + (i % 5) * 8;
                let body = json!({ "prompt": prompt, "temperature": 0, "max_tokens": tokens });
                let stream = EventStream::open(&server, "/v1/completions", body).await.unwrap();
                (tokens, stream.text().await.unwrap().0)
            }
        })
        .buffered(4)
        .collect()
        .await;
    for (prompt, (tokens, text)) in PROMPTS.iter().zip(answers) {
        assert_eq!(text, reference.greedy_text(prompt, tokens).unwrap(), "prompt {prompt:?}");
    }
}

#[tokio::test]
async fn half_precision_links_still_answer() {
    let server = Server::start("SmolLM2", &["--stages", "2", "--encoding", "f16"]).await.unwrap();
    let body = json!({ "prompt": "The capital of France is", "temperature": 0, "max_tokens": 16 });
    let (text, reason) =
        EventStream::open(&server, "/v1/completions", body).await.unwrap().text().await.unwrap();
    assert!(text.contains("Paris"), "{text:?}");
    assert_eq!(reason, "length");
}

#[tokio::test]
async fn a_prompt_that_shares_a_prefix_with_a_freed_slot_gives_the_same_text() {
    let mut reference = Reference::load(&model_path(SMOLLM2).unwrap()).unwrap();
    let server = Server::start("SmolLM2", &["--stages", "2", "--slots", "1", "--ctx", "512"]).await.unwrap();
    let long = "The rain in Spain stays mainly in the plain, and the people there say that";
    for prompt in [long, &long[..40], long, "Something else entirely"] {
        let body = json!({ "prompt": prompt, "temperature": 0, "max_tokens": 20 });
        let (_, answer) = server.post("/v1/completions", &body).await.unwrap();
        assert_eq!(
            answer["choices"][0]["text"].as_str().unwrap(),
            reference.greedy_text(prompt, 20).unwrap(),
            "prompt {prompt:?}"
        );
    }
    let body = json!({ "prompt": "Something else entirely", "temperature": 0, "max_tokens": 1 });
    let (_, answer) = server.post("/v1/completions", &body).await.unwrap();
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 0, "a repeated prompt reuses its slot: {answer}");
}

#[tokio::test]
async fn the_same_seed_gives_the_same_text_whatever_runs_beside_it() {
    let server = Arc::new(Server::start("SmolLM2", &["--stages", "3", "--slots", "4"]).await.unwrap());
    let ask = |seed: u64| {
        let server = Arc::clone(&server);
        async move {
            let body =
                json!({ "prompt": "My day began", "temperature": 0.9, "seed": seed, "max_tokens": 32 });
            let (_, answer) = server.post("/v1/completions", &body).await.unwrap();
            answer["choices"][0]["text"].as_str().unwrap().to_owned()
        }
    };
    let alone = ask(7).await;
    let together = futures::future::join_all([ask(7), ask(8), ask(9), ask(7)]).await;
    assert_eq!(alone, together[0]);
    assert_eq!(alone, together[3]);
    assert_ne!(alone, together[1]);
}
