//! What goes wrong, as Python's exceptions.

use std::fmt::Display;

use poorwill::{OpenError, PoolError};
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyTypeError, PyUserWarning, PyValueError};
use pyo3::prelude::*;

create_exception!(poorwill, PoorwillError, PyException, "What poorwill could not do, and what would help.");
create_exception!(
    poorwill,
    BudgetError,
    PoorwillError,
    "A claim that the budget does not allow, or a budget that nobody knows."
);
create_exception!(
    poorwill,
    ClosedError,
    PoorwillError,
    "Something of an arena that has been closed, or of a block that has been freed."
);
create_exception!(
    poorwill,
    BudgetWarning,
    PyUserWarning,
    "Something took more memory than it had claimed, and the rest of the budget covers it."
);

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("PoorwillError", module.py().get_type::<PoorwillError>())?;
    module.add("BudgetError", module.py().get_type::<BudgetError>())?;
    module.add("ClosedError", module.py().get_type::<ClosedError>())?;
    module.add("BudgetWarning", module.py().get_type::<BudgetWarning>())
}

/// A refusal of the library's, in its words.
pub(crate) fn refused(error: impl Display) -> PyErr {
    PoorwillError::new_err(error.to_string())
}

/// A device, or an arena on it, that would not open.
pub(crate) fn not_opened(error: &OpenError) -> PyErr {
    match error {
        OpenError::Budget(_) | OpenError::Claim(_) | OpenError::Pool(PoolError::InvalidConfig { .. }) => {
            over_budget(error)
        }
        _ => refused(error),
    }
}

/// What was closed or freed before.
pub(crate) fn closed(error: impl Display) -> PyErr {
    ClosedError::new_err(error.to_string())
}

/// What does not fit into a budget, or is not known of one.
pub(crate) fn over_budget(error: impl Display) -> PyErr {
    BudgetError::new_err(error.to_string())
}

/// A value that is none of those that are understood, in the library's words.
pub(crate) fn invalid(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A value of a type that is not understood; `wanted` is a sentence's beginning, as in "a size is an int".
pub(crate) fn wrong_type(wanted: &str, value: &Bound<'_, PyAny>) -> PyErr {
    match value.get_type().name() {
        Ok(name) => PyTypeError::new_err(format!("{wanted}, not {name}")),
        Err(error) => error,
    }
}
