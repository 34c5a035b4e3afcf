//! The measurement: servers take turns, round by round, and Ctrl-C ends it with what there is.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use loadgen::{Run, Summary, Tally, Target, warm_up};
use tokio_util::sync::CancellationToken;

use super::plan::Plan;
use crate::interrupt;
use crate::progress::ProgressView;

/// What was measured of one server.
pub(super) struct Side {
    pub(super) url: String,
    pub(super) model: String,
    /// Of all rounds.
    pub(super) tally: Tally,
    /// Of each round.
    pub(super) rounds: Vec<Summary>,
}

/// What was measured.
pub(super) struct Outcome {
    pub(super) sides: Vec<Side>,
    /// Ctrl-C was pressed.
    pub(super) is_interrupted: bool,
}

/// Measures.
pub(super) async fn measure(plan: &Plan) -> Result<Outcome> {
    loadgen::allow_many_connections();
    let stop = CancellationToken::new();
    let listener = tokio::spawn(stop_at_ctrl_c(stop.clone()));
    let mut session = Session { plan, stop, view: ProgressView::new() };
    let outcome = session.run().await;
    listener.abort();
    outcome
}

/// Asks the measurement to end; at the second time the process ends.
async fn stop_at_ctrl_c(stop: CancellationToken) {
    if tokio::signal::ctrl_c().await.is_ok() {
        stop.cancel();
        if tokio::signal::ctrl_c().await.is_ok() {
            std::process::exit(interrupt::EXIT_CODE);
        }
    }
}

struct Session<'a> {
    plan: &'a Plan,
    stop: CancellationToken,
    view: ProgressView,
}

impl Session<'_> {
    async fn run(&mut self) -> Result<Outcome> {
        let mut targets = Vec::new();
        for config in &self.plan.servers {
            let target = tokio::select! {
                target = Target::connect(config.clone()) => Arc::new(target?),
                () = self.stop.cancelled() => bail!("interrupted"),
            };
            targets.push(target);
        }
        for target in &targets {
            self.warm_up(target).await?;
        }
        let mut sides: Vec<Side> = targets.iter().map(|target| self.side(target)).collect();
        for round in 0..self.plan.rounds {
            // Who goes first changes, so that neither profits from what the other left in the caches.
            let mut order: Vec<usize> = (0..targets.len()).collect();
            order.rotate_left(round as usize % targets.len());
            for i in order {
                if self.stop.is_cancelled() {
                    break;
                }
                let tally = self.round(round, &targets[i]).await;
                // A round that was cut short is no match for the other server's whole one.
                if !self.stop.is_cancelled() {
                    sides[i].rounds.push(tally.summary());
                }
                sides[i].tally.append(&tally);
            }
        }
        self.view.finish();
        Ok(Outcome { sides, is_interrupted: self.stop.is_cancelled() })
    }

    fn side(&self, target: &Target) -> Side {
        Side {
            url: target.name().to_owned(),
            model: target.model().to_owned(),
            tally: Tally::new(self.plan.limits),
            rounds: Vec::new(),
        }
    }

    async fn warm_up(&mut self, target: &Arc<Target>) -> Result<()> {
        let (count, concurrency) = self.plan.warm_up;
        if count == 0 {
            return Ok(());
        }
        self.view.show_share(&format!("warming up {}", target.name()), 0, count);
        let warmed = warm_up(target, &self.plan.requests, (count, concurrency), &self.stop).await.summary();
        if self.stop.is_cancelled() {
            bail!("interrupted before anything was measured");
        }
        if warmed.answered == 0 {
            return Err(anyhow::Error::msg(failures(&warmed)))
                .with_context(|| format!("{} answered no request of the warm-up", target.name()));
        }
        Ok(())
    }

    async fn round(&mut self, round: u32, target: &Arc<Target>) -> Tally {
        let plan = self.plan;
        let rounds =
            if plan.rounds > 1 { format!("round {} of {}, ", round + 1, plan.rounds) } else { String::new() };
        let what = format!("{rounds}{}", target.name());
        let start = Instant::now();
        let view = &mut self.view;
        let mut show = |ended| {
            let (done, total) = plan.share(ended, start.elapsed());
            view.show_share(&what, done, total);
        };
        show(0);
        let run = Run {
            target,
            requests: &plan.requests,
            load: &plan.load,
            ending: plan.ending,
            first: plan.first_of(round),
            limits: plan.limits,
        };
        run.run(&self.stop, &mut show).await
    }
}

/// What went wrong, and how often.
pub(super) fn failures(summary: &Summary) -> String {
    let kinds = summary.failures.iter().map(|(kind, count)| format!("{count} × {kind}"));
    kinds.collect::<Vec<_>>().join(", ")
}
