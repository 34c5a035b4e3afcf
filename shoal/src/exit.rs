//! How a command that failed ends: what is printed, and with which code.

use std::error::Error;
use std::process::ExitCode;

use cluster::LayerRangeError;
use gguf::cut::CutError;
use loadgen::{PromptFileError, TargetError, TraceError};
use node::{PrepareError, SliceError};
use profiler::idle_gap::IdleGapError;
use registry::RegistryError;

use crate::commands::profile;
use crate::commands::serve::ReplicaArgs;
use crate::interrupt;

/// A wanted outcome that is a failure, such as a comparison that found a difference. It was reported already.
#[derive(Debug, thiserror::Error)]
#[error("the comparison failed")]
pub(crate) struct Unequal;

/// Something that is not well was found. It was reported already.
#[derive(Debug, thiserror::Error)]
#[error("some checks failed")]
pub(crate) struct Unwell;

/// Something on the command line that the files it names do not have.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// Ctrl-C ended a measurement, whose result until then was printed.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted;

/// Prints why a command failed, and gives its exit code: 2, as clap does, if the command line asks for something that the
/// model does not have, else 1.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<Unequal>() || error.is::<Unwell>() {
        return ExitCode::from(1);
    }
    if error.is::<Interrupted>() {
        return ExitCode::from(interrupt::EXIT_CODE as u8);
    }
    // Nothing can be done about a stderr that cannot be written.
    let _ = crate::output::note(&format!("error: {error:#}"));
    ExitCode::from(code(error))
}

fn code(error: &anyhow::Error) -> u8 {
    if error.chain().any(is_usage) { 2 } else { 1 }
}

fn is_usage(cause: &(dyn Error + 'static)) -> bool {
    let bad_range =
        |error: &SliceError| matches!(error, SliceError::Cut(cut) if matches!(**cut, CutError::Range { .. }));
    cause.is::<LayerRangeError>()
        || cause.downcast_ref().is_some_and(profile::is_usage)
        || cause.is::<ReplicaArgs>()
        || cause.is::<Usage>()
        || cause.is::<PromptFileError>()
        || cause.is::<TraceError>()
        || cause.downcast_ref().is_some_and(RegistryError::is_unknown_name)
        || matches!(cause.downcast_ref(), Some(TargetError::Url { .. } | TargetError::Key(_)))
        || cause.downcast_ref().is_some_and(bad_range)
        || matches!(cause.downcast_ref(), Some(IdleGapError::Cuts { .. } | IdleGapError::Context { .. }))
        || match cause.downcast_ref() {
            Some(PrepareError::Layers(_) | PrepareError::GpuLayers { .. }) => true,
            Some(PrepareError::Slices(error)) => bad_range(error),
            _ => false,
        }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use cluster::LayerRange;

    use super::*;

    #[test]
    fn bad_usage_exits_with_2_and_other_failures_with_1() {
        let cuts = LayerRange::from_cuts(&[9], 4).context("cutting").unwrap_err();
        assert_eq!(code(&cuts), 2);
        let cuts = PrepareError::from(LayerRange::from_cuts(&[9], 4).unwrap_err());
        assert_eq!(code(&cuts.into()), 2);
        assert_eq!(code(&anyhow::anyhow!("no such file")), 1);
    }
}
