//! A checkpoint in host memory: its tensors as slices of buffers, exported one by one.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use poorwill::checkpoint::{Checkpoint, CheckpointError, Dtype as FileDtype};
use poorwill::offload::{
    self, BufferPin, HostCheckpoint, LoadError, LoadOptions, LoadReport, ReadMethod, View,
};
use poorwill::{ByteSize, DeviceSpec, DriverErrorKind, chain};
use pyo3::exceptions::{PyBufferError, PyFileNotFoundError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use super::export::{DlpackRequest, driver_error, export, opened, pin_of, switches};
use super::view::DeviceView;
use crate::block::dlpack;
use crate::errors::{invalid, out_of_host_memory, refused};
use crate::interrupt::signal_raised;
use crate::process::ProcessLocal;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<LoadedTensor>()?;
    module.add_function(wrap_pyfunction!(load_checkpoint, module)?)
}

/// The bytes of a tensor that `load_checkpoint` read: a slice of a host buffer.
///
/// DLPack shares it as a flat uint8 array on the CPU. The buffer is freed with the last of its tensors, their
/// arrays and views.
#[pyclass(frozen, module = "poorwill.offload")]
#[derive(Debug)]
pub(crate) struct LoadedTensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
    address: u64,
    device: DeviceSpec,
    /// None without bytes.
    buffer: Option<BufferSlice>,
}

#[derive(Debug)]
struct BufferSlice {
    buffer: ProcessLocal<Arc<offload::Buffer>>,
    offset: u64,
    is_pinned: bool,
    pageable_because: Option<String>,
}

impl LoadedTensor {
    fn slice(&self) -> PyResult<&BufferSlice> {
        self.buffer.as_ref().ok_or_else(|| invalid("a tensor without elements has no memory"))
    }
}

#[pymethods]
impl LoadedTensor {
    /// Its name in the file.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Element type, as the format names it, like "BF16".
    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype
    }

    /// Elements in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Its address in this process; 0 without bytes.
    #[getter]
    fn address(&self) -> u64 {
        // Hands the address out. A forked child has only a number.
        if let Some(Ok(buffer)) = self.buffer.as_ref().map(|slice| slice.buffer.get()) {
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
        self.buffer.as_ref().is_some_and(|slice| slice.is_pinned)
    }

    /// Why it is not page-locked; None if it is, or has no bytes.
    #[getter]
    fn pageable_because(&self) -> Option<&str> {
        self.buffer.as_ref().and_then(|slice| slice.pageable_because.as_deref())
    }

    /// The same bytes at their device address.
    ///
    /// Raises PoorwillError as `HostBuffer.device_view`, and ValueError for no bytes.
    fn device_view(&self, py: Python<'_>) -> PyResult<DeviceView> {
        let slice = self.slice()?;
        let view = View::of(slice.buffer.get()?, switches()?).map_err(|error| driver_error(py, &error))?;
        Ok(DeviceView::of(view).part(slice.offset, self.bytes))
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
        let buffer = self.slice()?.buffer.get()?;
        let _ = buffer.lend();
        let keepalive = Arc::new(ProcessLocal::new(Arc::clone(buffer)));
        let bytes = (self.address, self.bytes);
        export(py, keepalive, bytes, dlpack::Device::CPU, DlpackRequest { max_version, dl_device, copy })
    }

    #[allow(clippy::unused_self)] // Python calls it of an object.
    fn __dlpack_device__(&self) -> (i32, i32) {
        let dlpack::Device { device_type, device_id } = dlpack::Device::CPU;
        (device_type, device_id)
    }

    fn __repr__(&self) -> String {
        let Self { name, dtype, shape, bytes, .. } = self;
        let name = name.escape_debug();
        format!("<poorwill.offload.LoadedTensor `{name}`: {dtype} {shape:?}, {}>", ByteSize(*bytes))
    }
}

/// Reads a checkpoint into host memory; returns its tensors in file order, and a report.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // They are made for the call.
#[pyo3(
    signature = (paths, dtypes, *, device=None, pin=None, readers=None),
    text_signature = "(paths, dtypes, *, device=None, pin=\"auto\", readers=None)"
)]
fn load_checkpoint<'py>(
    py: Python<'py>,
    paths: Vec<PathBuf>,
    dtypes: Vec<String>,
    device: Option<&Bound<'py, PyAny>>,
    pin: Option<&Bound<'py, PyAny>>,
    readers: Option<usize>,
) -> PyResult<(Vec<LoadedTensor>, Bound<'py, PyDict>)> {
    let pin = pin.map_or(Ok(BufferPin::Auto), pin_of)?;
    let readers = readers.map(|readers| {
        let allowed = NonZeroUsize::new(readers).filter(|readers| readers.get() <= 256);
        allowed.ok_or_else(|| invalid(format!("readers is {readers}, and can be 1 to 256")))
    });
    let (switches, readers) = (switches()?, readers.transpose()?);
    let checkpoint = py.detach(|| Checkpoint::open(&paths)).map_err(|error| checkpoint_error(&error))?;
    check_dtypes(&checkpoint, &dtypes)?;
    let device = opened(py, device)?;
    let options = LoadOptions::default().pinning(pin).switching(switches).reading_with(readers);
    let mut signalled = None;
    let loaded = py.detach(|| {
        HostCheckpoint::load(&device, &checkpoint, &options, &mut |_| {
            match Python::try_attach(signal_raised) {
                Some(Ok(())) => ControlFlow::Continue(()),
                Some(Err(raised)) => {
                    signalled = Some(raised);
                    ControlFlow::Break(())
                }
                // Python is ending.
                None => ControlFlow::Break(()),
            }
        })
    });
    let loaded = match (loaded, signalled) {
        (Ok(loaded), None) => loaded,
        (outcome, Some(raised)) => {
            py.detach(|| drop(outcome));
            return Err(raised);
        }
        (Err(error), None) => return Err(load_error(py, &error)),
    };
    let tensors = loaded.tensors().iter().map(|tensor| {
        let slice =
            tensor.location.and_then(|place| Some((place.offset, loaded.buffers().get(place.buffer)?)));
        LoadedTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape.clone(),
            bytes: tensor.bytes,
            address: slice.as_ref().map_or(0, |(offset, buffer)| buffer.addr() as u64 + offset),
            device: device.spec().clone(),
            buffer: slice.map(|(offset, buffer)| BufferSlice {
                buffer: ProcessLocal::new(Arc::clone(buffer)),
                offset,
                is_pinned: buffer.is_pinned(),
                pageable_because: buffer.pageable_because().map(str::to_owned),
            }),
        }
    });
    Ok((tensors.collect(), report_dict(py, loaded.report())?))
}

/// Fails for a tensor that the caller cannot have, before anything is allocated.
fn check_dtypes(checkpoint: &Checkpoint, dtypes: &[String]) -> PyResult<()> {
    for tensor in checkpoint.tensors() {
        // A file may name its tensors anything, at any length.
        let name: String = tensor.name.chars().take(100).flat_map(char::escape_debug).collect();
        let dtype = tensor.dtype.to_string();
        if !dtypes.contains(&dtype) {
            return Err(invalid(format!(
                "tensor `{name}` is of {dtype}, of which this PyTorch has no tensors; take a newer one, or a checkpoint of \
                 another type"
            )));
        }
        // PyTorch packs two of them into an element.
        let last = tensor.shape.last().copied().unwrap_or(1);
        if tensor.dtype == FileDtype::F4 && !last.is_multiple_of(2) {
            let shape = &tensor.shape;
            return Err(invalid(format!(
                "tensor `{name}` is of {dtype} and has the shape {shape:?}; PyTorch has pairs of these, so its last dimension \
                 would have to be even"
            )));
        }
    }
    Ok(())
}

fn checkpoint_error(error: &CheckpointError) -> PyErr {
    match error {
        CheckpointError::NothingNamed => invalid(chain(error)),
        CheckpointError::NotFound { .. } => PyFileNotFoundError::new_err(chain(error)),
        _ => refused(chain(error)),
    }
}

fn load_error(py: Python<'_>, error: &LoadError) -> PyErr {
    match error {
        LoadError::Checkpoint(error) => checkpoint_error(error),
        LoadError::Staging { bytes } => out_of_host_memory(py, chain(error), *bytes),
        LoadError::Memory { source, bytes, .. } => match source.kind {
            DriverErrorKind::OutOfHostMemory { .. } => out_of_host_memory(py, chain(error), *bytes),
            _ => refused(chain(error)),
        },
        _ => refused(chain(error)),
    }
}

/// By the names of its fields.
fn report_dict<'py>(py: Python<'py>, report: &LoadReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("tensors", report.tensors)?;
    dict.set_item("host_bytes", report.host_bytes)?;
    dict.set_item("buffers", report.buffers)?;
    dict.set_item("alignment_bytes", report.alignment_bytes)?;
    dict.set_item("seconds", report.seconds)?;
    dict.set_item("memory_s", report.memory_s)?;
    dict.set_item("readers", report.readers)?;
    dict.set_item("piece_bytes", report.piece_bytes)?;
    dict.set_item("direct_bytes", report.direct_bytes)?;
    dict.set_item("staged_bytes", report.staged_bytes)?;
    dict.set_item("buffered_bytes", report.buffered_bytes)?;
    dict.set_item("staging_bytes", report.staging_bytes)?;
    dict.set_item("pinned", report.pinned)?;
    dict.set_item("pageable_because", report.pageable_because.clone())?;
    let mut files = Vec::new();
    for file in &report.files {
        let how = match file.how {
            ReadMethod::Direct => "direct",
            ReadMethod::Buffered => "buffered",
            _ => "unread",
        };
        let entry = PyDict::new(py);
        entry.set_item("path", &file.path)?;
        entry.set_item("bytes", file.bytes)?;
        entry.set_item("how", how)?;
        entry.set_item("because", file.because.clone())?;
        files.push(entry);
    }
    dict.set_item("files", files)?;
    Ok(dict)
}
