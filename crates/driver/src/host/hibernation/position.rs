//! Where a process stands, its steps, and its device calls.
//!
//! Promise: each step is made from its state only, and ends there, one further, or in `Failed`. A call that has entered
//! ends before a lock returns; a call that enters later waits. A call that looks ends before a checkpoint.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use poorwill_core::hibernation::{
    CheckpointErrorKind, CheckpointStep, HeldMemory, Obstacle, ProcessInspection, ProcessState,
};

/// How often a lock looks whether queued work is done, and whether its caller is there.
const LOOK_EVERY: Duration = Duration::from_millis(1);

type Result<T> = std::result::Result<T, CheckpointErrorKind>;

/// What a process holds on its devices, and how it is taken off.
///
/// The steps call it on threads of their own, one step at a time, while no device call is under way.
pub trait HostProcessMemory: Send + Sync {
    /// What it holds now, by device.
    fn held(&self) -> Vec<HeldMemory>;

    /// What makes a checkpoint fail.
    fn obstacles(&self) -> Vec<Obstacle> {
        Vec::new()
    }

    /// Whether all queued work is done.
    fn is_idle(&self) -> bool {
        true
    }

    /// Moves all of it to host memory.
    ///
    /// # Errors
    /// Why not; then everything is on the devices as before, unless the device [is lost](StepFailure::is_lost).
    fn take_off(&self) -> std::result::Result<(), StepFailure>;

    /// Puts it back.
    ///
    /// # Errors
    /// As for [`HostProcessMemory::take_off`].
    fn put_back(&self) -> std::result::Result<(), StepFailure>;

    /// Runs in each step before its work. Tests make steps fail or wait here.
    ///
    /// # Errors
    /// The step fails with this, and does nothing.
    fn before(&self, step: CheckpointStep) -> std::result::Result<(), StepFailure> {
        let _ = step;
        Ok(())
    }
}

/// Why a step failed, and what that leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepFailure {
    /// What its caller gets.
    pub kind: CheckpointErrorKind,
    /// Whether the process has lost its device by it, and is `Failed`.
    pub is_lost: bool,
}

impl From<CheckpointErrorKind> for StepFailure {
    fn from(kind: CheckpointErrorKind) -> Self {
        Self { kind, is_lost: false }
    }
}

/// A device call of a process that has lost its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLost;

impl fmt::Display for DeviceLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this process has lost its device in a failed checkpoint; end it, and start it again")
    }
}

impl std::error::Error for DeviceLost {}

/// A device call under way. A lock waits until it is dropped.
#[derive(Debug)]
#[must_use = "the call is under way until it is dropped"]
pub struct DeviceCall(Option<Arc<Steps>>);

impl DeviceCall {
    /// A call that no lock waits for.
    pub(super) fn uncounted() -> Self {
        Self(None)
    }
}

impl Drop for DeviceCall {
    fn drop(&mut self) {
        let Some(steps) = &self.0 else { return };
        steps.position().calls -= 1;
        steps.changed.notify_all();
    }
}

/// The steps of one process.
pub(super) struct Steps {
    memory: Box<dyn HostProcessMemory>,
    position: Mutex<Position>,
    changed: Condvar,
}

#[derive(Debug)]
struct Position {
    state: ProcessState,
    /// Device calls under way.
    calls: u64,
    /// The step under way. Another one that begins in this state waits for it.
    step: Option<CheckpointStep>,
    /// The process no longer takes part.
    has_left: bool,
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Steps").field("position", &self.position).finish_non_exhaustive()
    }
}

impl Steps {
    pub(super) fn new(memory: Box<dyn HostProcessMemory>) -> Self {
        let position = Position { state: ProcessState::Running, calls: 0, step: None, has_left: false };
        Self { memory, position: Mutex::new(position), changed: Condvar::new() }
    }

    pub(super) fn state(&self) -> ProcessState {
        self.position().state
    }

    /// Begins a device call, once the process runs.
    pub(super) fn enter(self: &Arc<Self>) -> std::result::Result<DeviceCall, DeviceLost> {
        let mut position = self.position();
        loop {
            if position.has_left {
                return Ok(DeviceCall::uncounted());
            }
            match (position.state, position.step) {
                (ProcessState::Failed, _) => return Err(DeviceLost),
                (ProcessState::Running, None) => break,
                _ => position = self.changed.wait(position).unwrap_or_else(PoisonError::into_inner),
            }
        }
        position.calls += 1;
        Ok(DeviceCall(Some(Arc::clone(self))))
    }

    /// Begins a call that looks at queued work, of which there is none once the process is locked. `None` if the process
    /// is off its devices.
    pub(super) fn look(self: &Arc<Self>) -> std::result::Result<Option<DeviceCall>, DeviceLost> {
        let mut position = self.position();
        loop {
            if position.has_left {
                return Ok(Some(DeviceCall::uncounted()));
            }
            match position.state {
                ProcessState::Failed => return Err(DeviceLost),
                ProcessState::Checkpointed => return Ok(None),
                ProcessState::Running | ProcessState::Locked => break,
                _ => position = self.changed.wait(position).unwrap_or_else(PoisonError::into_inner),
            }
        }
        position.calls += 1;
        Ok(Some(DeviceCall(Some(Arc::clone(self)))))
    }

    pub(super) fn inspect(&self) -> ProcessInspection {
        let state = self.state();
        ProcessInspection { state, held: self.memory.held(), obstacles: self.memory.obstacles() }
    }

    /// `is_awaited` says whether the caller is still there. Without it nothing is locked.
    pub(super) fn lock(&self, wait_max: Duration, is_awaited: &dyn Fn() -> bool) -> Result<()> {
        let deadline = Instant::now().checked_add(wait_max);
        let wait = || {
            let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if is_late || !is_awaited() { Err(CheckpointErrorKind::Busy { wait_max }) } else { Ok(()) }
        };
        self.step(CheckpointStep::Lock, &wait, || {
            while !self.is_idle() {
                wait()?;
                drop(self.look_again(self.position()));
            }
            if is_awaited() { Ok(()) } else { Err(CheckpointErrorKind::Busy { wait_max }.into()) }
        })
    }

    pub(super) fn checkpoint(&self) -> Result<()> {
        self.step(CheckpointStep::Checkpoint, &|| Ok(()), || {
            if let Some(obstacle) = self.memory.obstacles().first() {
                let reason = format!("it cannot be taken off its devices: {obstacle}");
                return Err(CheckpointErrorKind::Unsupported { reason }.into());
            }
            let mut position = self.position();
            while position.calls > 0 {
                position = self.changed.wait(position).unwrap_or_else(PoisonError::into_inner);
            }
            drop(position);
            self.memory.take_off()
        })
    }

    pub(super) fn restore(&self) -> Result<()> {
        self.step(CheckpointStep::Restore, &|| Ok(()), || self.memory.put_back())
    }

    pub(super) fn unlock(&self) -> Result<()> {
        self.step(CheckpointStep::Unlock, &|| Ok(()), || Ok(()))
    }

    pub(super) fn has_left(&self) -> bool {
        self.position().has_left
    }

    /// Ends the process's part: device calls that wait go on, and steps fail.
    pub(super) fn leave(&self) {
        self.position().has_left = true;
        self.changed.notify_all();
    }

    /// `wait` fails when another step has been waited for long enough.
    fn step(
        &self,
        step: CheckpointStep,
        wait: &dyn Fn() -> Result<()>,
        work: impl FnOnce() -> std::result::Result<(), StepFailure>,
    ) -> Result<()> {
        let (before, meanwhile, after) = states(step);
        let mut position = self.position();
        loop {
            position.check(before)?;
            if position.step.is_none() {
                break;
            }
            wait()?;
            position = self.look_again(position);
        }
        (position.state, position.step) = (meanwhile, Some(step));
        drop(position);
        let done = caught(|| self.memory.before(step).and_then(|()| work()));
        let mut position = self.position();
        position.step = None;
        position.state = match &done {
            Ok(()) => after,
            Err(failure) if failure.is_lost => ProcessState::Failed,
            Err(_) => before,
        };
        drop(position);
        self.changed.notify_all();
        done.map_err(|failure| failure.kind)
    }

    fn is_idle(&self) -> bool {
        self.position().calls == 0 && self.memory.is_idle()
    }

    fn look_again<'a>(&self, position: MutexGuard<'a, Position>) -> MutexGuard<'a, Position> {
        self.changed.wait_timeout(position, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0
    }

    fn position(&self) -> MutexGuard<'_, Position> {
        self.position.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Position {
    fn check(&self, wanted: ProcessState) -> Result<()> {
        if self.has_left {
            return Err(CheckpointErrorKind::NoDevice);
        }
        if self.state == wanted { Ok(()) } else { Err(CheckpointErrorKind::wrong_state(self.state, wanted)) }
    }
}

/// Where a step begins, where the process is meanwhile, and where it ends.
fn states(step: CheckpointStep) -> (ProcessState, ProcessState, ProcessState) {
    use ProcessState::{Checkpointed, Checkpointing, Locked, Restoring, Running};
    match step {
        CheckpointStep::Checkpoint => (Locked, Checkpointing, Checkpointed),
        CheckpointStep::Restore => (Checkpointed, Restoring, Locked),
        CheckpointStep::Unlock => (Locked, Locked, Running),
        CheckpointStep::Lock | CheckpointStep::State | CheckpointStep::Inspect => (Running, Running, Locked),
    }
}

/// A panic of the owner's code loses the device: nothing is known of its memory.
fn caught(
    work: impl FnOnce() -> std::result::Result<(), StepFailure>,
) -> std::result::Result<(), StepFailure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        let text = "the process's own code panicked in this step".to_owned();
        let kind = CheckpointErrorKind::Refused { code: -1, name: "PANIC".into(), text };
        Err(StepFailure { kind, is_lost: true })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(200);
    const SHORT: Duration = Duration::from_millis(5);

    /// A process without memory, whose checkpoint panics if it is said so.
    struct Nothing {
        panics: bool,
    }

    impl HostProcessMemory for Nothing {
        fn held(&self) -> Vec<HeldMemory> {
            Vec::new()
        }

        fn take_off(&self) -> std::result::Result<(), StepFailure> {
            if self.panics {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
            Ok(())
        }

        fn put_back(&self) -> std::result::Result<(), StepFailure> {
            Ok(())
        }
    }

    fn steps(panics: bool) -> Arc<Steps> {
        Arc::new(Steps::new(Box::new(Nothing { panics })))
    }

    #[test]
    fn a_lock_waits_for_calls_under_way_and_runs_on_after_its_limit() {
        let steps = steps(false);
        let call = steps.enter().unwrap();
        assert_eq!(steps.lock(SHORT, &|| true), Err(CheckpointErrorKind::Busy { wait_max: SHORT }));
        drop(steps.enter().unwrap());
        thread::scope(|scope| {
            let locking = scope.spawn(|| steps.lock(LONG, &|| true));
            let waits = || steps.position().step.is_some();
            while !waits() {
                thread::yield_now();
            }
            assert_eq!((steps.state(), waits()), (ProcessState::Running, true));
            drop(call);
            assert_eq!(locking.join().unwrap(), Ok(()));
        });
        assert_eq!(steps.state(), ProcessState::Locked);
    }

    #[test]
    fn a_look_passes_a_lock_and_holds_up_a_checkpoint() {
        let steps = steps(false);
        steps.lock(LONG, &|| true).unwrap();
        let look = steps.look().unwrap().expect("it is on its devices");
        thread::scope(|scope| {
            let taking = scope.spawn(|| steps.checkpoint());
            while steps.state() != ProcessState::Checkpointing {
                thread::yield_now();
            }
            let second = scope.spawn(|| steps.look().map(|call| call.is_some()));
            drop(look);
            assert_eq!(taking.join().unwrap(), Ok(()));
            assert_eq!(second.join().unwrap(), Ok(false));
        });
        steps.restore().unwrap();
        assert!(steps.look().unwrap().is_some());
        steps.unlock().unwrap();
    }

    #[test]
    fn a_lock_without_its_caller_is_not_made() {
        let steps = steps(false);
        assert!(matches!(steps.lock(LONG, &|| false), Err(CheckpointErrorKind::Busy { .. })));
        let _call = steps.enter().unwrap();
        assert!(matches!(steps.lock(LONG, &|| false), Err(CheckpointErrorKind::Busy { .. })));
        assert_eq!(steps.state(), ProcessState::Running);
        drop(steps.enter().unwrap());
    }

    #[test]
    fn a_second_lock_waits_for_the_first() {
        let steps = steps(false);
        let call = steps.enter().unwrap();
        thread::scope(|scope| {
            let locks: Vec<_> = (0..2).map(|_| scope.spawn(|| steps.lock(LONG, &|| true))).collect();
            assert!(matches!(steps.unlock(), Err(CheckpointErrorKind::WrongState { .. })));
            drop(call);
            let mut ends: Vec<bool> = locks.into_iter().map(|lock| lock.join().unwrap().is_ok()).collect();
            ends.sort_unstable();
            assert_eq!(ends, [false, true]);
        });
        assert_eq!(steps.state(), ProcessState::Locked);
    }

    #[test]
    fn a_panic_of_the_owner_loses_the_device() {
        let steps = steps(true);
        steps.lock(LONG, &|| true).unwrap();
        let (entering, entered) = mpsc::channel();
        let other = Arc::clone(&steps);
        let waits = thread::spawn(move || entering.send(other.enter().map(drop)).unwrap());
        assert!(matches!(steps.checkpoint(), Err(CheckpointErrorKind::Refused { .. })));
        assert_eq!(entered.recv().unwrap(), Err(DeviceLost));
        waits.join().unwrap();
        let expected = CheckpointErrorKind::wrong_state(ProcessState::Failed, ProcessState::Locked);
        assert_eq!(steps.unlock(), Err(expected));
    }

    #[test]
    fn calls_go_on_when_the_process_leaves() {
        let steps = steps(false);
        steps.lock(LONG, &|| true).unwrap();
        let other = Arc::clone(&steps);
        let waits = thread::spawn(move || other.enter().map(drop));
        steps.leave();
        assert_eq!(waits.join().unwrap(), Ok(()));
        assert_eq!(steps.checkpoint(), Err(CheckpointErrorKind::NoDevice));
    }
}
