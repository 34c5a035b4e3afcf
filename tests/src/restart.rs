//! An orchestrator that is killed under load and started again: whether its stages stay loaded, how soon it serves, and what its clients see.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::time::sleep;

use crate::lan::Lan;
use crate::process::signal;
use crate::site::{Site, on};
use crate::survival::{Exam, ask};

/// Within which it serves at full width after it was started again.
pub const BACK: Duration = Duration::from_secs(5);

/// Requests while it is away end within that.
const CUT_OFF: Duration = Duration::from_secs(2);

/// Slots of the site's replicas together.
const SLOTS: usize = 8;

/// What came of it.
#[derive(Debug)]
pub struct Report {
    /// Requests that were under way or waited, and ended without the rest of their answer.
    pub cut_off: usize,
    /// Those that had been answered before.
    pub answered: usize,
    /// From its death until the last of them had ended.
    pub ended: Duration,
    /// From its start until all replicas served.
    pub back: Duration,
    /// Stages' processes before, by host.
    pub before: Vec<Vec<u32>>,
    /// And after.
    pub after: Vec<Vec<u32>>,
    /// As many requests as there are slots, all at once: what is wrong with their answers.
    pub wrong: Vec<String>,
}

impl Report {
    /// What is not as promised.
    pub fn breaches(&self) -> Vec<String> {
        let mut breaches = self.wrong.clone();
        let mut promise = |is_kept: bool, what: String| {
            if !is_kept {
                breaches.push(what);
            }
        };
        promise(self.cut_off > 0, "no request was under way".to_owned());
        promise(self.ended <= CUT_OFF, format!("clients waited for {:?}", self.ended));
        promise(self.back <= BACK, format!("it served after {:?}", self.back));
        promise(
            self.before == self.after,
            format!("stages were {:?}, and are {:?}", self.before, self.after),
        );
        breaches
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cut_off, answered, ended, back, before, after, wrong } = self;
        writeln!(f, "  {answered} answered before, {cut_off} cut off within {:.2} s", ended.as_secs_f64())?;
        writeln!(f, "  stages before {before:?}, after {after:?}")?;
        write!(
            f,
            "  service after {:.2} s; then {} of {SLOTS} exact",
            back.as_secs_f64(),
            SLOTS - wrong.len()
        )
    }
}

/// Kills it while so many requests are under way, and starts it again when it has been away for a time.
pub fn run(requests: usize, away: Duration, exam: &Exam, lan: &Lan) -> Result<Report> {
    let boss = lan.hosts().first().context("no host")?;
    on(boss, async || {
        let queue = requests.to_string();
        let args = ["--queue", &*queue];
        let mut site = Site::start(lan, &args).await?;
        let before = site.workers();
        let (answers, killed) = tokio::join!(ask(&site.server, requests, exam), async {
            sleep(Duration::from_secs(3)).await;
            signal(site.server.pid(), "KILL").map(|()| Instant::now())
        });
        let ended = killed?.elapsed();
        let answered = answers.iter().filter(|answer| answer.is_ok()).count();
        sleep(away.saturating_sub(ended)).await;
        let started = Instant::now();
        site.start_again(&args).await?;
        site.until_full(BACK * 12).await?;
        let back = started.elapsed();
        let answers = ask(&site.server, SLOTS, exam).await;
        let wrong = answers.into_iter().filter_map(Result::err).map(|error| format!("{error:#}")).collect();
        let (after, cut_off) = (site.workers(), requests - answered);
        Ok(Report { cut_off, answered, ended, back, before, after, wrong })
    })
}
