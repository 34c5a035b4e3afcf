//! A loaded GGUF model, or its vocabulary alone.
//!
//! [`Model`] is a cheap handle: contexts, vocabularies and samplers hold a clone, so llama.cpp frees the model after
//! the last of them. Knows nothing of slices: a slice is an ordinary model.

use std::ffi::{CString, c_char, c_void};
use std::fmt;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use llama_sys as sys;

use crate::backend::{init_logging, with_errors};
use crate::{Device, DeviceKind, Error, Vocab, VocabularyFacts, devices};

/// How weights come from the file into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryMap {
    /// Map the file; pages are read when they are used and can be dropped again. Weights that are repacked or go to
    /// a GPU are copied, and their part of the map is given back.
    #[default]
    Mapped,
    /// Read all of it into memory of the process.
    Read,
}

/// Whether ggml may repack weights for the CPU at load time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExtraBuffers {
    /// Repack: faster prompts, but results can differ with the number of rows computed at once (ggml-cpu/repack.cpp).
    #[default]
    Repacked,
    /// Keep the file's layout.
    Plain,
}

/// How much of a model is loaded.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Content {
    /// Weights and vocabulary.
    #[default]
    Whole,
    /// Weights, and instead of the vocabulary as many tokens without text: enough to compute logits.
    WithoutText(VocabularyFacts),
    /// Vocabulary and metadata: enough to tokenise and to apply templates, not to make a context.
    VocabularyOnly,
}

/// Which GPUs blocks are put on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Gpus {
    /// All that llama.cpp finds, by the memory they have free.
    #[default]
    All,
    /// The one of this name, as [`devices`](crate::devices) has it.
    Only(String),
}

/// Told how much is loaded, from 0 to 1; `Break` stops.
pub type LoadProgress = Box<dyn FnMut(f32) -> ControlFlow<()>>;

/// How to load a model. The default is llama.cpp's own, on the CPU.
#[derive(Default)]
pub struct ModelParams {
    /// Blocks kept on GPUs: the last ones of the model, and the head with them. With 0 no GPU is touched at all.
    pub gpu_layers: u32,
    /// On which GPUs.
    pub gpus: Gpus,
    /// How weights are brought into memory.
    pub memory_map: MemoryMap,
    /// Whether weights may be repacked.
    pub extra_buffers: ExtraBuffers,
    /// How much is loaded.
    pub content: Content,
    /// Called while weights are loaded.
    pub progress: Option<LoadProgress>,
}

impl ModelParams {
    /// Loads the vocabulary alone.
    pub fn vocabulary_only() -> Self {
        Self { content: Content::VocabularyOnly, ..Self::default() }
    }
}

impl fmt::Debug for ModelParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelParams")
            .field("gpu_layers", &self.gpu_layers)
            .field("gpus", &self.gpus)
            .field("memory_map", &self.memory_map)
            .field("extra_buffers", &self.extra_buffers)
            .field("content", &self.content)
            .finish_non_exhaustive()
    }
}

/// A handle to a loaded model.
#[derive(Clone)]
pub struct Model(Arc<Inner>);

struct Inner {
    handle: NonNull<sys::llama_model>,
    content: Content,
    path: Option<PathBuf>,
}

// SAFETY: a model is written while it loads and only read afterwards; contexts keep their state to themselves
// (llama-model.h). The one write after loading is llama-context.cpp's `llama_init_from_model` correcting `n_ctx_train`
// for a context with its own YaRN scale, and this crate never sets one.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the last handle is gone, and with it every context and vocabulary, which hold one
        // (llama-model.cpp, `llama_model_free`).
        unsafe { sys::llama_model_free(self.handle.as_ptr()) };
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("description", &self.description()).field("path", &self.0.path).finish()
    }
}

impl Model {
    /// Loads `path`; of a split file, the first part.
    pub fn load(path: &Path, mut params: ModelParams) -> Result<Self, Error> {
        init_logging();
        let fail = |reason: String| Error::Load { path: path.to_owned(), reason };
        if !path.is_file() {
            return Err(fail("there is no such file".to_owned()));
        }
        let c_path = c_path(path).ok_or_else(|| fail("llama.cpp cannot open a path like that".to_owned()))?;
        check_gpu(params.gpu_layers).map_err(fail)?;
        let mut progress = Progress { callback: params.progress.take(), stopped: false, panic: None };
        // Ended by a null pointer: an empty list, or one GPU.
        let mut devices = [std::ptr::null_mut(), std::ptr::null_mut()];
        let mut c_params = c_params(&params);
        let overrides = match &params.content {
            Content::WithoutText(facts) => without_text(facts).map_err(fail)?,
            Content::Whole | Content::VocabularyOnly => Vec::new(),
        };
        if !overrides.is_empty() {
            c_params.kv_overrides = overrides.as_ptr();
        }
        if params.gpu_layers == 0 {
            // An empty list, not none: with none llama.cpp starts every GPU it finds, even if it then puts nothing on it.
            c_params.devices = devices.as_mut_ptr();
        } else {
            if let Gpus::Only(name) = &params.gpus {
                devices[0] = gpu(name).ok_or_else(|| fail(format!("there is no GPU called {name:?}")))?;
                c_params.devices = devices.as_mut_ptr();
            }
            // llama.cpp counts the head as the layer after the last block (llama-model.cpp, `i_gpu_start`).
            c_params.n_gpu_layers = i32::try_from(params.gpu_layers).unwrap_or(i32::MAX - 1) + 1;
        }
        c_params.progress_callback = Some(on_progress);
        c_params.progress_callback_user_data = (&raw mut progress).cast::<c_void>();
        // SAFETY: path and parameters live during the call; the callback gets the `Progress` it expects and never
        // unwinds. C++ exceptions are caught inside (llama.cpp, `llama_model_load`).
        let (handle, reason) =
            with_errors(|| unsafe { sys::llama_model_load_from_file(c_path.as_ptr(), c_params) });
        if let Some(panic) = progress.panic {
            resume_unwind(panic);
        }
        match NonNull::new(handle) {
            Some(handle) => {
                Ok(Self(Arc::new(Inner { handle, content: params.content, path: Some(path.to_owned()) })))
            }
            None if progress.stopped => Err(Error::LoadCancelled { path: path.to_owned() }),
            None => Err(fail(reason)),
        }
    }

    /// Takes a model that was made without a file.
    #[cfg(feature = "testing")]
    pub(crate) fn from_handle(handle: NonNull<sys::llama_model>) -> Self {
        Self(Arc::new(Inner { handle, content: Content::Whole, path: None }))
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::llama_model {
        self.0.handle.as_ptr()
    }

    /// The file it was loaded from, if it was.
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// How much of it is loaded.
    pub fn content(&self) -> &Content {
        &self.0.content
    }

    /// Number of blocks.
    pub fn n_layer(&self) -> u32 {
        // SAFETY: reads a field of a live model (llama-model.cpp).
        positive(unsafe { sys::llama_model_n_layer(self.as_ptr()) })
    }

    /// Width of a hidden row.
    pub fn n_embd(&self) -> u32 {
        // SAFETY: as in `n_layer`.
        positive(unsafe { sys::llama_model_n_embd(self.as_ptr()) })
    }

    /// Width of an input row. It differs from [`n_embd`](Self::n_embd) only where images bring features for several layers.
    pub fn n_embd_input(&self) -> u32 {
        // SAFETY: as in `n_layer`.
        positive(unsafe { sys::llama_model_n_embd_inp(self.as_ptr()) })
    }

    /// Context length the model was trained for.
    pub fn n_ctx_train(&self) -> u32 {
        // SAFETY: as in `n_layer`.
        positive(unsafe { sys::llama_model_n_ctx_train(self.as_ptr()) })
    }

    /// Tokens that sliding-window layers look back on; 0 without such layers.
    pub fn sliding_window(&self) -> u32 {
        // SAFETY: as in `n_layer`.
        positive(unsafe { sys::llama_model_n_swa(self.as_ptr()) })
    }

    /// Whether a sequence's state cannot be cut back (recurrent or hybrid models).
    pub fn is_recurrent(&self) -> bool {
        // SAFETY: as in `n_layer`.
        unsafe { sys::llama_model_is_recurrent(self.as_ptr()) || sys::llama_model_is_hybrid(self.as_ptr()) }
    }

    /// Whether an encoder runs before the decoder.
    pub fn has_encoder(&self) -> bool {
        // SAFETY: as in `n_layer`.
        unsafe { sys::llama_model_has_encoder(self.as_ptr()) }
    }

    /// Positions a row has: 1, or 4 for models with M-RoPE.
    pub(crate) fn positions_per_row(&self) -> usize {
        // SAFETY: as in `n_layer`.
        match unsafe { sys::llama_model_rope_type(self.as_ptr()) } {
            // llama-hparams.cpp, `n_pos_per_embd`.
            sys::LLAMA_ROPE_TYPE_MROPE | sys::LLAMA_ROPE_TYPE_IMROPE => 4,
            _ => 1,
        }
    }

    /// Bytes of all weights.
    pub fn size(&self) -> u64 {
        // SAFETY: as in `n_layer`.
        unsafe { sys::llama_model_size(self.as_ptr()) }
    }

    /// The vocabulary.
    pub fn vocab(&self) -> Vocab {
        Vocab::of(self)
    }

    /// A value of the file's metadata as text; arrays in brackets.
    pub fn metadata(&self, key: &str) -> Option<String> {
        let key = CString::new(key).ok()?;
        // SAFETY: the key ends in NUL; snprintf fills the buffer, or counts without one (llama-model.cpp).
        read_text(|buffer, size| unsafe {
            sys::llama_model_meta_val_str(self.as_ptr(), key.as_ptr(), buffer, size)
        })
    }

    /// Architecture, size and type in one line, such as `llama 134.52M Q4_1`.
    pub fn description(&self) -> String {
        // SAFETY: as in `metadata`.
        read_text(|buffer, size| unsafe { sys::llama_model_desc(self.as_ptr(), buffer, size) })
            .unwrap_or_default()
    }
}

/// llama.cpp would put the blocks on the CPU, and say nothing.
fn check_gpu(gpu_layers: u32) -> Result<(), String> {
    if gpu_layers == 0 || devices().iter().any(is_gpu) {
        return Ok(());
    }
    Err(format!(
        "{gpu_layers} blocks are to go to a GPU, but this build finds none: is it built with the GPU's backend (cuda, \
         vulkan), and the driver installed?"
    ))
}

fn is_gpu(device: &Device) -> bool {
    matches!(device.kind, DeviceKind::Gpu | DeviceKind::IntegratedGpu)
}

/// The GPU of this name, which is no null pointer.
fn gpu(name: &str) -> Option<sys::ggml_backend_dev_t> {
    devices().iter().find(|device| device.name == name && is_gpu(device))?;
    let name = CString::new(name).ok()?;
    // SAFETY: reads the registry, which `devices` has filled; the name ends in NUL (ggml-backend-reg.cpp).
    let device = unsafe { sys::ggml_backend_dev_by_name(name.as_ptr()) };
    (!device.is_null()).then_some(device)
}

fn c_params(params: &ModelParams) -> sys::llama_model_params {
    // SAFETY: returns a struct by value (llama-model.cpp).
    let mut c_params = unsafe { sys::llama_model_default_params() };
    c_params.load_mode = match params.memory_map {
        MemoryMap::Mapped => sys::LLAMA_LOAD_MODE_MMAP,
        MemoryMap::Read => sys::LLAMA_LOAD_MODE_NONE,
    };
    c_params.use_extra_bufts = params.extra_buffers == ExtraBuffers::Repacked;
    c_params.vocab_only = params.content == Content::VocabularyOnly;
    c_params
}

/// Metadata that is read instead of the file's, so that llama.cpp makes tokens without text (llama-vocab.cpp, `load`, where
/// the tokenizer is "none"); ended by an entry without a key.
fn without_text(facts: &VocabularyFacts) -> Result<Vec<sys::llama_model_kv_override>, String> {
    let n_tokens = i64::from(facts.n_tokens);
    let mut tokenizer = metadata_entry("tokenizer.ggml.model", sys::LLAMA_KV_OVERRIDE_TYPE_STR)?;
    tokenizer.__bindgen_anon_1.val_str = characters("none")?;
    let key = format!("{}.vocab_size", facts.architecture);
    let mut size = metadata_entry(&key, sys::LLAMA_KV_OVERRIDE_TYPE_INT)?;
    size.__bindgen_anon_1.val_i64 = n_tokens;
    Ok(vec![tokenizer, size, metadata_entry("", sys::LLAMA_KV_OVERRIDE_TYPE_INT)?])
}

fn metadata_entry(
    key: &str,
    tag: sys::llama_model_kv_override_type,
) -> Result<sys::llama_model_kv_override, String> {
    let value = sys::llama_model_kv_override__bindgen_ty_1 { val_i64: 0 };
    Ok(sys::llama_model_kv_override { tag, key: characters(key)?, __bindgen_anon_1: value })
}

/// `text` as a C string in an array of llama.cpp's size.
fn characters(text: &str) -> Result<[c_char; 128], String> {
    let mut array = [0; 128];
    if text.len() >= array.len() {
        return Err(format!("{text:?} is longer than the {} bytes that llama.cpp takes", array.len() - 1));
    }
    for (character, byte) in array.iter_mut().zip(text.bytes()) {
        *character = c_char::from_ne_bytes([byte]);
    }
    Ok(array)
}

#[cfg(unix)]
pub(crate) fn c_path(path: &Path) -> Option<CString> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(path.as_os_str().as_bytes()).ok()
}

#[cfg(not(unix))]
pub(crate) fn c_path(path: &Path) -> Option<CString> {
    // llama-mmap.cpp and ggml.c convert from UTF-8 on Windows.
    CString::new(path.to_str()?).ok()
}

/// What `on_progress` works on.
struct Progress {
    callback: Option<LoadProgress>,
    stopped: bool,
    panic: Option<Box<dyn std::any::Any + Send>>,
}

unsafe extern "C" fn on_progress(fraction: f32, user_data: *mut c_void) -> bool {
    // SAFETY: `load` passes its `Progress`, which nothing else touches while llama.cpp loads, on the same thread
    // (llama-model-loader.cpp, `load_all_data`).
    let progress = unsafe { &mut *user_data.cast::<Progress>() };
    let Some(callback) = &mut progress.callback else { return true };
    match catch_unwind(AssertUnwindSafe(|| callback(fraction))) {
        Ok(ControlFlow::Continue(())) => return true,
        Ok(ControlFlow::Break(())) => progress.stopped = true,
        Err(panic) => progress.panic = Some(panic),
    }
    false
}

/// Calls a function of snprintf's kind twice: for the length, and for the text.
fn read_text(write: impl Fn(*mut c_char, usize) -> i32) -> Option<String> {
    let length = usize::try_from(write(std::ptr::null_mut(), 0)).ok()?;
    let mut buffer = vec![0_u8; length + 1];
    write(buffer.as_mut_ptr().cast::<c_char>(), buffer.len());
    buffer.truncate(length);
    Some(String::from_utf8_lossy(&buffer).into_owned())
}

/// llama.cpp counts with signed numbers that are never negative.
fn positive(number: i32) -> u32 {
    u32::try_from(number).unwrap_or(0)
}
