//! Small random models of any architecture llama.cpp knows, for tests and for certification (feature `testing`).
//!
//! Weights depend only on the seed and the tensor's name, and are scaled so that values stay finite over some hundred
//! tokens. llama.cpp decides which tensors there are: it builds the model from metadata and asks for each one's
//! content (`llama_model_init_from_user`).

mod fill;
mod metadata;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::ptr::NonNull;

use llama_sys as sys;

use crate::backend::{init_logging, with_errors};
use crate::shim;
use crate::{Error, Model};

use metadata::Metadata;

pub use metadata::MetadataValue;

/// Type of a weight matrix of a random model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// 16-bit float.
    F16,
    /// 16-bit brain float.
    Bf16,
    /// Blocks of 32.
    Q4_0,
    /// Blocks of 32.
    Q4_1,
    /// Blocks of 32.
    Q8_0,
    /// Blocks of 32.
    Mxfp4,
    /// Blocks of 256.
    Q4K,
    /// Blocks of 256.
    Q6K,
}

/// A random model before it is built.
#[derive(Debug, Clone)]
pub struct RandomModel {
    architecture: String,
    metadata: BTreeMap<String, MetadataValue>,
    /// The last rule that matches a name holds.
    types: Vec<(String, WeightType)>,
    seed: u64,
}

impl RandomModel {
    /// A model of `architecture` without a tokenizer; everything else it needs must be set.
    pub fn new(architecture: &str) -> Self {
        let model = Self {
            architecture: architecture.to_owned(),
            metadata: BTreeMap::new(),
            types: Vec::new(),
            seed: 1,
        };
        model.set("general.architecture", architecture).set("tokenizer.ggml.model", "none")
    }

    /// Sets a metadata key.
    #[must_use]
    pub fn set(mut self, key: &str, value: impl Into<MetadataValue>) -> Self {
        self.metadata.insert(key.to_owned(), value.into());
        self
    }

    /// Sets a metadata key of the architecture, such as `block_count`.
    #[must_use]
    pub fn set_arch(self, key: &str, value: impl Into<MetadataValue>) -> Self {
        let key = format!("{}.{key}", self.architecture);
        self.set(&key, value)
    }

    /// Gives matrices whose name contains `part` a type. Norms, biases and vectors stay f32, and so does a matrix whose
    /// rows are not whole blocks of the type.
    #[must_use]
    pub fn weights(mut self, part: &str, weight_type: WeightType) -> Self {
        self.types.push((part.to_owned(), weight_type));
        self
    }

    /// Other weights.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Builds the model in memory.
    pub fn build(&self) -> Result<Model, Error> {
        init_logging();
        let metadata = Metadata::new(&self.metadata)?;
        if !self.types.is_empty() {
            // llama.cpp takes a tensor's type from the metadata, but only it knows the shapes: ask it first.
            let mut shapes = Shapes::default();
            init(&metadata, Some(on_shape), (&raw mut shapes).cast::<c_void>())?;
            for (name, shape) in &shapes.0 {
                if let Some(weight_type) = self.type_of(name, shape) {
                    metadata.add_tensor(name, *shape, weight_type)?;
                }
            }
        }
        let mut seed = self.seed;
        init(&metadata, Some(on_fill), (&raw mut seed).cast::<c_void>())
    }

    /// Builds the model and writes it as a GGUF file. llama.cpp then states every per-layer array explicitly.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        save_model(&self.build()?, path)
    }

    fn type_of(&self, name: &CStr, shape: &[i64; 4]) -> Option<sys::ggml_type> {
        let name = name.to_string_lossy();
        let (_, weight_type) = self.types.iter().rev().find(|(part, _)| name.contains(part.as_str()))?;
        let kind = weight_type.to_c();
        let is_matrix = name.ends_with(".weight") && !name.contains("norm") && shape[1] > 1;
        // SAFETY: reads a table (ggml.c, `ggml_blck_size`).
        (is_matrix && shape[0] % unsafe { sys::ggml_blck_size(kind) } == 0).then_some(kind)
    }
}

/// Writes a model as a GGUF file.
pub fn save_model(model: &Model, path: &Path) -> Result<(), Error> {
    let refuse = || Error::Build { reason: format!("llama.cpp cannot open {}", path.display()) };
    let c_path = crate::model::c_path(path).ok_or_else(refuse)?;
    // SAFETY: the model lives and the path ends in NUL (llama.cpp, `llama_model_save_to_file`).
    shim::call(|error| unsafe { sys::shoal_model_save(model.as_ptr(), c_path.as_ptr(), error) })
        .map_err(Error::exception("saving a model"))?;
    if path.is_file() { Ok(()) } else { Err(refuse()) }
}

fn init(
    metadata: &Metadata,
    callback: sys::llama_model_set_tensor_data_t,
    user_data: *mut c_void,
) -> Result<Model, Error> {
    // SAFETY: returns a struct by value (llama-model.cpp).
    let mut params = unsafe { sys::llama_model_default_params() };
    let mut no_devices = [std::ptr::null_mut()];
    params.devices = no_devices.as_mut_ptr();
    // Blocks that predict further tokens: without a file llama.cpp asserts that no tensor is skipped.
    params.load_mtp = true;
    let (handle, reason) = with_errors(|| {
        // SAFETY: metadata and parameters live during the call, the callback fits its user data, and exceptions are
        // caught inside (llama.cpp, `llama_model_load`).
        unsafe { sys::llama_model_init_from_user(metadata.as_ptr(), callback, user_data, params) }
    });
    NonNull::new(handle).map(Model::from_handle).ok_or(Error::Build { reason })
}

#[derive(Default)]
struct Shapes(BTreeMap<CString, [i64; 4]>);

unsafe extern "C" fn on_shape(tensor: *mut sys::ggml_tensor, user_data: *mut c_void) {
    // SAFETY: `build` passes its `Shapes`; tensor and name live during the call (llama-model-loader.cpp).
    let (tensor, shapes, name) =
        unsafe { (&*tensor, &mut *user_data.cast::<Shapes>(), CStr::from_ptr((*tensor).name.as_ptr())) };
    shapes.0.insert(name.to_owned(), tensor.ne);
}

unsafe extern "C" fn on_fill(tensor: *mut sys::ggml_tensor, user_data: *mut c_void) {
    // SAFETY: `build` passes its seed; the tensor lives during the call and has a buffer (llama-model-loader.cpp).
    unsafe { fill::fill(tensor, *user_data.cast::<u64>()) };
}

impl WeightType {
    fn to_c(self) -> sys::ggml_type {
        match self {
            Self::F16 => sys::GGML_TYPE_F16,
            Self::Bf16 => sys::GGML_TYPE_BF16,
            Self::Q4_0 => sys::GGML_TYPE_Q4_0,
            Self::Q4_1 => sys::GGML_TYPE_Q4_1,
            Self::Q8_0 => sys::GGML_TYPE_Q8_0,
            Self::Mxfp4 => sys::GGML_TYPE_MXFP4,
            Self::Q4K => sys::GGML_TYPE_Q4_K,
            Self::Q6K => sys::GGML_TYPE_Q6_K,
        }
    }
}
