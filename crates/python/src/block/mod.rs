//! `Block`: a part of an arena's memory, exported by DLPack.

pub(crate) mod dlpack;
mod dtype;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill::{AllocRequest, ByteSize, DeviceSpec, PoolError, Tag};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use self::dlpack::Layout;
pub(crate) use self::dtype::Dtype;
use crate::errors::{closed, failed, invalid, wrong_type};
use crate::process::{ProcessLocal, ProcessOwned};
use crate::registry::{ArenaError, Opened};
use crate::sizes::whole_number;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Block>()
}

/// Frees the block when dropped, except in a forked child.
#[derive(Debug)]
struct Memory {
    opened: ProcessOwned<Arc<Opened>>,
    block: poorwill::Block,
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.opened.is_here() {
            // Only a broken arena can refuse: a block is freed once, by its own arena.
            let _ = self.opened.arena().free(self.block.id);
        }
    }
}

/// An arena's memory as an array of elements, shared by DLPack: `numpy.from_dlpack(block)`.
///
/// It is freed with the last of this object and its arrays. Access while its tag sleeps is a segmentation
/// fault or a GPU error. So is access to a closed arena and, on the host device, from a forked child.
///
/// On a GPU it belongs to the default stream. Other streams' work must complete before it is freed.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Block {
    tag: Tag,
    dtype: Dtype,
    shape: Vec<i64>,
    bytes: u64,
    address: u64,
    device: DeviceSpec,
    /// None once it was freed.
    memory: ProcessLocal<Mutex<Option<Arc<Memory>>>>,
}

impl Block {
    pub(crate) fn take(
        py: Python<'_>,
        opened: Arc<Opened>,
        shape: &Bound<'_, PyAny>,
        dtype: Dtype,
        tag: Tag,
    ) -> PyResult<Self> {
        let shape = shape_of(shape)?;
        let bytes = bytes_of(&shape, dtype)?;
        let device = opened.device().spec().clone();
        let request = AllocRequest::new(bytes, tag.clone());
        let taken = py.detach(move || {
            let block = opened.with(|arena| arena.alloc(&request))?;
            Ok(Memory { opened: ProcessOwned::new(opened), block })
        });
        let memory = taken.map_err(|error: ArenaError| error.raise(py))?;
        let address = memory.block.range.addr;
        let memory = ProcessLocal::new(Mutex::new(Some(Arc::new(memory))));
        Ok(Self { tag, dtype, shape, bytes, address, device, memory })
    }

    fn memory(&self) -> PyResult<MutexGuard<'_, Option<Arc<Memory>>>> {
        Ok(self.memory.get()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn dlpack_device(&self) -> PyResult<dlpack::Device> {
        match self.device {
            DeviceSpec::Cuda { ordinal } => Ok(dlpack::Device::cuda(i32::try_from(ordinal)?)),
            _ => Ok(dlpack::Device::CPU),
        }
    }

    /// The block is freed on the default stream, so the consumer's stream must be ordered with it.
    fn check_stream(&self, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(stream) = stream else { return Ok(()) };
        let known = match self.device {
            // The legacy default stream, and the per-thread one, which waits for it.
            DeviceSpec::Cuda { .. } => matches!(stream.extract::<i64>()?, 1 | 2),
            _ => false,
        };
        if known {
            return Ok(());
        }
        let (stream, device) = (stream.str()?, &self.device);
        Err(PyBufferError::new_err(format!(
            "a block on {device} is not lent to stream {stream}: it is freed on the default stream, which does not \
             wait for others; take it on the default stream, or use poorwill.pool() for tensors"
        )))
    }
}

#[pymethods]
impl Block {
    #[getter]
    fn tag(&self) -> &str {
        self.tag.as_str()
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
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

    /// Its address, the same asleep and awake.
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    /// Name of the device.
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    /// Frees the memory once its last array is gone. Repeating it does nothing.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let memory = self.memory()?.take();
        py.detach(|| drop(memory));
        Ok(())
    }

    /// Exports a DLPack capsule.
    ///
    /// Raises TagError while the tag sleeps. Raises BufferError for another device, a copy, or a GPU stream
    /// that is not ordered with the default stream.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let Some(memory) = self.memory()?.clone() else {
            return Err(closed(format!("this block of `{}` has been freed; take another one", self.tag)));
        };
        let device = self.dlpack_device()?;
        if dl_device.is_some_and(|wanted| wanted != (device.device_type, device.device_id)) {
            let words =
                format!("this block is on {}, and is lent where it is only; copy the array", self.device);
            return Err(PyBufferError::new_err(words));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a block is lent as it is; copy the array instead"));
        }
        self.check_stream(stream)?;
        let state = py.detach(|| memory.opened.with(|arena| arena.tag_state(&self.tag)));
        let state = state.map_err(|error| error.raise(py))?;
        if state.is_asleep() {
            return Err(failed(py, &PoolError::Asleep { op: "lend a block", tag: self.tag.clone(), state }));
        }
        let addr = memory.block.range.addr;
        let layout = Layout { addr, device, dtype: self.dtype.as_dlpack(), shape: &self.shape };
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::capsule(py, memory, layout, versioned)
    }

    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        let dlpack::Device { device_type, device_id } = self.dlpack_device()?;
        Ok((device_type, device_id))
    }

    fn __repr__(&self) -> String {
        let Self { tag, device, shape, .. } = self;
        let freed = match self.memory() {
            Ok(memory) if memory.is_some() => "",
            Ok(_) => ", freed",
            Err(_) => ", of another process",
        };
        let (size, dtype) = (ByteSize(self.bytes), self.dtype.name());
        format!("<poorwill.Block {tag} on {device}: {size}, {shape:?} of {dtype}{freed}>")
    }
}

const SHAPE: &str = "a shape is an int, or a sequence of them";

/// A single number is one dimension.
fn shape_of(shape: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if let Some(size) = dimension(shape)? {
        return Ok(vec![size]);
    }
    let Ok(sizes) = shape.try_iter() else { return Err(wrong_type(SHAPE, shape)) };
    let one = |size: PyResult<Bound<'_, PyAny>>| {
        let size = size?;
        dimension(&size)?.ok_or_else(|| wrong_type("a size is an int", &size))
    };
    sizes.map(one).collect()
}

fn dimension(size: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    match whole_number(size)? {
        None => Ok(None),
        Some(number) => match number.ok().and_then(|number| i64::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => {
                Err(invalid(format!("`{}` is no size of an array: it is from 1 to 2**63 - 1", size.str()?)))
            }
        },
    }
}

/// Size of an array in bytes, at least one.
fn bytes_of(shape: &[i64], dtype: Dtype) -> PyResult<u64> {
    let one = i64::from(dtype.bytes());
    let bytes = shape.iter().try_fold(one, |bytes, size| bytes.checked_mul(*size));
    match bytes.and_then(|bytes| u64::try_from(bytes).ok()) {
        Some(0) => {
            Err(invalid(format!("an array of {shape:?} has no element, and a block has at least one")))
        }
        Some(bytes) => Ok(bytes),
        None => Err(invalid(format!("an array of {shape:?} {} is too large for any device", dtype.name()))),
    }
}
