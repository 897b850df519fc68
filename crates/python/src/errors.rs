//! What goes wrong, as Python's exceptions.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(poorwill, PoorwillError, PyException, "What poorwill could not do, and what would help.");

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("PoorwillError", module.py().get_type::<PoorwillError>())
}
