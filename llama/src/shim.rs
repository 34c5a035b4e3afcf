//! Calls into the C++ shim (llama-sys/shim): text in, text or an error out. Knows nothing of what is called.

use std::ffi::{CStr, c_char};

use llama_sys as sys;

/// A call of the shim that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ShimError {
    pub(crate) kind: ShimErrorKind,
    pub(crate) message: String,
}

/// Whose fault a failed call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShimErrorKind {
    /// llama.cpp refused the arguments.
    Refused,
    /// There was no memory left.
    OutOfMemory,
}

/// Longest message kept: llama.cpp's hold whole inputs.
const MAX_MESSAGE: usize = 400;

/// `text` for the shim, which reads it during the call only.
pub(crate) fn borrow(text: &str) -> sys::shoal_text {
    sys::shoal_text { data: text.as_ptr().cast::<c_char>(), size: text.len() }
}

/// Runs `body` with room for a message, and makes a `Result` of its status.
pub(crate) fn call(body: impl FnOnce(&mut sys::shoal_error) -> sys::shoal_status) -> Result<(), ShimError> {
    let mut error = sys::shoal_error { message: [0; 1024] };
    let kind = match body(&mut error) {
        sys::SHOAL_OK => return Ok(()),
        sys::SHOAL_OUT_OF_MEMORY => ShimErrorKind::OutOfMemory,
        _ => ShimErrorKind::Refused,
    };
    // SAFETY: shim/guard.hpp's `fail` writes with snprintf, which always terminates, and the array starts as NULs.
    let message = unsafe { CStr::from_ptr(error.message.as_ptr()) }.to_string_lossy();
    Err(ShimError { kind, message: shorten(message.trim()) })
}

fn shorten(message: &str) -> String {
    match message.char_indices().nth(MAX_MESSAGE) {
        Some((end, _)) => format!("{}…", &message[..end]),
        None => message.to_owned(),
    }
}

/// Runs `body`, which fills a string, and takes that string.
pub(crate) fn call_for_text(
    body: impl FnOnce(&mut sys::shoal_string, &mut sys::shoal_error) -> sys::shoal_status,
) -> Result<String, ShimError> {
    let mut out = sys::shoal_string { data: std::ptr::null_mut(), size: 0 };
    call(|error| body(&mut out, error))?;
    // SAFETY: on SHOAL_OK the shim has set `data` to `size` bytes of its own (shim/guard.hpp, `to_string`).
    let bytes = unsafe { std::slice::from_raw_parts(out.data.cast::<u8>(), out.size) };
    let text = String::from_utf8_lossy(bytes).into_owned();
    // SAFETY: `out` came from the shim and is not used again (shim/core.cpp).
    unsafe { sys::shoal_string_free(&raw mut out) };
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_cut_between_characters() {
        assert_eq!(shorten("short"), "short");
        let cut = shorten(&"ü".repeat(1000));
        assert_eq!(cut.chars().count(), MAX_MESSAGE + 1);
    }
}
