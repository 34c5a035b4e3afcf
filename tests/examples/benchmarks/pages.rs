//! What huge pages do for servers that are alike in everything but the order in which they were started (ADR 0016).

use std::process::Command;

use anyhow::Result;
use tests::process::shoal_binary;
use tests::server::Server;

use crate::contest::{self, Load};
use crate::start::median;
use crate::{Arguments, shoal_arguments};

const SERVERS: usize = 3;

/// What workers get unless somebody says otherwise, and what they would get without it.
const PAGES: [(&str, Option<&str>); 2] =
    [("pages of 4 KiB", Some("glibc.malloc.hugetlb=0")), ("huge pages", None)];

/// Milliseconds per token of each server, with its pages of either kind.
pub(crate) async fn pages(arguments: &Arguments) -> Result<()> {
    println!("| workers ask for | 1st started | 2nd started | 3rd started |");
    println!("| --- | --- | --- | --- |");
    for (name, tunables) in PAGES {
        let mut servers = Vec::with_capacity(SERVERS);
        for _ in 0..SERVERS {
            servers.push(start(arguments, tunables).await?);
        }
        let mut times = vec![Vec::new(); SERVERS];
        for _ in 0..arguments.rounds {
            for (server, times) in servers.iter().zip(&mut times) {
                let load = Load { at_once: 1, requests: 3, prompt: 64, answer: 96 };
                times.push(contest::alone(arguments, &server.url(""), &load, "tpot_mean")?);
            }
        }
        let medians: Vec<String> = times.iter_mut().map(|times| format!("{:.1} ms", median(times))).collect();
        println!("| {name} | {} |", medians.join(" | "));
    }
    Ok(())
}

async fn start(arguments: &Arguments, tunables: Option<&str>) -> Result<Server> {
    let mut command = Command::new(shoal_binary()?);
    command.envs(tunables.map(|tunables| ("GLIBC_TUNABLES", tunables)));
    let common = shoal_arguments(arguments);
    let args: Vec<&str> = common.iter().map(String::as_str).collect();
    let mut server = Server::run(command, &arguments.model.to_string_lossy(), &args)?;
    server.wait_ready(tests::server::READY_DEADLINE).await?;
    Ok(server)
}
