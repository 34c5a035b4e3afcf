//! Metadata of a random model as ggml keeps it.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::NonNull;

use llama_sys as sys;

use crate::Error;

/// A value of GGUF metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum MetadataValue {
    /// Unsigned number, as most keys are.
    U32(u32),
    /// Signed number.
    I32(i32),
    /// Float.
    F32(f32),
    /// Flag.
    Bool(bool),
    /// Text.
    String(String),
    /// Per layer.
    U32s(Vec<u32>),
    /// Per layer.
    I32s(Vec<i32>),
    /// Per layer or per dimension.
    F32s(Vec<f32>),
    /// Per layer.
    Bools(Vec<bool>),
    /// A vocabulary.
    Strings(Vec<String>),
}

macro_rules! from {
    ($($type:ty => $variant:ident),* $(,)?) => {
        $(impl From<$type> for MetadataValue {
            fn from(value: $type) -> Self {
                Self::$variant(value.into())
            }
        })*
    };
}

from! {
    u32 => U32, i32 => I32, f32 => F32, bool => Bool, &str => String, String => String, Vec<u32> => U32s,
    Vec<i32> => I32s, Vec<f32> => F32s, Vec<bool> => Bools, Vec<String> => Strings,
}

/// Owns a gguf_context.
pub(super) struct Metadata(NonNull<sys::gguf_context>);

impl Drop for Metadata {
    fn drop(&mut self) {
        // SAFETY: `self` is its only owner; models copy what they need (gguf.cpp, llama-model-loader.cpp).
        unsafe { sys::gguf_free(self.0.as_ptr()) };
    }
}

impl Metadata {
    pub(super) fn new(values: &BTreeMap<String, MetadataValue>) -> Result<Self, Error> {
        // SAFETY: takes nothing (gguf.cpp, `gguf_init_empty`).
        let context = unsafe { sys::gguf_init_empty() };
        let metadata = Self(NonNull::new(context).ok_or_else(|| build_error("out of memory"))?);
        values.iter().try_for_each(|(key, value)| metadata.set(key, value))?;
        Ok(metadata)
    }

    pub(super) fn as_ptr(&self) -> *mut sys::gguf_context {
        self.0.as_ptr()
    }

    fn set(&self, key: &str, value: &MetadataValue) -> Result<(), Error> {
        let c_key = c_string(key)?;
        let (context, key) = (self.as_ptr(), c_key.as_ptr());
        // SAFETY: the context lives, the key ends in NUL, and values are copied (gguf.cpp, `gguf_set_val_*`).
        unsafe {
            match value {
                MetadataValue::U32(value) => sys::gguf_set_val_u32(context, key, *value),
                MetadataValue::I32(value) => sys::gguf_set_val_i32(context, key, *value),
                MetadataValue::F32(value) => sys::gguf_set_val_f32(context, key, *value),
                MetadataValue::Bool(value) => sys::gguf_set_val_bool(context, key, *value),
                MetadataValue::String(value) => {
                    sys::gguf_set_val_str(context, key, c_string(value)?.as_ptr())
                }
                MetadataValue::U32s(values) => self.set_array(&c_key, sys::GGUF_TYPE_UINT32, values),
                MetadataValue::I32s(values) => self.set_array(&c_key, sys::GGUF_TYPE_INT32, values),
                MetadataValue::F32s(values) => self.set_array(&c_key, sys::GGUF_TYPE_FLOAT32, values),
                MetadataValue::Bools(values) => self.set_array(&c_key, sys::GGUF_TYPE_BOOL, values),
                MetadataValue::Strings(values) => self.set_strings(&c_key, values)?,
            }
        }
        Ok(())
    }

    /// # Safety
    ///
    /// `kind` must be the GGUF type of `T`.
    unsafe fn set_array<T>(&self, key: &CStr, kind: sys::gguf_type, values: &[T]) {
        let data = values.as_ptr().cast::<c_void>();
        // SAFETY: `values` holds that many numbers of `kind`, which are copied (gguf.cpp, `gguf_set_arr_data`).
        unsafe { sys::gguf_set_arr_data(self.as_ptr(), key.as_ptr(), kind, data, values.len()) };
    }

    fn set_strings(&self, key: &CStr, values: &[String]) -> Result<(), Error> {
        let values = values.iter().map(|value| c_string(value)).collect::<Result<Vec<_>, _>>()?;
        let mut pointers: Vec<*const c_char> = values.iter().map(|value| value.as_ptr()).collect();
        // SAFETY: each pointer is to a string that ends in NUL, and all are copied (gguf.cpp, `gguf_set_arr_str`).
        unsafe { sys::gguf_set_arr_str(self.as_ptr(), key.as_ptr(), pointers.as_mut_ptr(), pointers.len()) };
        Ok(())
    }

    /// Names a tensor's type, without data.
    pub(super) fn add_tensor(&self, name: &CStr, shape: [i64; 4], kind: sys::ggml_type) -> Result<(), Error> {
        // SAFETY: returns a number (ggml.c). Twice: for the tensor, and for the context's own bookkeeping.
        let mem_size = 2 * unsafe { sys::ggml_tensor_overhead() };
        let params = sys::ggml_init_params { mem_size, mem_buffer: std::ptr::null_mut(), no_alloc: true };
        // SAFETY: the context lives until it is freed below; `no_alloc` tensors have no data, and gguf.cpp's
        // `gguf_add_tensor` copies name, type and shape. Rows are whole blocks of `kind`, as `type_of` saw to.
        unsafe {
            let context = sys::ggml_init(params);
            if context.is_null() {
                return Err(build_error("out of memory"));
            }
            let tensor = sys::ggml_new_tensor(context, kind, 4, shape.as_ptr());
            sys::ggml_set_name(tensor, name.as_ptr());
            sys::gguf_add_tensor(self.as_ptr(), tensor);
            sys::ggml_free(context);
        }
        Ok(())
    }
}

fn c_string(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| build_error("a key or a text contains a NUL"))
}

fn build_error(reason: &str) -> Error {
    Error::Build { reason: reason.to_owned() }
}
