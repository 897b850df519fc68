//! Sizes in bytes as users write them.

use poorwill::{ByteSize, ParseSizeError};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::errors::{invalid, wrong_type};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(parse_bytes, module)?)
}

/// Bytes of a size like "24GiB", "1.5GiB", "512m" or "1048576".
///
/// Units are powers of 1024, except for "kB", "MB", "GB" and so on, which are powers of 1000. Raises
/// ValueError for anything else.
#[pyfunction]
#[pyo3(signature = (text, /))]
fn parse_bytes(text: &str) -> PyResult<u64> {
    let size: ByteSize = text.parse().map_err(invalid)?;
    Ok(size.0)
}

pub(crate) fn size_of(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(text) = value.extract::<String>() {
        return text.parse::<ByteSize>().map(|size| size.0).map_err(invalid);
    }
    match whole_number(value)? {
        Some(Ok(bytes)) => Ok(bytes),
        Some(Err(reason)) => Err(invalid(ParseSizeError::new(value.str()?.to_string(), reason))),
        None => Err(wrong_type("a size is an int, in bytes, or a text like \"1.5GiB\"", value)),
    }
}

/// The value of an int, or why it is no `u64`; `None` if it is no int.
pub(crate) fn whole_number(value: &Bound<'_, PyAny>) -> PyResult<Option<Result<u64, &'static str>>> {
    if value.is_instance_of::<PyBool>() {
        return Ok(None);
    }
    let py = value.py();
    match value.extract::<u64>() {
        Ok(number) => Ok(Some(Ok(number))),
        Err(error) if error.is_instance_of::<PyTypeError>(py) => Ok(None),
        Err(error) if error.is_instance_of::<PyOverflowError>(py) => {
            Ok(Some(Err(if value.lt(0)? { "it is negative" } else { "it does not fit into 64 bits" })))
        }
        Err(error) => Err(error),
    }
}
