//! Process-wide setting up of llama.cpp: its backends, its version, its log.
//!
//! llama.cpp logs through one C callback for the whole process, in pieces of lines, and says why a call failed only
//! there. Lines become `tracing` events with target `llama.cpp`; while [`with_errors`] runs, the error lines of this
//! thread are also kept, so that they can be put into an [`Error`](crate::Error).

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Once, OnceLock};

use llama_sys as sys;

/// Sends llama.cpp's log to `tracing` and starts its backends. Any number of calls is as good as one; loading a model
/// does it too, so a call is needed only before listing devices.
///
/// llama.cpp's info lines are Shoal's debug lines, since it describes every model it loads in some hundred of them.
pub fn init_logging() {
    static INIT: Once = Once::new();
    INIT.call_once(|| {
        // SAFETY: `on_log` is a function that never unwinds and has no user data (llama-impl.cpp, `llama_log_set`).
        unsafe { sys::llama_log_set(Some(on_log), std::ptr::null_mut()) };
        // SAFETY: called once, before every other use of llama.cpp in this crate (llama.cpp, `llama_backend_init`).
        unsafe { sys::llama_backend_init() };
    });
}

/// Version of llama.cpp and of the package that carries it, such as `0.6.0-dev (llama-cpp-sys-2 0.1.161)`.
///
/// Formats that are llama.cpp's own (KV state) are only exchanged between equal versions.
pub fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        // SAFETY: returns a string literal (llama.cpp, `llama_version`).
        let version = unsafe { CStr::from_ptr(sys::llama_version()) };
        format!("{} (llama-cpp-sys-2 {})", version.to_string_lossy(), sys::PACKAGE_VERSION)
    })
}

/// Kept error lines: more only repeat themselves.
const MAX_ERRORS: usize = 8;

#[derive(Default)]
struct ThreadLog {
    /// The line that has not ended yet, and its level.
    line: String,
    level: sys::ggml_log_level,
    /// Error lines since `with_errors` began.
    errors: Option<Vec<String>>,
}

thread_local! {
    static LOG: RefCell<ThreadLog> = RefCell::default();
}

/// Runs `body` and returns what it returned with the errors that llama.cpp logged on this thread meanwhile.
pub(crate) fn with_errors<T>(body: impl FnOnce() -> T) -> (T, String) {
    LOG.with_borrow_mut(|log| log.errors = Some(Vec::new()));
    let result = body();
    let errors = LOG.with_borrow_mut(|log| log.errors.take()).unwrap_or_default();
    if errors.is_empty() {
        (result, "llama.cpp gave no reason".to_owned())
    } else {
        (result, errors.join("; "))
    }
}

unsafe extern "C" fn on_log(level: sys::ggml_log_level, text: *const c_char, _user_data: *mut c_void) {
    // SAFETY: llama-impl.cpp (`llama_log_internal_v`) passes a NUL-terminated buffer that lives during the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    // A thread that is ending has no thread-local storage any more: its last words are dropped.
    let lines = LOG.try_with(|log| log.try_borrow_mut().map(|mut log| log.add(level, &text)));
    if let Ok(Ok(lines)) = lines {
        lines.iter().for_each(|(level, line)| emit(*level, line));
    }
}

impl ThreadLog {
    /// Adds a piece of log and returns the lines it completes.
    fn add(&mut self, level: sys::ggml_log_level, text: &str) -> Vec<(sys::ggml_log_level, String)> {
        let mut lines = Vec::new();
        // A piece that is not a continuation begins a line, even if the one before was never ended.
        if level != sys::GGML_LOG_LEVEL_CONT {
            self.finish_line(&mut lines);
            self.level = level;
        }
        for piece in text.split_inclusive('\n') {
            self.line.push_str(piece);
            if piece.ends_with('\n') {
                self.finish_line(&mut lines);
            }
        }
        lines
    }

    fn finish_line(&mut self, lines: &mut Vec<(sys::ggml_log_level, String)>) {
        let line = std::mem::take(&mut self.line);
        let line = line.trim();
        if line.is_empty() {
            return;
        }
        if self.level == sys::GGML_LOG_LEVEL_ERROR
            && let Some(errors) = &mut self.errors
            && errors.len() < MAX_ERRORS
        {
            errors.push(line.to_owned());
        }
        lines.push((self.level, line.to_owned()));
    }
}

fn emit(level: sys::ggml_log_level, line: &str) {
    match level {
        sys::GGML_LOG_LEVEL_ERROR => tracing::error!(target: "llama.cpp", "{line}"),
        sys::GGML_LOG_LEVEL_WARN => tracing::warn!(target: "llama.cpp", "{line}"),
        sys::GGML_LOG_LEVEL_INFO => tracing::debug!(target: "llama.cpp", "{line}"),
        _ => tracing::trace!(target: "llama.cpp", "{line}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_line_become_one_line() {
        let mut log = ThreadLog::default();
        assert!(log.add(sys::GGML_LOG_LEVEL_INFO, "loading ").is_empty());
        assert!(log.add(sys::GGML_LOG_LEVEL_CONT, "..").is_empty());
        let lines = log.add(sys::GGML_LOG_LEVEL_CONT, ".\nnext");
        assert_eq!(lines, [(sys::GGML_LOG_LEVEL_INFO, "loading ...".to_owned())]);
        let lines = log.add(sys::GGML_LOG_LEVEL_WARN, "careful\n");
        let expected =
            [(sys::GGML_LOG_LEVEL_INFO, "next".to_owned()), (sys::GGML_LOG_LEVEL_WARN, "careful".to_owned())];
        assert_eq!(lines, expected);
    }

    #[test]
    fn errors_are_kept_only_while_asked_for() {
        let log = |text: &str| LOG.with_borrow_mut(|log| log.add(sys::GGML_LOG_LEVEL_ERROR, text));
        log("before\n");
        let ((), reason) = with_errors(|| {
            log("first\n");
            log("second\n");
        });
        assert_eq!(reason, "first; second");
        let ((), reason) = with_errors(|| ());
        assert_eq!(reason, "llama.cpp gave no reason");
    }

    #[test]
    fn the_version_names_llama_cpp_and_its_package() {
        assert!(version().contains("llama-cpp-sys-2 0.1."), "{}", version());
    }
}
