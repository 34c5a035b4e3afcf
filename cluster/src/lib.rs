//! The nouns of a Shoal cluster, with their units.
//!
//! Every other crate speaks in these types. They carry no wire format (`protocol` has the twins), do no I/O,
//! read no clock and no environment, and know neither llama.cpp nor tokio.
#![forbid(unsafe_code)]

mod correction;
mod demand;
mod device;
mod ids;
mod layers;
mod link;
mod memory;
mod model;
mod observation;
mod plan;
mod replica;
mod stage_time;
mod units;
mod workload;

pub use correction::Correction;
pub use demand::{CountedLengths, Demand, DemandLevel, DemandRange};
pub use device::{
    BlockCurves, ColdCall, ColdCallError, ComputeBuffers, Device, DeviceId, DeviceMemory, DeviceProfile,
    NodeId, ProcessorProfile, Surface, SurfaceError,
};
pub use ids::{Epoch, ModelHash, RequestId, SlotId, StageIndex, StepId};
pub use layers::{LayerRange, LayerRangeError, split_by_bytes};
pub use link::{BytesPerSecond, Link, LinkEncoding, LinkQuality, Links};
pub use memory::{CONTEXT_STEP, Load, MemoryCosts, StageLoad, cache_request, stage_memory};
pub use model::{
    Attention, BlockKind, BlockShape, CacheRequest, Experts, FeedForward, ModelShape, RangeRefusal, RangeRule,
};
pub use observation::{
    ForetoldHops, ObservedHops, ObservedSteps, StageObservation, StepBucket, StepTotals, Tally, hop_time,
    hops_since,
};
pub use plan::{Limit, Plan, Prediction, ReplicaPlan, Role, StagePlan};
pub use replica::{ReplicaState, StageMemory, StageReport};
pub use stage_time::{NotMeasured, Phase, ProcessorKind, StageBatch, StageParts, StageTimeError};
pub use units::{Bytes, Millis, TokensPerSecond};
pub use workload::{Arrivals, Lengths, Spread, TraceEntry, Workload};
