//! The suite as a page with tables and a chart. It is given what was measured and measures nothing.

use std::fmt::Write as _;

use serde::Serialize;

use super::{ByObjective, EQUAL_BELOW, Outcome, Ratio, SEEDS, Suite};
use crate::settings::ObjectiveKind;

/// The suite under one reading of decode times, and how long planning took.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// What came out.
    #[serde(flatten)]
    pub suite: Suite,
    /// Seconds of planning all configurations.
    pub planning_s: ByObjective<f64>,
    /// Seconds of the configuration that took longest to plan.
    pub slowest_plan_s: ByObjective<f64>,
}

/// Both readings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Evaluation {
    /// With batched decode, as hardware does it.
    #[serde(flatten)]
    pub batched: Measured,
    /// With the paper's serial reading.
    pub serial: Measured,
}

/// The page. `on` says on what machine and when planning was timed.
pub fn markdown(evaluation: &Evaluation, on: &str) -> String {
    let mut out = format!("{INTRODUCTION}\n## What came out\n\n");
    out.push_str(
        "How much longer the longest wait is than under the plan that `queue` chose, as geometric mean and largest ratio \
         over the\ncongested configurations:\n\n\
         | decode | congested | els | ft | splitwise | lost by queue |\n| --- | --- | --- | --- | --- | --- |\n",
    );
    for (name, measured) in readings(evaluation) {
        let suite = &measured.suite;
        let ratios = &suite.ratio_to_queue;
        let cell = |ratio: &Ratio| format!("{:.2}× (at most {:.1}×)", ratio.geometric_mean, ratio.largest);
        let lost = [ratios.els.lost, ratios.ft.lost, ratios.splitwise.lost].into_iter().max().unwrap_or(0);
        let n = suite.configurations.len();
        let cells = [cell(&ratios.els), cell(&ratios.ft), cell(&ratios.splitwise)].join(" | ");
        let _ = writeln!(out, "| {name} | {} of {n} | {cells} | {lost} |", suite.congested);
    }
    let _ = write!(
        out,
        "\n![longest wait of every configuration under the four objectives](evaluation.svg)\n\n\
         Planning time in seconds on {on}, all configurations and the slowest:\n\n\
         | decode | els | ft | splitwise | queue |\n| --- | --- | --- | --- | --- |\n"
    );
    for (name, measured) in readings(evaluation) {
        let pairs = measured.planning_s.all().into_iter().zip(measured.slowest_plan_s.all());
        let cells: Vec<String> = pairs.map(|(all, slowest)| format!("{all:.2} ({slowest:.3})")).collect();
        let _ = writeln!(out, "| {name} | {} |", cells.join(" | "));
    }
    for (name, measured) in readings(evaluation) {
        let _ = write!(
            out,
            "\n## Longest wait in seconds, {name} decode\n\n\
             | configuration | els | ft | splitwise | queue |\n| --- | --- | --- | --- | --- |\n"
        );
        for outcome in &measured.suite.configurations {
            let _ = writeln!(out, "{}", row(outcome));
        }
    }
    out
}

const INTRODUCTION: &str = "\
# Planner: the paper's configurations

<!-- Written by `shoal bench planner --suite e2llm36 --markdown docs/evaluation.md --svg docs/evaluation.svg`; do not edit. -->

E2LLM evaluates 36 configurations: four, six and eight devices, two models, two data sets, a request every 0.1, 1 and 3 s.
`planner/data/e2llm_testbed.json` rebuilds that test bed from the paper's tables and public llama.cpp figures; every
constant there has its source. Each configuration is planned under four objectives: `els`, the paper's congestion
model; `ft`, its finishing-time baseline after HexGen-2; `splitwise`, its adaptation of Splitwise; and `queue`, Shoal's, which
chooses by simulation. The first three plan with the paper's rule for slots.

All plans are then compared in Shoal's simulator, with 100 requests and 8 seeds apart from the 3 that `queue` chose with, so
`queue` is judged on workloads it has not seen, but in the kind of world that it plans for. What is compared is the longest wait: before
prefill, for a decode slot, and for the cache to arrive; the mean over the seeds. Waits under 0.5 s count as equal.

*Batched* decode reads the measured batch curves at the workload's mean context, which is what hardware does. *Serial* is the paper's
reading: one request's time at the slot's full context, times the requests.
";

fn readings(evaluation: &Evaluation) -> [(&'static str, &Measured); 2] {
    [("batched", &evaluation.batched), ("serial", &evaluation.serial)]
}

/// One configuration's row of the page.
pub(super) fn row(outcome: &Outcome) -> String {
    let cells: Vec<String> = outcome.max_wait_s.all().map(|wait| format!("{wait:.2}")).to_vec();
    format!("| {} | {} |", outcome.name, cells.join(" | "))
}

const LEFT: f64 = 330.0;
const WIDTH: f64 = 560.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 78.0;
const ROW: f64 = 17.0;
/// Colours that differ in lightness too.
const COLOURS: [&str; 4] = ["#e08a1e", "#8c6bb1", "#4d9f4a", "#1f5f9c"];

/// A chart of the longest waits: a line for each configuration, a dot for each objective, on a logarithmic axis.
pub fn chart(suite: &Suite) -> String {
    let waits = || suite.configurations.iter().flat_map(|outcome| outcome.max_wait_s.all());
    let most = waits().copied().fold(1.0, f64::max);
    let decades = (most / EQUAL_BELOW).log10();
    let x = |wait: f64| LEFT + WIDTH * ((wait.max(EQUAL_BELOW) / EQUAL_BELOW).log10() / decades);
    let bottom = TOP + ROW * suite.configurations.len() as f64;
    let (width, height) = (LEFT + WIDTH + RIGHT, bottom + 34.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" font-family=\"system-ui, sans-serif\" font-size=\"11\">\n\
         <title>Longest wait of every configuration under four objectives</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    text(&mut out, (14.0, 24.0, "start", 15), "Longest wait in seconds, batched decode");
    let note = format!("mean of {} seeds, 100 requests; logarithmic from {EQUAL_BELOW} s", SEEDS.len());
    text(&mut out, (14.0, 42.0, "start", 11), &note);
    for (at, kind) in ObjectiveKind::ALL.into_iter().enumerate() {
        let centre = LEFT + 110.0 * at as f64;
        dot(&mut out, (centre, 56.0), at);
        text(&mut out, (centre + 9.0, 60.0, "start", 12), kind.name());
    }
    for tick in [0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0].into_iter().filter(|t| *t <= most * 1.05) {
        let _ = writeln!(
            out,
            "<line x1=\"{0:.1}\" y1=\"{TOP:.1}\" x2=\"{0:.1}\" y2=\"{bottom:.1}\" stroke=\"#e3e6ea\"/>",
            x(tick)
        );
        text(&mut out, (x(tick), bottom + 16.0, "middle", 11), &tick.to_string());
    }
    for (at, outcome) in suite.configurations.iter().enumerate() {
        let y = TOP + ROW * (at as f64 + 0.5);
        text(&mut out, (LEFT - 14.0, y + 4.0, "end", 11), &outcome.name);
        let ends = outcome.max_wait_s.all().map(|wait| x(*wait));
        let (low, high) = ends.iter().fold((f64::MAX, 0.0_f64), |(l, h), &e| (l.min(e), h.max(e)));
        let _ = writeln!(
            out,
            "<line x1=\"{low:.1}\" y1=\"{y:.1}\" x2=\"{high:.1}\" y2=\"{y:.1}\" stroke=\"#b8bfc8\"/>"
        );
        for (at, end) in ends.into_iter().enumerate() {
            dot(&mut out, (end, y), at);
        }
    }
    out.push_str("</svg>\n");
    out
}

/// A dot for the objective at a place in [`ObjectiveKind::ALL`]; the later are smaller, so that equal ones are all seen.
fn dot(out: &mut String, (x, y): (f64, f64), at: usize) {
    let radius = 6.0 - at as f64;
    let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{}\"/>", COLOURS[at]);
}

fn text(out: &mut String, (x, y, anchor, size): (f64, f64, &str, u32), content: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"#1f2430\">{content}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::super::{outcome, suite};
    use super::*;
    use crate::settings::DecodeReading;
    use crate::testbed::Testbed;

    /// The page in `docs/` has figures of all configurations; those of four and six devices are quick to plan again.
    #[test]
    fn the_published_page_says_what_the_planner_does_now() {
        let page = include_str!("../../../docs/evaluation.md");
        let bed = Testbed::e2llm().unwrap();
        for reading in [DecodeReading::Batched, DecodeReading::Serial] {
            for configuration in bed.configurations().iter().filter(|c| c.devices != "8") {
                let row = row(&outcome(&bed, configuration, reading, &mut |_| {}).unwrap());
                assert!(page.contains(&row), "docs/evaluation.md lacks {row}: write it anew");
            }
        }
    }

    #[test]
    fn the_page_and_the_chart_name_every_configuration_and_objective() {
        let bed = Testbed::e2llm().unwrap();
        let few = bed.configurations().into_iter().filter(|c| c.devices == "4").take(3);
        let outcomes = few.map(|c| outcome(&bed, &c, DecodeReading::Batched, &mut |_| {}).unwrap());
        let measured = Measured {
            suite: suite(outcomes.collect()),
            planning_s: ByObjective::default(),
            slowest_plan_s: ByObjective::default(),
        };
        let chart = chart(&measured.suite);
        let evaluation = Evaluation { serial: measured.clone(), batched: measured };
        let page = markdown(&evaluation, "a machine");
        for outcome in &evaluation.batched.suite.configurations {
            assert!(chart.contains(&outcome.name));
            assert_eq!(page.matches(&outcome.name).count(), 2);
        }
        for kind in ObjectiveKind::ALL {
            assert!(chart.contains(kind.name()) && page.contains(kind.name()));
        }
        assert_eq!(chart.matches("<circle").count(), 4 + 4 * 3);
        assert!(page.contains("a machine"));
    }
}
