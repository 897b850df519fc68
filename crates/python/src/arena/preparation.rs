//! Sleeps that are being prepared in the background.
//!
//! An arena knows the preparations that were begun on it, so that none of them is at work when the process ends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use poorwill::{ByteSize, PoolError, PrepareProgress, PrepareReport as Done};
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;

use super::report::PrepareReport;
use super::request;
use crate::errors::failed;
use crate::process::Here;

/// How long nobody looks whether Python has been interrupted, at most.
const LOOK_EVERY_MAX: Duration = Duration::from_millis(20);

/// A preparation that was begun.
#[derive(Debug)]
pub(super) struct Begun(Mutex<State>);

#[derive(Debug)]
struct State {
    /// There until its end has been seen.
    under_way: Option<poorwill::Preparation>,
    progress: PrepareProgress,
    outcome: Option<Outcome>,
}

type Outcome = Result<Done, Arc<PoolError>>;

impl Begun {
    pub(super) fn new(preparation: poorwill::Preparation) -> Arc<Self> {
        let progress = preparation.progress();
        Arc::new(Self(Mutex::new(State { under_way: Some(preparation), progress, outcome: None })))
    }

    pub(super) fn cancel(&self) {
        if let Some(preparation) = &self.look().under_way {
            preparation.cancel();
        }
    }

    pub(super) fn is_ended(&self) -> bool {
        self.look().under_way.is_none()
    }

    /// What came of it, waiting for that.
    pub(super) fn end(&self) {
        // Whoever else waits looks every now and then, and finds it.
        let mut pause = Duration::from_millis(1);
        while !self.is_ended() {
            thread::sleep(pause);
            pause = (pause * 2).min(LOOK_EVERY_MAX);
        }
    }

    /// How it is now. Nothing waits with this lock held.
    fn look(&self) -> MutexGuard<'_, State> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(preparation) = state.under_way.take() {
            state.progress = preparation.progress();
            if state.progress.is_ended {
                // It has ended, so this does not wait.
                state.outcome = Some(preparation.wait().map_err(Arc::new));
            } else {
                state.under_way = Some(preparation);
            }
        }
        state
    }
}

/// A sleep that is being prepared: backups are made in the background, so that the sleep copies only what has changed
/// by then.
///
/// Nobody has to hold or to wait for it; a sleep or a discard of one of the tags ends it. In a `with` statement the
/// end of the block waits for it, and an exception in the block cancels it.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Preparation(Here<Arc<Begun>>);

impl Preparation {
    pub(super) fn new(begun: Arc<Begun>) -> Self {
        Self(Here::new(begun))
    }

    fn progress(&self) -> PyResult<PrepareProgress> {
        Ok(self.0.get()?.look().progress)
    }
}

#[pymethods]
impl Preparation {
    /// Looked at so far.
    #[getter]
    fn done_bytes(&self) -> PyResult<u64> {
        Ok(self.progress()?.done_bytes)
    }

    /// Live bytes that there were to look at when it began.
    #[getter]
    fn total_bytes(&self) -> PyResult<u64> {
        Ok(self.progress()?.total_bytes)
    }

    /// Whether it has ended, in whatever way.
    #[getter]
    fn is_ended(&self) -> PyResult<bool> {
        Ok(self.progress()?.is_ended)
    }

    /// Asks it to end. What is being copied is finished and kept.
    fn cancel(&self) -> PyResult<()> {
        self.0.get()?.cancel();
        Ok(())
    }

    /// Waits for its end and says what was done.
    ///
    /// Raises TimeoutError when it has not ended after `timeout` seconds; it goes on then. Raises SleepError when
    /// host memory was lacking or the device failed; what was backed up by then stays.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<PrepareReport> {
        let begun = self.0.get()?;
        let patience = timeout.map(request::timeout).transpose()?;
        let deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
        let mut pause = Duration::from_millis(1);
        while !begun.is_ended() {
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
            pause = (pause * 2).min(LOOK_EVERY_MAX);
        }
        match &begun.look().outcome {
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
