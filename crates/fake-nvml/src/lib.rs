//! A library with the symbols of NVIDIA's `libnvidia-ml.so.1`, which reports configured devices.
//!
//! It tests code that reads NVML without a GPU: slices of a card, instances whose memory may not be queried,
//! and false figures. It is independent of the fake libcuda. For the same device in both, use the UUID of
//! `poorwill_fake_libcuda::uuid_text`.
//!
//! # Settings
//!
//! `POORWILL_FAKE_NVML_DEVICES` holds a `UUID:KEY=VALUE:KEY=VALUE…` per device, separated by commas; without
//! it there are none. A UUID begins with `GPU-` (a card) or `MIG-` (an instance, which has no index of its
//! own). `nvmlInit` reads it unless the library is already initialized. A malformed setting fails it with
//! `NVML_ERROR_INVALID_ARGUMENT`, and the reason goes to stderr.
//!
//! | key | value | default |
//! |---|---|---|
//! | `total` | size: all memory | memory is `NVML_ERROR_NOT_SUPPORTED` |
//! | `used` | size: memory in use | 0 |
//! | `free` | size: free memory | `total` less `used`, wrapping at 64 bits |
//! | `memory_error` | number: the result of memory queries | success |
//! | `process` | `PID/SIZE` or `self/SIZE`, repeatable: a process and its memory | no processes |
//! | `parent` | UUID: the card of an instance | unknown |
//! | `mig_mode` | `0` or `1`: whether the card is divided | 1 for a `parent`; for others `NVML_ERROR_NOT_SUPPORTED` |
//! | `link_gen`, `link_gen_max`, `link_width`, `link_width_max` | number: the PCIe link, current and maximum | `NVML_ERROR_NOT_SUPPORTED` |
//! | `capability` | `MAJOR.MINOR`: compute capability | 8.0 |
//! | `name` | text | `Poorwill fake GPU N`, `Poorwill fake MIG instance` |
//!
//! Processes over the fake libcuda that are registered in `POORWILL_FAKE_CUDA_PROCESSES` come on top, with what they hold
//! now, in lists and in `used`.
//!
//! Cards are numbered in order, and card N is on bus N + 1, as with the fake libcuda. An unknown UUID is
//! `NVML_ERROR_NOT_FOUND`.
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
mod abi;
#[cfg(target_os = "linux")]
mod calls;
#[cfg(target_os = "linux")]
mod config;
#[cfg(target_os = "linux")]
mod device;
// The file and not the crate, whose symbols would end up in this library, too.
#[path = "../../fake-libcuda/src/locate.rs"]
mod locate;
#[cfg(target_os = "linux")]
mod processes;
#[cfg(target_os = "linux")]
mod state;

/// Path of the shared library: the value of `POORWILL_FAKE_NVML` (any library with NVML's symbols), otherwise
/// the one that cargo built with the running program.
///
/// # Panics
/// If there is none; the message lists the tried paths.
#[must_use]
pub fn path() -> std::path::PathBuf {
    locate::find("POORWILL_FAKE_NVML", "libpoorwill_fake_nvml.so")
}
