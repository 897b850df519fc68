//! Sizes in bytes as people write them.

use poorwill::{ByteSize, ParseSizeError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

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
    let size: ByteSize =
        text.parse().map_err(|error: ParseSizeError| PyValueError::new_err(error.to_string()))?;
    Ok(size.0)
}
