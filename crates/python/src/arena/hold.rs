//! `Hold`: keeps a tag's memory in place, as a context manager.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::errors::refused;
use crate::process::ProcessLocal;

/// Keeps the memory of a tag at its address until it is ended or dropped.
///
/// The end of a `with` block ends it.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Hold {
    tag: String,
    holder: String,
    /// None once it is ended.
    hold: ProcessLocal<Mutex<Option<poorwill::Hold>>>,
}

impl Hold {
    pub(super) fn new(hold: poorwill::Hold) -> Self {
        let (tag, holder) = (hold.tag().to_string(), hold.holder().to_owned());
        Self { tag, holder, hold: ProcessLocal::new(Mutex::new(Some(hold))) }
    }

    fn is_ended(&self) -> PyResult<bool> {
        Ok(self.hold.get()?.lock().unwrap_or_else(PoisonError::into_inner).is_none())
    }
}

#[pymethods]
impl Hold {
    /// The held tag.
    #[getter]
    fn tag(&self) -> &str {
        &self.tag
    }

    /// Name of the holder.
    #[getter]
    fn holder(&self) -> &str {
        &self.holder
    }

    /// Ends the hold. Repeating it does nothing.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        let ended = self.hold.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(ended));
        Ok(())
    }

    /// Raises PoorwillError when it has ended, since nothing would be held.
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
