//! What NVML, the library behind `nvidia-smi`, knows of GPUs without taking memory of any.
//!
//! It comes with NVIDIA's driver and is loaded when asked for. Nothing depends on it: where it is missing,
//! [`Nvml::load`] says why, and a question that it has no answer to is answered with `None`. No error is
//! remembered: the next question, and the next load, is judged on its own.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml as Library};
use serde::Serialize;

/// By which name a driver installs it, and by which its development files do.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// What stands before the number of a device in its UUID.
const PREFIXES: [&str; 2] = ["GPU-", "MIG-"];

/// The one of this process, once it is there.
static LOADED: Mutex<Option<Nvml>> = Mutex::new(None);

/// The loaded library. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Nvml(Arc<Library>);

/// Memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GpuMemory {
    /// All of it, that of the driver's own included.
    pub total_bytes: u64,
    /// Of which nobody uses.
    pub free_bytes: u64,
    /// Of which processes use.
    pub used_bytes: u64,
}

impl Nvml {
    /// The system's library, loaded once in a process.
    ///
    /// # Errors
    /// Why there is none, for people, with the name of the file.
    pub fn load() -> Result<Self, String> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nvml) = &*loaded {
            return Ok(nvml.clone());
        }
        let mut refused = None;
        for name in NAMES {
            match Self::open(name.as_ref()) {
                Ok(nvml) => return Ok(loaded.insert(nvml).clone()),
                // What the first name lacks is what people should hear of.
                Err(reason) => refused = refused.or(Some(reason)),
            }
        }
        Err(refused.unwrap_or_default())
    }

    /// The library in this file, for tests.
    ///
    /// # Errors
    /// As for [`Nvml::load`].
    pub fn load_from(path: &Path) -> Result<Self, String> {
        Self::open(path.as_os_str())
    }

    fn open(name: &OsStr) -> Result<Self, String> {
        let library = Library::builder().lib_path(name).init();
        library.map(|library| Self(Arc::new(library))).map_err(|error| match error {
            // The system's own words, which begin with the name.
            NvmlError::LibloadingError(error) => format!("cannot load {error}"),
            error => format!("cannot use {}: {error}", Path::new(name).display()),
        })
    }

    /// Version of the driver, as in `580.159.04`.
    #[must_use]
    pub fn driver_version(&self) -> Option<String> {
        self.0.sys_driver_version().ok().filter(|version| !version.is_empty())
    }

    /// Memory of the GPU with this UUID, which has no prefix.
    #[must_use]
    pub fn memory(&self, uuid: &str) -> Option<GpuMemory> {
        let memory = self.device(uuid)?.memory_info().ok()?;
        Some(GpuMemory { total_bytes: memory.total, free_bytes: memory.free, used_bytes: memory.used })
    }

    /// What process `pid` uses of the GPU with this UUID. `None` also when the process is not listed, as in a
    /// container with process numbers of its own, and where the driver keeps no such figure.
    #[must_use]
    pub fn process_used_bytes(&self, uuid: &str, pid: u32) -> Option<u64> {
        let processes = self.device(uuid)?.running_compute_processes().ok()?;
        used_bytes(
            processes.iter().filter(|process| process.pid == pid).map(|process| &process.used_gpu_memory),
        )
    }

    fn device(&self, uuid: &str) -> Option<Device<'_>> {
        PREFIXES.iter().find_map(|prefix| self.0.device_by_uuid(format!("{prefix}{uuid}")).ok())
    }
}

/// What the entries of one process come to; each part of a divided GPU has an entry of its own.
fn used_bytes<'a>(entries: impl Iterator<Item = &'a UsedGpuMemory>) -> Option<u64> {
    let known = entries.filter_map(|used| match used {
        UsedGpuMemory::Used(bytes) if *bytes < u64::MAX => Some(*bytes),
        _ => None,
    });
    known.reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_is_named() {
        for name in ["/nowhere/libnvidia-ml.so.1", "/dev/null"] {
            for _ in 0..2 {
                let reason = Nvml::load_from(Path::new(name)).unwrap_err();
                assert!(reason.contains(name) && !reason.contains('\n'), "{reason}");
            }
        }
    }

    #[test]
    fn loading_says_what_is_missing_or_answers() {
        match Nvml::load() {
            Err(reason) => assert!(reason.contains("libnvidia-ml.so.1"), "{reason}"),
            Ok(nvml) => {
                assert!(nvml.memory("no such device").is_none());
                assert!(nvml.memory("\0").is_none());
                assert!(nvml.process_used_bytes("", std::process::id()).is_none());
            }
        }
    }

    #[test]
    fn figures_that_the_driver_does_not_keep_are_none() {
        use UsedGpuMemory::{Unavailable, Used};
        for (entries, expected) in [
            (&[][..], None),
            (&[Unavailable], None),
            (&[Used(u64::MAX)], None),
            (&[Used(5 << 20)], Some(5 << 20)),
            (&[Used(0)], Some(0)),
            (&[Used(1), Unavailable, Used(2)], Some(3)),
            (&[Used(u64::MAX - 1), Used(u64::MAX - 1)], Some(u64::MAX)),
        ] {
            assert_eq!(used_bytes(entries.iter()), expected, "{entries:?}");
        }
    }
}
