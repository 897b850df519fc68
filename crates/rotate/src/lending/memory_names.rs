//! Which memory a GPU's is, by the name that all processes of the computer agree on.
//!
//! A real GPU's is its UUID as NVML prints it. Positions are NVML's, whatever `CUDA_VISIBLE_DEVICES` says to an engine.
//! A simulated GPU's is its folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;
#[cfg(target_os = "linux")]
use std::sync::{Mutex, PoisonError};

use poorwill_rotation_policy::Gpu;

/// The name of a GPU's memory; `None` while it is not known, so that nothing counts as lent there. It may block.
pub type MemoryNames = Arc<dyn Fn(Gpu) -> Option<String> + Send + Sync>;

/// By NVML. A name that is not found is looked for again.
#[cfg(target_os = "linux")]
#[must_use]
pub fn of_devices() -> MemoryNames {
    use std::collections::BTreeMap;

    use poorwill_driver::nvml::Nvml;

    let known = Mutex::<(Option<Nvml>, BTreeMap<usize, String>)>::default();
    Arc::new(move |Gpu(position)| {
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        let (nvml, names) = &mut *known;
        if let Some(name) = names.get(&position) {
            return Some(name.clone());
        }
        if nvml.is_none() {
            *nvml = Nvml::load().ok();
        }
        let name = nvml.as_ref()?.uuid_at(u32::try_from(position).ok()?).ok()?;
        names.insert(position, name.clone());
        Some(name)
    })
}

/// There is none elsewhere.
#[cfg(not(target_os = "linux"))]
#[must_use]
pub fn of_devices() -> MemoryNames {
    Arc::new(|_| None)
}

/// Of simulated GPUs, each of which has a folder below this one.
#[must_use]
pub fn of_simulated(folder: PathBuf) -> MemoryNames {
    Arc::new(move |gpu| {
        let folder = simulated_folder(&folder, gpu);
        std::fs::create_dir_all(&folder).ok()?;
        Some(format!("host:{}", folder.canonicalize().ok()?.display()))
    })
}

/// The folder of one simulated GPU, whose engines share it as their host device.
#[must_use]
pub fn simulated_folder(folder: &Path, gpu: Gpu) -> PathBuf {
    folder.join(format!("gpu{}", gpu.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_gpus_have_folders_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().canonicalize().unwrap();
        let link = top.join("link");
        std::os::unix::fs::symlink(&top, &link).unwrap();
        let names = of_simulated(link);
        let name = |gpu: usize| format!("host:{}/gpu{gpu}", top.display());
        assert_eq!([names(Gpu(0)), names(Gpu(1))], [Some(name(0)), Some(name(1))]);
        assert!(top.join("gpu1").is_dir());
        std::fs::write(top.join("file"), "").unwrap();
        assert_eq!(of_simulated(top.join("file"))(Gpu(0)), None);
    }
}
