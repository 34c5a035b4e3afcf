//! Reads the test bed of the E2LLM paper as it was rebuilt from published measurements
//! (`data/e2llm_testbed.json`, every constant with its source), and makes its 36 configurations.
//!
//! It is the format of that one file, not Shoal's own; those are in `protocol`.

use std::collections::BTreeMap;

use cluster::{
    Arrivals, Attention, BlockCurves, BlockKind, BlockShape, Bytes, BytesPerSecond, ComputeBuffers, Device,
    DeviceId, DeviceMemory, DeviceProfile, FeedForward, Lengths, LinkQuality, Links, Millis, ModelShape,
    NodeId, ProcessorProfile, Surface, SurfaceError, TokensPerSecond, Workload,
};
use serde::Deserialize;
use thiserror::Error;

use crate::problem::Problem;
use crate::settings::{BlockDetail, DecodeReading, KvLayout, ObjectiveKind, Settings, SlotRule};

/// The file, read.
#[derive(Debug, Clone, Deserialize)]
pub struct Testbed {
    batch_sizes: Vec<u32>,
    chunk_sizes: Vec<u32>,
    link: FileLink,
    slot_context: u32,
    ubatch_prefill: u32,
    min_tps: f64,
    slot_cap: u32,
    models: BTreeMap<String, FileModel>,
    device_types: BTreeMap<String, FileDeviceType>,
    devices: Vec<FileDevice>,
    compute_buffer_bytes: FileBuffers,
    clusters: BTreeMap<String, Vec<usize>>,
    datasets: BTreeMap<String, BTreeMap<String, [f64; 2]>>,
    arrival_s: Vec<f64>,
    workload: FileWorkload,
}

#[derive(Debug, Clone, Deserialize)]
struct FileLink {
    mbit_per_s: f64,
    one_way_latency_s: f64,
    rpc_stage_overhead_s: f64,
}

#[derive(Debug, Clone, Deserialize)]
struct FileModel {
    n_blocks: u32,
    d: u32,
    vocab: u32,
    block_bytes: u64,
    head_bytes: u64,
    embd_bytes: u64,
    kv_bytes_per_token_block: u64,
    swa_window: u32,
    swa_every: u32,
}

#[derive(Debug, Clone, Deserialize)]
struct FileDeviceType {
    kind: String,
    usable_vram_bytes: f64,
    usable_ram_bytes: f64,
    profile: BTreeMap<String, FileProfile>,
}

#[derive(Debug, Clone, Deserialize)]
struct FileProfile {
    gpu_decode_block: Vec<f64>,
    gpu_kv_slope: f64,
    gpu_prefill_block: Vec<f64>,
    gpu_head: Vec<f64>,
    cpu_decode_block: Option<Vec<f64>>,
    cpu_kv_slope: Option<f64>,
    cpu_prefill_block: Option<Vec<f64>>,
}

#[derive(Debug, Clone, Deserialize)]
struct FileDevice {
    id: String,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Clone, Deserialize)]
struct FileBuffers {
    prefill: BTreeMap<String, f64>,
    decode: BTreeMap<String, f64>,
}

#[derive(Debug, Clone, Deserialize)]
struct FileWorkload {
    n_requests: u32,
}

/// Why a test bed cannot be used.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum TestbedError {
    #[error("the test bed is not valid JSON of its form")]
    Json(#[from] serde_json::Error),
    #[error("the test bed has no {what} called {name}")]
    Unknown { what: &'static str, name: String },
    #[error("a curve of {device} cannot be used")]
    Curve {
        device: String,
        #[source]
        source: SurfaceError,
    },
}

/// One of the paper's configurations.
#[derive(Debug, Clone, PartialEq)]
pub struct Configuration {
    /// Devices in the cluster: 4, 6 or 8.
    pub devices: String,
    /// The model's name in the file.
    pub model: String,
    /// The data set's name in the file.
    pub dataset: String,
    /// Seconds between requests.
    pub interval: f64,
}

impl Configuration {
    /// For tables and JSON.
    pub fn name(&self) -> String {
        format!("{} devices, {}, {}, {} s", self.devices, self.model, self.dataset, self.interval)
    }
}

impl Testbed {
    /// The paper's test bed, which comes with this crate.
    pub fn e2llm() -> Result<Self, TestbedError> {
        Self::read(include_bytes!("../data/e2llm_testbed.json"))
    }

    /// Reads a file's bytes.
    pub fn read(json: &[u8]) -> Result<Self, TestbedError> {
        Ok(serde_json::from_slice(json)?)
    }

    /// The 36 configurations, in the file's order.
    pub fn configurations(&self) -> Vec<Configuration> {
        let mut all = Vec::new();
        for devices in self.clusters.keys() {
            for model in self.models.keys() {
                for dataset in self.datasets.keys() {
                    all.extend(self.arrival_s.iter().map(|&interval| Configuration {
                        devices: devices.clone(),
                        model: model.clone(),
                        dataset: dataset.clone(),
                        interval,
                    }));
                }
            }
        }
        all
    }

    /// One configuration as a problem.
    pub fn problem(&self, configuration: &Configuration) -> Result<Problem, TestbedError> {
        let Configuration { devices, model, dataset, interval } = configuration;
        let numbers = self.clusters.get(devices).ok_or_else(|| unknown("cluster", devices))?;
        let mut problem = self.on_devices(numbers, model)?;
        let means = self.datasets.get(dataset).and_then(|of| of.get(model));
        let [prompt, output] = *means.ok_or_else(|| unknown("data set", dataset))?;
        // Spreads are the fixture's assumptions ("workload.lengths").
        let prompt_cv = if dataset == "IELTS" { 0.15 } else { 0.35 };
        problem.workload.prompt = Lengths::log_normal(prompt, prompt_cv);
        problem.workload.output = Lengths::log_normal(output, 0.4);
        problem.workload.arrivals = Arrivals::Every(Millis(interval * 1e3));
        Ok(problem)
    }

    /// Devices of the test bed by their numbers from 1 (one may come more than once), with a workload to be replaced.
    pub fn on_devices(&self, numbers: &[usize], model: &str) -> Result<Problem, TestbedError> {
        let shape = self.models.get(model).ok_or_else(|| unknown("model", model))?;
        let (mut devices, mut profiles) = (Vec::new(), Vec::new());
        for (copy, &number) in numbers.iter().enumerate() {
            let device = number.checked_sub(1).and_then(|n| self.devices.get(n));
            let device = device.ok_or_else(|| unknown("device", &number.to_string()))?;
            let again = numbers[..copy].iter().filter(|n| **n == number).count();
            let name = if again == 0 { device.id.clone() } else { format!("{}.{again}", device.id) };
            let (device, profile) = self.device(name, &device.kind, model)?;
            devices.push(device);
            profiles.push(profile);
        }
        Ok(Problem {
            model: shape_of(model, shape),
            devices,
            profiles,
            links: self.links(),
            workload: self.workload(),
        })
    }

    /// How the paper plans, by one of its objectives or Shoal's.
    pub fn settings(&self, objective: ObjectiveKind, reading: DecodeReading) -> Settings {
        Settings {
            objective,
            reading,
            slots: if objective == ObjectiveKind::Queue { SlotRule::Either } else { SlotRule::Largest },
            blocks: BlockDetail::Averaged,
            kv_layout: KvLayout::Unified { n_ubatch: 512 },
            prefill_chunk: self.ubatch_prefill,
            ..Settings::default()
        }
    }

    fn links(&self) -> Links {
        Links::uniform(LinkQuality {
            bandwidth: BytesPerSecond::from_mbit(self.link.mbit_per_s),
            one_way_latency: Millis(self.link.one_way_latency_s * 1e3),
        })
    }

    fn workload(&self) -> Workload {
        Workload {
            arrivals: Arrivals::Every(Millis(1000.0)),
            prompt: Lengths::fixed(576.0),
            output: Lengths::fixed(700.0),
            requests: self.workload.n_requests,
            min_rate: TokensPerSecond(self.min_tps),
            slot_context: self.slot_context,
            max_slots: self.slot_cap,
        }
    }

    fn device(&self, name: String, kind: &str, model: &str) -> Result<(Device, DeviceProfile), TestbedError> {
        let device_type = self.device_types.get(kind).ok_or_else(|| unknown("device type", kind))?;
        let profile = device_type.profile.get(model).ok_or_else(|| unknown("profile of model", model))?;
        let shape = self.models.get(model).ok_or_else(|| unknown("model", model))?;
        let bytes = |of: f64| Bytes(of as u64);
        let vram = bytes(device_type.usable_vram_bytes);
        let memory = match device_type.kind.as_str() {
            "unified" => DeviceMemory::Unified { total: vram },
            _ => DeviceMemory::Discrete { vram, ram: bytes(device_type.usable_ram_bytes) },
        };
        let buffer = |of: &BTreeMap<String, f64>| bytes(of.get(model).copied().unwrap_or(0.0));
        let gpu = self
            .gpu(profile, shape)
            .map_err(|source| TestbedError::Curve { device: name.clone(), source })?;
        let cpu = self
            .cpu(profile, shape)
            .map_err(|source| TestbedError::Curve { device: name.clone(), source })?;
        let id = DeviceId(name.clone());
        let profile = DeviceProfile {
            device: id.clone(),
            model: model.to_owned(),
            runtime: "test bed".to_owned(),
            gpu: Some(gpu),
            cpu,
            hop_overhead: Millis(self.link.rpc_stage_overhead_s * 1e3),
            buffers: ComputeBuffers {
                prefill: buffer(&self.compute_buffer_bytes.prefill),
                decode: buffer(&self.compute_buffer_bytes.decode),
            },
            embedding: None,
            cold_call: None,
            memory: None,
        };
        Ok((Device { id, node: NodeId(name), memory }, profile))
    }

    fn gpu(&self, profile: &FileProfile, shape: &FileModel) -> Result<ProcessorProfile, SurfaceError> {
        let decode = self.decode(&profile.gpu_decode_block, profile.gpu_kv_slope)?;
        self.processor(shape, decode, &profile.gpu_prefill_block, &profile.gpu_head)
    }

    /// The CPU's curves; its head is never asked for, as every device of the test bed has a GPU with room for it.
    fn cpu(
        &self,
        profile: &FileProfile,
        shape: &FileModel,
    ) -> Result<Option<ProcessorProfile>, SurfaceError> {
        let (Some(block), Some(slope), Some(prefill)) =
            (&profile.cpu_decode_block, profile.cpu_kv_slope, &profile.cpu_prefill_block)
        else {
            return Ok(None);
        };
        let decode = self.decode(block, slope)?;
        self.processor(shape, decode, prefill, &profile.gpu_head).map(Some)
    }

    fn processor(
        &self,
        shape: &FileModel,
        decode: Surface,
        prefill: &[f64],
        head: &[f64],
    ) -> Result<ProcessorProfile, SurfaceError> {
        let prefill = Surface::flat(self.chunk_sizes.clone(), millis(prefill))?;
        let curves = |kind| BlockCurves { kind, decode: decode.clone(), prefill: prefill.clone() };
        let blocks = (0..shape.n_blocks.min(2)).map(|block| curves(kind_of(shape, block))).collect();
        Ok(ProcessorProfile {
            blocks,
            head: Surface::flat(self.batch_sizes.clone(), millis(head))?,
            call: None,
        })
    }

    /// The file's table is at depth 0 and its slope is per row and token of depth.
    fn decode(&self, table: &[f64], slope: f64) -> Result<Surface, SurfaceError> {
        let depths = vec![0, self.slot_context];
        let times = self.batch_sizes.iter().zip(table).flat_map(|(&rows, &time)| {
            depths.iter().map(move |&depth| Millis((time + f64::from(rows) * f64::from(depth) * slope) * 1e3))
        });
        Surface::new(self.batch_sizes.clone(), depths.clone(), times.collect())
    }
}

fn unknown(what: &'static str, name: &str) -> TestbedError {
    TestbedError::Unknown { what, name: name.to_owned() }
}

fn millis(seconds: &[f64]) -> Vec<Millis> {
    seconds.iter().map(|s| Millis(s * 1e3)).collect()
}

fn kind_of(shape: &FileModel, block: u32) -> BlockKind {
    let sliding = shape.swa_every > 0 && block.is_multiple_of(shape.swa_every);
    let attention =
        if sliding { Attention::SlidingWindow { window: shape.swa_window } } else { Attention::Full };
    BlockKind { attention, feed_forward: FeedForward::MixtureOfExperts }
}

fn shape_of(name: &str, shape: &FileModel) -> ModelShape {
    // f16 caches: two bytes for each element.
    let block = |index| BlockShape {
        kind: kind_of(shape, index),
        weight_bytes: Bytes(shape.block_bytes),
        kv_elements_per_token: shape.kv_bytes_per_token_block / 2,
        state_bytes_per_slot: Bytes::ZERO,
    };
    ModelShape {
        architecture: name.to_owned(),
        name: Some(name.to_owned()),
        n_embd: shape.d,
        n_vocab: shape.vocab,
        n_ctx_train: 131_072,
        n_head: Vec::new(),
        n_head_kv: Vec::new(),
        blocks: (0..shape.n_blocks).map(block).collect(),
        embedding_bytes: Bytes(shape.embd_bytes),
        head_bytes: Bytes(shape.head_bytes),
        tied: false,
        global_bytes: Bytes::ZERO,
        experts: None,
        range_rules: Vec::new(),
    }
}
