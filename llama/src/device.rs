//! The devices that ggml's backends offer, and their memory. Knows nothing of models.

use std::ffi::{CStr, c_char};

use llama_sys as sys;

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// The host's processors and memory.
    Cpu,
    /// A GPU with its own memory.
    Gpu,
    /// A GPU that shares the host's memory.
    IntegratedGpu,
    /// A library that helps the CPU (BLAS), and whatever else ggml may have.
    Other,
}

/// A device as ggml describes it now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// ggml's name, such as `CUDA0`; buffer types of [`MemoryBreakdown`](crate::MemoryBreakdown) refer to it.
    pub name: String,
    /// The product's name.
    pub description: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Bytes free now. An estimate: other processes take and give.
    pub memory_free: u64,
    /// Bytes in all.
    pub memory_total: u64,
}

/// All devices of the backends that were compiled in, in ggml's order (GPUs before the CPU).
pub fn devices() -> Vec<Device> {
    crate::init_logging();
    // SAFETY: reads the registry, which `init_logging` has filled (ggml-backend-reg.cpp).
    let count = unsafe { sys::ggml_backend_dev_count() };
    (0..count).map(describe).collect()
}

fn describe(index: usize) -> Device {
    // SAFETY: `index` is below `ggml_backend_dev_count`, and devices live as long as the process
    // (ggml-backend-reg.cpp). The struct is plain data, for which zeros are a value.
    let props = unsafe {
        let mut props: sys::ggml_backend_dev_props = std::mem::zeroed();
        sys::ggml_backend_dev_get_props(sys::ggml_backend_dev_get(index), &raw mut props);
        props
    };
    Device {
        name: text(props.name),
        description: text(props.description),
        kind: match props.type_ {
            sys::GGML_BACKEND_DEVICE_TYPE_CPU => DeviceKind::Cpu,
            sys::GGML_BACKEND_DEVICE_TYPE_GPU => DeviceKind::Gpu,
            sys::GGML_BACKEND_DEVICE_TYPE_IGPU => DeviceKind::IntegratedGpu,
            _ => DeviceKind::Other,
        },
        memory_free: props.memory_free as u64,
        memory_total: props.memory_total as u64,
    }
}

fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: names and descriptions are NUL-terminated and owned by the device (ggml-backend.h, `dev_props`).
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_a_device_with_memory() {
        let cpu = devices().into_iter().find(|device| device.kind == DeviceKind::Cpu).unwrap();
        assert_eq!(cpu.name, "CPU");
        assert!(cpu.memory_total > 0 && cpu.memory_free <= cpu.memory_total);
    }
}
