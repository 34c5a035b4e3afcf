//! What the benches reach into that nobody else needs.

use crate::instance::{Buffers, Instance};
use crate::layout::Layouter;
use crate::problem::Problem;
use crate::settings::Settings;

/// Seconds of one partition of all devices as one decode chain, as timed by `time`.
#[doc(hidden)]
pub fn partition_seconds(
    problem: &Problem,
    settings: &Settings,
    time: &dyn Fn(&mut dyn FnMut()) -> f64,
) -> f64 {
    let Ok(inst) = Instance::new(problem, settings) else { return f64::NAN };
    let group: Vec<usize> = (0..inst.devices.len()).collect();
    let layouter = Layouter { inst: &inst, encoding: settings.encoding };
    time(&mut || {
        let _ = layouter.partition_once(&group, Buffers::Decode);
    })
}
