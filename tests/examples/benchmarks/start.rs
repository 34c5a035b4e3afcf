//! From the start of the program to its first token.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::json;
use tests::server::{READY_DEADLINE, Server};

use crate::peer::Peer;
use crate::{Arguments, shoal_arguments};

/// How often a server that starts is asked.
const POLL: Duration = Duration::from_millis(5);

/// Starts both in turns, the page cache and Shoal's cut slices being warm.
pub(crate) async fn cold_start(arguments: &Arguments) -> Result<()> {
    // Cuts the slices, and reads all files once.
    drop(Peer::start(arguments).await?);
    drop(crate::shoal(arguments, &[]).await?);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..arguments.rounds {
        let started = Instant::now();
        let peer = Peer::launch(arguments)?;
        theirs.push(first_token(&format!("{}/v1/completions", peer.url()), started).await?);
        drop(peer);
        let started = Instant::now();
        let common = shoal_arguments(arguments);
        let args: Vec<&str> = common.iter().map(String::as_str).collect();
        let server = Server::launch(&arguments.model.to_string_lossy(), &args)?;
        ours.push(first_token(&server.url("/v1/completions"), started).await?);
    }
    let mut ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs).collect();
    let (ours, theirs, ratio) = (median(&mut ours), median(&mut theirs), median(&mut ratios));
    let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
    println!("| figure | Shoal | llama-server | ratio: median (least to most) |");
    println!("| --- | --- | --- | --- |");
    println!("| start to first token | {ours:.2} s | {theirs:.2} s | {ratio:.3} ({least:.2} to {most:.2}) |");
    Ok(())
}

/// Seconds from `started` until a token was answered.
async fn first_token(url: &str, started: Instant) -> Result<f64> {
    let client = reqwest::Client::builder().timeout(Duration::from_secs(30)).build()?;
    let body = json!({ "prompt": "The sea is", "max_tokens": 1, "temperature": 0 });
    while started.elapsed() < READY_DEADLINE {
        if let Ok(reply) = client.post(url).json(&body).send().await
            && reply.status().is_success()
        {
            return Ok(started.elapsed().as_secs_f64());
        }
        tokio::time::sleep(POLL).await;
    }
    bail!("{url} gave no token within {READY_DEADLINE:?}")
}

/// Sorts, too.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
