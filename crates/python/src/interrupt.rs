//! Calls that a signal ends, such as Ctrl-C.
//!
//! Python runs the handlers of signals on its main thread, between steps of its own. So a call of that thread is
//! carried out by another one. The main thread looks for signals meanwhile, and cancels the call once a handler raises.

use std::convert::Infallible;
use std::panic::resume_unwind;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use poorwill::CancellationToken;
use pyo3::prelude::*;

use crate::errors::refused;
use crate::running::POLL_INTERVAL_MAX;

/// Calls without Python's lock. Raises what a handler raised, after the call has ended.
pub(crate) fn interruptible<T: Send>(py: Python<'_>, call: impl FnOnce() -> T + Send) -> PyResult<T> {
    if !runs_handlers(py)? {
        return Ok(py.detach(call));
    }
    py.detach(|| {
        let token = CancellationToken::default();
        thread::scope(|scope| {
            let (until_ended, ended) = mpsc::channel::<Infallible>();
            let carried_out = || {
                let _until_ended = until_ended;
                token.scope(call)
            };
            let worker = thread::Builder::new().name("poorwill-call".to_owned());
            let worker = worker.spawn_scoped(scope, carried_out).map_err(refused)?;
            let mut raised = None;
            while ended.recv_timeout(POLL_INTERVAL_MAX) == Err(RecvTimeoutError::Timeout) {
                raised = Python::try_attach(signal_raised).and_then(Result::err);
                if raised.is_some() {
                    token.cancel();
                    break;
                }
            }
            let done = worker.join().unwrap_or_else(|panic| resume_unwind(panic));
            raised.map_or(Ok(done), Err)
        })
    })
}

/// Runs the handlers of signals that have come, and returns what one raises.
pub(crate) fn signal_raised(py: Python<'_>) -> PyResult<()> {
    py.check_signals()
}

/// Whether this is the thread on which Python runs them.
fn runs_handlers(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    threading.call_method0("main_thread")?.getattr("ident")?.eq(threading.call_method0("get_ident")?)
}
