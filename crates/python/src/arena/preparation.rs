//! `Preparation`: backups that run in the background.
//!
//! An arena knows its own, so that none still runs when the process ends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use poorwill::{ByteSize, PoolError, PrepareProgress, PrepareReport as Done};
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;

use super::report::PrepareReport;
use super::request;
use crate::errors::failed;
use crate::process::ProcessLocal;

/// Longest delay of a poll, and so of a signal handler.
const POLL_INTERVAL_MAX: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct RunningPreparation(Mutex<PreparationState>);

#[derive(Debug)]
struct PreparationState {
    /// None once its end was seen.
    running: Option<poorwill::Preparation>,
    progress: PrepareProgress,
    outcome: Option<PreparationOutcome>,
}

type PreparationOutcome = Result<Done, Arc<PoolError>>;

impl RunningPreparation {
    pub(super) fn new(preparation: poorwill::Preparation) -> Arc<Self> {
        let progress = preparation.progress();
        Arc::new(Self(Mutex::new(PreparationState { running: Some(preparation), progress, outcome: None })))
    }

    pub(super) fn cancel(&self) {
        if let Some(preparation) = &self.poll().running {
            preparation.cancel();
        }
    }

    pub(super) fn is_ended(&self) -> bool {
        self.poll().running.is_none()
    }

    pub(super) fn wait_until_ended(&self) {
        // By polling, since `Preparation.wait` may wait for the same one.
        let mut pause = Duration::from_millis(1);
        while !self.is_ended() {
            thread::sleep(pause);
            pause = (pause * 2).min(POLL_INTERVAL_MAX);
        }
    }

    /// The current state. No caller waits while it holds this lock.
    fn poll(&self) -> MutexGuard<'_, PreparationState> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(preparation) = state.running.take() {
            state.progress = preparation.progress();
            if state.progress.is_ended {
                // Returns at once, since it has ended.
                state.outcome = Some(preparation.wait().map_err(Arc::new));
            } else {
                state.running = Some(preparation);
            }
        }
        state
    }
}

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
        Ok(self.0.get()?.poll().progress)
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
        match &running.poll().outcome {
            Some(Ok(report)) => Ok(PrepareReport::from(report.clone())),
            Some(Err(error)) => Err(failed(py, error)),
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
