//! The planner's files: `cluster.json`, profiles, `workload.toml`, `model.json` and `plan.json`, each with a version, a
//! published JSON schema (`docs/schema/`) and conversions to the nouns in `cluster`; and traces of requests.
//!
//! Units are in the fields' names. A field that is not known is refused: a misspelt option must not pass for a default.
//! Whether the numbers make sense is the planner's business, which reports all faults of a problem at once.

mod hosts;
mod measured;
mod model;
mod plan;
mod profile;
mod trace;
mod workload;

pub use hosts::{ClusterFile, DeviceEntry, LinkEntry, LinkQualityEntry, LinksEntry, MemoryEntry, NodeEntry};
pub use measured::{
    FailureEntry, HostEntry, KvEntry, LayersEntry, MeasuredEntry, MeasuredPartEntry, MeasurementEntry,
    MemoryCostsEntry, ProcessorFactsEntry, ProcessorKindEntry,
};
pub use model::{BlockKindEntry, ExpertsEntry, ModelBlockEntry, ModelShapeFile, RangeRuleEntry};
pub use plan::{EncodingEntry, LimitEntry, PlanFile, PredictionEntry, ReplicaEntry, RoleEntry, StageEntry};
pub use profile::{
    AttentionEntry, BlockEntry, BuffersEntry, ColdCallEntry, CurveEntry, FeedForwardEntry, ProcessorEntry,
    ProfileEntry, ProfilesFile,
};
pub use trace::read_trace;
pub use workload::{ArrivalsEntry, LengthsEntry, RequestEntry, SpreadEntry, WorkloadFile};

use cluster::{ColdCallError, LayerRangeError, SurfaceError};
use schemars::{JsonSchema, Schema, schema_for};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Version of all of the files. Raise it with every change that an older reader would misunderstand.
pub const VERSION: u32 = 1;

/// Why a file is not what it should be.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum PlanFileError {
    #[error("{what} is not valid: {source}")]
    Json {
        what: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error("{what} is not valid at {field}: {source}")]
    JsonField {
        what: &'static str,
        field: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("{what} is not valid: {source}")]
    Toml {
        what: &'static str,
        #[source]
        source: toml::de::Error,
    },
    #[error("{what} has version {got}, but this shoal reads version {VERSION}: make the file anew")]
    Version { what: &'static str, got: u32 },
    #[error("the profile of device {device} cannot be used: {field}: {source}")]
    Curve {
        device: String,
        field: String,
        #[source]
        source: CurveError,
    },
    #[error("a stage of the plan has no blocks")]
    Layers(#[from] LayerRangeError),
    #[error("the model description has {blocks} blocks: at most {most} can be planned")]
    TooManyBlocks { blocks: u64, most: u64 },
    #[error(
        "line {line} of the trace is not a request such as {{\"at_ms\": 0, \"prompt\": 812, \"output\": 240}}: {source}"
    )]
    TraceLine {
        line: usize,
        #[source]
        source: serde_json::Error,
    },
}

/// Why measurements cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
#[allow(missing_docs, reason = "the sources say it")]
pub enum CurveError {
    #[error(transparent)]
    Surface(#[from] SurfaceError),
    #[error(transparent)]
    ColdCall(#[from] ColdCallError),
    #[error("{value} must be finite and at least 0")]
    Number { value: f64 },
}

/// A file of one of the kinds.
pub trait PlannerFile: Serialize + DeserializeOwned + JsonSchema {
    /// What it is called in messages.
    const WHAT: &'static str;

    /// Its version field.
    fn version(&self) -> u32;

    /// Reads JSON.
    fn from_json(text: &str) -> Result<Self, PlanFileError> {
        let what = Self::WHAT;
        // First of all, since what another version holds cannot be judged.
        if let Ok(Versioned { version: Some(got) }) = serde_json::from_str(text)
            && got != VERSION
        {
            return Err(PlanFileError::Version { what, got });
        }
        let mut reader = serde_json::Deserializer::from_str(text);
        let file = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
            let field = error.path().to_string();
            PlanFileError::JsonField { what, field, source: error.into_inner() }
        })?;
        reader.end().map_err(|source| PlanFileError::Json { what, source })?;
        Ok(file)
    }

    /// Reads TOML.
    fn from_toml(text: &str) -> Result<Self, PlanFileError> {
        let file: Self =
            toml::from_str(text).map_err(|source| PlanFileError::Toml { what: Self::WHAT, source })?;
        checked(file)
    }

    /// Its JSON schema.
    fn schema() -> Schema {
        schema_for!(Self)
    }
}

/// What every version of a file has.
#[derive(Deserialize)]
struct Versioned {
    version: Option<u32>,
}

fn checked<F: PlannerFile>(file: F) -> Result<F, PlanFileError> {
    match file.version() {
        VERSION => Ok(file),
        got => Err(PlanFileError::Version { what: F::WHAT, got }),
    }
}

/// The schema of every kind of file, by the name under which it is published.
pub fn schemas() -> [(&'static str, Schema); 5] {
    [
        ("cluster", ClusterFile::schema()),
        ("model", ModelShapeFile::schema()),
        ("plan", PlanFile::schema()),
        ("profile", ProfilesFile::schema()),
        ("workload", WorkloadFile::schema()),
    ]
}

/// The version of a file that does not state one.
pub(crate) const fn current() -> u32 {
    VERSION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_refused_by_number() {
        let error = ClusterFile::from_json(r#"{"version": 9, "nodes": [], "links": {}}"#).unwrap_err();
        assert!(matches!(error, PlanFileError::Version { got: 9, .. }), "{error}");
    }

    #[test]
    fn a_misspelt_field_is_refused_by_name() {
        let error = ClusterFile::from_json(r#"{"nodes": [], "links": {}, "lniks": {}}"#).unwrap_err();
        assert!(error.to_string().contains("lniks"), "{error}");
    }

    #[test]
    fn every_schema_names_its_fields() {
        let fields = ["nodes", "blocks", "replicas", "profiles", "min_tokens_per_second"];
        for ((name, schema), field) in schemas().into_iter().zip(fields) {
            assert!(schema.as_value().pointer(&format!("/properties/{field}")).is_some(), "{name}: {field}");
        }
    }
}
