//! Holds on the memory of a tag, as a `with` statement has them.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::errors::refused;
use crate::process::Here;

/// Keeps the memory of a tag where it is until it is ended, or no longer used.
///
/// In a `with` statement the end of the block ends it.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Hold {
    tag: String,
    holder: String,
    /// There until it is ended.
    hold: Here<Mutex<Option<poorwill::Hold>>>,
}

impl Hold {
    pub(super) fn new(hold: poorwill::Hold) -> Self {
        let (tag, holder) = (hold.tag().to_string(), hold.holder().to_owned());
        Self { tag, holder, hold: Here::new(Mutex::new(Some(hold))) }
    }

    fn is_ended(&self) -> PyResult<bool> {
        Ok(self.hold.get()?.lock().unwrap_or_else(PoisonError::into_inner).is_none())
    }
}

#[pymethods]
impl Hold {
    /// What is held.
    #[getter]
    fn tag(&self) -> &str {
        &self.tag
    }

    /// By whom.
    #[getter]
    fn holder(&self) -> &str {
        &self.holder
    }

    /// Lets the memory go. Doing so again does nothing.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        let ended = self.hold.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(ended));
        Ok(())
    }

    /// Raises PoorwillError when it is ended: nothing would be held.
    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let Self { tag, holder, .. } = slf.get();
        if slf.get().is_ended()? {
            let reason =
                format!("the hold of `{tag}` by {holder} is ended; call `Arena.hold` for another one");
            return Err(refused(reason));
        }
        Ok(slf)
    }

    #[pyo3(signature = (exc_type, exc_value, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc_value: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (_, _, _) = (exc_type, exc_value, traceback);
        self.end(py)
    }

    fn __repr__(&self) -> String {
        let Self { tag, holder, .. } = self;
        let ended = match self.is_ended() {
            Ok(false) => "",
            Ok(true) => ", ended",
            Err(_) => ", of another process",
        };
        format!("<poorwill.Hold of {tag} by {holder}{ended}>")
    }
}
