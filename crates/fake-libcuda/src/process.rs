//! Processes that are taken off their devices: this one as a target, and others.
//!
//! As with NVIDIA's driver, the state is the target's, and a step goes on without its caller. Who asks for a state during
//! a step waits. A restore that fails loses the process, which goes on to be called checkpointed. A checkpointed process
//! that looks at a stream or an event ends. Some calls wait here that NVIDIA answers at once, such as for attributes.

use std::ffi::c_int;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use poorwill_core::hibernation::{
    CheckpointErrorKind, CheckpointStep, Checkpointer, HeldMemory, ProcessState,
};
use poorwill_driver::host::{DeviceCall, HostCheckpointer, HostProcess, HostProcessMemory, StepFailure};

use crate::abi::{CallResult, Code, names};
use crate::device::Device;
use crate::script::{Script, Shown, show};
use crate::state::SimulatorState;
use crate::{faults, state, uuid};

static THIS: OnceLock<(HostProcess, Option<Shown>)> = OnceLock::new();

/// NVIDIA's driver waits for a stopped process without a limit.
const ANSWER_MAX: Duration = Duration::from_secs(24 * 3600);

/// Begins a device call. Waits while this process is locked.
pub(crate) fn enter() -> CallResult<Option<DeviceCall>> {
    THIS.get().map(|(process, _)| process.enter()).transpose().map_err(|_| Code::LAUNCH_FAILED)
}

/// Begins a call that looks at a stream or an event.
pub(crate) fn look(symbol: &str) -> CallResult<Option<DeviceCall>> {
    let Some((process, _)) = THIS.get() else { return Ok(None) };
    match process.look() {
        Ok(Some(call)) => Ok(Some(call)),
        Ok(None) => end_of(symbol),
        Err(_) => Err(Code::LAUNCH_FAILED),
    }
}

/// Begins a call that looks at memory.
pub(crate) fn look_at_memory() -> CallResult<Option<DeviceCall>> {
    let Some((process, _)) = THIS.get() else { return Ok(None) };
    process.look().map_err(|_| Code::LAUNCH_FAILED)?.ok_or(Code::OPERATING_SYSTEM).map(Some)
}

/// Driver 580 ends the process by `SIGSEGV`, which Rust's handler would survive here.
fn end_of(symbol: &str) -> ! {
    eprintln!("fake libcuda: {symbol} while this process is checkpointed; NVIDIA's driver ends it as well");
    loop {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Registers this process, if the settings name a folder.
pub(crate) fn register(state: &'static SimulatorState) -> CallResult {
    let config = faults::config()?;
    let Some(folder) = &config.processes else { return Ok(()) };
    let refused = |error: std::io::Error| {
        eprintln!("fake libcuda: POORWILL_FAKE_CUDA_PROCESSES: {}: {error}", folder.display());
        Code::OPERATING_SYSTEM
    };
    let shown = config.script.obstacle().map(show).transpose().map_err(refused)?;
    let memory = ProcessMemory { state, folder, script: &config.script, is_lost: AtomicBool::new(false) };
    let process = HostProcess::register(folder, Box::new(memory)).map_err(refused)?;
    THIS.get_or_init(|| (process, shown));
    Ok(())
}

/// What this process holds, on all devices.
struct ProcessMemory {
    state: &'static SimulatorState,
    folder: &'static Path,
    script: &'static Script,
    /// A restore has failed.
    is_lost: AtomicBool,
}

impl HostProcessMemory for ProcessMemory {
    fn held(&self) -> Vec<HeldMemory> {
        let held = |device: &Device| HeldMemory {
            uuid: uuid_of(device),
            used_bytes: device.memory().ok().map(|memory| memory.held_bytes),
        };
        self.state.devices().iter().map(held).collect()
    }

    fn is_idle(&self) -> bool {
        self.state.devices().iter().all(|device| device.host.is_idle())
    }

    fn take_off(&self) -> Result<(), StepFailure> {
        for (done, device) in self.state.devices().iter().enumerate() {
            if device.host.take_off().is_err() {
                let back = self.state.devices()[..done].iter().all(|device| device.host.put_back().is_ok());
                return Err(StepFailure { is_lost: !back, ..failure(Code::OUT_OF_MEMORY) });
            }
        }
        Ok(())
    }

    fn put_back(&self) -> Result<(), StepFailure> {
        let others = others_held(self.folder);
        for device in self.state.devices() {
            let of_others = others.iter().filter(|held| held.uuid == uuid_of(device));
            let used_bytes = of_others.filter_map(|held| held.used_bytes).fold(0, u64::saturating_add);
            if !device.has_space_to_return(used_bytes) || device.host.put_back().is_err() {
                self.is_lost.store(true, Ordering::Release);
                return Err(failure(Code::OUT_OF_MEMORY));
            }
        }
        Ok(())
    }

    fn before(&self, step: CheckpointStep) -> Result<(), StepFailure> {
        let is_restore = step == CheckpointStep::Restore;
        if is_restore && self.is_lost.load(Ordering::Acquire) {
            return Err(failure(Code::OPERATING_SYSTEM));
        }
        let scripted = self.script.run(step);
        let obstacle = self.script.obstacle().filter(|_| is_restore).and_then(|it| Some((it.code()?, false)));
        let Some((code, is_lost)) = scripted.or(obstacle) else { return Ok(()) };
        if is_restore {
            self.is_lost.store(true, Ordering::Release);
        }
        Err(StepFailure { is_lost, ..failure(Code(code)) })
    }
}

/// What all other processes of the folder hold.
fn others_held(folder: &Path) -> Vec<HeldMemory> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let pids = entries.filter_map(|entry| entry.path().file_stem()?.to_str()?.parse().ok());
    let checkpointer = HostCheckpointer::open(folder);
    pids.filter_map(|pid| checkpointer.inspect(pid).ok()).flat_map(|inspection| inspection.held).collect()
}

fn uuid_of(device: &Device) -> String {
    uuid::uuid_text(u32::try_from(device.ordinal).unwrap_or(u32::MAX))
}

/// A failure that the caller's side turns into the code again.
fn failure(code: Code) -> StepFailure {
    let words = names(code.0).map(|(name, text)| (name.to_string_lossy(), text.to_string_lossy()));
    let (name, text) = words.unwrap_or_default();
    let kind = CheckpointErrorKind::Refused { code: code.0.into(), name: name.into(), text: text.into() };
    StepFailure { kind, is_lost: false }
}

/// Makes a step of another process.
pub(crate) fn make(step: CheckpointStep, pid: c_int, wait_max: Duration) -> CallResult {
    let (checkpointer, pid) = (others()?, pid.cast_unsigned());
    let done = match step {
        CheckpointStep::Lock => checkpointer.lock(pid, wait_max),
        CheckpointStep::Checkpoint => checkpointer.checkpoint(pid),
        CheckpointStep::Restore => checkpointer.restore(pid),
        CheckpointStep::Unlock => checkpointer.unlock(pid),
        CheckpointStep::State | CheckpointStep::Inspect => checkpointer.state(pid).map(drop),
    };
    done.map_err(|error| code_of(&error.kind))
}

/// The number of a process's state. Waits for a step under way.
pub(crate) fn state(pid: c_int) -> CallResult<c_int> {
    let checkpointer = others()?;
    loop {
        let found = checkpointer.state(pid.cast_unsigned()).map_err(|error| code_of(&error.kind))?;
        match found {
            ProcessState::Running => return Ok(0),
            ProcessState::Locked => return Ok(1),
            ProcessState::Checkpointed => return Ok(2),
            ProcessState::Checkpointing | ProcessState::Restoring => thread::sleep(Duration::from_millis(1)),
            _ => return Ok(3),
        }
    }
}

fn others() -> CallResult<HostCheckpointer> {
    state::get()?;
    let folder = faults::config()?.processes.as_ref().ok_or(Code::NOT_SUPPORTED)?;
    Ok(HostCheckpointer::open(folder).answering_within(ANSWER_MAX))
}

fn code_of(kind: &CheckpointErrorKind) -> Code {
    match kind {
        CheckpointErrorKind::NoDevice => Code::NOT_INITIALIZED,
        CheckpointErrorKind::OwnProcess => Code::INVALID_VALUE,
        CheckpointErrorKind::WrongState { .. } => Code::ILLEGAL_STATE,
        CheckpointErrorKind::Busy { .. } => Code::NOT_READY,
        CheckpointErrorKind::OutOfHostMemory | CheckpointErrorKind::OutOfDeviceMemory => Code::OUT_OF_MEMORY,
        CheckpointErrorKind::Unsupported { .. } => Code::NOT_SUPPORTED,
        CheckpointErrorKind::Refused { code, .. } => i32::try_from(*code).map_or(Code::UNKNOWN, Code),
        _ => Code::OPERATING_SYSTEM,
    }
}
