//! The file of what was measured.

use std::time::{SystemTime, UNIX_EPOCH};

use cluster::{
    ComputeBuffers, DeviceId, DeviceProfile, LayerRange, Load, MemoryCosts, Millis, ModelShape, cache_request,
};
use protocol::node::DeviceKind;
use protocol::plan_files::{
    MeasuredEntry, MeasuredPartEntry, MeasurementEntry, ModelShapeFile, ProfileEntry, ProfilesFile,
};

use crate::curves::flat;
use crate::profile::{Outcome, Request};
use crate::sampling::{Point, is_noisy};
use crate::statistics::{Quartiles, median};

/// Rows of a prefill-sized batch, unless something else is asked for: what `shoal serve` has.
const PREFILL_ROWS: u32 = 512;

/// Rows of the largest decode step that is measured.
const DECODE_ROWS: u32 = 32;

/// Rows of a usual hop: a micro-batch of a few slots.
const HOP_ROWS: f64 = 8.0;

/// A device for each GPU, with the host's CPU beside it; the CPU alone where no GPU was measured.
pub(crate) fn file(request: &Request<'_>, outcomes: &[Outcome]) -> ProfilesFile {
    let cpu = outcomes.iter().find(|outcome| outcome.facts.kind == DeviceKind::Cpu);
    let gpus: Vec<&Outcome> =
        outcomes.iter().filter(|outcome| outcome.facts.kind != DeviceKind::Cpu).collect();
    let devices: Vec<(Option<&Outcome>, Option<&Outcome>)> = if gpus.is_empty() {
        vec![(None, cpu)]
    } else {
        gpus.into_iter().map(|gpu| (Some(gpu), cpu)).collect()
    };
    let mut file = ProfilesFile::new(&[]);
    file.profiles = devices.into_iter().map(|(gpu, cpu)| entry(request, gpu, cpu)).collect();
    file
}

fn entry(request: &Request<'_>, gpu: Option<&Outcome>, cpu: Option<&Outcome>) -> ProfileEntry {
    let both: Vec<&Outcome> = gpu.into_iter().chain(cpu).collect();
    let name = both.first().map_or("", |first| first.facts.name.as_str());
    let around: Vec<(Point, f64)> =
        both.iter().flat_map(|outcome| &outcome.samples).map(|(point, ms)| (*point, median(ms))).collect();
    let hop = flat(&around, MeasuredPartEntry::Hop);
    let costs = both.first().map_or(MemoryCosts::assumed(request.model.shape()), |first| first.costs);
    let profile = DeviceProfile {
        device: DeviceId(format!("{}/{}", request.host.name, name.to_ascii_lowercase())),
        model: request.hash.to_string(),
        runtime: llama::version().to_owned(),
        gpu: gpu.map(|gpu| gpu.profile.clone()),
        cpu: cpu.map(|cpu| cpu.profile.clone()),
        hop_overhead: hop.map_or(Millis(0.0), |hop| hop.at(HOP_ROWS, 0.0)),
        buffers: buffers(request.model.shape(), &costs, request.settings.n_ctx),
        embedding: flat(&around, MeasuredPartEntry::Embedding),
        cold_call: both.first().and_then(|first| first.cold_call.clone()),
        memory: cpu.map(|cpu| cpu.costs),
    };
    ProfileEntry { measured: Some(Box::new(measured(request, &both))), ..ProfileEntry::new(&profile) }
}

fn buffers(shape: &ModelShape, costs: &MemoryCosts, n_ctx: u32) -> ComputeBuffers {
    let of = |n_ubatch: u32| {
        let load = Load { slots: DECODE_ROWS.min(n_ubatch), n_ctx, n_ubatch };
        let cells =
            LayerRange::new(0, shape.n_layer()).map_or(0, |all| shape.cells(all, cache_request(load)));
        costs.compute(load, cells, true) + costs.work_row * u64::from(n_ubatch)
    };
    ComputeBuffers { prefill: of(PREFILL_ROWS), decode: of(DECODE_ROWS) }
}

fn measured(request: &Request<'_>, outcomes: &[&Outcome]) -> MeasuredEntry {
    let measurements = outcomes.iter().flat_map(|outcome| {
        outcome.samples.iter().map(|(point, samples)| measurement(&outcome.facts.name, point, samples))
    });
    MeasuredEntry {
        model_name: request.model.name(),
        model: ModelShapeFile::new(request.hash.to_string(), request.model.shape()),
        host: request.host.entry(request.settings.reserve),
        features: request.settings.features.clone(),
        threads: request.settings.threads,
        n_ctx: request.settings.n_ctx,
        taken_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        kv: outcomes.first().map(|first| first.kv.clone()).unwrap_or_default(),
        peak_resident_bytes: outcomes.iter().map(|outcome| outcome.peak).max().unwrap_or(0),
        measurements: measurements.collect(),
        failures: outcomes.iter().flat_map(|outcome| outcome.failures.clone()).collect(),
    }
}

fn measurement(processor: &str, point: &Point, samples: &[f64]) -> MeasurementEntry {
    let quartiles = Quartiles::of(samples);
    MeasurementEntry {
        processor: processor.to_owned(),
        part: point.part,
        layers: point.layers.map(Into::into),
        rows: point.rows,
        depth: point.depth,
        samples: samples.len() as u32,
        median_ms: quartiles.median,
        lower_quartile_ms: quartiles.lower,
        upper_quartile_ms: quartiles.upper,
        noisy: is_noisy(samples),
    }
}

#[cfg(test)]
mod tests {
    use protocol::plan_files::MeasuredPartEntry;

    use super::*;

    #[test]
    fn a_measurement_keeps_its_spread_and_says_when_it_is_wide() {
        let point = Point { part: MeasuredPartEntry::Hop, layers: None, rows: 8, depth: 0 };
        let steady = measurement("CPU", &point, &[1.0, 1.01, 1.02]);
        assert_eq!((steady.samples, steady.median_ms, steady.noisy), (3, 1.01, false));
        assert!(measurement("CPU", &point, &[1.0, 2.0, 3.0]).noisy);
    }
}
