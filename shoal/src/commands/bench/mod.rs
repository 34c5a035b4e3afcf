//! `shoal bench`: measure.

mod emulation;
mod idle_gap;
mod memory;
mod parts;
mod planner;
mod profile_accuracy;
mod serve;
mod slices;
mod testbed;

use anyhow::Result;
use clap::Subcommand;

use crate::cli::Globals;

/// What can be measured.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Put load on an OpenAI-compatible server, and measure what its clients see.
    Serve(Box<serve::ServeArgs>),
    /// Compare what stages are estimated to hold with what their processes do.
    Memory(memory::MemoryArgs),
    /// Compare what a profile foretells of a whole model with what it takes.
    ProfileAccuracy(profile_accuracy::ProfileAccuracyArgs),
    /// Compare the speed of a chain of slices with that of the whole model.
    Slices(slices::SlicesArgs),
    /// Measure what waiting between two calls of a slice costs the second.
    IdleGap(idle_gap::IdleGapArgs),
    /// Compare the planner's objectives on the configurations of the E2LLM paper.
    Planner(planner::PlannerArgs),
    /// Compare the step times of emulated devices with their profiles.
    Emulation(emulation::EmulationArgs),
    /// Run plans for the E2LLM paper's devices, emulated, and compare what clients see with what was simulated.
    Testbed(testbed::TestbedArgs),
}

/// Runs a command.
pub(crate) fn run(command: BenchCommand, globals: &Globals) -> Result<()> {
    match command {
        BenchCommand::Serve(args) => serve::run(&args, globals),
        BenchCommand::Memory(args) => memory::run(&args, globals),
        BenchCommand::ProfileAccuracy(args) => profile_accuracy::run(&args, globals),
        BenchCommand::Slices(args) => slices::run(&args, globals),
        BenchCommand::IdleGap(args) => idle_gap::run(&args, globals),
        BenchCommand::Planner(args) => planner::run(&args),
        BenchCommand::Emulation(args) => emulation::run(&args, globals),
        BenchCommand::Testbed(args) => testbed::run(&args, globals),
    }
}
