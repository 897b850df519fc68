//! Runs a Python callback soon after PyTorch got a segment.
//!
//! An allocation runs under PyTorch's lock, where Python must not. It leaves a *pending call*, which Python's
//! main thread runs between two instructions, with no allocator lock held. One call serves all requests
//! before it, of any thread.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{process, ptr};

use pyo3::ffi;
use pyo3::prelude::*;

static CALLBACK: Mutex<Option<Py<PyAny>>> = Mutex::new(None);
/// Whether there is a callback. Requests read this without a lock; it changes with [`CALLBACK`].
static HAS_CALLBACK: AtomicBool = AtomicBool::new(false);
/// Whether a pending call was left that has not run.
static IS_PENDING: AtomicBool = AtomicBool::new(false);
/// The process that left it.
static LEFT_BY: AtomicU32 = AtomicU32::new(0);

/// Sets what Python's main thread calls after PyTorch got a segment; None unsets it.
#[pyfunction]
#[pyo3(signature = (look))]
pub(super) fn torch_call_afterwards(py: Python<'_>, look: Option<Py<PyAny>>) {
    // No Python runs while the lock is held: the old callback is dropped afterwards.
    let before = py.detach(|| {
        let mut now = lock();
        HAS_CALLBACK.store(look.is_some(), Ordering::Release);
        std::mem::replace(&mut *now, look)
    });
    drop(before);
}

/// PyTorch got a segment. Takes only Python's lock of pending calls, which is held briefly.
pub(super) fn schedule() {
    if !HAS_CALLBACK.load(Ordering::Acquire) || IS_PENDING.swap(true, Ordering::AcqRel) {
        return;
    }
    LEFT_BY.store(process::id(), Ordering::Release);
    // SAFETY: P6.
    let refused = unsafe { ffi::Py_AddPendingCall(Some(run_pending), ptr::null_mut()) };
    if refused != 0 {
        // The list is full. The next request retries.
        IS_PENDING.store(false, Ordering::Release);
    }
}

/// A forked child skips it: the parent left it.
extern "C" fn run_pending(_nothing: *mut c_void) -> c_int {
    IS_PENDING.store(false, Ordering::Release);
    if LEFT_BY.load(Ordering::Acquire) != process::id() {
        return 0;
    }
    // This thread has Python's lock. `try_attach` lets PyO3 drop deferred references now.
    Python::try_attach(run_callback).unwrap_or(0)
}

fn run_callback(py: Python<'_>) -> c_int {
    let Some(callback) = lock().as_ref().map(|callback| callback.clone_ref(py)) else { return 0 };
    match callback.call0(py) {
        Ok(_) => 0,
        Err(error) => {
            error.restore(py);
            -1
        }
    }
}

fn lock() -> MutexGuard<'static, Option<Py<PyAny>>> {
    CALLBACK.lock().unwrap_or_else(PoisonError::into_inner)
}
