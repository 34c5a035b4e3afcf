//! The order of devices and their classes, and the links between them in that order.

use cluster::LinkQuality;

use super::{ByVisit, DenseDevice};
use crate::problem::Problem;

pub(super) fn links_of(problem: &Problem, order: &[usize]) -> Vec<(f64, f64)> {
    let node = |d: usize| &problem.devices[d].node;
    let pairs = order.iter().flat_map(|&from| order.iter().map(move |&to| (from, to)));
    pairs
        .map(|(from, to)| {
            if node(from) == node(to) {
                return (0.0, 0.0);
            }
            match problem.links.between(node(from), node(to)) {
                Some(LinkQuality { bandwidth, one_way_latency }) => {
                    (1.0 / bandwidth.0, one_way_latency.0 / 1e3)
                }
                None => (f64::INFINITY, f64::INFINITY),
            }
        })
        .collect()
}

/// Devices by what they can do; names only decide between devices that are alike in everything.
pub(super) fn canonical_order(problem: &Problem, devices: &[DenseDevice]) -> Vec<usize> {
    let n = problem.devices.len();
    let identity: Vec<usize> = (0..n).collect();
    let links = links_of(problem, &identity);
    let mut keyed: Vec<(Vec<f64>, usize)> = identity
        .iter()
        .map(|&d| {
            let mut key = features(&devices[d]);
            let mut row: Vec<f64> =
                (0..n).flat_map(|e| [links[d * n + e], links[e * n + d]]).map(|l| l.0 + l.1).collect();
            row.sort_by(f64::total_cmp);
            key.extend(row);
            (key, d)
        })
        .collect();
    keyed.sort_by(|(a, d), (b, e)| {
        let by_features = a.iter().zip(b).map(|(x, y)| x.total_cmp(y)).find(|o| o.is_ne());
        let by_features = by_features.unwrap_or_else(|| a.len().cmp(&b.len()));
        by_features.then_with(|| problem.devices[*d].id.cmp(&problem.devices[*e].id))
    });
    keyed.into_iter().map(|(_, d)| d).collect()
}

pub(super) fn features(device: &DenseDevice) -> Vec<f64> {
    let mut key = vec![
        device.gpu_bytes,
        device.cpu_bytes,
        device.prefill_buffer,
        device.decode_buffer,
        device.overhead,
    ];
    for processor in [&device.gpu, &device.cpu] {
        match processor {
            None => key.push(0.0),
            Some(processor) => key.extend(processor.numbers()),
        }
    }
    if let Some(process) = &device.process {
        key.extend(process.compute.iter().chain(&process.runtime).flatten());
    }
    key.extend(device.embedding.iter().flat_map(ByVisit::numbers));
    if let Some(cold) = &device.cold {
        key.extend(cold.gaps().iter().chain(cold.extra()).map(|millis| millis.0));
    }
    key
}

/// Two devices are of one class if swapping them leaves every cost as it is.
pub(super) fn classes_of(devices: &[DenseDevice], links: &[(f64, f64)], uniform_links: bool) -> Vec<usize> {
    let n = devices.len();
    let swappable = |a: usize, b: usize| {
        devices[a] == devices[b]
            && (uniform_links
                || (links[a * n + b] == links[b * n + a]
                    && (0..n).filter(|&x| x != a && x != b).all(|x| {
                        links[a * n + x] == links[b * n + x] && links[x * n + a] == links[x * n + b]
                    })))
    };
    let mut class_of: Vec<usize> = Vec::with_capacity(n);
    let mut first: Vec<usize> = Vec::new();
    for device in 0..n {
        let known = first.iter().position(|&f| swappable(f, device));
        class_of.push(known.unwrap_or_else(|| {
            first.push(device);
            first.len() - 1
        }));
    }
    class_of
}
