//! Printing: facts on stdout, words for people on stderr.

use std::io::{self, Write};

use serde::Serialize;

/// Prints text for the user of the command on stdout.
pub(crate) fn print(text: &str) -> io::Result<()> {
    forgive(writeln!(io::stdout().lock(), "{text}"))
}

/// Prints a value as JSON on stdout, indented.
pub(crate) fn print_json(value: &impl Serialize) -> io::Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}

/// Prints a value as one line of JSON on stdout, for programs that read events as they come.
pub(crate) fn print_json_line(value: &impl Serialize) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    forgive(writeln!(stdout, "{}", serde_json::to_string(value)?).and_then(|()| stdout.flush()))
}

/// Prints a word to people on stderr.
pub(crate) fn note(text: &str) -> io::Result<()> {
    forgive(writeln!(io::stderr().lock(), "{text}"))
}

/// Whoever reads may have seen enough (`shoal … | head`).
fn forgive(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
