//! Targets on NVIDIA's GPUs, or over the fake libcuda.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use poorwill_core::Driver;
use poorwill_core::hibernation::Checkpointer;
use poorwill_driver::CudaDevice;
use poorwill_driver::cuda::CudaCheckpointer;
use poorwill_driver::nvml::Nvml;
use tempfile::TempDir;

use super::fault::{Hold, TargetFault};
use super::target::{Enter, serve};
use super::{Setup, target_command};
use crate::child;
use crate::device::{DeviceKind, cuda_config, cuda_library};

const FOLDER: &str = "POORWILL_FAKE_CUDA_PROCESSES";
const SCRIPT: &str = "POORWILL_FAKE_CUDA_CHECKPOINT";

/// The machine's GPU, or the fake library in this process and its targets.
#[derive(Debug)]
pub struct CudaSetup {
    folder: PathBuf,
    nvml: Option<PathBuf>,
}

impl CudaSetup {
    /// In a child of this process, which these variables reach. `None` in the parent, after the child has passed. `nvml` is
    /// a library for the figures; without it, the machine's.
    ///
    /// # Panics
    /// If the child fails.
    #[must_use]
    pub fn open(nvml: Option<PathBuf>, variables: &[(&str, &str)]) -> Option<Self> {
        if let Some(folder) = std::env::var_os(FOLDER) {
            return Some(Self { folder: folder.into(), nvml });
        }
        let folder = TempDir::new().unwrap();
        let mut command = child::command("setup", variables);
        command.env(FOLDER, folder.path());
        child::expect_success(command);
        None
    }

    /// The folder of the targets.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Setup for CudaSetup {
    fn checkpointer_within(&self, answer_max: Option<Duration>) -> Arc<dyn Checkpointer> {
        let mut checkpointer = CudaCheckpointer::open(cuda_library().as_deref()).unwrap();
        if let Some(nvml) = &self.nvml {
            checkpointer = checkpointer.reading(Some(Nvml::load_from(nvml).unwrap()));
        }
        Arc::new(match answer_max {
            Some(answer_max) => checkpointer.answering_within(answer_max),
            None => checkpointer,
        })
    }

    fn command(&self, module: &str, fault: Option<TargetFault>) -> Command {
        let mut command = target_command(module);
        if let Some(fault) = fault {
            command.env(SCRIPT, self.text(fault));
        }
        command
    }

    fn hold(&self) -> Hold {
        Hold::of(&self.folder)
    }

    fn variables(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    fn has_faults(&self) -> bool {
        !matches!(DeviceKind::of_this_run(), DeviceKind::Cuda(_))
    }
}

impl CudaSetup {
    fn text(&self, fault: TargetFault) -> String {
        match fault {
            TargetFault::Fails(step) => format!("{step}:999"),
            TargetFault::Loses(step) => format!("{step}:999:failed"),
            TargetFault::Holds(step) => format!("{step}:hold:{}", self.hold().path()),
            TargetFault::Obstacle => "communicator".to_owned(),
        }
    }
}

/// What the target does.
///
/// # Panics
/// If there is no device.
pub fn target() {
    let device: Arc<dyn Driver> = Arc::new(CudaDevice::open(&cuda_config()).unwrap());
    let enter: Enter = Arc::new(|| Some(Box::new(()) as Box<dyn Any>));
    serve(&device, &enter);
}
