//! A checkpoint in host memory: its tensors as pieces of buffers, each lent by itself.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use poorwill::checkpoint::{Checkpoint, CheckpointError, Dtype as FileDtype};
use poorwill::offload::{self, BufferPin, HostCheckpoint, How, LoadError, LoadOptions, LoadReport, View};
use poorwill::{ByteSize, DeviceSpec, DriverErrorKind, chain};
use pyo3::exceptions::{PyBufferError, PyFileNotFoundError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use super::{DeviceView, Wish, lend, opened, pin_of, switches};
use crate::block::dlpack;
use crate::errors::{invalid, out_of_host_memory, refused};
use crate::process::Here;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<LoadedTensor>()?;
    module.add_function(wrap_pyfunction!(load_checkpoint, module)?)
}

/// A tensor of a checkpoint that `load_checkpoint` has read, or rather its bytes: a piece of a buffer of host memory.
///
/// It is lent by the DLPack protocol as a flat array of uint8 on the CPU. The buffer goes when neither this, nor an array,
/// nor a view of any of its pieces is left; in a forked child it is not there.
#[pyclass(frozen, module = "poorwill.offload")]
#[derive(Debug)]
pub(crate) struct LoadedTensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
    address: u64,
    device: DeviceSpec,
    /// None where there are no bytes.
    buffer: Option<Piece>,
}

#[derive(Debug)]
struct Piece {
    buffer: Here<Arc<offload::Buffer>>,
    offset: u64,
    is_pinned: bool,
    pageable_because: Option<String>,
}

impl LoadedTensor {
    fn piece(&self) -> PyResult<&Piece> {
        self.buffer.as_ref().ok_or_else(|| invalid("a tensor without elements has no memory"))
    }
}

#[pymethods]
impl LoadedTensor {
    /// Its name, as the file has it.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements, as the format names it: "BF16".
    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype
    }

    /// Its dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Its size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Where it begins in this process; 0 without bytes.
    #[getter]
    fn address(&self) -> u64 {
        // In a forked child it is a number.
        if let Some(Ok(buffer)) = self.buffer.as_ref().map(|piece| piece.buffer.get()) {
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
        self.buffer.as_ref().is_some_and(|piece| piece.is_pinned)
    }

    /// Why it is not page-locked; None if it is, or has no bytes.
    #[getter]
    fn pageable_because(&self) -> Option<&str> {
        self.buffer.as_ref().and_then(|piece| piece.pageable_because.as_deref())
    }

    /// The same bytes as the device sees them.
    ///
    /// Raises PoorwillError where the device does not, as `HostBuffer.device_view`, and ValueError without bytes.
    fn device_view(&self, py: Python<'_>) -> PyResult<DeviceView> {
        let piece = self.piece()?;
        let view = View::of(piece.buffer.get()?, switches()?).map_err(|error| super::raised(py, &error))?;
        let mut seen = DeviceView::of(view);
        (seen.address, seen.bytes) = (seen.address + piece.offset, self.bytes);
        Ok(seen)
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
        let buffer = self.piece()?.buffer.get()?;
        let _ = buffer.lend();
        let kept = Arc::new(Here::new(Arc::clone(buffer)));
        let bytes = (self.address, self.bytes);
        lend(py, kept, bytes, dlpack::Device::CPU, Wish { max_version, dl_device, copy })
    }

    /// Where it is, as the DLPack protocol has it: on the CPU.
    #[allow(clippy::unused_self)] // Python calls it of an object.
    fn __dlpack_device__(&self) -> (i32, i32) {
        let dlpack::Device { kind, ordinal } = dlpack::Device::CPU;
        (kind, ordinal)
    }

    fn __repr__(&self) -> String {
        let Self { name, dtype, shape, bytes, .. } = self;
        let name = name.escape_debug();
        format!("<poorwill.offload.LoadedTensor `{name}`: {dtype} {shape:?}, {}>", ByteSize(*bytes))
    }
}

/// Reads the checkpoint that `paths` make up into host memory, and gives its tensors, in the order of the files, and a
/// dictionary of what was done.
///
/// `dtypes` are those that the caller can have tensors of, by the format's names. `device`, `pin` are as for
/// `HostBuffer`; `readers` is how many read at the same time, 1 to 256, chosen from the machine if it is None. Python
/// code goes on meanwhile, and a signal's handler that raises ends the load: everything is given back then, as after
/// every error.
///
/// Raises ValueError for a tensor of another type, OutOfMemoryError, before anything is read, where there is no room for
/// all of it, FileNotFoundError, and PoorwillError for files that are no checkpoint, or that cannot be read.
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
    let checkpoint = py.detach(|| Checkpoint::open(&paths)).map_err(|error| no_checkpoint(&error))?;
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
        (Err(error), None) => return Err(not_loaded(py, &error)),
    };
    let tensors = loaded.tensors().iter().map(|tensor| {
        let piece = tensor.place.and_then(|place| Some((place.offset, loaded.buffers().get(place.buffer)?)));
        LoadedTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape.clone(),
            bytes: tensor.bytes,
            address: piece.as_ref().map_or(0, |(offset, buffer)| buffer.addr() as u64 + offset),
            device: device.spec().clone(),
            buffer: piece.map(|(offset, buffer)| Piece {
                buffer: Here::new(Arc::clone(buffer)),
                offset,
                is_pinned: buffer.is_pinned(),
                pageable_because: buffer.pageable_because().map(str::to_owned),
            }),
        }
    });
    Ok((tensors.collect(), dictionary(py, loaded.report())?))
}

/// What a handler of a signal's raises, if one has come.
fn signal_raised(py: Python<'_>) -> PyResult<()> {
    py.check_signals()
}

/// Before anything is taken: a tensor that the caller can have none of.
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
        // Two of them are an element of PyTorch's.
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

fn no_checkpoint(error: &CheckpointError) -> PyErr {
    match error {
        CheckpointError::NothingNamed => invalid(chain(error)),
        CheckpointError::NotFound { .. } => PyFileNotFoundError::new_err(chain(error)),
        _ => refused(chain(error)),
    }
}

fn not_loaded(py: Python<'_>, error: &LoadError) -> PyErr {
    match error {
        LoadError::Checkpoint(error) => no_checkpoint(error),
        LoadError::Staging { bytes } => out_of_host_memory(py, chain(error), *bytes),
        LoadError::Memory { source, bytes, .. } => match source.kind {
            DriverErrorKind::OutOfHostMemory { .. } => out_of_host_memory(py, chain(error), *bytes),
            _ => refused(chain(error)),
        },
        _ => refused(chain(error)),
    }
}

/// A report, by the names of its fields.
fn dictionary<'py>(py: Python<'py>, report: &LoadReport) -> PyResult<Bound<'py, PyDict>> {
    let made = PyDict::new(py);
    made.set_item("bytes", report.bytes)?;
    made.set_item("tensors", report.tensors)?;
    made.set_item("host_bytes", report.host_bytes)?;
    made.set_item("buffers", report.buffers)?;
    made.set_item("alignment_bytes", report.alignment_bytes)?;
    made.set_item("seconds", report.seconds)?;
    made.set_item("memory_s", report.memory_s)?;
    made.set_item("readers", report.readers)?;
    made.set_item("piece_bytes", report.piece_bytes)?;
    made.set_item("direct_bytes", report.direct_bytes)?;
    made.set_item("staged_bytes", report.staged_bytes)?;
    made.set_item("buffered_bytes", report.buffered_bytes)?;
    made.set_item("staging_bytes", report.staging_bytes)?;
    made.set_item("pinned", report.pinned)?;
    made.set_item("pageable_because", report.pageable_because.clone())?;
    let mut files = Vec::new();
    for file in &report.files {
        let how = match file.how {
            How::Direct => "direct",
            How::Buffered => "buffered",
            _ => "unread",
        };
        let entry = PyDict::new(py);
        entry.set_item("path", &file.path)?;
        entry.set_item("bytes", file.bytes)?;
        entry.set_item("how", how)?;
        entry.set_item("because", file.because.clone())?;
        files.push(entry);
    }
    made.set_item("files", files)?;
    Ok(made)
}
