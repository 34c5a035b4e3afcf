//! How many streams one thread of the load generator keeps up with: prints its share of a core and how late it is, at 2,000 streams
//! of tokens at once, for several rates.
//!
//!     cargo bench -p loadgen --bench streams
//!
//! The server is a second process, so that its processor time does not count: it sends the same event again and again.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // how a bench's helpers fail, and its result

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::{get, post};
use bytes::Bytes;
use futures::{StreamExt, stream};
use loadgen::{Ending, Endpoint, Limits, Load, Prompts, Requests, Run, Target, TargetConfig};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

const STREAMS: usize = 2000;
const TOKENS_PER_SECOND: [u32; 4] = [5, 10, 15, 20];
const SECONDS: u32 = 8;
const SERVER: &str = "SHOAL_BENCH_STREAM_SERVER";

const TOKEN: &str = "data: {\"id\":\"chatcmpl-0123456789\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,\
    \"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n";
const END: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    loadgen::allow_many_connections();
    match std::env::var(SERVER) {
        Ok(rate) => runtime.block_on(serve(rate.parse().unwrap())),
        Err(_) => TOKENS_PER_SECOND.into_iter().for_each(|rate| runtime.block_on(measure(rate))),
    }
}

/// Tells its port, then serves until its standard input ends.
async fn serve(rate: u32) {
    let generate = move || async move {
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / rate);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let tokens = stream::unfold((ticks, 0), move |(mut ticks, sent)| async move {
            if sent > rate * SECONDS {
                return None;
            }
            ticks.tick().await;
            let event = if sent == rate * SECONDS { END } else { TOKEN };
            Some((Ok::<_, std::io::Error>(Bytes::from_static(event.as_bytes())), (ticks, sent + 1)))
        });
        Body::from_stream(tokens.boxed())
    };
    let models = || async { "{\"data\":[{\"id\":\"m\"}]}" };
    let routes = Router::new().route("/v1/models", get(models)).route("/v1/chat/completions", post(generate));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    std::io::stdout().flush().unwrap();
    let gone = async {
        tokio::task::spawn_blocking(|| std::io::stdin().lines().for_each(drop)).await.unwrap();
    };
    tokio::select! {
        served = axum::serve(listener, routes).into_future() => served.unwrap(),
        () = gone => {}
    }
}

struct Server(Child, String);

impl Server {
    fn start(rate: u32) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(SERVER, rate.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut address = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
        Self(child, address.trim().to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

async fn measure(rate: u32) {
    let server = Server::start(rate);
    let config = TargetConfig {
        url: server.1.clone(),
        key: None,
        model: None,
        endpoint: Endpoint::Chat,
        fields: serde_json::Map::new(),
        timeout: Duration::from_secs(60),
    };
    let target = Arc::new(Target::connect(config).await.unwrap());
    let max_tokens = "100".parse().unwrap();
    let requests = Requests { prompts: Prompts::parse("hello").unwrap(), max_tokens, trace: None, seed: 0 };
    let run = Run {
        target: &target,
        requests: &requests,
        load: &Load::Closed { concurrency: STREAMS },
        ending: Ending { requests: STREAMS as u64, after: None },
        first: 0,
        limits: Limits::default(),
    };
    let summary = run.run(&CancellationToken::new(), &mut |_| {}).await.summary();
    let client = summary.client;
    println!(
        "{STREAMS} streams of {rate} tokens/s: {} answered, {} failed, {:.0} tokens/s; {:.0} % of a core, late by {:.1} ms \
         at p50, {:.1} at p99, {:.1} at most; inter-token p50 {:.1} ms, p99 {:.1} ms of {:.1}",
        summary.answered,
        summary.failed,
        summary.tokens_per_second,
        client.cpu_share * 100.0,
        client.late_ms.p50,
        client.late_ms.p99,
        client.late_ms.max,
        summary.inter_token_ms.unwrap().p50,
        summary.inter_token_ms.unwrap().p99,
        1e3 / f64::from(rate),
    );
}
