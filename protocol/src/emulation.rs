//! What an emulated stage worker is told: the device it stands for, and the model that it pretends to hold. It has no files,
//! and sleeps for the profiled time instead of computing.

use cluster::{DeviceMemory, DeviceProfile, ModelShape};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::plan_files::{MemoryEntry, ModelShapeFile, PlanFileError, ProfileEntry};

/// A device and a model to stand for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Emulation {
    /// The device's profile for the model.
    pub profile: ProfileEntry,
    /// What the device can hold.
    pub memory: MemoryEntry,
    /// The whole model.
    pub model: ModelShapeFile,
    /// Seconds that a second of the device takes here: below 1 runs faster than the device would.
    pub time_scale: f64,
}

/// Why nothing can be emulated.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum EmulationError {
    #[error("time scale {0} is not a number above 0 and up to 1000")]
    TimeScale(f64),
    #[error("the emulated model's {what} is {got}, but the stage was told {wanted}")]
    Model { what: &'static str, got: u32, wanted: u32 },
    #[error(transparent)]
    Profile(#[from] PlanFileError),
}

impl Emulation {
    /// Stands for a device that was profiled with a model.
    pub fn new(
        profile: &DeviceProfile,
        memory: DeviceMemory,
        model: &ModelShape,
        time_scale: f64,
    ) -> Result<Self, EmulationError> {
        let emulation = Self {
            profile: ProfileEntry::new(profile),
            memory: memory.into(),
            model: ModelShapeFile::new(profile.model.clone(), model),
            time_scale,
        };
        emulation.check_scale()?;
        Ok(emulation)
    }

    /// Compares it with what a stage is told of its model.
    pub(crate) fn check(&self, n_layer: u32, n_embd: u32) -> Result<(), EmulationError> {
        self.check_scale()?;
        let blocks = self.model.shape()?.n_layer();
        for (what, got, wanted) in
            [("number of blocks", blocks, n_layer), ("width of a hidden row", self.model.n_embd, n_embd)]
        {
            if got != wanted {
                return Err(EmulationError::Model { what, got, wanted });
            }
        }
        self.profile.profile()?;
        Ok(())
    }

    fn check_scale(&self) -> Result<(), EmulationError> {
        if self.time_scale > 0.0 && self.time_scale <= 1000.0 {
            Ok(())
        } else {
            Err(EmulationError::TimeScale(self.time_scale))
        }
    }
}
