//! Has Python look, when PyTorch was given a segment: as soon as the operation that asked for it is over.
//!
//! Nothing can be done within the request, under PyTorch's lock. But it can be left as a *pending call*, which Python's
//! main thread makes between two instructions, as it runs signal handlers: then that thread runs Python code, if within
//! a C function that has called back, and PyTorch calls back with none of its allocator's locks held. Requests of other
//! threads have it called as well, and requests that come before it was made are answered by one call.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::ffi;
use pyo3::prelude::*;

use super::route::routes;

/// What is to be called, while anybody wants to be.
static LOOK: Mutex<Option<Py<PyAny>>> = Mutex::new(None);
/// Whether there is something to be called: what a request looks at, which takes no lock. Changes with [`LOOK`].
static IS_WANTED: AtomicBool = AtomicBool::new(false);
/// Whether a call was left that is not made yet.
static IS_DUE: AtomicBool = AtomicBool::new(false);

/// Has a function without arguments called, in Python's main thread, soon after PyTorch was given a segment; None ends
/// that. What it raises is raised where the main thread is.
#[pyfunction]
#[pyo3(signature = (look))]
pub(super) fn torch_call_afterwards(py: Python<'_>, look: Option<Py<PyAny>>) {
    // No Python runs while the lock is held: who is replaced goes afterwards.
    let before = py.detach(|| {
        let mut now = lock();
        IS_WANTED.store(look.is_some(), Ordering::Release);
        std::mem::replace(&mut *now, look)
    });
    drop(before);
}

/// PyTorch was given a segment. Takes none of Python's locks but that of the list of calls, which is held for moments.
pub(super) fn note() {
    if !IS_WANTED.load(Ordering::Acquire) || IS_DUE.swap(true, Ordering::AcqRel) {
        return;
    }
    // SAFETY: P6.
    let refused = unsafe { ffi::Py_AddPendingCall(Some(call), ptr::null_mut()) };
    if refused != 0 {
        // The list is full. The next request asks again.
        IS_DUE.store(false, Ordering::Release);
    }
}

/// In a forked child nobody is to look: what was left there was left by the parent.
extern "C" fn call(_nothing: *mut c_void) -> c_int {
    IS_DUE.store(false, Ordering::Release);
    if !routes().is_here() {
        return 0;
    }
    // This thread has Python's lock. That PyO3 is told so lets go of references here, and not some time later.
    Python::try_attach(look).unwrap_or(0)
}

fn look(py: Python<'_>) -> c_int {
    let Some(look) = lock().as_ref().map(|look| look.clone_ref(py)) else { return 0 };
    match look.call0(py) {
        Ok(_) => 0,
        Err(error) => {
            error.restore(py);
            -1
        }
    }
}

fn lock() -> MutexGuard<'static, Option<Py<PyAny>>> {
    LOOK.lock().unwrap_or_else(PoisonError::into_inner)
}
