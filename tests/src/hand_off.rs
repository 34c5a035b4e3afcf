//! Two replicas with roles under load: what is asked, what should come, and how many bytes should travel for it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::StreamExt;
use serde_json::json;

use crate::chat::{Answer, completion};
use crate::reference::Reference;
use crate::server::{Server, sample};

/// Bytes of a token's keys and values in all of SmolLM2's blocks: 30 of them, each with three heads of 64 numbers of 16 bits, twice.
const KV_BYTES: f64 = (30 * 3 * 64 * 2 * 2) as f64;

/// Fewer tokens than make llama.cpp's CPU attention take another path, so that it makes no difference who is computed beside whom.
const SENTENCES: [&str; 8] = [
    "The harbour was quiet in the early morning, and only one old fisherman sat on the wall, mending his nets and",
    "Every winter the river freezes over near the mill, and the children of the village walk across it to",
    "She opened the letter very slowly, read the first line twice, put it down on the kitchen table, and",
    "A good bread needs flour, water, salt and time; most of all it needs time, because the dough",
    "When the train had left, nobody was on the platform any more but a man with a large suitcase, who",
    "The museum keeps more than four thousand clocks, and on Sundays at noon all of them strike together, so",
    "Long before there were maps of this coast, the pilots knew each rock by its name and told",
    "In the north of the country there is a lake so deep that its ground was never found, and people",
];

/// A prompt, and how many tokens are asked for.
#[derive(Debug, Clone)]
pub struct Question {
    /// Of 40 to 62 tokens.
    pub prompt: String,
    /// At most.
    pub tokens: u32,
}

/// So many questions, of which hardly two that follow one another begin alike: else what a slot holds need not travel.
pub fn questions(n: usize) -> Vec<Question> {
    let letters: Vec<char> = ('a'..='z').chain('A'..='Z').collect();
    let question = |i: usize| {
        let sentence = |i: usize| SENTENCES[i % SENTENCES.len()];
        let (letter, first, second) = (letters[i * 7 % letters.len()], sentence(i), sentence(i / 8 + i + 3));
        Question { prompt: format!("{letter}{i}) {first} so on. {second}"), tokens: 8 + (i as u32 % 4) * 4 }
    };
    (0..n).map(question).collect()
}

/// The texts that should come.
pub fn expected(reference: &mut Reference, questions: &[Question]) -> Result<Vec<String>> {
    questions.iter().map(|asked| reference.greedy_text(&asked.prompt, asked.tokens as usize)).collect()
}

/// Asks all of them, so many at once.
pub async fn ask(server: &Server, questions: &[Question], at_once: usize) -> Result<Vec<Answer>> {
    let asked = questions.iter().map(|Question { prompt, tokens }| {
        completion(
            server,
            json!({
                "prompt": prompt, "temperature": 0, "max_tokens": tokens, "stream_options": { "include_usage": true },
            }),
        )
    });
    futures::stream::iter(asked).buffered(at_once).collect::<Vec<_>>().await.into_iter().collect()
}

/// What came of it.
#[derive(Debug, Clone, Copy)]
pub struct Figures {
    /// Requests.
    pub requests: usize,
    /// Answers that are what the whole model says.
    pub exact: usize,
    /// Requests whose keys and values changed hands.
    pub moved: f64,
    /// Bytes that travelled.
    pub bytes: f64,
    /// Bytes that the keys and values of so many prompts have: of the shortest ones, and of the longest.
    pub due: (f64, f64),
    /// Mean time until they were there.
    pub hand_off: Duration,
    /// From the first request to the last answer.
    pub took: Duration,
}

impl Figures {
    /// Bytes that travelled above those that had to, as a share of these; negative for those that are missing. Which prompts moved
    /// is not known, so if not all did, nothing is too much or too little between the shortest and the longest.
    pub fn excess(&self) -> f64 {
        let (least, most) = self.due;
        self.bytes / self.bytes.clamp(least, most) - 1.0
    }
}

/// Asks all questions of a server that has done nothing yet.
pub async fn measure(
    server: &Server,
    (questions, expected): (&[Question], &[String]),
    at_once: usize,
) -> Result<Figures> {
    let since = Instant::now();
    let answers = ask(server, questions, at_once).await?;
    let took = since.elapsed();
    let metrics = server.metrics().await?;
    let value = |name: &str| sample(&metrics, name).unwrap_or(0.0);
    let count = value("shoal_hand_off_seconds_count");
    let moved = value("shoal_hand_offs_total{outcome=\"moved\"}");
    let lengths: Option<Vec<u64>> =
        answers.iter().map(|answer| answer.usage["prompt_tokens"].as_u64()).collect();
    let mut lengths = lengths.context("an answer without usage")?;
    lengths.sort_unstable();
    let count_moved = (moved as usize).min(lengths.len());
    let bytes_of = |lengths: &[u64]| lengths.iter().sum::<u64>() as f64 * KV_BYTES;
    Ok(Figures {
        requests: questions.len(),
        exact: answers.iter().zip(expected).filter(|(answer, expected)| answer.text == **expected).count(),
        moved,
        bytes: value("shoal_hand_off_bytes_total"),
        due: (bytes_of(&lengths[..count_moved]), bytes_of(&lengths[lengths.len() - count_moved..])),
        hand_off: Duration::from_secs_f64(value("shoal_hand_off_seconds_sum") / count.max(1.0)),
        took,
    })
}

#[cfg(target_os = "linux")]
pub use hosts::on_three_hosts;

#[cfg(target_os = "linux")]
mod hosts {
    use anyhow::Result;

    use super::{Figures, Question, measure};
    use crate::lan::{Host, Lan};
    use crate::node::cluster_on;
    use crate::process::eventually;
    use crate::server::{READY_DEADLINE, Server};

    /// Two replicas of two stages each on the three hosts of a LAN, the one in the middle with a stage of each: the first computes
    /// prompts and is cut at 12, the second decodes and is cut at 19.
    pub fn on_three_hosts(lan: &Lan, asked: (&[Question], &[String]), at_once: usize) -> Result<Figures> {
        lan.host("h1").inside(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let hosts: Vec<&Host> = lan.hosts().iter().collect();
                let (trust, _nodes, addresses) = cluster_on(&hosts).await?;
                let me = trust.issue("me")?;
                let nodes: Vec<&str> = addresses.split(',').collect();
                let (first, second) = (nodes[..2].join(","), nodes[1..].join(","));
                let args = ["--replica", &first, "--replica", &second, "--roles", "prefill,decode"];
                let cuts = ["--cuts", "12", "--cuts", "19", "--slots", "8", "--ctx", "256", "--threads", "1"];
                let identity = me.to_string_lossy();
                let server =
                    Server::start("SmolLM2", &[&args[..], &cuts, &["--identity", &*identity]].concat())
                        .await?;
                eventually("both replicas", READY_DEADLINE, async || server.ready_replicas(2).await).await?;
                measure(&server, asked, at_once).await
            })
        })?
    }
}
