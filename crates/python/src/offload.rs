//! Host memory that a device accesses in place: buffers of exact size, and views.
//!
//! Exported arrays and views keep the memory. The last one waits for the device's work, without Python's
//! lock.

use std::sync::{Arc, Mutex, PoisonError};

use poorwill::offload::{BufferPin, Switches, View};
use poorwill::{ByteSize, DeviceSpec, offload};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use self::export::{DlpackRequest, driver_error, export, opened, pin_of, switches};
use self::view::DeviceView;
use crate::block::dlpack;
use crate::errors::closed;
use crate::process::ProcessLocal;
use crate::sizes::size_of;

mod export;
mod load;
mod view;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<HostBuffer>()?;
    module.add_class::<DeviceView>()?;
    load::register(module)?;
    module.add_function(wrap_pyfunction!(view::device_view_of, module)?)?;
    module.add_function(wrap_pyfunction!(offload_policy, module)?)
}

/// A value that is dropped once: by a call, or with its object.
type Shared<T> = ProcessLocal<Mutex<Option<Arc<T>>>>;

fn shared<T: Send + Sync>(value: Arc<T>) -> Shared<T> {
    ProcessLocal::new(Mutex::new(Some(value)))
}

fn get<T: Send + Sync>(shared: &Shared<T>) -> PyResult<Option<Arc<T>>> {
    Ok(shared.get()?.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

/// Host memory of exactly `nbytes` bytes, from a device's host arena; its bytes are unspecified.
///
/// `device` is as for `budget`. `pin` True page-locks the memory or raises PoorwillError. "auto" does so
/// where possible for a GPU with memory of its own; otherwise `pageable_because` says why not.
/// POORWILL_DISABLE_PIN=1 and VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 override `pin`.
///
/// DLPack shares it as a flat uint8 array on the CPU: `numpy.from_dlpack(buffer)`. It is freed with the last
/// of this object, its arrays and views. A forked child does not have it.
///
/// Raises OutOfMemoryError, with the requested, held and allowed bytes, where it does not fit.
#[pyclass(frozen, module = "poorwill.offload")]
#[derive(Debug)]
pub(crate) struct HostBuffer {
    bytes: u64,
    address: u64,
    device: DeviceSpec,
    is_pinned: bool,
    pageable_because: Option<String>,
    buffer: Shared<offload::Buffer>,
}

impl HostBuffer {
    fn buffer(&self) -> PyResult<Arc<offload::Buffer>> {
        get(&self.buffer)?.ok_or_else(|| {
            let size = ByteSize(self.bytes);
            closed(format!("this host buffer of {size} has been freed; take another one"))
        })
    }
}

#[pymethods]
impl HostBuffer {
    #[new]
    #[pyo3(
        signature = (nbytes, *, device=None, pin=None),
        text_signature = "(nbytes, *, device=None, pin=\"auto\")"
    )]
    fn new(
        py: Python<'_>,
        nbytes: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        pin: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let bytes = size_of(nbytes)?;
        let pin = pin.map_or(Ok(BufferPin::Auto), pin_of)?;
        let (switches, device) = (switches()?, opened(py, device)?);
        let taken = py.detach(|| offload::Buffer::new(&device, bytes, pin, switches));
        let buffer = taken.map_err(|error| driver_error(py, &error))?;
        Ok(Self {
            bytes,
            address: buffer.addr() as u64,
            device: device.spec().clone(),
            is_pinned: buffer.is_pinned(),
            pageable_because: buffer.pageable_because().map(str::to_owned),
            buffer: shared(Arc::new(buffer)),
        })
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Its address in this process.
    #[getter]
    fn address(&self) -> u64 {
        // Hands the address out. A freed buffer, and a forked child, have only a number.
        if let Ok(Some(buffer)) = get(&self.buffer) {
            let _ = buffer.lend();
        }
        self.address
    }

    /// Name of the device.
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    /// Whether it is page-locked for a GPU.
    #[getter]
    fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    /// Why it is not page-locked; None if it is.
    #[getter]
    fn pageable_because(&self) -> Option<&str> {
        self.pageable_because.as_deref()
    }

    /// The same bytes at their device address.
    ///
    /// Raises PoorwillError for a pageable buffer of a GPU, and with VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1.
    fn device_view(&self, py: Python<'_>) -> PyResult<DeviceView> {
        let view = View::of(&self.buffer()?, switches()?);
        view.map(DeviceView::of).map_err(|error| driver_error(py, &error))
    }

    /// Frees the memory once its last array and view are gone. Repeating it does nothing.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let buffer = self.buffer.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(buffer));
        Ok(())
    }

    /// Exports a DLPack capsule.
    ///
    /// Raises BufferError for another device, a copy, or a stream.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("memory of the CPU has no streams"));
        }
        let buffer = self.buffer()?;
        let bytes = (buffer.lend() as u64, self.bytes);
        let keepalive = Arc::new(ProcessLocal::new(buffer));
        export(py, keepalive, bytes, dlpack::Device::CPU, DlpackRequest { max_version, dl_device, copy })
    }

    #[allow(clippy::unused_self)] // Python calls it of an object.
    fn __dlpack_device__(&self) -> (i32, i32) {
        let dlpack::Device { device_type, device_id } = dlpack::Device::CPU;
        (device_type, device_id)
    }

    fn __repr__(&self) -> String {
        let Self { bytes, device, is_pinned, .. } = self;
        let kind = if *is_pinned { "page-locked" } else { "pageable" };
        let freed = match get(&self.buffer) {
            Ok(Some(_)) => "",
            Ok(None) => ", freed",
            Err(_) => ", of another process",
        };
        format!("<poorwill.offload.HostBuffer for {device}: {}, {kind}{freed}>", ByteSize(*bytes))
    }
}

/// What the environment allows now, by key.
#[pyfunction]
fn offload_policy(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let Switches { pin_off, uva_off, .. } = switches()?;
    let policy = PyDict::new(py);
    policy.set_item("pin", pin_off.is_none())?;
    policy.set_item("pin_because", pin_off)?;
    policy.set_item("uva", uva_off.is_none())?;
    policy.set_item("uva_because", uva_off)?;
    Ok(policy)
}
