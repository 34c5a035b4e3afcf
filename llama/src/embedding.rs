//! The token embedding of a model, looked up by the first stage: the input rows of the first slice.
//!
//! An embedding file is a GGUF of architecture `shoal-embedding` that holds `token_embd.weight` as it is in the model,
//! and the factor that the architecture multiplies rows with. Rows are read when they are used and kept by nobody but the system's
//! page cache: mapped, they would pile up in the process, sixteen pages around each. A row is what llama.cpp's graph would
//! compute: ggml's own dequantisation, then one multiplication, so it is equal to the bit.

use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use llama_sys as sys;

use crate::{Error, Token};

/// `general.architecture` of an embedding file.
pub const EMBEDDING_ARCHITECTURE: &str = "shoal-embedding";
/// Key of the factor rows are multiplied with, f32.
pub const EMBEDDING_SCALE_KEY: &str = "shoal.embedding.scale";
const TENSOR: &str = "token_embd.weight";

/// An open embedding file.
#[derive(Debug)]
pub struct EmbeddingTable {
    path: PathBuf,
    file: File,
    /// Where the matrix begins in the file.
    start: u64,
    /// A row as it is in the file; kept for its memory.
    bytes: Vec<u8>,
    n_embd: usize,
    n_tokens: u32,
    scale: f32,
    /// ggml's dequantisation; `None` for f32, which is copied.
    to_float: Option<ToFloat>,
}

type ToFloat = unsafe extern "C" fn(*const c_void, *mut f32, i64);

/// What the header of an embedding file says.
struct Layout {
    start: u64,
    bytes_per_row: usize,
    n_embd: usize,
    n_tokens: u32,
    scale: f32,
    to_float: Option<ToFloat>,
}

impl EmbeddingTable {
    /// Opens `path` and reads its header.
    pub fn open(path: &Path) -> Result<Self, Error> {
        crate::init_logging();
        let fail = |reason: String| Error::Embedding { path: path.to_owned(), reason };
        let file = File::open(path).map_err(|error| fail(error.to_string()))?;
        let length = file.metadata().map_err(|error| fail(error.to_string()))?.len();
        let layout = Header::read(path)?.layout().map_err(fail)?;
        let size = layout.bytes_per_row as u64 * u64::from(layout.n_tokens);
        if layout.start.checked_add(size).is_none_or(|end| end > length) {
            let start = layout.start;
            return Err(fail(format!(
                "{TENSOR} has {size} bytes from {start}, but the file ends at {length}"
            )));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            start: layout.start,
            bytes: vec![0; layout.bytes_per_row],
            n_embd: layout.n_embd,
            n_tokens: layout.n_tokens,
            scale: layout.scale,
            to_float: layout.to_float,
        })
    }

    /// Numbers of a row.
    pub fn n_embd(&self) -> u32 {
        u32::try_from(self.n_embd).unwrap_or(u32::MAX)
    }

    /// Number of rows.
    pub fn n_tokens(&self) -> u32 {
        self.n_tokens
    }

    /// Puts the rows of `tokens` into `rows`, `[tokens, n_embd]`, in place of what it held. On an error `rows` is empty.
    pub fn lookup(&mut self, tokens: &[Token], rows: &mut Vec<f32>) -> Result<(), Error> {
        rows.clear();
        let exists = |token: &Token| u32::try_from(token.0).is_ok_and(|id| id < self.n_tokens);
        if let Some(missing) = tokens.iter().find(|token| !exists(token)) {
            return Err(Error::Token { token: missing.0, n_tokens: self.n_tokens });
        }
        rows.resize(tokens.len() * self.n_embd, 0.0);
        for (token, row) in tokens.iter().zip(rows.chunks_exact_mut(self.n_embd)) {
            if let Err(error) = self.read_row(token.0 as u64, row) {
                rows.clear();
                let reason = format!("reading the row of token {}: {error}", token.0);
                return Err(Error::Embedding { path: self.path.clone(), reason });
            }
        }
        Ok(())
    }

    fn read_row(&mut self, index: u64, row: &mut [f32]) -> io::Result<()> {
        let Self { file, start, bytes, .. } = self;
        // Inside the file: `open` has seen that the whole matrix is.
        file.seek(SeekFrom::Start(*start + index * bytes.len() as u64))?;
        file.read_exact(bytes)?;
        match self.to_float {
            // SAFETY: `bytes` holds one row of the type whose function this is, `row` has a row's length
            // (ggml.c, `ggml_get_type_traits`); ggml-cpu/ops.cpp reads rows at such offsets with the same function.
            Some(to_float) => unsafe {
                to_float(bytes.as_ptr().cast::<c_void>(), row.as_mut_ptr(), row.len() as i64)
            },
            None => row.iter_mut().zip(bytes.chunks_exact(4)).for_each(|(number, bytes)| {
                *number = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }),
        }
        // ggml-cpu/ops.cpp, `ggml_compute_forward_scale_f32`.
        if self.scale != 1.0 {
            row.iter_mut().for_each(|number| *number *= self.scale);
        }
        Ok(())
    }
}

/// The metadata of a GGUF file, read by ggml, which checks what it reads (gguf.cpp).
struct Header(NonNull<sys::gguf_context>);

impl Drop for Header {
    fn drop(&mut self) {
        // SAFETY: `self` is its only owner (gguf.cpp).
        unsafe { sys::gguf_free(self.0.as_ptr()) };
    }
}

impl Header {
    fn read(path: &Path) -> Result<Self, Error> {
        let fail = |reason: String| Error::Embedding { path: PathBuf::from(path), reason };
        let c_path =
            crate::model::c_path(path).ok_or_else(|| fail("ggml cannot open a path like that".to_owned()))?;
        let params = sys::gguf_init_params { no_alloc: true, ctx: std::ptr::null_mut() };
        let (header, reason) =
            // SAFETY: the path ends in NUL; without `ctx` only metadata is read (gguf.cpp, `gguf_init_from_file`).
            crate::backend::with_errors(|| unsafe { sys::gguf_init_from_file(c_path.as_ptr(), params) });
        NonNull::new(header).map(Self).ok_or_else(|| fail(format!("it is no GGUF file: {reason}")))
    }

    fn layout(&self) -> Result<Layout, String> {
        let architecture = self.string("general.architecture");
        if architecture.as_deref() != Some(EMBEDDING_ARCHITECTURE) {
            return Err(format!("its architecture is {architecture:?}, not {EMBEDDING_ARCHITECTURE:?}"));
        }
        let scale =
            self.float(EMBEDDING_SCALE_KEY).ok_or_else(|| format!("{EMBEDDING_SCALE_KEY} is missing"))?;
        let tensor = self.find_tensor().ok_or_else(|| format!("{TENSOR} is missing"))?;
        // SAFETY: the tensor exists; these read its entry (gguf.cpp), and `ne` has GGML_MAX_DIMS entries.
        let (kind, offset, [n_embd, n_tokens, planes, blocks]) = unsafe {
            let header = self.0.as_ptr();
            let shape = sys::gguf_get_tensor_ne(header, tensor).cast::<[i64; 4]>();
            let start = sys::gguf_get_data_offset(header) + sys::gguf_get_tensor_offset(header, tensor);
            (sys::gguf_get_tensor_type(header, tensor), start as u64, *shape)
        };
        let shape = || {
            format!("{TENSOR} has the shape [{n_embd}, {n_tokens}, {planes}, {blocks}], not that of a matrix")
        };
        if planes != 1 || blocks != 1 || n_embd < 1 || n_tokens < 1 {
            return Err(shape());
        }
        // SAFETY: gguf.cpp has checked that the type exists and that rows are whole blocks of it.
        let (bytes_per_row, traits) =
            unsafe { (sys::ggml_row_size(kind, n_embd), &*sys::ggml_get_type_traits(kind)) };
        if traits.to_float.is_none() && kind != sys::GGML_TYPE_F32 {
            return Err(format!("{TENSOR} has ggml's type {kind}, which cannot be dequantised"));
        }
        Ok(Layout {
            start: offset,
            bytes_per_row,
            n_embd: usize::try_from(n_embd).map_err(|_| shape())?,
            n_tokens: u32::try_from(n_tokens).map_err(|_| shape())?,
            scale,
            to_float: traits.to_float.filter(|_| kind != sys::GGML_TYPE_F32),
        })
    }

    fn find_tensor(&self) -> Option<i64> {
        let name = CString::new(TENSOR).ok()?;
        // SAFETY: the name ends in NUL; -1 is "none" (gguf.cpp).
        let index = unsafe { sys::gguf_find_tensor(self.0.as_ptr(), name.as_ptr()) };
        (index >= 0).then_some(index)
    }

    /// Index of `key`, if its value has the type `kind`: ggml asserts on the others.
    fn find(&self, key: &str, kind: sys::gguf_type) -> Option<i64> {
        let key = CString::new(key).ok()?;
        // SAFETY: the key ends in NUL; -1 is "none"; the index is valid for the second call (gguf.cpp).
        unsafe {
            let index = sys::gguf_find_key(self.0.as_ptr(), key.as_ptr());
            (index >= 0 && sys::gguf_get_kv_type(self.0.as_ptr(), index) == kind).then_some(index)
        }
    }

    fn string(&self, key: &str) -> Option<String> {
        let index = self.find(key, sys::GGUF_TYPE_STRING)?;
        // SAFETY: the index exists and is a string, which lives as long as the header (gguf.cpp).
        let text = unsafe { std::ffi::CStr::from_ptr(sys::gguf_get_val_str(self.0.as_ptr(), index)) };
        Some(text.to_string_lossy().into_owned())
    }

    fn float(&self, key: &str) -> Option<f32> {
        let index = self.find(key, sys::GGUF_TYPE_FLOAT32)?;
        // SAFETY: the index exists and is a float (gguf.cpp).
        Some(unsafe { sys::gguf_get_val_f32(self.0.as_ptr(), index) })
    }
}
