//! Reads GPU state without a CUDA context, from NVML, the library behind `nvidia-smi`.
//!
//! The library comes with NVIDIA's driver and is loaded on demand. Without it, [`Nvml::load`] returns why.
//! Queries without an answer return `None`. Errors are not remembered. Figures are NVML's own, even odd ones:
//! free memory may exceed the total.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

use self::ffi::{GpuHandle, NvmlCode, NvmlError, NvmlLibrary};
use crate::system::PciLink;

mod ffi;

/// As the driver installs it, and as its development files do.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

const PREFIXES: [(&str, Handle); 2] = [("GPU-", Handle::Gpu), ("MIG-", Handle::MigInstance)];

static LOADED: Mutex<Option<Nvml>> = Mutex::new(None);

/// The loaded library. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Nvml(Arc<NvmlLibrary>);

/// Memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GpuMemory {
    /// All memory, including the driver's own.
    pub total_bytes: u64,
    /// Memory that is free.
    pub free_bytes: u64,
    /// Memory in use.
    pub used_bytes: u64,
}

/// A process that computes on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuProcess {
    /// By the driver's numbers: a container may have another one.
    pub pid: u32,
    /// Memory that it uses there. `None` where the driver keeps no figure.
    pub used_bytes: Option<u64>,
}

/// What a UUID names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Handle {
    /// A whole GPU.
    Gpu,
    /// A MIG instance.
    MigInstance,
}

/// What NVML reports for a UUID.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NvmlMemory {
    /// What the figures describe.
    pub handle: Handle,
    /// Whether the GPU is in MIG mode. `None` where NVML does not report it, and for an instance.
    pub mig_mode: Option<bool>,
    /// The figures. The error, for people, is NVML's: no permission, or no such figure.
    pub memory: Result<GpuMemory, String>,
    /// Whether the GPU has no such figures: as where it shares the computer's memory.
    pub has_no_figures: bool,
}

impl NvmlMemory {
    /// Whether the figures describe a whole GPU in MIG mode, not the process's instance there.
    #[must_use]
    pub fn is_mig_parent(&self) -> bool {
        self.handle == Handle::Gpu && self.mig_mode == Some(true)
    }
}

impl Nvml {
    /// The system's library, loaded once in a process.
    ///
    /// # Errors
    /// Why it cannot be used, for people, with the file's name.
    pub fn load() -> Result<Self, String> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nvml) = &*loaded {
            return Ok(nvml.clone());
        }
        let mut refused = None;
        for name in NAMES {
            match Self::open(name.as_ref()) {
                Ok(nvml) => return Ok(loaded.insert(nvml).clone()),
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
        NvmlLibrary::open(name).map(|library| Self(Arc::new(library))).map_err(|error| match error {
            // The system's text already begins with the name.
            NvmlError::Load(error) => format!("cannot load {error}"),
            error => format!("cannot use {}: {error}", Path::new(name).display()),
        })
    }

    /// The driver's version, as in `580.159.04`.
    #[must_use]
    pub fn driver_version(&self) -> Option<String> {
        self.0.driver_version().ok().filter(|version| !version.is_empty())
    }

    /// The number of GPUs. Indices are counted from 0.
    ///
    /// # Errors
    /// Why NVML does not count them, for people.
    pub fn count(&self) -> Result<u32, String> {
        self.0.count().map_err(|error| error.to_string())
    }

    /// UUID of the GPU with this index, with its prefix.
    ///
    /// # Errors
    /// Why it is unknown, for people.
    pub fn uuid_at(&self, index: u32) -> Result<String, String> {
        self.0.by_index(index).and_then(|gpu| gpu.uuid()).map_err(|error| error.to_string())
    }

    /// The processes that compute on the GPU with this index.
    ///
    /// # Errors
    /// Why they are unknown, for people.
    pub fn processes_at(&self, index: u32) -> Result<Vec<GpuProcess>, String> {
        let processes = self.0.by_index(index).and_then(|gpu| gpu.processes());
        let process = |info: ffi::ProcessInfo| GpuProcess { pid: info.pid, used_bytes: info.used_bytes() };
        processes
            .map(|processes| processes.into_iter().map(process).collect())
            .map_err(|error| error.to_string())
    }

    /// Memory of the GPU with this UUID, without prefix.
    #[must_use]
    pub fn memory(&self, uuid: &str) -> Option<GpuMemory> {
        self.known_memory(uuid).ok()??.memory.ok()
    }

    /// Memory, and what the UUID names; `None` if NVML does not know the UUID.
    ///
    /// # Errors
    /// Why NVML cannot tell whether it knows the UUID, for people.
    pub fn known_memory(&self, uuid: &str) -> Result<Option<NvmlMemory>, String> {
        let Some((handle, device)) = self.device(uuid).map_err(|error| error.to_string())? else {
            return Ok(None);
        };
        let memory = device.memory().map(|memory| GpuMemory {
            total_bytes: memory.total_bytes,
            free_bytes: memory.free_bytes,
            used_bytes: memory.used_bytes,
        });
        let mig_mode = match handle {
            Handle::Gpu => is_enabled(&device.mig_mode()),
            Handle::MigInstance => None,
        };
        let has_no_figures = matches!(memory, Err(NvmlError::Code(NvmlCode::NOT_SUPPORTED)));
        let memory = memory.map_err(|error| error.to_string());
        Ok(Some(NvmlMemory { handle, mig_mode, memory, has_no_figures }))
    }

    /// The link of the GPU with this UUID, or of the GPU that contains this instance.
    #[must_use]
    pub fn pci_link(&self, uuid: &str) -> PciLink {
        let Ok(Some((handle, device))) = self.device(uuid) else { return PciLink::default() };
        let whole = match handle {
            Handle::Gpu => Ok(device),
            Handle::MigInstance => device.parent(),
        };
        whole.map_or_else(
            |_| PciLink::default(),
            |gpu| PciLink {
                width: gpu.link_width().ok(),
                width_max: gpu.link_width_max().ok(),
                generation: gpu.link_generation().ok(),
                generation_max: gpu.link_generation_max().ok(),
            },
        )
    }

    /// Memory that process `pid` uses of the GPU with this UUID; `None` without a figure or such a process.
    /// In a container with its own process numbers, another process may have our number.
    #[must_use]
    pub fn process_used_bytes(&self, uuid: &str, pid: u32) -> Option<u64> {
        let (_, device) = self.device(uuid).ok()??;
        held_by(&device, pid)?
    }

    /// Where process `pid` uses memory: UUID without prefix, and bytes where the driver keeps a figure.
    #[must_use]
    pub fn memory_of_process(&self, pid: u32) -> Vec<(String, Option<u64>)> {
        self.gpus_and_instances().filter_map(|gpu| Some((uuid(&gpu)?, held_by(&gpu, pid)?))).collect()
    }

    /// Processes that use a GPU, by the driver's numbers.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let listed = self.gpus().filter_map(|gpu| gpu.processes().ok());
        listed.flatten().map(|process| process.pid).collect()
    }

    /// UUID, without prefix, of the GPU with this device file: `/dev/nvidiaN`.
    #[must_use]
    pub fn uuid_of_minor(&self, minor: u32) -> Option<String> {
        self.gpus()
            .find(|gpu| gpu.minor_number().is_ok_and(|number| number == minor))
            .and_then(|gpu| uuid(&gpu))
    }

    /// Whether process `pid` uses a GPU through the Multi-Process Service. `None` where NVML does not report it.
    #[must_use]
    pub fn is_mps_client(&self, pid: u32) -> Option<bool> {
        let clients = self.gpus().filter_map(|gpu| gpu.mps_processes().ok());
        clients
            .map(|clients| clients.iter().any(|client| client.pid == pid))
            .reduce(|one, other| one || other)
    }

    fn gpus(&self) -> impl Iterator<Item = GpuHandle<'_>> {
        let count = self.0.count().unwrap_or(0);
        (0..count).filter_map(|index| self.0.by_index(index).ok())
    }

    /// Whole GPUs, and the instances of those in MIG mode.
    fn gpus_and_instances(&self) -> impl Iterator<Item = GpuHandle<'_>> {
        self.gpus().flat_map(|gpu| {
            if is_enabled(&gpu.mig_mode()) != Some(true) {
                return vec![gpu];
            }
            let count = gpu.instances_max().unwrap_or(0);
            (0..count).filter_map(|index| gpu.instance(index).ok()).collect()
        })
    }

    fn device(&self, uuid: &str) -> Result<Option<(Handle, GpuHandle<'_>)>, NvmlError> {
        first(PREFIXES.into_iter().map(|(prefix, handle)| {
            let device = self.0.by_uuid(&format!("{prefix}{uuid}"));
            device.map(|device| (handle, device))
        }))
    }
}

fn uuid(gpu: &GpuHandle<'_>) -> Option<String> {
    let uuid = gpu.uuid().ok()?;
    PREFIXES.into_iter().find_map(|(prefix, _)| uuid.strip_prefix(prefix)).map(str::to_owned)
}

/// `None` unless the process is listed there.
fn held_by(gpu: &GpuHandle<'_>, pid: u32) -> Option<Option<u64>> {
    let processes = gpu.processes().ok()?;
    let mut entries = processes.iter().filter(|process| process.pid == pid).peekable();
    entries.peek()?;
    Some(used_bytes(entries.map(ffi::ProcessInfo::used_bytes)))
}

/// Without a hit, the first error other than "not found".
fn first<T>(answers: impl Iterator<Item = Result<T, NvmlError>>) -> Result<Option<T>, NvmlError> {
    let mut refused = None;
    for answer in answers {
        match answer {
            Ok(found) => return Ok(Some(found)),
            // NVML's errors for an unknown or malformed UUID.
            Err(NvmlError::Code(NvmlCode::NOT_FOUND | NvmlCode::INVALID_ARGUMENT) | NvmlError::Zero) => {}
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    refused.map_or(Ok(None), Err)
}

/// GPUs and drivers without MIG have it off.
fn is_enabled(mode: &Result<u32, NvmlError>) -> Option<bool> {
    match mode {
        Ok(mode) => Some(*mode != 0),
        Err(
            NvmlError::Code(NvmlCode::NOT_SUPPORTED | NvmlCode::FUNCTION_NOT_FOUND) | NvmlError::Symbol(_),
        ) => Some(false),
        Err(_) => None,
    }
}

/// Each MIG instance has an entry.
fn used_bytes(entries: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    entries.flatten().reduce(u64::saturating_add)
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
                assert_eq!(nvml.known_memory("\0"), Ok(None));
                assert_eq!(nvml.pci_link("no such device"), PciLink::default());
                assert!(nvml.process_used_bytes("", std::process::id()).is_none());
            }
        }
    }

    #[test]
    fn figures_that_the_driver_does_not_keep_are_none() {
        for (entries, expected) in [
            (&[][..], None),
            (&[None], None),
            (&[Some(5 << 20)], Some(5 << 20)),
            (&[Some(0)], Some(0)),
            (&[Some(1), None, Some(2)], Some(3)),
            (&[Some(u64::MAX - 1), Some(u64::MAX - 1)], Some(u64::MAX)),
        ] {
            assert_eq!(used_bytes(entries.iter().copied()), expected, "{entries:?}");
        }
    }

    #[test]
    fn unknown_differs_from_refused() {
        let refused = |code| Err(NvmlError::Code(code));
        let (unknown, malformed) = (NvmlCode::NOT_FOUND, NvmlCode::INVALID_ARGUMENT);
        let (forbidden, lost) = (NvmlCode::NO_PERMISSION, NvmlCode::GPU_IS_LOST);
        let found = |answers: [Result<u8, NvmlError>; 2]| {
            first(answers.into_iter()).map_err(|error| match error {
                NvmlError::Code(code) => code,
                other => panic!("{other}"),
            })
        };
        assert_eq!(found([Ok(1), Ok(2)]), Ok(Some(1)));
        assert_eq!(found([refused(unknown), Ok(2)]), Ok(Some(2)));
        assert_eq!(found([refused(forbidden), Ok(2)]), Ok(Some(2)));
        assert_eq!(found([refused(unknown), refused(malformed)]), Ok(None));
        assert_eq!(found([Err(NvmlError::Zero), refused(malformed)]), Ok(None));
        assert_eq!(found([refused(forbidden), refused(unknown)]), Err(forbidden));
        assert_eq!(found([refused(unknown), refused(lost)]), Err(lost));
        assert_eq!(found([refused(lost), refused(forbidden)]), Err(lost));
    }

    #[test]
    fn figures_of_a_divided_card_are_marked() {
        let refused = |code| Err(NvmlError::Code(code));
        for (mode, expected) in [
            (Ok(1), Some(true)),
            (Ok(0), Some(false)),
            (refused(NvmlCode::NOT_SUPPORTED), Some(false)),
            (refused(NvmlCode::FUNCTION_NOT_FOUND), Some(false)),
            (Err(NvmlError::Symbol("nvmlDeviceGetMigMode".into())), Some(false)),
            (refused(NvmlCode::NO_PERMISSION), None),
        ] {
            assert_eq!(is_enabled(&mode), expected);
        }
        for (handle, mig_mode, expected) in [
            (Handle::Gpu, Some(true), true),
            (Handle::Gpu, Some(false), false),
            (Handle::Gpu, None, false),
            (Handle::MigInstance, None, false),
        ] {
            let memory = NvmlMemory { handle, mig_mode, memory: Err(String::new()), has_no_figures: false };
            assert_eq!(memory.is_mig_parent(), expected, "{memory:?}");
        }
    }
}
