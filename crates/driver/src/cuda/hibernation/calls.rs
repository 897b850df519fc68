//! The driver's calls, each with a limit, and what their results mean.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use poorwill_core::DriverErrorKind;
use poorwill_core::hibernation::{CheckpointErrorKind, CheckpointStep, ProcessState};

use crate::cuda::ffi::{Api, CheckpointApi, CheckpointArgs, CuResult};
use crate::other_process;

/// How often a caller looks whether a process that does not answer is stopped.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The library, and what it needs for processes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Library {
    pub(super) api: &'static Api,
    pub(super) calls: &'static CheckpointApi,
}

/// A step of one process, as the driver takes it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) step: CheckpointStep,
    pub(super) pid: c_int,
    /// Of a lock.
    pub(super) wait_max: Duration,
}

/// What a call came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallOutcome {
    Done,
    State(c_int),
    Failed(CuResult),
    /// The process has been stopped for so long.
    NoAnswer(Duration),
}

impl Library {
    /// Makes the call on a thread of its own, since it does not end while the process is stopped. A lock that ends later
    /// is undone.
    pub(super) fn call(self, call: Call, answer_max: Duration) -> CallOutcome {
        let (done, outcome) = mpsc::sync_channel(1);
        let is_given_up = Arc::new(AtomicBool::new(false));
        let given_up = Arc::clone(&is_given_up);
        let work = move || {
            let outcome = self.make(call);
            // Not sent where the caller has given up in between.
            let is_undelivered = given_up.swap(true, Ordering::AcqRel) || done.send(outcome).is_err();
            if is_undelivered && call.step == CheckpointStep::Lock && outcome == CallOutcome::Done {
                self.make(Call { step: CheckpointStep::Unlock, ..call });
            }
        };
        if thread::Builder::new().name("poorwill-checkpoint".into()).spawn(work).is_err() {
            return self.make(call);
        }
        let pid = call.pid.cast_unsigned();
        let mut stopped_since = None;
        loop {
            match outcome.recv_timeout(LOOK_EVERY.min(answer_max)) {
                Ok(outcome) => return outcome,
                // The driver's library panicked or ended the thread: nothing more is known.
                Err(RecvTimeoutError::Disconnected) => return CallOutcome::Failed(CuResult::UNKNOWN),
                Err(RecvTimeoutError::Timeout) if !other_process::is_stopped(pid) => stopped_since = None,
                Err(RecvTimeoutError::Timeout) => {
                    let waited = stopped_since.get_or_insert_with(Instant::now).elapsed();
                    if waited >= answer_max {
                        if is_given_up.swap(true, Ordering::AcqRel) {
                            continue; // The call has just ended.
                        }
                        return CallOutcome::NoAnswer(waited);
                    }
                }
            }
        }
    }

    fn make(self, call: Call) -> CallOutcome {
        let mut args = CheckpointArgs::default();
        let (api, pid) = (self.calls, call.pid);
        let code = match call.step {
            CheckpointStep::State | CheckpointStep::Inspect => {
                let mut state: c_int = -1;
                // SAFETY: C2.
                let code = unsafe { (api.state)(pid, &raw mut state) };
                return if code == CuResult::SUCCESS {
                    CallOutcome::State(state)
                } else {
                    CallOutcome::Failed(code)
                };
            }
            CheckpointStep::Lock => {
                args.timeout_ms = timeout_ms(call.wait_max);
                // SAFETY: C2.
                unsafe { (api.lock)(pid, &raw mut args) }
            }
            CheckpointStep::Checkpoint => {
                // SAFETY: C2.
                unsafe { (api.checkpoint)(pid, &raw mut args) }
            }
            CheckpointStep::Restore => {
                // SAFETY: C2.
                unsafe { (api.restore)(pid, &raw mut args) }
            }
            CheckpointStep::Unlock => {
                // SAFETY: C2.
                unsafe { (api.unlock)(pid, &raw mut args) }
            }
        };
        if code == CuResult::SUCCESS { CallOutcome::Done } else { CallOutcome::Failed(code) }
    }

    /// The error of a failed call where the process is there, and stands at `state` as far as the driver says so.
    pub(super) fn error(
        self,
        call: Call,
        code: CuResult,
        state: Option<ProcessState>,
    ) -> CheckpointErrorKind {
        let step = call.step;
        if let (Some(found), Some(wanted)) = (state, step.begins()) {
            if code == CuResult::ILLEGAL_STATE && found != wanted {
                return CheckpointErrorKind::wrong_state(found, wanted);
            }
            if code == CuResult::OPERATING_SYSTEM && step == CheckpointStep::Restore && found == wanted {
                // A restore has failed before, and the driver has given the process up.
                return CheckpointErrorKind::wrong_state(ProcessState::Failed, wanted);
            }
        }
        match code {
            CuResult::NOT_INITIALIZED => CheckpointErrorKind::NoDevice,
            CuResult::NOT_READY if step == CheckpointStep::Lock => {
                CheckpointErrorKind::Busy { wait_max: call.wait_max }
            }
            CuResult::OUT_OF_MEMORY if step == CheckpointStep::Restore => {
                CheckpointErrorKind::OutOfDeviceMemory
            }
            CuResult::OUT_OF_MEMORY => CheckpointErrorKind::OutOfHostMemory,
            CuResult::OPERATING_SYSTEM | CuResult::NOT_PERMITTED if state.is_none() => {
                CheckpointErrorKind::NotPermitted { reason: not_permitted(&self.text(code)) }
            }
            CuResult::NOT_SUPPORTED => {
                CheckpointErrorKind::Unsupported { reason: unsupported(step, &self.text(code)) }
            }
            _ => self.refused(code),
        }
    }

    fn refused(self, code: CuResult) -> CheckpointErrorKind {
        match self.api.error(code) {
            DriverErrorKind::Device { code, name, text } => CheckpointErrorKind::Refused { code, name, text },
            other => CheckpointErrorKind::Unsupported { reason: other.to_string() },
        }
    }

    fn text(self, code: CuResult) -> String {
        self.api.error(code).to_string()
    }
}

/// Rounded up; 0 would wait without a limit.
fn timeout_ms(wait_max: Duration) -> u32 {
    u32::try_from(wait_max.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX).max(1)
}

fn not_permitted(error: &str) -> String {
    format!(
        "the system keeps this process away from it ({error}): it must be of the same user, or this process root; in a \
         container, both must see the same process numbers, and CAP_SYS_PTRACE helps, as does 0 in \
         /proc/sys/kernel/yama/ptrace_scope"
    )
}

fn unsupported(step: CheckpointStep, error: &str) -> String {
    match step {
        CheckpointStep::Restore => format!(
            "the driver cannot put it back ({error}): it has a communicator between ranks, or memory that it shares; end \
             it, and start it again without, or suspend them before"
        ),
        _ => format!(
            "the driver does not support this for it ({error}): memory shared between processes, managed memory and the \
             Multi-Process Service are not supported; use driver 570 or later"
        ),
    }
}

/// `None` for what later drivers may add.
pub(super) fn state_of(number: c_int) -> Option<ProcessState> {
    Some(match number {
        0 => ProcessState::Running,
        1 => ProcessState::Locked,
        2 => ProcessState::Checkpointed,
        3 => ProcessState::Failed,
        4 => ProcessState::Checkpointing,
        5 => ProcessState::Restoring,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_has_always_a_limit() {
        for (wait_max, expected) in [
            (Duration::ZERO, 1),
            (Duration::from_nanos(1), 1),
            (Duration::from_micros(1001), 2),
            (Duration::from_secs(5), 5000),
            (Duration::MAX, u32::MAX),
        ] {
            assert_eq!(timeout_ms(wait_max), expected, "{wait_max:?}");
        }
    }

    #[test]
    fn states_have_the_drivers_numbers() {
        let states: Vec<_> = (0..6).filter_map(state_of).map(ProcessState::as_str).collect();
        assert_eq!(states, ["running", "locked", "checkpointed", "failed", "checkpointing", "restoring"]);
        assert_eq!((state_of(-1), state_of(6)), (None, None));
    }
}
