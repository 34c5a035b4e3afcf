//! What a hop between two stages costs: a frame of hidden rows encoded, sent over TLS on this host, received, checked,
//! handed to the thread that would compute, and decoded.
//!
//!     cargo bench -p profiler --bench hop
#![allow(clippy::unwrap_used, missing_docs)] // how a bench fails, and what criterion's macros make

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use profiler::hop::Link;

const N_EMBD: u32 = 2048;

fn hop(criterion: &mut Criterion) {
    let mut link = Link::new(N_EMBD).unwrap();
    for rows in [1, 8, 512] {
        criterion.bench_function(&format!("hop/{rows} rows of {N_EMBD} floats"), |bencher| {
            bencher.iter(|| black_box(link.send(rows).unwrap()));
        });
    }
}

criterion_group!(benches, hop);
criterion_main!(benches);
