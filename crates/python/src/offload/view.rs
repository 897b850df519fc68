//! Host memory at its device address.

use std::sync::Arc;

use poorwill::offload::View;
use poorwill::{ByteSize, DeviceSpec};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use super::export::{DlpackRequest, driver_error, export, opened, switches};
use crate::block::dlpack;
use crate::errors::invalid;
use crate::process::ProcessLocal;

/// Host memory at its device address, without a copy; see `HostBuffer.device_view` and `device_view_of`.
///
/// DLPack shares it as a flat uint8 array on the device. The memory stays until the last of this object and
/// its arrays is gone, which waits for the device's work.
#[pyclass(frozen, module = "poorwill.offload")]
#[derive(Debug)]
pub(crate) struct DeviceView {
    bytes: u64,
    address: u64,
    device: DeviceSpec,
    view: ProcessLocal<Arc<View>>,
}

impl DeviceView {
    pub(super) fn of(view: View) -> Self {
        Self {
            bytes: view.bytes(),
            address: view.device_addr(),
            device: view.device().spec().clone(),
            view: ProcessLocal::new(Arc::new(view)),
        }
    }

    /// `bytes` bytes of it.
    pub(super) fn part(self, offset: u64, bytes: u64) -> Self {
        Self { address: self.address + offset, bytes, ..self }
    }

    fn dlpack_device(&self) -> PyResult<dlpack::Device> {
        match self.device {
            DeviceSpec::Cuda { ordinal } => Ok(dlpack::Device::cuda(i32::try_from(ordinal)?)),
            _ => Ok(dlpack::Device::CPU),
        }
    }
}

#[pymethods]
impl DeviceView {
    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Its address on the device.
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    /// Name of the device.
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    /// Exports a DLPack capsule.
    ///
    /// Raises BufferError for another device, or a copy.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // No work is queued on it, so any stream will do.
        let _ = stream;
        let keepalive = Arc::new(ProcessLocal::new(Arc::clone(self.view.get()?)));
        export(
            py,
            keepalive,
            (self.address, self.bytes),
            self.dlpack_device()?,
            DlpackRequest { max_version, dl_device, copy },
        )
    }

    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        let dlpack::Device { device_type, device_id } = self.dlpack_device()?;
        Ok((device_type, device_id))
    }

    fn __repr__(&self) -> String {
        let Self { bytes, address, device, .. } = self;
        format!("<poorwill.offload.DeviceView of {} at {address:#x} on {device}>", ByteSize(*bytes))
    }
}

/// A device view of `nbytes` of host memory at `address` that another owner allocated.
#[pyfunction]
#[pyo3(signature = (address, nbytes, keep, *, device=None))]
pub(super) fn device_view_of(
    py: Python<'_>,
    address: usize,
    nbytes: usize,
    keep: Py<PyAny>,
    device: Option<&Bound<'_, PyAny>>,
) -> PyResult<DeviceView> {
    let (switches, device) = (switches()?, opened(py, device)?);
    let Some(end) = address.checked_add(nbytes).filter(|_| address != 0) else {
        return Err(invalid(format!("{nbytes} bytes at {address:#x} are no memory")));
    };
    let keep = Box::new(ProcessLocal::new(keep));
    let view = py.detach(|| View::over(&device, address..end, keep, switches));
    view.map(DeviceView::of).map_err(|error| driver_error(py, &error))
}
