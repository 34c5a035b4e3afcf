//! Traces of requests: a line of JSON for each, `{"at_ms": 0, "prompt": 812, "output": 240}`, in the order of arrival.

use cluster::{Millis, TraceEntry};

use super::PlanFileError;
use super::workload::RequestEntry;

/// Reads a trace; empty lines are skipped.
pub fn read_trace(text: &str) -> Result<Vec<TraceEntry>, PlanFileError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let entry = |(number, line): (usize, &str)| {
        let entry: RequestEntry = serde_json::from_str(line)
            .map_err(|source| PlanFileError::TraceLine { line: number + 1, source })?;
        Ok(TraceEntry { at: Millis(entry.at_ms), prompt: entry.prompt, output: entry.output })
    };
    lines.map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_line_by_line_and_a_bad_line_is_named() {
        let good = "{\"at_ms\": 0, \"prompt\": 10, \"output\": 3}\n\n{\"at_ms\": 8.5, \"prompt\": 1, \"output\": 1}\n";
        let trace = read_trace(good).unwrap();
        assert_eq!(trace[1], TraceEntry { at: Millis(8.5), prompt: 1, output: 1 });
        let error = read_trace(&good.replace("8.5, \"prompt\": 1", "8.5, \"prompt\": -1")).unwrap_err();
        assert!(error.to_string().contains("line 3"), "{error}");
    }
}
