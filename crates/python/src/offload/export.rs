//! What buffers, views and checkpoints in host memory have in common.

use poorwill::offload::{BufferPin, Switches};
use poorwill::{Device, DriverError, DriverErrorKind};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyCapsule, PyString};

use crate::block::Dtype;
use crate::block::dlpack::{self, Keepalive, Layout};
use crate::device;
use crate::errors::{invalid, out_of_host_memory, refused, wrong_type};
use crate::registry;

pub(super) fn driver_error(py: Python<'_>, error: &DriverError) -> PyErr {
    match &error.kind {
        DriverErrorKind::OutOfHostMemory { asked_bytes, .. } => out_of_host_memory(py, error, *asked_bytes),
        DriverErrorKind::InvalidArgument { .. } => invalid(error),
        _ => refused(error),
    }
}

pub(super) fn switches() -> PyResult<Switches> {
    Switches::from_env().map_err(refused)
}

pub(super) fn opened(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Device> {
    let any_size = device.is_some_and(|device| device.cast::<PyString>().is_ok_and(|text| text == "host"));
    let spec = device::named(device, py)?;
    registry::device(py, &spec, any_size)
}

pub(super) fn pin_of(pin: &Bound<'_, PyAny>) -> PyResult<BufferPin> {
    const UNDERSTOOD: &str = "pin is True, False, or \"auto\"";
    if let Ok(pin) = pin.cast::<PyBool>() {
        return Ok(if pin.is_true() { BufferPin::Always } else { BufferPin::Never });
    }
    match pin.cast::<PyString>() {
        Ok(text) if text == "auto" => Ok(BufferPin::Auto),
        Ok(text) => {
            Err(invalid(format!("{UNDERSTOOD}, and not `{}`", text.to_string_lossy().escape_debug())))
        }
        Err(_) => Err(wrong_type(UNDERSTOOD, pin)),
    }
}

/// A DLPack consumer's request.
#[derive(Debug, Clone, Copy)]
pub(super) struct DlpackRequest {
    pub(super) max_version: Option<(u32, u32)>,
    pub(super) dl_device: Option<(i32, i32)>,
    pub(super) copy: Option<bool>,
}

/// Exports bytes as a flat array of `uint8`. No work is queued on them, so any stream will do.
pub(super) fn export<'py>(
    py: Python<'py>,
    keepalive: Keepalive,
    (addr, bytes): (u64, u64),
    device: dlpack::Device,
    request: DlpackRequest,
) -> PyResult<Bound<'py, PyCapsule>> {
    let DlpackRequest { max_version, dl_device, copy } = request;
    if dl_device.is_some_and(|wanted| wanted != (device.device_type, device.device_id)) {
        let words = "host memory is lent where it is only; copy the array".to_owned();
        return Err(PyBufferError::new_err(words));
    }
    if copy == Some(true) {
        return Err(PyBufferError::new_err("host memory is lent as it is; copy the array instead"));
    }
    let shape = [i64::try_from(bytes)?];
    let layout = Layout { addr, device, dtype: Dtype::UINT8.as_dlpack(), shape: &shape };
    dlpack::capsule(py, keepalive, layout, max_version.is_some_and(|(major, _)| major >= 1))
}
