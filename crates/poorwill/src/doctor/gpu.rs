//! The GPUs that the driver shows, and what NVML tells beside it.

use serde::Serialize;

/// A GPU. What could not be found out is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuReport {
    /// How the command line names it.
    pub id: String,
    /// Name for people.
    pub name: String,
    /// Major and minor, as in `9.0`.
    pub compute_capability: String,
    /// Smallest unit that can be mapped, in bytes.
    pub granule_bytes: u64,
    /// Physical memory as the driver tells it, in bytes.
    pub total_bytes: u64,
    /// Of which nobody uses, in bytes.
    pub free_bytes: Option<u64>,
    /// Who said how much is free.
    pub free_source: Option<FreeSource>,
    /// Why nobody did.
    pub free_error: Option<String>,
    /// Version of the driver, as in `580.159.04`.
    pub driver_version: Option<String>,
    /// Newest CUDA version that the driver supports, as in `13.0`.
    pub cuda_version: String,
    /// As `nvidia-smi` writes it, without what stands before the first hyphen.
    pub uuid: String,
    /// Where it sits, as `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// Whether it shares the computer's memory.
    pub integrated: bool,
}

/// Who tells how much memory of a GPU is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum FreeSource {
    /// NVML, from outside.
    Nvml,
    /// The CUDA driver, in a context that was made for the question.
    Cuda,
}

#[cfg(not(target_os = "linux"))]
pub(super) fn examine(warnings: &mut Vec<String>) -> Vec<GpuReport> {
    warnings.push("no NVIDIA GPU can be used: poorwill drives them on Linux only".into());
    Vec::new()
}

#[cfg(target_os = "linux")]
pub(super) use linux::examine;

#[cfg(target_os = "linux")]
mod linux {
    use poorwill_core::Driver;
    use poorwill_driver::cuda::{self, GpuInfo};
    use poorwill_driver::nvml::Nvml;
    use poorwill_driver::{CudaConfig, CudaDevice};

    use super::{FreeSource, GpuReport};

    /// Asks for all of them; what goes wrong is added to `warnings`.
    pub(in super::super) fn examine(warnings: &mut Vec<String>) -> Vec<GpuReport> {
        let gpus = match cuda::gpus(None) {
            Ok(gpus) => gpus,
            Err(error) => {
                warnings.push(format!("no NVIDIA GPU can be used: {}", error.kind));
                return Vec::new();
            }
        };
        let mut answered = Vec::new();
        for (ordinal, gpu) in gpus.into_iter().enumerate() {
            match gpu {
                Ok(gpu) => answered.push(gpu),
                Err(error) => warnings.push(format!("cuda:{ordinal} cannot be used: {}", error.kind)),
            }
        }
        let nvml = Nvml::load();
        if let Err(reason) = &nvml {
            warnings.push(format!(
                "the driver's version is not known, and what is free takes a context to ask for: {reason}"
            ));
        }
        let driver_version = nvml.as_ref().ok().and_then(Nvml::driver_version);
        let nvml_free_bytes = |gpu: &GpuInfo| {
            let memory = nvml.as_ref().map_err(Clone::clone)?.memory(&gpu.uuid);
            memory.map(|memory| memory.free_bytes).ok_or_else(|| "NVML has no figure for it".to_owned())
        };
        let reports = answered.into_iter().map(|gpu| {
            let free = free_bytes(nvml_free_bytes(&gpu), || cuda_free_bytes(gpu.ordinal));
            report(gpu, free, driver_version.clone())
        });
        let reports: Vec<GpuReport> = reports.collect();
        for report in &reports {
            if report.granule_bytes == 0 {
                let reason = "it has no virtual memory management, which sleeping needs";
                warnings.push(format!("{} cannot be used: {reason}", report.id));
            }
            if let Some(reason) = &report.free_error {
                warnings.push(format!("how much of {} is free is not known: {reason}", report.id));
            }
        }
        reports
    }

    /// NVML's figure if there is one, otherwise that of the driver.
    fn free_bytes(
        nvml: Result<u64, String>,
        cuda: impl FnOnce() -> Result<u64, String>,
    ) -> Result<(u64, FreeSource), String> {
        nvml.map(|bytes| (bytes, FreeSource::Nvml)).or_else(|nvml| {
            let cuda = cuda().map(|bytes| (bytes, FreeSource::Cuda));
            cuda.map_err(|cuda| format!("{nvml}; {cuda}"))
        })
    }

    /// What the driver says is free, asked in a context of its own.
    fn cuda_free_bytes(ordinal: u32) -> Result<u64, String> {
        let asked = CudaDevice::open(&CudaConfig::gpu(ordinal)).and_then(|device| device.memory_info());
        asked.map(|memory| memory.free_bytes).map_err(|error| error.to_string())
    }

    fn report(
        gpu: GpuInfo,
        free: Result<(u64, FreeSource), String>,
        driver_version: Option<String>,
    ) -> GpuReport {
        let version = |(major, minor)| format!("{major}.{minor}");
        let (free, free_error) = match free {
            Ok(free) => (Some(free), None),
            Err(reason) => (None, Some(reason)),
        };
        GpuReport {
            id: format!("cuda:{}", gpu.ordinal),
            name: gpu.name,
            compute_capability: version(gpu.compute_capability),
            granule_bytes: gpu.granule_bytes,
            total_bytes: gpu.total_bytes,
            free_bytes: free.map(|(bytes, _)| bytes),
            free_source: free.map(|(_, source)| source),
            free_error,
            driver_version,
            cuda_version: version(gpu.cuda_version),
            uuid: gpu.uuid,
            pci_bus_id: gpu.pci_bus_id,
            integrated: gpu.integrated,
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn gpu() -> GpuInfo {
            GpuInfo {
                ordinal: 1,
                name: "NVIDIA H200".into(),
                compute_capability: (9, 0),
                cuda_version: (13, 0),
                uuid: "01234567-89ab-cdef-0123-456789abcdef".into(),
                pci_bus_id: "0000:4e:00.0".into(),
                granule_bytes: 2 << 20,
                total_bytes: 140 << 30,
                shared_memory_per_block_bytes: 227 << 10,
                integrated: false,
            }
        }

        #[test]
        fn nvml_is_asked_first() {
            let free = free_bytes(Ok(7), || panic!("a context costs memory"));
            assert_eq!(free, Ok((7, FreeSource::Nvml)));
            assert_eq!(free_bytes(Err("no NVML".into()), || Ok(8)), Ok((8, FreeSource::Cuda)));
            let reason = free_bytes(Err("no NVML".into()), || Err("no context".into())).unwrap_err();
            assert_eq!(reason, "no NVML; no context");
        }

        #[test]
        fn a_gpu_in_json() {
            let report = report(gpu(), Ok((139 << 30, FreeSource::Nvml)), Some("580.159.04".into()));
            assert_eq!(
                serde_json::to_value(report).unwrap(),
                serde_json::json!({
                    "id": "cuda:1",
                    "name": "NVIDIA H200",
                    "compute_capability": "9.0",
                    "granule_bytes": 2 << 20,
                    "total_bytes": 140_u64 << 30,
                    "free_bytes": 139_u64 << 30,
                    "free_source": "nvml",
                    "free_error": null,
                    "driver_version": "580.159.04",
                    "cuda_version": "13.0",
                    "uuid": "01234567-89ab-cdef-0123-456789abcdef",
                    "pci_bus_id": "0000:4e:00.0",
                    "integrated": false,
                })
            );
        }

        #[test]
        fn what_is_not_known_is_none() {
            let report = report(gpu(), Err("no NVML; no context".into()), None);
            assert_eq!((report.free_bytes, report.free_source, report.driver_version), (None, None, None));
            assert_eq!(report.free_error.as_deref(), Some("no NVML; no context"));
        }
    }
}
