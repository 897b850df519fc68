//! The checkpointer.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use poorwill_core::hibernation::{
    CheckpointError, CheckpointErrorKind, CheckpointStep, Checkpointer, HeldMemory, ProcessInspection,
    ProcessState, Result,
};
use poorwill_core::{DriverErrorKind, Op};

use super::calls::{Call, CallOutcome, Library, state_of};
use super::seen::{Seen, obstacles};
use crate::cuda::ffi::{Api, CheckpointApi, CuResult};
use crate::cuda::gpu;
use crate::ledger::of;
use crate::nvml::{Handle, Nvml};
use crate::other_process;

/// How long a stopped process may take to answer, by default.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Takes processes off NVIDIA's GPUs. It makes no context, so it takes no memory there.
///
/// ```
/// use poorwill_core::hibernation::Checkpointer;
/// use poorwill_driver::cuda::CudaCheckpointer;
///
/// match CudaCheckpointer::open(None) {
///     Ok(checkpointer) => assert!(checkpointer.state(std::process::id()).is_err()),
///     Err(error) => println!("{error}"), // No driver, no GPU, or a driver before 570.
/// }
/// ```
#[derive(Debug)]
pub struct CudaCheckpointer {
    library: Library,
    nvml: OnceLock<Nvml>,
    loads_nvml: bool,
    answer_max: Duration,
    /// Processes that a restore has lost, which the driver goes on to call checkpointed: number and start.
    lost: Mutex<HashSet<(u32, u64)>>,
}

impl CudaCheckpointer {
    /// Loads the driver's library, or another one for tests.
    ///
    /// # Errors
    /// `Unsupported` without a usable driver, and where it is older than 570; `Device` with what the
    /// driver reports.
    pub fn open(library: Option<&Path>) -> poorwill_core::driver::Result<Self> {
        let api = Api::load(library)?;
        let calls =
            CheckpointApi::load(library).map_err(|error| too_old(api, Nvml::load().ok().as_ref(), error));
        let calls: &'static CheckpointApi = Box::leak(Box::new(calls.map_err(of(Op::Open))?));
        gpu::count(api).map_err(not_yet).map_err(of(Op::Open))?;
        let library = Library { api, calls };
        let nvml = OnceLock::new();
        Ok(Self { library, nvml, loads_nvml: true, answer_max: ANSWER_MAX, lost: Mutex::default() })
    }

    /// Sets where figures of memory are read, for tests.
    #[must_use]
    pub fn reading(mut self, nvml: Option<Nvml>) -> Self {
        self.nvml = nvml.map_or_else(OnceLock::new, OnceLock::from);
        self.loads_nvml = false;
        self
    }

    /// Sets how long a stopped process may take to answer.
    #[must_use]
    pub fn answering_within(mut self, answer_max: Duration) -> Self {
        self.answer_max = answer_max;
        self
    }

    /// Loaded at the first question that finds it, since it may come later than the driver.
    fn nvml(&self) -> Option<&Nvml> {
        if self.nvml.get().is_none() && self.loads_nvml {
            let _ = self.nvml.set(Nvml::load().ok()?);
        }
        self.nvml.get()
    }

    fn step(&self, step: CheckpointStep, pid: u32, wait_max: Duration) -> Result<()> {
        let failed = |kind| CheckpointError::new(step, pid, kind);
        other_process::expect(step, pid)?;
        if let Some(wanted) = step.begins().filter(|_| self.is_lost(pid)) {
            return Err(failed(CheckpointErrorKind::wrong_state(ProcessState::Failed, wanted)));
        }
        let call = Call { step, pid: pid.cast_signed(), wait_max };
        match self.library.call(call, self.answer_max) {
            CallOutcome::Done | CallOutcome::State(_) => Ok(()),
            CallOutcome::NoAnswer(waited) => Err(failed(CheckpointErrorKind::NoAnswer { waited })),
            CallOutcome::Failed(code) => Err(failed(self.failure(call, code, pid))),
        }
    }

    /// Why a call failed. The driver's code says little: it is the same for a process that has ended, and for one that the
    /// system keeps away.
    fn failure(&self, call: Call, code: CuResult, pid: u32) -> CheckpointErrorKind {
        if other_process::has_ended(pid) || self.is_ending(code, pid) {
            return CheckpointErrorKind::NoSuchProcess;
        }
        let asked = self.library.call(Call { step: CheckpointStep::State, ..call }, self.answer_max);
        let state = match asked {
            CallOutcome::State(number) => state_of(number),
            _ => None,
        };
        if call.step == CheckpointStep::Restore && code != CuResult::ILLEGAL_STATE && state.is_some() {
            self.lost().extend(other_process::started(pid).map(|started| (pid, started)));
        }
        self.library.error(call, code, state)
    }

    /// A process that is killed answers no more some time before it is gone.
    fn is_ending(&self, code: CuResult, pid: u32) -> bool {
        matches!(code, CuResult::OPERATING_SYSTEM | CuResult::NOT_INITIALIZED)
            && other_process::is_ending(pid)
            && other_process::ends_within(pid, self.answer_max)
    }

    fn is_lost(&self, pid: u32) -> bool {
        other_process::started(pid).is_some_and(|started| self.lost().contains(&(pid, started)))
    }

    fn lost(&self) -> MutexGuard<'_, HashSet<(u32, u64)>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_for(&self, step: CheckpointStep, pid: u32) -> Result<ProcessState> {
        let failed = |kind| CheckpointError::new(step, pid, kind);
        other_process::expect(step, pid)?;
        if self.is_lost(pid) {
            return Ok(ProcessState::Failed);
        }
        let call = Call { step: CheckpointStep::State, pid: pid.cast_signed(), wait_max: Duration::ZERO };
        match self.library.call(call, self.answer_max) {
            CallOutcome::State(number) => state_of(number).ok_or_else(|| {
                let reason = format!("its driver calls its state {number}, which this version does not know");
                failed(CheckpointErrorKind::Unsupported { reason })
            }),
            CallOutcome::NoAnswer(waited) => Err(failed(CheckpointErrorKind::NoAnswer { waited })),
            CallOutcome::Failed(code) => Err(failed(self.failure(call, code, pid))),
            CallOutcome::Done => Err(failed(CheckpointErrorKind::NoDevice)),
        }
    }

    /// Free memory of an instance has no figure of its own, and a restore there was never seen.
    fn expect_whole_gpus(&self, pid: u32, held: &[HeldMemory]) -> Result<()> {
        let is_divided = |uuid: &str| {
            let found = self.nvml().and_then(|nvml| nvml.known_memory(uuid).ok().flatten());
            found.is_some_and(|memory| memory.handle == Handle::MigInstance || memory.is_mig_parent())
        };
        let Some(HeldMemory { uuid, .. }) = held.iter().find(|held| is_divided(&held.uuid)) else {
            return Ok(());
        };
        let reason = format!("its device {uuid} is divided by MIG: let it sleep, or use a GPU without MIG");
        Err(CheckpointError::new(CheckpointStep::Inspect, pid, CheckpointErrorKind::Unsupported { reason }))
    }

    /// NVML's figures. Where it does not list the process, the devices that it has open, without figures: it may have another
    /// number there, as in a container. Where NVML lists others by their numbers here, this one holds nothing.
    fn held(&self, pid: u32, state: ProcessState, seen: &Seen) -> Vec<HeldMemory> {
        let Some(nvml) = self.nvml() else { return Vec::new() };
        let listed = nvml.memory_of_process(pid);
        let is_on_gpu =
            |other: u32| other != pid && Seen::minors_of(other).is_ok_and(|gpus| !gpus.is_empty());
        let unlisted_bytes = || nvml.processes().into_iter().any(is_on_gpu).then_some(0);
        let figures: Vec<(String, Option<u64>)> = match state {
            ProcessState::Running | ProcessState::Locked if listed.is_empty() => {
                let used_bytes = unlisted_bytes();
                let gpus = seen.minors().into_iter().filter_map(|minor| nvml.uuid_of_minor(minor));
                gpus.map(|uuid| (uuid, used_bytes)).collect()
            }
            _ => listed,
        };
        figures.into_iter().map(|(uuid, used_bytes)| HeldMemory { uuid, used_bytes }).collect()
    }
}

impl Checkpointer for CudaCheckpointer {
    fn state(&self, pid: u32) -> Result<ProcessState> {
        self.state_for(CheckpointStep::State, pid)
    }

    fn inspect(&self, pid: u32) -> Result<ProcessInspection> {
        let state = self.state_for(CheckpointStep::Inspect, pid)?;
        let mut seen = Seen::of(pid).map_err(|error| unseen(pid, &error))?;
        if let Some(is_client) = self.nvml().and_then(|nvml| nvml.is_mps_client(pid)) {
            seen.is_mps_client = is_client; // A service that has ended may have left its pipe.
        }
        let held = self.held(pid, state, &seen);
        self.expect_whole_gpus(pid, &held)?;
        Ok(ProcessInspection { state, held, obstacles: obstacles(&seen) })
    }

    fn free_bytes(&self, uuid: &str) -> Option<u64> {
        self.nvml()?.memory(uuid).map(|memory| memory.free_bytes)
    }

    fn used_bytes(&self, uuid: &str) -> Option<u64> {
        self.nvml()?.memory(uuid).map(|memory| memory.used_bytes)
    }

    fn lock(&self, pid: u32, wait_max: Duration) -> Result<()> {
        self.step(CheckpointStep::Lock, pid, wait_max)
    }

    fn checkpoint(&self, pid: u32) -> Result<()> {
        self.step(CheckpointStep::Checkpoint, pid, Duration::ZERO)
    }

    fn restore(&self, pid: u32) -> Result<()> {
        self.step(CheckpointStep::Restore, pid, Duration::ZERO)
    }

    fn unlock(&self, pid: u32) -> Result<()> {
        self.step(CheckpointStep::Unlock, pid, Duration::ZERO)
    }
}

/// What hinders a checkpoint cannot be seen.
fn unseen(pid: u32, error: &io::Error) -> CheckpointError {
    let is_ending = other_process::is_ending(pid) && other_process::ends_within(pid, ANSWER_MAX);
    let kind = if is_ending || other_process::has_ended(pid) {
        CheckpointErrorKind::NoSuchProcess
    } else {
        let reason = format!(
            "{error}; without it nothing says whether it could come back: ask as its user or as root, with CAP_SYS_PTRACE \
             in a container"
        );
        CheckpointErrorKind::NotPermitted { reason }
    };
    CheckpointError::new(CheckpointStep::Inspect, pid, kind)
}

/// A driver that comes up shows no GPU yet, and may do so another time.
fn not_yet(error: DriverErrorKind) -> DriverErrorKind {
    let DriverErrorKind::Unsupported { reason } = error else { return error };
    let (code, name) = (CuResult::NO_DEVICE.0.into(), "CUDA_ERROR_NO_DEVICE".to_owned());
    DriverErrorKind::Device { code, name, text: reason }
}

/// Names the driver that lacks the calls.
fn too_old(api: &Api, nvml: Option<&Nvml>, error: DriverErrorKind) -> DriverErrorKind {
    let DriverErrorKind::Unsupported { reason } = error else { return error };
    let version =
        nvml.and_then(Nvml::driver_version).map_or_else(String::new, |version| format!("{version}, "));
    let cuda = gpu::cuda_version(api)
        .map_or_else(|_| "unknown".to_owned(), |(major, minor)| format!("{major}.{minor}"));
    DriverErrorKind::Unsupported {
        reason: format!("this driver ({version}CUDA {cuda}) takes no process off its GPU: {reason}"),
    }
}
