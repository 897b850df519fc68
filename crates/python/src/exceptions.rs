//! The package's exceptions that have no attributes, and how to raise them.

use std::fmt::Display;

use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyUserWarning, PyValueError};
use pyo3::prelude::*;

create_exception!(
    poorwill,
    PoorwillError,
    PyRuntimeError,
    "An operation failed; the message says what would help."
);
create_exception!(
    poorwill,
    BudgetError,
    PoorwillError,
    "A claim or a limit exceeds the budget, or the budget is unknown."
);
create_exception!(poorwill, ClosedError, PoorwillError, "The arena was closed, or the block freed.");
create_exception!(
    poorwill,
    TagError,
    PoorwillError,
    "The arena does not know the tag, or the tag's state does not allow the call."
);
create_exception!(
    poorwill,
    WakeError,
    PoorwillError,
    "A wake failed; everything sleeps as before, with its backups."
);
create_exception!(
    poorwill,
    UndoneError,
    PoorwillError,
    "A group of ranks did not sleep or wake; this one is as it was."
);
create_exception!(
    poorwill,
    BudgetWarning,
    PyUserWarning,
    "More memory was taken than was claimed, and the rest of the budget covers it."
);

pub(crate) fn refused(error: impl Display) -> PyErr {
    PoorwillError::new_err(error.to_string())
}

pub(crate) fn closed(error: impl Display) -> PyErr {
    ClosedError::new_err(error.to_string())
}

pub(crate) fn over_budget(error: impl Display) -> PyErr {
    BudgetError::new_err(error.to_string())
}

pub(crate) fn invalid(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// `wanted` begins the sentence, as in "a size is an int".
pub(crate) fn wrong_type(wanted: &str, value: &Bound<'_, PyAny>) -> PyErr {
    match value.get_type().name() {
        Ok(name) => PyTypeError::new_err(format!("{wanted}, not {name}")),
        Err(error) => error,
    }
}
