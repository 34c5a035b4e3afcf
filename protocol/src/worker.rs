//! What an agent tells a stage worker when it starts it, and what the worker answers: one line of JSON each way, on
//! the worker's stdin and stdout. Stdin then stays open for renewed certificates; its end means that the agent has gone.
//!
//! All lines begin with a version. Another version is refused by number before anything else is read, so that mixed
//! binaries say so instead of misreading each other.

use std::net::SocketAddr;
use std::path::PathBuf;

use cluster::LayerRange;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::emulation::{Emulation, EmulationError};
use crate::slots::MAX_SLOTS;
use crate::tls::TlsIdentity;

/// Version of all lines. Raise it with every change to them.
pub const VERSION: u32 = 4;

/// Everything a stage worker needs to know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// [`VERSION`].
    pub version: u32,
    /// Place in the chain, from 0; the last stage is the master.
    pub stage: u32,
    /// Stages of the replica.
    pub n_stages: u32,
    /// Blocks of the whole model.
    pub n_layer: u32,
    /// Width of a hidden row.
    pub n_embd: u32,
    /// SHA-256 of the whole model: slots change hands between stages of one model only.
    pub model_hash: [u8; 32],
    /// The stage's slices in order; each begins where the one before ends.
    pub slices: Vec<SliceConfig>,
    /// The file of token embeddings; stage 0 has one, no other stage does.
    pub embedding: Option<PathBuf>,
    /// Sequences.
    pub slots: u32,
    /// Positions per sequence.
    pub n_ctx: u32,
    /// Rows per frame and per merged batch, at most.
    pub n_batch: u32,
    /// Rows computed at once.
    pub n_ubatch: u32,
    /// CPU threads.
    pub threads: u32,
    /// A file whose lock the stage holds while it computes, so that stages of a host can each have all its cores in turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<PathBuf>,
    /// Decode frames in flight, at most.
    pub micro_batches: u32,
    /// Requests that may wait for a slot.
    pub queue_limit: u32,
    /// Prompt tokens per prefill frame.
    pub prefill_chunk: u32,
    /// Whether weights may be repacked for speed, which makes results depend on the batch's size.
    pub extra_buffers: bool,
    /// Whether any block of the model keeps a recurrent state, which cannot be rolled back.
    pub recurrent: bool,
    /// The smallest sliding window of any block of the model.
    pub smallest_window: Option<u32>,
    /// Seconds a step may be in flight before the master gives the replica up.
    #[serde(default = "default_step_deadline")]
    pub step_deadline_secs: u32,
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The worker's certificate.
    pub tls: TlsIdentity,
    /// The device to stand for instead of computing; then no file is opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emulation: Option<Box<Emulation>>,
}

/// One slice of a stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SliceConfig {
    /// Its file.
    pub path: PathBuf,
    /// Its blocks, numbered as in the whole model.
    pub layers: LayerRange,
    /// Blocks on a GPU.
    pub gpu_layers: u32,
}

/// A later line of the agent's: from now on the worker has this identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerRenewal {
    /// [`VERSION`].
    pub version: u32,
    /// The worker's new certificate.
    pub tls: TlsIdentity,
}

/// The worker's answer, as soon as it listens and before it loads anything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerHello {
    /// [`VERSION`].
    pub version: u32,
    /// The port it listens on.
    pub port: u16,
}

/// Two minutes: a frame of 512 rows through 40 blocks takes some seconds on the slowest hosts we know of, and frozen
/// peers are noticed by keepalive long before.
const fn default_step_deadline() -> u32 {
    120
}

/// Why a line is not what it should be.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum WorkerLineError {
    #[error("{what} is not valid JSON")]
    Json {
        what: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error(
        "{what} has version {got}, but this binary speaks version {VERSION}: use the same shoal on both sides"
    )]
    Version { what: &'static str, got: u32 },
    #[error("worker configuration: stage {stage} is not one of {n_stages} stages")]
    Stage { stage: u32, n_stages: u32 },
    #[error("worker configuration: {field} is {value}, but must be {wanted}")]
    Number { field: &'static str, value: u32, wanted: &'static str },
    #[error("worker configuration: no slices")]
    NoSlices,
    #[error("worker configuration: slice {layers} does not begin at block {wanted}, or is empty")]
    SliceStart { layers: LayerRange, wanted: u32 },
    #[error("worker configuration: stage {stage} of {n_stages} ends at block {end} of {n_layer}")]
    SliceEnd { stage: u32, n_stages: u32, end: u32, n_layer: u32 },
    #[error("worker configuration: stage {stage} {fault} the token embeddings, which stage 0 alone needs")]
    Embedding { stage: u32, fault: &'static str },
    #[error("worker configuration: {0}")]
    Emulation(#[from] EmulationError),
}

impl WorkerConfig {
    /// Reads and checks a line.
    pub fn from_line(line: &str) -> Result<Self, WorkerLineError> {
        let config: Self = versioned("worker configuration", line)?;
        config.check()?;
        Ok(config)
    }

    /// The line, without its end.
    pub fn to_line(&self) -> Result<String, WorkerLineError> {
        to_line("worker configuration", self)
    }

    /// Whether this stage is the replica's master.
    pub const fn is_master(&self) -> bool {
        self.stage + 1 == self.n_stages
    }

    /// The first block of the stage.
    pub fn entry_layer(&self) -> u32 {
        self.slices.first().map_or(0, |slice| slice.layers.start())
    }

    /// The block after the stage's last: where its frames enter the next stage. The master's enter at 0.
    pub fn exit_layer(&self) -> u32 {
        if self.is_master() { 0 } else { self.slices.last().map_or(0, |slice| slice.layers.end()) }
    }

    fn check(&self) -> Result<(), WorkerLineError> {
        if self.stage >= self.n_stages {
            return Err(WorkerLineError::Stage { stage: self.stage, n_stages: self.n_stages });
        }
        self.check_numbers()?;
        self.check_slices()?;
        if let Some(emulation) = &self.emulation {
            return Ok(emulation.check(self.n_layer, self.n_embd)?);
        }
        match (self.stage, self.embedding.is_some()) {
            (0, false) => Err("lacks"),
            (1.., true) => Err("has"),
            (0, true) | (1.., false) => Ok(()),
        }
        .map_err(|fault| WorkerLineError::Embedding { stage: self.stage, fault })
    }

    fn check_numbers(&self) -> Result<(), WorkerLineError> {
        // llama.cpp keeps positions and counts in i32, and n_ctx × slots must fit one too.
        let most_ctx = (i32::MAX.unsigned_abs()) / self.slots.clamp(1, MAX_SLOTS);
        for (field, value, least, most, wanted) in [
            ("n_layer", self.n_layer, 1, u32::MAX, "at least 1"),
            ("n_embd", self.n_embd, 1, 1 << 20, "between 1 and 1048576"),
            ("slots", self.slots, 1, MAX_SLOTS.min(self.n_batch), "between 1 and 256, and at most n_batch"),
            ("n_ctx", self.n_ctx, 1, most_ctx, "at least 1, and below 2^31 over all slots"),
            ("n_batch", self.n_batch, 1, 1 << 16, "between 1 and 65536"),
            ("n_ubatch", self.n_ubatch, 1, self.n_batch, "between 1 and n_batch"),
            ("threads", self.threads, 1, 512, "between 1 and 512"),
            ("micro_batches", self.micro_batches, 1, 1024, "between 1 and 1024"),
            ("prefill_chunk", self.prefill_chunk, 1, self.n_batch, "between 1 and n_batch"),
            ("queue_limit", self.queue_limit, 0, 1 << 16, "at most 65536"),
            ("step_deadline_secs", self.step_deadline_secs, 1, u32::MAX, "at least 1"),
        ] {
            if value < least || value > most {
                return Err(WorkerLineError::Number { field, value, wanted });
            }
        }
        Ok(())
    }

    fn check_slices(&self) -> Result<(), WorkerLineError> {
        let first = self.slices.first().ok_or(WorkerLineError::NoSlices)?;
        let mut wanted = if self.stage == 0 { 0 } else { first.layers.start() };
        for SliceConfig { layers, .. } in &self.slices {
            // A range read from JSON has not passed its constructor.
            if layers.start() != wanted || layers.start() >= layers.end() {
                return Err(WorkerLineError::SliceStart { layers: *layers, wanted });
            }
            wanted = layers.end();
        }
        let whole = wanted == self.n_layer;
        if wanted > self.n_layer || whole != self.is_master() {
            return Err(WorkerLineError::SliceEnd {
                stage: self.stage,
                n_stages: self.n_stages,
                end: wanted,
                n_layer: self.n_layer,
            });
        }
        Ok(())
    }
}

impl WorkerRenewal {
    /// With this build's version.
    pub const fn new(tls: TlsIdentity) -> Self {
        Self { version: VERSION, tls }
    }

    /// Reads a line.
    pub fn from_line(line: &str) -> Result<Self, WorkerLineError> {
        versioned("a renewed identity", line)
    }

    /// The line, without its end.
    pub fn to_line(&self) -> Result<String, WorkerLineError> {
        to_line("a renewed identity", self)
    }
}

impl WorkerHello {
    /// This version's hello.
    pub const fn new(port: u16) -> Self {
        Self { version: VERSION, port }
    }

    /// Reads a line.
    pub fn from_line(line: &str) -> Result<Self, WorkerLineError> {
        versioned("worker hello", line)
    }

    /// The line, without its end.
    pub fn to_line(&self) -> Result<String, WorkerLineError> {
        to_line("worker hello", self)
    }
}

fn to_line(what: &'static str, value: &impl Serialize) -> Result<String, WorkerLineError> {
    // serde_json writes no line breaks of its own, and escapes those in strings.
    serde_json::to_string(value).map_err(|source| WorkerLineError::Json { what, source })
}

fn versioned<T: DeserializeOwned>(what: &'static str, line: &str) -> Result<T, WorkerLineError> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let json = |source| WorkerLineError::Json { what, source };
    let Versioned { version } = serde_json::from_str(line).map_err(json)?;
    if version != VERSION {
        return Err(WorkerLineError::Version { what, got: version });
    }
    serde_json::from_str(line).map_err(json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulation::EmulatedNetwork;
    use crate::tls::ClusterCa;

    fn slice(start: u32, end: u32) -> SliceConfig {
        SliceConfig {
            path: format!("{start}-{end}.gguf").into(),
            layers: LayerRange::new(start, end).unwrap(),
            gpu_layers: 0,
        }
    }

    fn good() -> WorkerConfig {
        WorkerConfig {
            version: VERSION,
            stage: 0,
            n_stages: 2,
            n_layer: 10,
            n_embd: 64,
            model_hash: [7; 32],
            slices: vec![slice(0, 2), slice(2, 5)],
            embedding: Some("embedding\n.gguf".into()),
            slots: 4,
            n_ctx: 2048,
            n_batch: 512,
            n_ubatch: 512,
            threads: 2,
            turns: Some("turns".into()),
            micro_batches: 2,
            queue_limit: 64,
            prefill_chunk: 256,
            extra_buffers: true,
            recurrent: false,
            smallest_window: None,
            step_deadline_secs: 120,
            listen: ([127, 0, 0, 1], 0).into(),
            tls: ClusterCa::new().unwrap().issue("stage 0").unwrap(),
            emulation: None,
        }
    }

    fn emulation() -> Emulation {
        let curve = r#"{"rows": [1], "ms": [0.5]}"#;
        serde_json::from_str(&format!(
            r#"{{"time_scale": 1.0, "memory": {{"kind": "unified", "total_bytes": 1000}},
                "profile": {{"device": "d", "model": "m", "runtime": "r", "hop_overhead_ms": 0.1,
                    "buffers": {{"prefill_bytes": 1, "decode_bytes": 1}}, "cpu": {{"head": {curve}, "blocks": [
                        {{"attention": {{"type": "full"}}, "feed_forward": "dense", "decode": {curve}, "prefill": {curve}}}
                    ]}}}},
                "model": {{"model": "m", "architecture": "llama", "n_embd": 64, "n_vocab": 100, "head_bytes": 1,
                    "blocks": [{{"count": 10, "kind": {{"attention": {{"type": "full"}}, "feed_forward": "dense"}},
                        "weight_bytes": 1, "kv_elements_per_token": 1}}]}}}}"#
        ))
        .unwrap()
    }

    fn refusal(change: impl FnOnce(&mut WorkerConfig)) -> String {
        let mut config = good();
        change(&mut config);
        WorkerConfig::from_line(&config.to_line().unwrap()).unwrap_err().to_string()
    }

    #[test]
    fn a_configuration_is_one_line_and_comes_back_whole() {
        let line = good().to_line().unwrap();
        assert!(!line.contains('\n'));
        let back = WorkerConfig::from_line(&line).unwrap();
        assert_eq!(back.slices, good().slices);
        assert_eq!((back.entry_layer(), back.exit_layer()), (0, 5));
        assert!(!back.is_master());
    }

    #[test]
    fn another_version_is_refused_by_number_even_if_its_fields_are_unknown() {
        let error = WorkerConfig::from_line(r#"{"version":5,"engine":"new"}"#).unwrap_err();
        assert!(error.to_string().contains("has version 5, but this binary speaks version 4"), "{error}");
        let error = WorkerHello::from_line(r#"{"version":0,"port":1}"#).unwrap_err();
        assert!(error.to_string().contains("worker hello has version 0"), "{error}");
        let hello = WorkerHello::new(4711);
        assert_eq!(WorkerHello::from_line(&hello.to_line().unwrap()).unwrap(), hello);
    }

    #[test]
    fn an_unknown_field_or_a_truncated_line_is_refused() {
        let line = good().to_line().unwrap();
        assert!(WorkerConfig::from_line(&line[..line.len() - 5]).is_err());
        assert!(WorkerConfig::from_line(&line.replacen("\"stage\"", "\"stge\"", 1)).is_err());
        assert!(WorkerConfig::from_line("").is_err());
    }

    #[test]
    fn slices_that_leave_gaps_or_miss_their_end_are_refused() {
        assert!(refusal(|c| c.slices.clear()).contains("no slices"));
        assert!(refusal(|c| c.slices = vec![slice(1, 5)]).contains("slice 1..5"));
        assert!(refusal(|c| c.slices = vec![slice(0, 2), slice(3, 5)]).contains("block 2"));
        assert!(refusal(|c| c.slices = vec![slice(0, 10)]).contains("stage 0 of 2"));
        assert!(refusal(|c| c.n_stages = 1).contains("ends at block 5 of 10"));
        assert!(refusal(|c| c.stage = 2).contains("stage 2 is not one of 2"));
        let line = good().to_line().unwrap().replacen(r#""end":2"#, r#""end":0"#, 1);
        assert!(WorkerConfig::from_line(&line).is_err(), "an empty range was accepted");
    }

    #[test]
    fn stage_0_alone_has_embeddings() {
        assert!(refusal(|c| c.embedding = None).contains("stage 0 lacks"));
        assert!(
            refusal(|c| {
                c.stage = 1;
                c.slices = vec![slice(5, 10)];
            })
            .contains("stage 1 has")
        );
    }

    #[test]
    fn numbers_out_of_range_are_refused_by_name() {
        assert!(refusal(|c| c.slots = 0).contains("slots is 0"));
        assert!(refusal(|c| c.slots = 257).contains("slots is 257"));
        assert!(refusal(|c| c.n_ctx = 1 << 30).contains("n_ctx"));
        assert!(refusal(|c| c.n_ubatch = 513).contains("n_ubatch"));
        assert!(refusal(|c| c.prefill_chunk = 0).contains("prefill_chunk"));
        assert!(refusal(|c| c.threads = 0).contains("threads"));
    }

    #[test]
    fn an_emulated_stage_needs_no_files_but_a_model_and_a_profile_that_make_sense() {
        let emulated = |change: fn(&mut Emulation)| {
            let mut emulation = emulation();
            change(&mut emulation);
            WorkerConfig { emulation: Some(Box::new(emulation)), embedding: None, ..good() }
        };
        let line = emulated(|_| {}).to_line().unwrap();
        assert_eq!(WorkerConfig::from_line(&line).unwrap().emulation, Some(Box::new(emulation())));
        let refusal = |change: fn(&mut Emulation)| {
            WorkerConfig::from_line(&emulated(change).to_line().unwrap()).unwrap_err().to_string()
        };
        assert!(refusal(|e| e.time_scale = 0.0).contains("time scale 0"));
        assert!(refusal(|e| e.time_scale = -1.0).contains("time scale -1"));
        let network = EmulatedNetwork { bytes_per_second: 1e8, latency_ms: 0.1 };
        assert!(emulation().within(network).is_ok());
        for network in [
            EmulatedNetwork { bytes_per_second: 0.0, ..network },
            EmulatedNetwork { latency_ms: -1.0, ..network },
            EmulatedNetwork { bytes_per_second: f64::NAN, ..network },
        ] {
            assert!(emulation().within(network).unwrap_err().to_string().contains("cannot be emulated"));
        }
        assert!(refusal(|e| e.model.blocks[0].count = 9).contains("number of blocks is 9"));
        assert!(refusal(|e| e.model.n_embd = 65).contains("width of a hidden row is 65"));
        assert!(
            refusal(|e| e.profile.cpu.as_mut().unwrap().head.ms = vec![0.0])
                .contains("the profile of device d")
        );
    }

    #[test]
    fn a_renewed_identity_survives_its_line() {
        let renewal = WorkerRenewal::new(ClusterCa::new().unwrap().issue("stage 0").unwrap());
        let line = renewal.to_line().unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(WorkerRenewal::from_line(&line).unwrap(), renewal);
        assert!(WorkerRenewal::from_line("{}").is_err());
    }
}
