//! What an emulated stage worker is told: the device it stands for, and the model that it pretends to hold. It has no files,
//! and sleeps for the profiled time instead of computing.

use cluster::{DeviceMemory, DeviceProfile, ModelShape};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::plan_files::{
    MemoryEntry, ModelShapeFile, PlanFileError, PlannerFile, ProfileEntry, ProfilesFile, current,
};

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
    /// The network that it is in; else what this host's takes is what it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<EmulatedNetwork>,
}

/// A network that is emulated with the devices in it. Hidden rows and caches then take the time that the model's would, and only a
/// few bytes of each travel: hidden rows as wide as the stage is told, an element of keys and one of values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmulatedNetwork {
    /// Of each device's card, each way.
    pub bytes_per_second: f64,
    /// One way.
    pub latency_ms: f64,
}

/// `device.json`: a device for a node to stand for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceFile {
    /// Version of the format.
    #[serde(default = "current")]
    pub version: u32,
    /// The device's profile for a model.
    pub profile: ProfileEntry,
    /// What the device can hold; if it is left out, what the profile says of the host on which it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryEntry>,
    /// The whole model; if it is left out, as the profile has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelShapeFile>,
}

impl PlannerFile for DeviceFile {
    const WHAT: &'static str = "the device file";

    fn version(&self) -> u32 {
        self.version
    }
}

impl DeviceFile {
    /// Reads the file, or a file of profiles that has one.
    pub fn from_either(text: &str) -> Result<Self, EmulationError> {
        let profiles = ProfilesFile::from_json(text).map(|file| file.profiles);
        match profiles.as_deref() {
            Ok([profile]) => {
                Ok(Self { version: current(), profile: profile.clone(), memory: None, model: None })
            }
            Ok(several) => Err(EmulationError::Profiles(several.len())),
            Err(_) => Ok(Self::from_json(text)?),
        }
    }

    /// Stands for the device.
    pub fn emulation(self, time_scale: f64) -> Result<Emulation, EmulationError> {
        let Self { profile, memory, model, .. } = self;
        let measured = profile.measured.as_deref();
        let model = model.or_else(|| measured.map(|measured| measured.model.clone()));
        let memory = memory.or_else(|| {
            let host = &measured?.host;
            let ram_bytes = host.ram_available_bytes.saturating_sub(host.reserve_bytes);
            // A GPU's memory is not known from its profile alone: another processor of the host may be meant.
            profile.gpu.is_none().then_some(MemoryEntry::Discrete { vram_bytes: 0, ram_bytes })
        });
        let emulation = Emulation {
            model: model.ok_or(EmulationError::Lacks("model"))?,
            memory: memory.ok_or(EmulationError::Lacks("memory"))?,
            profile,
            time_scale,
            network: None,
        };
        emulation.check_scale()?;
        emulation.model.shape()?;
        emulation.profile.profile()?;
        Ok(emulation)
    }
}

/// Why nothing can be emulated.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum EmulationError {
    #[error("time scale {0} is not a number above 0 and up to 1000")]
    TimeScale(f64),
    #[error(
        "a network of {bytes_per_second} bytes per second and {latency_ms} ms of latency cannot be emulated: it takes 1 byte per \
         second or more, and 0 to 1000000 ms"
    )]
    Network { bytes_per_second: f64, latency_ms: f64 },
    #[error("the emulated model's {what} is {got}, but the stage was told {wanted}")]
    Model { what: &'static str, got: u32, wanted: u32 },
    #[error(transparent)]
    Profile(#[from] PlanFileError),
    #[error("the file has {0} profiles: a node stands for one device")]
    Profiles(usize),
    #[error("the device file lacks the device's {0}, and its profile does not tell it")]
    Lacks(&'static str),
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
            network: None,
        };
        emulation.check_scale()?;
        Ok(emulation)
    }

    /// In a network that is emulated too.
    pub fn within(self, network: EmulatedNetwork) -> Result<Self, EmulationError> {
        let emulation = Self { network: Some(network), ..self };
        emulation.check_network()?;
        Ok(emulation)
    }

    /// Compares it with what a stage is told of its model.
    pub(crate) fn check(&self, n_layer: u32, n_embd: u32) -> Result<(), EmulationError> {
        self.check_scale()?;
        self.check_network()?;
        let blocks = self.model.shape()?.n_layer();
        // In an emulated network rows may be narrower than the model's.
        let width = if self.network.is_some() { n_embd } else { self.model.n_embd };
        for (what, got, wanted) in
            [("number of blocks", blocks, n_layer), ("width of a hidden row", width, n_embd)]
        {
            if got != wanted {
                return Err(EmulationError::Model { what, got, wanted });
            }
        }
        self.profile.profile()?;
        Ok(())
    }

    fn check_network(&self) -> Result<(), EmulationError> {
        match self.network {
            Some(EmulatedNetwork { bytes_per_second, latency_ms })
                if !(bytes_per_second >= 1.0 && (0.0..=1e6).contains(&latency_ms)) =>
            {
                Err(EmulationError::Network { bytes_per_second, latency_ms })
            }
            _ => Ok(()),
        }
    }

    fn check_scale(&self) -> Result<(), EmulationError> {
        if self.time_scale > 0.0 && self.time_scale <= 1000.0 {
            Ok(())
        } else {
            Err(EmulationError::TimeScale(self.time_scale))
        }
    }
}
