//! Sizes in bytes as people write them.

use poorwill::{ByteSize, Cap, ParseSizeError};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::errors::{invalid, wrong_type};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(parse_bytes, module)?)
}

/// How many bytes a size like "24GiB", "1.5GiB", "512m" or "1048576" stands for.
///
/// Units are powers of 1024, except for "kB", "MB", "GB" and so on, which are powers of 1000.
/// Raises ValueError for anything else.
#[pyfunction]
#[pyo3(signature = (text, /))]
fn parse_bytes(text: &str) -> PyResult<u64> {
    let size: ByteSize = text.parse().map_err(invalid)?;
    Ok(size.0)
}

/// A size as an int or a text. A fraction of a byte counts as one: it is asked how much is needed.
pub(crate) fn size_needed(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(text) = value.extract::<String>() {
        let size = text.parse::<ByteSize>().map(|size| size.0);
        return size.or_else(|refused| rounded_up(&text).ok_or_else(|| invalid(refused)));
    }
    match whole_number(value)? {
        Some(Ok(bytes)) => Ok(bytes),
        Some(Err(reason)) => Err(invalid(ParseSizeError { text: value.str()?.to_string(), reason })),
        None => Err(wrong_type("a size is an int, in bytes, or a text like \"1.5GiB\"", value)),
    }
}

/// A size like `1.53GiB`, which is no whole number of bytes.
fn rounded_up(text: &str) -> Option<u64> {
    let (whole, rest) = text.trim().split_once('.')?;
    let unit = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    let fraction = rest.strip_suffix(unit).filter(|digits| !digits.is_empty())?;
    let [whole, one] = [whole, "1"].map(|number| format!("{number}{unit}").parse::<ByteSize>());
    let part = format!("0.{fraction}").parse::<Cap>().ok()?.of(one.ok()?.0);
    whole.ok()?.0.checked_add(part)?.checked_add(1)
}

/// The number that an int is, or why it is none that counts something; `None` for what is no int.
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
