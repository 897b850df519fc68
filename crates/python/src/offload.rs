//! Host memory that a device reads where it is: buffers of exact size, and views of them and of others' memory.
//!
//! What is lent by DLPack keeps what is behind it, and so does a view. The last to go has the device's work waited
//! for, without Python's lock.

use std::sync::{Arc, Mutex, PoisonError};

use poorwill::offload::{BufferPin, Switches, View};
use poorwill::{ByteSize, Device, DeviceSpec, DriverError, DriverErrorKind, offload};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyCapsule, PyDict, PyString};

use crate::arena::device_for_host_memory;
use crate::block::Dtype;
use crate::block::dlpack::{self, Kept, Layout};
use crate::device;
use crate::errors::{closed, invalid, out_of_host_memory, refused, wrong_type};
use crate::process::Here;
use crate::sizes::size_of;

mod load;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<HostBuffer>()?;
    module.add_class::<DeviceView>()?;
    load::register(module)?;
    module.add_function(wrap_pyfunction!(device_view_of, module)?)?;
    module.add_function(wrap_pyfunction!(offload_policy, module)?)
}

/// What the library says, as an exception.
fn raised(py: Python<'_>, error: &DriverError) -> PyErr {
    match &error.kind {
        DriverErrorKind::OutOfHostMemory { asked_bytes, .. } => out_of_host_memory(py, error, *asked_bytes),
        DriverErrorKind::InvalidArgument { .. } => invalid(error),
        _ => refused(error),
    }
}

fn switches() -> PyResult<Switches> {
    Switches::here().map_err(refused)
}

/// The device that is named, open.
fn opened(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Device> {
    let any_size = device.is_some_and(|device| device.cast::<PyString>().is_ok_and(|text| text == "host"));
    let spec = device::named(device, py)?;
    device_for_host_memory(py, &spec, any_size)
}

fn pin_of(pin: &Bound<'_, PyAny>) -> PyResult<BufferPin> {
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

/// Something that goes once, on the caller's word or with the object.
type Place<T> = Here<Mutex<Option<Arc<T>>>>;

fn place<T: Send + Sync>(value: Arc<T>) -> Place<T> {
    Here::new(Mutex::new(Some(value)))
}

fn held<T: Send + Sync>(place: &Place<T>) -> PyResult<Option<Arc<T>>> {
    Ok(place.get()?.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

/// What a library says of the capsule that it wants.
#[derive(Debug, Clone, Copy)]
struct Wish {
    max_version: Option<(u32, u32)>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
}

/// Lends bytes as a flat array of `uint8`. They are as they are: no work is queued on them, so any stream will do.
fn lend<'py>(
    py: Python<'py>,
    kept: Kept,
    (addr, bytes): (u64, u64),
    device: dlpack::Device,
    wish: Wish,
) -> PyResult<Bound<'py, PyCapsule>> {
    let Wish { max_version, dl_device, copy } = wish;
    if dl_device.is_some_and(|wanted| wanted != (device.kind, device.ordinal)) {
        let words = "host memory is lent where it is only; copy the array".to_owned();
        return Err(PyBufferError::new_err(words));
    }
    if copy == Some(true) {
        return Err(PyBufferError::new_err("host memory is lent as it is; copy the array instead"));
    }
    let shape = [i64::try_from(bytes)?];
    let layout = Layout { addr, device, dtype: Dtype::UINT8.as_dlpack(), shape: &shape };
    dlpack::capsule(py, kept, layout, max_version.is_some_and(|(major, _)| major >= 1))
}

/// Host memory of exactly `nbytes` bytes, of a device's host arena.
///
/// `device` is named as for `budget`. With `pin` True the memory is page-locked for the device, or this raises
/// PoorwillError; with "auto" it is where the GPU has memory of its own and the machine does it, and otherwise
/// `pageable_because` says why not; with False it is not. POORWILL_DISABLE_PIN=1 and
/// VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 win over `pin`. What the bytes are at first is unspecified.
///
/// It is lent by the DLPack protocol as a flat array of uint8 on the CPU: `numpy.from_dlpack(buffer)`. The memory goes
/// when neither this, nor an array, nor a view of it is left; in a forked child it is not there.
///
/// Raises OutOfMemoryError, with what is asked, held and allowed, where there is no room for it.
#[pyclass(frozen, module = "poorwill.offload")]
#[derive(Debug)]
pub(crate) struct HostBuffer {
    bytes: u64,
    address: u64,
    device: DeviceSpec,
    is_pinned: bool,
    pageable_because: Option<String>,
    buffer: Place<offload::Buffer>,
}

impl HostBuffer {
    fn buffer(&self) -> PyResult<Arc<offload::Buffer>> {
        held(&self.buffer)?.ok_or_else(|| {
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
        let buffer = taken.map_err(|error| raised(py, &error))?;
        Ok(Self {
            bytes,
            address: buffer.addr() as u64,
            device: device.spec().clone(),
            is_pinned: buffer.is_pinned(),
            pageable_because: buffer.pageable_because().map(str::to_owned),
            buffer: place(Arc::new(buffer)),
        })
    }

    /// Its size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Where it begins in this process.
    #[getter]
    fn address(&self) -> u64 {
        // Of one that was freed, and in a forked child, it is a number.
        if let Ok(Some(buffer)) = held(&self.buffer) {
            let _ = buffer.lend();
        }
        self.address
    }

    /// The device, by name.
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

    /// The same bytes as the device sees them.
    ///
    /// Raises PoorwillError where the device does not: for a pageable buffer of a GPU, and with
    /// VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1.
    fn device_view(&self, py: Python<'_>) -> PyResult<DeviceView> {
        let view = View::of(&self.buffer()?, switches()?);
        view.map(DeviceView::of).map_err(|error| raised(py, &error))
    }

    /// Lets go of the memory. Arrays and views that were made of it keep it until they are gone, too. Freeing again
    /// does nothing.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let buffer = self.buffer.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(buffer));
        Ok(())
    }

    /// A capsule of the DLPack protocol; `max_version` says which of its versions is understood.
    ///
    /// Raises BufferError for another device, and for a copy.
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
        let kept = Arc::new(Here::new(buffer));
        lend(py, kept, bytes, dlpack::Device::CPU, Wish { max_version, dl_device, copy })
    }

    /// Where it is, as the DLPack protocol has it: on the CPU.
    #[allow(clippy::unused_self)] // Python calls it of an object.
    fn __dlpack_device__(&self) -> (i32, i32) {
        let dlpack::Device { kind, ordinal } = dlpack::Device::CPU;
        (kind, ordinal)
    }

    fn __repr__(&self) -> String {
        let Self { bytes, device, is_pinned, .. } = self;
        let kind = if *is_pinned { "page-locked" } else { "pageable" };
        let freed = match held(&self.buffer) {
            Ok(Some(_)) => "",
            Ok(None) => ", freed",
            Err(_) => ", of another process",
        };
        format!("<poorwill.offload.HostBuffer for {device}: {}, {kind}{freed}>", ByteSize(*bytes))
    }
}

/// Host memory as a device sees it, without a copy: `HostBuffer.device_view` and `device_view_of` make one.
///
/// It is lent by the DLPack protocol as a flat array of uint8 on the device. The memory stays as long as this or an
/// array of it is left, and the last to go waits for the device's work.
#[pyclass(frozen, module = "poorwill.offload")]
#[derive(Debug)]
pub(crate) struct DeviceView {
    bytes: u64,
    address: u64,
    device: DeviceSpec,
    view: Here<Arc<View>>,
}

impl DeviceView {
    fn of(view: View) -> Self {
        Self {
            bytes: view.bytes(),
            address: view.device_addr(),
            device: view.device().spec().clone(),
            view: Here::new(Arc::new(view)),
        }
    }

    fn place(&self) -> PyResult<dlpack::Device> {
        match self.device {
            DeviceSpec::Cuda { ordinal } => Ok(dlpack::Device::cuda(i32::try_from(ordinal)?)),
            _ => Ok(dlpack::Device::CPU),
        }
    }
}

#[pymethods]
impl DeviceView {
    /// Its size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Where the device sees it.
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    /// The device, by name.
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    /// A capsule of the DLPack protocol; `max_version` says which of its versions is understood.
    ///
    /// Raises BufferError for another device, and for a copy.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // Nothing is queued on it, whichever stream that would be.
        let _ = stream;
        let kept = Arc::new(Here::new(Arc::clone(self.view.get()?)));
        lend(py, kept, (self.address, self.bytes), self.place()?, Wish { max_version, dl_device, copy })
    }

    /// Where it is, as the DLPack protocol has it: (1, 0) for the host device, (2, N) for a GPU.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        let dlpack::Device { kind, ordinal } = self.place()?;
        Ok((kind, ordinal))
    }

    fn __repr__(&self) -> String {
        let Self { bytes, address, device, .. } = self;
        format!("<poorwill.offload.DeviceView of {} at {address:#x} on {device}>", ByteSize(*bytes))
    }
}

/// `nbytes` of host memory of somebody else's at `address`, as the device sees them. `keep` is what keeps the memory,
/// and is held until the last array of the view has gone.
///
/// Memory that is page-locked, by whomever, is seen as it is; other memory is page-locked in place, in whole pages,
/// until its last view has gone. It must not be freed before.
///
/// Raises ValueError for no bytes and for memory that shares a page with such as somebody else has page-locked, and
/// PoorwillError where it cannot be page-locked, or a variable of the environment says not to.
#[pyfunction]
#[pyo3(signature = (address, nbytes, keep, *, device=None))]
fn device_view_of(
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
    let keep = Box::new(Here::new(keep));
    let view = py.detach(|| View::over(&device, address..end, keep, switches));
    view.map(DeviceView::of).map_err(|error| raised(py, &error))
}

/// What the environment turns off now: `pin` and `uva` are whether host memory may be page-locked, and seen in place;
/// `pin_because` and `uva_because` name the variable where not.
///
/// Raises PoorwillError for one that is neither 0 nor 1.
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
