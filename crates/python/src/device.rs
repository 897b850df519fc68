//! Devices as Python names them, and queries that do not open them.

use poorwill::{DeviceSpec, DriverErrorKind, OpenError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors::{invalid, refused, wrong_type};
use crate::sizes::whole_number;

const UNDERSTOOD: &str = "a device is an int, a text like \"cuda:0\" or \"host:8GiB\", or a torch.device";

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(cuda_ordinal, module)?)?;
    module.add_function(wrap_pyfunction!(shared_memory_of_device, module)?)
}

/// Number of a GPU: None or "cuda" for the current one, a number, "cuda:1", or a torch.device.
#[pyfunction]
#[pyo3(signature = (device=None, /))]
fn cuda_ordinal(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<u32> {
    match named(device, py)? {
        DeviceSpec::Cuda { ordinal } => Ok(ordinal),
        other => {
            Err(invalid(format!("`{other}` is no GPU; write \"cuda:0\", or a kind of GPU like \"sm_90\"")))
        }
    }
}

/// Shared memory, in bytes, that a thread block may opt in to on a GPU.
#[pyfunction]
fn shared_memory_of_device(py: Python<'_>, ordinal: u32) -> PyResult<u64> {
    let bytes = py.detach(|| poorwill::shared_memory_per_block_bytes(ordinal));
    bytes.map_err(|error| match &error {
        OpenError::Device { source, .. }
            if matches!(source.kind, DriverErrorKind::InvalidArgument { .. }) =>
        {
            invalid(poorwill::chain(&error))
        }
        _ => refused(poorwill::chain(&error)),
    })
}

/// A number, a text, or an object with `type` and `index` like `torch.device`. Without an index it is the
/// current GPU.
pub(crate) fn named(device: Option<&Bound<'_, PyAny>>, py: Python<'_>) -> PyResult<DeviceSpec> {
    let Some(device) = device else { return current(py) };
    if let Ok(text) = device.cast::<PyString>() {
        // `Display` would run signal handlers and swallow what they raise.
        return match &*text.to_string_lossy() {
            "cuda" => current(py),
            text => text.parse().map_err(invalid),
        };
    }
    if let Some(spec) = numbered(device)? {
        return Ok(spec);
    }
    let (Some(kind), Some(index)) = (device.getattr_opt("type")?, device.getattr_opt("index")?) else {
        return Err(wrong_type(UNDERSTOOD, device));
    };
    match kind.extract::<String>() {
        Ok(kind) if kind == "cuda" => {}
        Ok(_) => return Err(invalid(format!("`{}` is no GPU of NVIDIA's; {UNDERSTOOD}", device.str()?))),
        Err(_) => return Err(wrong_type(UNDERSTOOD, device)),
    }
    if index.is_none() {
        return current(py);
    }
    numbered(&index)?.ok_or_else(|| wrong_type("the index of a device is an int", &index))
}

fn numbered(ordinal: &Bound<'_, PyAny>) -> PyResult<Option<DeviceSpec>> {
    let ordinal = match whole_number(ordinal)? {
        None => return Ok(None),
        Some(number) => number.ok().and_then(|number| u32::try_from(number).ok()).ok_or(ordinal),
    };
    match ordinal {
        Ok(ordinal) => Ok(Some(DeviceSpec::Cuda { ordinal })),
        Err(other) => Err(invalid(format!("`{}` is no number of a GPU; {UNDERSTOOD}", other.str()?))),
    }
}

/// PyTorch's current GPU if PyTorch is in use, otherwise the first. Neither imports nor initializes PyTorch.
fn current(py: Python<'_>) -> PyResult<DeviceSpec> {
    let first = DeviceSpec::Cuda { ordinal: 0 };
    let modules = py.import("sys")?.getattr("modules")?;
    let Ok(torch) = modules.get_item("torch") else { return Ok(first) };
    // During its import attributes may be missing.
    let Some(cuda) = torch.getattr_opt("cuda")? else { return Ok(first) };
    let Some(is_initialized) = cuda.getattr_opt("is_initialized")? else { return Ok(first) };
    if !is_initialized.call0()?.is_truthy()? {
        return Ok(first);
    }
    let ordinal = cuda.call_method0("current_device")?;
    numbered(&ordinal)?.ok_or_else(|| wrong_type("the index of a device is an int", &ordinal))
}
