//! Results: the file in which they are kept, the table, and the section of a page.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use comfy_table::{Table, presets};
use planner::table::in_short;
use serde::{Deserialize, Serialize};

use super::compare::{Comparison, Figures, share};
use super::trial::{Trial, Workload};
use crate::commands::planning::write_file;

/// The section's first line: what is after it is written anew.
pub(in super::super) const SECTION: &str =
    "<!-- From here on written by `shoal bench testbed --markdown`; do not edit. -->";

/// All runs, and what they have in common.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Report {
    suite: String,
    time_scale: f64,
    seed: u64,
    requests: Option<u32>,
    runs: Vec<Run>,
}

/// A run that was made.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Run {
    number: u32,
    configuration: String,
    objective: String,
    plan: String,
    agrees: bool,
    #[serde(flatten)]
    comparison: Comparison,
}

impl Run {
    pub(super) fn new((number, trial): (u32, &Trial), comparison: Comparison) -> Self {
        Self {
            number,
            configuration: trial.name.clone(),
            objective: trial.objective.name().to_owned(),
            plan: in_short(&trial.plan),
            agrees: comparison.agrees(),
            comparison,
        }
    }
}

impl Report {
    /// What is in the file already, if there is one.
    pub(super) fn open(file: Option<&Path>, time_scale: f64, workload: Workload) -> Result<Self> {
        let Workload { seed, requests } = workload;
        let none = Self { suite: "e2llm36".to_owned(), time_scale, seed, requests, runs: Vec::new() };
        let Some(path) = file.filter(|path| path.exists()) else { return Ok(none) };
        let reading = || format!("reading the results in {}", path.display());
        let text = fs::read_to_string(path).with_context(reading)?;
        let known: Self = serde_json::from_str(&text).with_context(reading)?;
        ensure!(
            (known.time_scale, known.seed, known.requests) == (time_scale, seed, requests),
            "the results in {} are of time scale {}, seed {} and {}: add to them with the same, or choose another file",
            path.display(),
            known.time_scale,
            known.seed,
            known.requests.map_or("all requests".to_owned(), |requests| format!("{requests} requests"))
        );
        Ok(known)
    }

    /// Whether the same plan was run already. The simulation beside it may be another since; a run of another plan is none.
    pub(super) fn knows(&mut self, trial: &Trial, simulated: Figures) -> bool {
        self.refresh((&trial.name, trial.objective.name(), &in_short(&trial.plan)), simulated)
    }

    fn refresh(&mut self, (configuration, objective, plan): (&str, &str, &str), simulated: Figures) -> bool {
        self.runs.retain(|run| !run.is_of(configuration, objective) || run.plan == plan);
        let Some(run) = self.runs.iter_mut().find(|run| run.is_of(configuration, objective)) else {
            return false;
        };
        run.comparison.simulated = simulated;
        run.agrees = run.comparison.agrees();
        true
    }

    /// Adds a run, and writes all to the file if there is one.
    pub(super) fn add(&mut self, run: Run, file: Option<&Path>) -> Result<()> {
        self.runs.push(run);
        self.runs.sort_by_key(|run| run.number);
        let Some(path) = file else { return Ok(()) };
        write_file(path, &serde_json::to_string_pretty(self)?)
    }

    /// For people.
    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_BORDERS_ONLY);
        table.set_header(TITLES);
        for run in &self.runs {
            table.add_row(run.cells());
        }
        format!("{table}\n{}", self.outcome())
    }

    /// Writes the page's section anew; what is before it stays.
    pub(super) fn write_section(&self, path: &Path, measured_on: &str) -> Result<()> {
        let page = if path.exists() {
            fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?
        } else {
            String::new()
        };
        let before = page.split(SECTION).next().unwrap_or_default().trim_end();
        write_file(path, &format!("{before}\n\n{SECTION}\n\n{}", self.section(measured_on)))
    }

    fn section(&self, measured_on: &str) -> String {
        let mut text = format!(
            "## The test bed: simulated and run\n\n\
             The configurations of eight devices, run: the planner's plan by worker processes of emulated devices and links under real\n\
             agents, engines, hand-offs, router and orchestrator ([ADR 0017](adr/0017-test-bed.md)), and the same requests (seed {}) simulated.\n\
             A second of the devices took {} s on {measured_on}. Waits are the longest, times to first token and per token the means, in\n\
             seconds; a row agrees within 10 % (waits below 1 s: within 0.2 s). `shoal bench testbed --time-scale {}`\n\n",
            self.seed, self.time_scale, self.time_scale
        );
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        text.push_str(&line(&TITLES.map(str::to_owned)));
        text.push_str(&line(&TITLES.map(|_| "---".to_owned())));
        for run in &self.runs {
            text.push_str(&line(&run.cells()));
        }
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{}", self.outcome());
        text
    }

    fn outcome(&self) -> String {
        let agree = self.runs.iter().filter(|run| run.agrees).count();
        format!("{agree} of {} runs agree with their simulation.", self.runs.len())
    }
}

const TITLES: [&str; 10] = [
    "configuration",
    "plan",
    "wait simulated",
    "run",
    "TTFT simulated",
    "run",
    "TPOT simulated",
    "run",
    "differences",
    "agrees",
];

impl Run {
    fn is_of(&self, configuration: &str, objective: &str) -> bool {
        self.configuration == configuration && self.objective == objective
    }

    fn cells(&self) -> [String; 10] {
        let Comparison { simulated, measured } = self.comparison;
        let percent =
            |of: fn(&Figures) -> f64| format!("{:+.1} %", share(of(&simulated), of(&measured)) * 100.0);
        let wait = match simulated.max_wait_s.max(measured.max_wait_s) {
            short if short < 1.0 => format!("{:+.2} s", measured.max_wait_s - simulated.max_wait_s),
            _ => percent(|figures| figures.max_wait_s),
        };
        [
            self.configuration.clone(),
            self.objective.clone(),
            format!("{:.2}", simulated.max_wait_s),
            format!("{:.2}", measured.max_wait_s),
            format!("{:.2}", simulated.ttft_s),
            format!("{:.2}", measured.ttft_s),
            format!("{:.4}", simulated.tpot_s),
            format!("{:.4}", measured.tpot_s),
            format!("{wait}, {}, {}", percent(|figures| figures.ttft_s), percent(|figures| figures.tpot_s)),
            if self.agrees { "yes" } else { "no" }.to_owned(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKLOAD: Workload = Workload { seed: 101, requests: None };

    fn run(number: u32, wait: f64) -> Run {
        let figures = |max_wait_s| Figures { max_wait_s, ttft_s: 1.0, tpot_s: 0.05, end_s: 100.0 };
        let comparison = Comparison { simulated: figures(20.0), measured: figures(wait) };
        Run {
            number,
            configuration: format!("configuration {number}"),
            objective: "els".to_owned(),
            plan: "a plan".to_owned(),
            agrees: comparison.agrees(),
            comparison,
        }
    }

    #[test]
    fn finished_runs_are_found_again_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.json");
        let mut report = Report::open(Some(&path), 0.1, WORKLOAD).unwrap();
        report.add(run(2, 21.0), Some(&path)).unwrap();
        report.add(run(1, 25.0), Some(&path)).unwrap();
        let mut again = Report::open(Some(&path), 0.1, WORKLOAD).unwrap();
        assert_eq!(again.table(), report.table());
        // Another simulation of the same plan stands beside what was measured; another plan was not run.
        let simulated = Figures { max_wait_s: 25.0, ..again.runs[0].comparison.simulated };
        assert!(!again.refresh(("configuration 1", "queue", "a plan"), simulated));
        assert!(again.refresh(("configuration 1", "els", "a plan"), simulated));
        assert!(again.table().contains("2 of 2 runs agree"), "{}", again.table());
        assert!(!again.refresh(("configuration 2", "els", "another plan"), simulated));
        assert_eq!(again.runs.len(), 1);
        assert!(report.table().contains("1 of 2 runs agree"), "{}", report.table());
        let other = Report::open(Some(&path), 0.2, WORKLOAD).unwrap_err().to_string();
        assert!(other.contains("time scale 0.1"), "{other}");
    }

    #[test]
    fn only_the_section_of_a_page_is_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.md");
        fs::write(&path, "# Page\n\ntext\n").unwrap();
        let mut report = Report::open(None, 0.1, WORKLOAD).unwrap();
        report.write_section(&path, "a machine").unwrap();
        report.add(run(1, 21.0), None).unwrap();
        report.write_section(&path, "a machine").unwrap();
        let page = fs::read_to_string(&path).unwrap();
        assert!(page.starts_with("# Page\n\ntext\n\n<!--"), "{page}");
        assert_eq!(page.matches(SECTION).count(), 1);
        assert!(page.contains("| 20.00 | 21.00 |"), "{page}");
    }
}
