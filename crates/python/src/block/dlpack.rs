//! DLPack 1.0, and the unversioned protocol before it: how NumPy and PyTorch share memory.
//!
//! A consumer renames the capsule and calls its deleter when it is done, on any thread, with Python's lock or
//! without. An unconsumed capsule calls it itself. Names follow `dlpack.h`.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// `DLDevice`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Device {
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
}

impl Device {
    pub(crate) const CPU: Self = Self { device_type: 1, device_id: 0 };

    pub(crate) fn cuda(device_id: i32) -> Self {
        Self { device_type: 2, device_id }
    }
}

/// `DLDataType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DataType {
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
}

#[derive(Debug)]
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// Called once.
type Deleter<M> = unsafe extern "C" fn(*mut M);

/// `DLManagedTensor`.
#[derive(Debug)]
#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    manager_ctx: *mut c_void,
    deleter: Option<Deleter<Self>>,
}

/// `DLManagedTensorVersioned`.
#[derive(Debug)]
#[repr(C)]
struct ManagedTensorVersioned {
    major: u32,
    minor: u32,
    manager_ctx: *mut c_void,
    deleter: Option<Deleter<Self>>,
    flags: u64,
    tensor: Tensor,
}

trait Managed: Sized {
    /// Name of an unconsumed capsule.
    const NAME: &'static CStr;

    fn of(tensor: Tensor) -> Self;
}

impl Managed for ManagedTensor {
    const NAME: &'static CStr = c"dltensor";

    fn of(tensor: Tensor) -> Self {
        Self { tensor, manager_ctx: ptr::null_mut(), deleter: Some(deleter::<Self>) }
    }
}

impl Managed for ManagedTensorVersioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn of(tensor: Tensor) -> Self {
        let (manager_ctx, deleter) = (ptr::null_mut(), Some(deleter::<Self> as Deleter<Self>));
        Self { major: 1, minor: 0, manager_ctx, deleter, flags: 0, tensor }
    }
}

/// What a capsule points to. `managed` comes first, so that both have one address.
#[repr(C)]
struct Exported<M> {
    managed: M,
    /// The tensor's shape and strides point here.
    _dimensions: Vec<i64>,
    _memory: Keepalive,
}

/// Keeps exported memory alive. It may be dropped on any thread, with Python's lock or without.
pub(crate) type Keepalive = Arc<dyn Any + Send + Sync>;

/// A dense array in C order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout<'a> {
    pub(crate) addr: u64,
    pub(crate) device: Device,
    pub(crate) dtype: DataType,
    pub(crate) shape: &'a [i64],
}

pub(crate) fn capsule<'py>(
    py: Python<'py>,
    memory: Keepalive,
    layout: Layout<'_>,
    versioned: bool,
) -> PyResult<Bound<'py, PyCapsule>> {
    if versioned {
        export::<ManagedTensorVersioned>(py, memory, layout)
    } else {
        export::<ManagedTensor>(py, memory, layout)
    }
}

fn export<'py, M: Managed>(
    py: Python<'py>,
    memory: Keepalive,
    layout: Layout<'_>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let Layout { addr, device, dtype, shape } = layout;
    let mut dimensions = [shape, &strides(shape)].concat();
    // Moving a vector does not move its elements.
    let (shape_part, strides_part) = dimensions.split_at_mut(shape.len());
    let tensor = Tensor {
        data: ptr::with_exposed_provenance_mut(usize::try_from(addr)?),
        device,
        dimensions: i32::try_from(shape.len())?,
        dtype,
        shape: shape_part.as_mut_ptr(),
        strides: strides_part.as_mut_ptr(),
        byte_offset: 0,
    };
    let exported = Box::new(Exported { managed: M::of(tensor), _dimensions: dimensions, _memory: memory });
    let exported = NonNull::from(Box::leak(exported)).cast::<c_void>();
    // SAFETY: P1: the pointer is to an `Exported<M>`, as the name says, and lives until its deleter runs.
    // `capsule_destructor::<M>` runs that, on any thread, unless a consumer took it over.
    let capsule = unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, exported, M::NAME, Some(capsule_destructor::<M>))
    };
    if capsule.is_err() {
        // SAFETY: P1: there is no capsule, so this is the only pointer to it.
        unsafe { deleter::<M>(exported.as_ptr().cast()) };
    }
    capsule
}

/// In elements, by dimension. The total size fits, so these products do.
fn strides(shape: &[i64]) -> Vec<i64> {
    (0..shape.len()).map(|dimension| shape[dimension + 1..].iter().product()).collect()
}

/// Frees what was exported.
///
/// # Safety
/// P1: `exported` came from a capsule with `M`'s name, and is not used afterwards.
unsafe extern "C" fn deleter<M: Managed>(exported: *mut M) {
    if exported.is_null() {
        return;
    }
    // SAFETY: P1: it is the first field of a boxed `Exported<M>`, and nothing else uses it any more.
    let exported = unsafe { Box::from_raw(exported.cast::<Exported<M>>()) };
    let gil = GilGuard::lock();
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(exported))) {
        // No panic may cross into C; dropping the payload might panic again.
        mem::forget(panic);
    }
    drop(gil);
}

/// Takes Python's lock on a Python thread. A library may have released it below a frame of ours, and PyO3
/// would release it again. On other threads the dropped value takes the lock itself.
struct GilGuard(Option<ffi::PyGILState_STATE>);

impl GilGuard {
    fn lock() -> Self {
        // SAFETY: P1: callable on any thread, with the lock or without.
        let is_python_thread = unsafe { ffi::Py_IsInitialized() } != 0;
        // SAFETY: as above.
        let is_python_thread = is_python_thread && !unsafe { ffi::PyGILState_GetThisThreadState() }.is_null();
        // SAFETY: P1: this thread has a state, and may take the lock whether it has it or not.
        Self(is_python_thread.then(|| unsafe { ffi::PyGILState_Ensure() }))
    }
}

impl Drop for GilGuard {
    fn drop(&mut self) {
        if let Some(state) = self.0.take() {
            // SAFETY: P1: releases what this thread took, once.
            unsafe { ffi::PyGILState_Release(state) };
        }
    }
}

/// Frees what an unconsumed capsule exported.
///
/// # Safety
/// P1: called by Python, with a capsule that `export::<M>` made.
unsafe extern "C" fn capsule_destructor<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: P1: a capsule, while Python's lock is held.
    let is_unconsumed = unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } != 0;
    if !is_unconsumed {
        return;
    }
    // SAFETY: P1: it has this name.
    let exported = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
    // SAFETY: P1: no consumer took it, and the capsule ends now.
    unsafe { deleter::<M>(exported.cast()) };
}
