//! A library with the symbols of NVIDIA's `libnvidia-ml.so.1`, which says of devices what it is told to.
//!
//! What reads figures from NVML is tested with it where no GPU is: with a slice of a card, with an instance
//! whose memory nobody may ask for, with figures that cannot be true. It knows nothing of the fake libcuda;
//! whoever wants both to speak of the same device gives it the UUID that
//! `poorwill_fake_libcuda::uuid_text` tells.
//!
//! # Settings
//!
//! `POORWILL_FAKE_NVML_DEVICES` holds a `UUID:KEY=VALUE:KEY=VALUE…` per device, separated by commas. A UUID
//! begins with `GPU-` (a card) or `MIG-` (an instance, which has no number of its own). Without the variable there
//! are no devices. It is read by each `nvmlInit` that nobody was before, or that all before have shut down; with a
//! malformed one this gives `NVML_ERROR_INVALID_ARGUMENT` and says on stderr what is wrong.
//!
//! | key | value | otherwise |
//! |---|---|---|
//! | `total` | size: all memory | memory is `NVML_ERROR_NOT_SUPPORTED` |
//! | `used` | size: memory in use | 0 |
//! | `free` | size: free memory | `total` less `used`, around the end of 64 bits where that is less than nothing |
//! | `memory_error` | number: what questions for memory give | they succeed |
//! | `process` | `PID/SIZE` or `self/SIZE`, any number of times: a process and what it uses | no processes |
//! | `parent` | UUID: the card of an instance | an unknown one |
//! | `mig_mode` | `0` or `1`: whether the card is divided | 1 for a card that is a `parent`; for others `NVML_ERROR_NOT_SUPPORTED` |
//! | `link_gen`, `link_gen_max`, `link_width`, `link_width_max` | number: of the PCIe link, now and at most | `NVML_ERROR_NOT_SUPPORTED` |
//! | `capability` | `MAJOR.MINOR`: compute capability | 8.0 |
//! | `name` | text | `Poorwill fake GPU N`, `Poorwill fake MIG instance` |
//!
//! Cards are numbered in their order, and number N has bus N + 1, as with the fake libcuda. A UUID that is not
//! there is `NVML_ERROR_NOT_FOUND`.
//!
//! # Symbols
//!
//! - `nvmlInit_v2`, `nvmlInitWithFlags`, `nvmlShutdown`, `nvmlErrorString`, `nvmlSystemGetDriverVersion`
//! - `nvmlDeviceGetCount_v2`, `nvmlDeviceGetHandleByIndex_v2`, `nvmlDeviceGetHandleByUUID`,
//!   `nvmlDeviceGetHandleByPciBusId_v2`
//! - `nvmlDeviceGetUUID`, `nvmlDeviceGetName`, `nvmlDeviceGetCudaComputeCapability`
//! - `nvmlDeviceGetMemoryInfo`, `nvmlDeviceGetMemoryInfo_v2`, `nvmlDeviceGetComputeRunningProcesses_v3`
//! - `nvmlDeviceGetMigMode`, `nvmlDeviceGetMaxMigDeviceCount`, `nvmlDeviceGetMigDeviceHandleByIndex`,
//!   `nvmlDeviceIsMigDeviceHandle`, `nvmlDeviceGetDeviceHandleFromMigDeviceHandle`
//! - `nvmlDeviceGet{Curr,Max}PcieLink{Generation,Width}`
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
mod abi;
#[cfg(target_os = "linux")]
mod calls;
#[cfg(target_os = "linux")]
mod config;
#[cfg(target_os = "linux")]
mod device;
// The file and not the crate, whose symbols would be in this library, too.
#[path = "../../fake-libcuda/src/place.rs"]
mod place;
#[cfg(target_os = "linux")]
mod world;

/// The shared library: what the environment variable `POORWILL_FAKE_NVML` names (any library with the symbols
/// of NVML), otherwise the one that cargo built with the running program.
///
/// # Panics
/// When it is not there; the message says where it was looked for.
#[must_use]
pub fn path() -> std::path::PathBuf {
    place::find("POORWILL_FAKE_NVML", "libpoorwill_fake_nvml.so")
}
