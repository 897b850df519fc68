//! `Preparation`: backups that run in the background.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use poorwill::{ByteSize, PoolError, PrepareProgress};
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;

use crate::errors::failed;
use crate::process::ProcessLocal;
use crate::report::PrepareReport;
use crate::request;
use crate::running::{POLL_INTERVAL_MAX, RunningPreparation};

/// Backups in the background, so that a later sleep copies only what changed since.
///
/// A sleep or discard of one of its tags ends it. The end of a `with` block waits for it, or cancels it after
/// an exception.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Preparation(ProcessLocal<Arc<RunningPreparation>>);

impl Preparation {
    pub(super) fn new(running: Arc<RunningPreparation>) -> Self {
        Self(ProcessLocal::new(running))
    }

    fn progress(&self) -> PyResult<PrepareProgress> {
        Ok(self.0.get()?.progress())
    }
}

#[pymethods]
impl Preparation {
    /// Bytes processed so far.
    #[getter]
    fn done_bytes(&self) -> PyResult<u64> {
        Ok(self.progress()?.done_bytes)
    }

    /// Live bytes when it began.
    #[getter]
    fn total_bytes(&self) -> PyResult<u64> {
        Ok(self.progress()?.total_bytes)
    }

    /// Whether it has ended, for whatever reason.
    #[getter]
    fn is_ended(&self) -> PyResult<bool> {
        Ok(self.progress()?.is_ended)
    }

    /// Requests its end. Copies in progress are finished and kept.
    fn cancel(&self) -> PyResult<()> {
        self.0.get()?.cancel();
        Ok(())
    }

    /// Waits for its end and reports what was done.
    ///
    /// Raises TimeoutError after `timeout` seconds; the preparation continues. Raises SleepError when host
    /// memory was missing or the device failed; finished backups stay.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<PrepareReport> {
        let running = self.0.get()?;
        let timeout = timeout.map(request::timeout).transpose()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut pause = Duration::from_millis(1);
        while !running.is_ended() {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                let PrepareProgress { done_bytes, total_bytes, .. } = self.progress()?;
                let [done, total] = [done_bytes, total_bytes].map(ByteSize);
                return Err(PyTimeoutError::new_err(format!(
                    "the preparation is at {done} of {total}, and goes on; wait longer, or cancel it"
                )));
            }
            py.detach(|| thread::sleep(pause.min(left.unwrap_or(pause))));
            py.check_signals()?;
            pause = (pause * 2).min(POLL_INTERVAL_MAX);
        }
        match running.outcome() {
            Some(Ok(report)) => Ok(PrepareReport::from(report)),
            Some(Err(error)) => Err(failed(py, &error)),
            None => Err(failed(py, &PoolError::Poisoned)),
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (exc_type, exc_value, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc_value: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (_, _) = (exc_value, traceback);
        if exc_type.is_none() {
            return self.wait(py, None).map(drop);
        }
        self.cancel()
    }

    fn __repr__(&self) -> String {
        let Ok(PrepareProgress { done_bytes, total_bytes, is_ended, .. }) = self.progress() else {
            return "<poorwill.Preparation of another process>".to_owned();
        };
        let [done, total] = [done_bytes, total_bytes].map(ByteSize);
        let ended = if is_ended { ", ended" } else { "" };
        format!("<poorwill.Preparation: {done} of {total}{ended}>")
    }
}
