//! Host functions that a stream calls, and their outcomes.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use poorwill_core::DriverErrorKind;
use poorwill_core::driver::HostWork;

use super::context::Context;
use super::stream::Stream;
use crate::ledger::Result;

#[derive(Default)]
pub(super) struct HostJob {
    work: Mutex<Option<HostWork>>,
    outcome: Mutex<Option<JobOutcome>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JobOutcome {
    Returned,
    Panicked,
}

impl HostJob {
    pub(super) fn new(work: HostWork) -> Arc<Self> {
        Arc::new(Self { work: Mutex::new(Some(work)), outcome: Mutex::new(None) })
    }

    /// The context is entered.
    pub(super) fn launch(self: &Arc<Self>, context: &Context, stream: &Stream) -> Result<()> {
        let user = Arc::into_raw(Arc::clone(self)).cast_mut().cast::<c_void>();
        // SAFETY: C3 for the stream; `run` takes over the reference count that `user` stands for.
        let launched = unsafe { (context.api().launch_host_func)(stream.raw(), run, user) };
        context.api().check(launched).inspect_err(|_| {
            // SAFETY: refused, so `run` will not be called with it.
            drop(unsafe { Arc::from_raw(user.cast_const().cast::<Self>()) });
        })
    }

    /// Call it once the stream has passed it.
    pub(super) fn outcome(&self) -> Result<()> {
        let (name, text) = match *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(JobOutcome::Returned) => return Ok(()),
            Some(JobOutcome::Panicked) => {
                ("work panicked", "a function of the host that the stream called panicked")
            }
            None => ("work lost", "the driver did not call a function of the host that was queued"),
        };
        Err(DriverErrorKind::Device { code: 0, name: name.into(), text: text.into() })
    }

    fn run(&self) {
        let work = self.work.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(work) = work else { return };
        let outcome = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(()) => JobOutcome::Returned,
            Err(payload) => {
                // Dropping the payload may panic again.
                std::mem::forget(payload);
                JobOutcome::Panicked
            }
        };
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }
}

extern "C" fn run(user: *mut c_void) {
    // SAFETY: `launch` made it of an `Arc` for this one call.
    let job = unsafe { Arc::from_raw(user.cast_const().cast::<HostJob>()) };
    job.run();
    // Dropping the last reference may run the caller's code. Its panic must not cross into the driver either.
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(job))) {
        std::mem::forget(payload);
    }
}
