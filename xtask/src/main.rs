//! `cargo xtask`: chores that change files in the checkout. What only checks it is a test in `xtask/tests`.
#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Repository chores")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Writes the documents that are generated from code
    Docs,
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().chore {
        Chore::Docs => xtask::documents::write_all(),
    }
}
