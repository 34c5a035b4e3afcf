//! What was found: a line for each check.

use std::fmt;

use serde::Serialize;

/// How something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// As it should be.
    Ok,
    /// It serves, or would, but not well.
    Warn,
    /// Nothing can be served so.
    Fail,
}

/// A line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    /// Of what: `this host`, `the orchestrator`, a node, or a path between two.
    pub(super) subject: String,
    /// What was looked at, in one word.
    pub(super) check: &'static str,
    pub(super) verdict: Verdict,
    /// What was seen, with numbers.
    pub(super) found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
}

/// All lines.
#[derive(Debug, Default, Serialize)]
pub(super) struct Findings {
    checks: Vec<Check>,
}

impl Findings {
    /// It is as it should be.
    pub(super) fn ok(&mut self, subject: &str, check: &'static str, found: impl Into<String>) {
        let (subject, found) = (subject.to_owned(), found.into());
        self.checks.push(Check { subject, check, verdict: Verdict::Ok, found, remedy: None });
    }

    /// It is not well.
    pub(super) fn warn(&mut self, subject: &str, check: &'static str, (found, remedy): (String, &str)) {
        let (subject, remedy) = (subject.to_owned(), Some(remedy.to_owned()));
        self.checks.push(Check { subject, check, verdict: Verdict::Warn, found, remedy });
    }

    /// Nothing can be served so.
    pub(super) fn fail(&mut self, subject: &str, check: &'static str, (found, remedy): (String, &str)) {
        let (subject, remedy) = (subject.to_owned(), Some(remedy.to_owned()));
        self.checks.push(Check { subject, check, verdict: Verdict::Fail, found, remedy });
    }

    /// How many failed.
    pub(super) fn failed(&self) -> usize {
        self.count(Verdict::Fail)
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.checks.iter().filter(|check| check.verdict == verdict).count()
    }

    #[cfg(test)]
    pub(super) fn checks(&self) -> &[Check] {
        &self.checks
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        })
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Check { subject, check, verdict, found, remedy } in &self.checks {
            writeln!(f, "{verdict:<5} {subject}: {check}: {found}")?;
            if let Some(remedy) = remedy {
                writeln!(f, "      {remedy}")?;
            }
        }
        let (warned, failed) = (self.count(Verdict::Warn), self.failed());
        write!(f, "{} checks: {failed} failed, {warned} with warnings", self.checks.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_check_is_a_line_and_what_to_do_another() {
        let mut findings = Findings::default();
        findings.ok("node a", "clock", "0.2 s ahead");
        findings.warn("node a", "disk", ("1 GiB is free".into(), "free some"));
        findings.fail("node b", "reached", ("not at 10.0.0.1:8470".into(), "start it"));
        let text = findings.to_string();
        assert_eq!(
            text,
            "ok    node a: clock: 0.2 s ahead\n\
             WARN  node a: disk: 1 GiB is free\n      free some\n\
             FAIL  node b: reached: not at 10.0.0.1:8470\n      start it\n\
             3 checks: 1 failed, 1 with warnings"
        );
        let json = serde_json::to_value(&findings).unwrap();
        assert_eq!(
            (&json["checks"][2]["verdict"], &json["checks"][0]["remedy"]),
            (&"fail".into(), &serde_json::Value::Null)
        );
    }
}
