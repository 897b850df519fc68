//! The memory of real GPUs, by the interface of their driver: one module for each.

#[cfg(target_os = "linux")]
use std::cell::RefCell;
#[cfg(target_os = "linux")]
use std::collections::BTreeSet;
use std::path::Path;
#[cfg(target_os = "linux")]
use std::sync::Arc;

#[cfg(target_os = "linux")]
use poorwill::gpus::Gpus;
#[cfg(target_os = "linux")]
use tokio::sync::Mutex;
#[cfg(target_os = "linux")]
use tokio::task::spawn_blocking;

#[cfg(not(target_os = "linux"))]
use super::GpuMemory;
#[cfg(target_os = "linux")]
use super::amdgpu::{self, Amdgpu};
#[cfg(target_os = "linux")]
use super::files::Files;
#[cfg(target_os = "linux")]
use super::intel::{self, Intel};
#[cfg(target_os = "linux")]
use super::unified::Unified;
#[cfg(target_os = "linux")]
use super::{DeviceMemory, Held, Remark, by_process};
use super::{Measured, Meter, on_a_thread};
use poorwill_rotation_policy::Gpu;

/// Advice where no GPU can be measured.
const HELP: &str = "install NVIDIA's driver, declare the memory with [memory] measure = \"declared\", or simulate GPUs \
                    with measure = \"processes\" and gpu = \"8GiB\"";

/// NVIDIA's number among the vendors of PCI devices.
#[cfg(target_os = "linux")]
const NVIDIA: &str = "0x10de";

/// Whose figures are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceDriver {
    /// The first of NVML, amdgpu, and Intel's drivers that has a GPU.
    #[default]
    Any,
    /// NVML, for NVIDIA's GPUs.
    Nvml,
    /// amdgpu, by sysfs.
    Amdgpu,
    /// i915 and xe, by fdinfo.
    Intel {
        /// The size of each card, where the driver does not report it.
        total_bytes: Option<u64>,
    },
    /// The computer's memory, which its GPU shares.
    Unified,
}

/// What is known of a driver.
#[cfg(target_os = "linux")]
#[derive(Debug, Default)]
struct Found {
    device: Option<Box<dyn DeviceMemory>>,
    was_sought: bool,
}

/// Measures by a driver, which is looked for at the first use, and by each measurement after a failure to find it.
///
/// A driver has one call at a time: one that hangs keeps one thread, and no more.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    driver: DeviceDriver,
    #[cfg(target_os = "linux")]
    files: Files,
    /// The thread that calls the driver has it.
    #[cfg(target_os = "linux")]
    found: Arc<Mutex<Found>>,
}

impl Meter for Devices {
    #[cfg(target_os = "linux")]
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        let devices = self.clone();
        Box::pin(async move {
            let found = RefCell::new(Arc::clone(&devices.found).lock_owned().await);
            let memory = move |gpu| devices.ask(&mut found.borrow_mut(), |device| device.memory(gpu));
            on_a_thread(gpus, memory).await
        })
    }

    #[cfg(not(target_os = "linux"))]
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        let devices = self.clone();
        Box::pin(on_a_thread(gpus, move |gpu| devices.memory(gpu)))
    }

    #[cfg(target_os = "linux")]
    fn remark(&self, gpu: Gpu) -> Remark<'_> {
        let devices = self.clone();
        Box::pin(async move {
            let mut found = Arc::clone(&devices.found).lock_owned().await;
            let asked = move || devices.ask(&mut found, |device| Ok(device.remark(gpu))).ok().flatten();
            spawn_blocking(asked).await.ok().flatten()
        })
    }

    #[cfg(target_os = "linux")]
    fn held<'a>(&'a self, gpus: &'a [Gpu], pids: Vec<u32>) -> Held<'a> {
        let (devices, gpus, pids) = (self.clone(), gpus.to_vec(), BTreeSet::from_iter(pids));
        Box::pin(async move {
            // It does not wait for a driver that may hang.
            let Ok(mut found) = Arc::clone(&devices.found).try_lock_owned() else { return None };
            by_process::off_the_runtime(move || devices.held_by(&mut found, &gpus, &pids)).await
        })
    }
}

impl Devices {
    /// By this driver.
    #[must_use]
    pub fn by(driver: DeviceDriver) -> Self {
        Self { driver, ..Self::default() }
    }

    /// With `/proc` and `/sys` in this folder, for tests.
    #[must_use]
    pub fn below(self, root: &Path) -> Self {
        #[cfg(target_os = "linux")]
        return Self { files: Files::at(root), ..self };
        #[cfg(not(target_os = "linux"))]
        return { self };
    }

    #[cfg(target_os = "linux")]
    fn ask<T>(
        &self,
        found: &mut Found,
        one: impl FnOnce(&mut dyn DeviceMemory) -> Result<T, String>,
    ) -> Result<T, String> {
        found.was_sought = true;
        let device = match &mut found.device {
            Some(device) => device,
            none => none.insert(self.find()?),
        };
        one(&mut **device)
    }

    /// A driver that was not found is looked for by measurements only.
    #[cfg(target_os = "linux")]
    fn held_by(&self, found: &mut Found, gpus: &[Gpu], pids: &BTreeSet<u32>) -> Option<Vec<u64>> {
        if found.was_sought && found.device.is_none() {
            return None;
        }
        let held = |device: &mut dyn DeviceMemory| {
            Ok(gpus.iter().map(|gpu| device.held(*gpu, pids)).collect::<Option<Vec<u64>>>())
        };
        self.ask(found, held).ok().flatten()
    }

    #[cfg(target_os = "linux")]
    fn find(&self) -> Result<Box<dyn DeviceMemory>, String> {
        let files = self.files.clone();
        Ok(match self.driver {
            DeviceDriver::Any => return self.find_any(),
            DeviceDriver::Nvml => Box::new(Gpus::open().map_err(|error| format!("{error}; {HELP}"))?),
            DeviceDriver::Amdgpu => Box::new(Amdgpu(files)),
            DeviceDriver::Intel { total_bytes } => Box::new(Intel { files, total_bytes }),
            DeviceDriver::Unified => Box::new(Unified(files)),
        })
    }

    /// A card of NVIDIA's whose driver does not load is no reason to measure the processor's graphics instead.
    #[cfg(target_os = "linux")]
    fn find_any(&self) -> Result<Box<dyn DeviceMemory>, String> {
        let files = self.files.clone();
        let why_not = match Gpus::open() {
            Ok(gpus) if gpus.count().is_ok_and(|count| count > 0) => return Ok(Box::new(gpus)),
            Ok(_) => "NVML shows no GPU".to_owned(),
            Err(error) => error.to_string(),
        };
        if files.has_gpu_of(NVIDIA) {
            return Err(format!("{why_not}; {HELP}"));
        }
        if !files.cards(amdgpu::DRIVERS)?.is_empty() {
            return Ok(Box::new(Amdgpu(files)));
        }
        if !files.cards(intel::DRIVERS)?.is_empty() {
            return Ok(Box::new(Intel { files, total_bytes: None }));
        }
        Err(format!("{why_not}, and /sys/class/drm has no card of amdgpu, i915 or xe; {HELP}"))
    }

    #[cfg(not(target_os = "linux"))]
    #[expect(clippy::unused_self, reason = "drivers are asked on Linux only")]
    fn memory(&self, _: Gpu) -> Result<GpuMemory, String> {
        Err(format!("GPUs are measured on Linux only; {HELP}"))
    }
}
