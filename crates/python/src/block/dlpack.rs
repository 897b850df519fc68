//! DLPack: how memory is lent to NumPy, PyTorch and whoever else reads this protocol.
//!
//! A capsule holds a description of the memory and a function that gives it back. Who takes the description out
//! renames the capsule, and calls that function when nothing uses the memory any more, on whatever thread, with
//! Python's lock or without. A capsule that nobody took from does it itself. Structures and names are those of DLPack
//! 1.0, and those that were there before it had versions.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Device {
    pub(crate) kind: i32,
    pub(crate) ordinal: i32,
}

impl Device {
    pub(crate) const CPU: Self = Self { kind: 1, ordinal: 0 };

    pub(crate) fn cuda(ordinal: i32) -> Self {
        Self { kind: 2, ordinal }
    }
}

/// What an element is.
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

/// Called once, with what was lent.
type GiveBack<M> = unsafe extern "C" fn(*mut M);

/// `DLManagedTensor`.
#[derive(Debug)]
#[repr(C)]
struct Unversioned {
    tensor: Tensor,
    context: *mut c_void,
    give_back: Option<GiveBack<Self>>,
}

/// `DLManagedTensorVersioned`.
#[derive(Debug)]
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    give_back: Option<GiveBack<Self>>,
    flags: u64,
    tensor: Tensor,
}

/// One of the two.
trait Managed: Sized {
    /// Name of a capsule that nobody has taken from.
    const NAME: &'static CStr;

    fn of(tensor: Tensor) -> Self;
}

impl Managed for Unversioned {
    const NAME: &'static CStr = c"dltensor";

    fn of(tensor: Tensor) -> Self {
        Self { tensor, context: ptr::null_mut(), give_back: Some(give_back::<Self>) }
    }
}

impl Managed for Versioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn of(tensor: Tensor) -> Self {
        let (context, give_back) = (ptr::null_mut(), Some(give_back::<Self> as GiveBack<Self>));
        Self { major: 1, minor: 0, context, give_back, flags: 0, tensor }
    }
}

/// What is lent: what the protocol sees comes first, and has the address of the whole.
#[repr(C)]
struct Lent<M> {
    managed: M,
    /// What the tensor's shape and strides point to.
    _dimensions: Vec<i64>,
    _memory: Kept,
}

/// What keeps memory that is lent. It may be dropped on any thread, with Python's lock or without.
pub(crate) type Kept = Arc<dyn Any + Send + Sync>;

/// A dense array in memory, in C's order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout<'a> {
    pub(crate) addr: u64,
    pub(crate) device: Device,
    pub(crate) dtype: DataType,
    pub(crate) shape: &'a [i64],
}

/// A capsule of the protocol with versions, or of the one before.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    memory: Kept,
    layout: Layout<'_>,
    versioned: bool,
) -> PyResult<Bound<'py, PyCapsule>> {
    if versioned { lend::<Versioned>(py, memory, layout) } else { lend::<Unversioned>(py, memory, layout) }
}

fn lend<'py, M: Managed>(
    py: Python<'py>,
    memory: Kept,
    layout: Layout<'_>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let Layout { addr, device, dtype, shape } = layout;
    let mut dimensions = [shape, &strides(shape)].concat();
    // Where a vector's elements are does not change when the vector is moved.
    let (shape_at, strides_at) = dimensions.split_at_mut(shape.len());
    let tensor = Tensor {
        data: ptr::with_exposed_provenance_mut(usize::try_from(addr)?),
        device,
        dimensions: i32::try_from(shape.len())?,
        dtype,
        shape: shape_at.as_mut_ptr(),
        strides: strides_at.as_mut_ptr(),
        byte_offset: 0,
    };
    let lent = Box::new(Lent { managed: M::of(tensor), _dimensions: dimensions, _memory: memory });
    let lent = NonNull::from(Box::leak(lent)).cast::<c_void>();
    // SAFETY: P1: the pointer is to a `Lent<M>`, as the name says, and lives until it is given back; `end_of_capsule::<M>`
    // does that if nobody else has taken it over, on any thread.
    let capsule =
        unsafe { PyCapsule::new_with_pointer_and_destructor(py, lent, M::NAME, Some(end_of_capsule::<M>)) };
    if capsule.is_err() {
        // SAFETY: P1: there is no capsule, so this is the only pointer to it.
        unsafe { give_back::<M>(lent.as_ptr().cast()) };
    }
    capsule
}

/// Elements from one index to the next, for each dimension. All of them together fit, so their products do.
fn strides(shape: &[i64]) -> Vec<i64> {
    (0..shape.len()).map(|dimension| shape[dimension + 1..].iter().product()).collect()
}

/// Gives back what was lent.
///
/// # Safety
/// P1: `lent` is what a capsule of the name of `M` held. It is not used after this.
unsafe extern "C" fn give_back<M: Managed>(lent: *mut M) {
    if lent.is_null() {
        return;
    }
    // SAFETY: P1: it is the first field of a `Lent<M>` that was a box, and nobody uses it any more.
    let lent = unsafe { Box::from_raw(lent.cast::<Lent<M>>()) };
    let held = Held::lock();
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(lent))) {
        // Nothing of a panic crosses to C; what it carries might panic once more.
        mem::forget(panic);
    }
    drop(held);
}

/// Python's lock, on a thread of Python's. A library may have let go of it beneath a frame of ours that counts on it,
/// and call from there: what is dropped then would let go of a lock that it does not have. Other threads have no such
/// frame, and what is dropped there asks for the lock itself.
struct Held(Option<ffi::PyGILState_STATE>);

impl Held {
    fn lock() -> Self {
        // SAFETY: P1: both may be asked on any thread, with the lock or without.
        let is_pythons = unsafe { ffi::Py_IsInitialized() } != 0;
        // SAFETY: as above.
        let is_pythons = is_pythons && !unsafe { ffi::PyGILState_GetThisThreadState() }.is_null();
        // SAFETY: P1: this thread has a state, and may ask for the lock whether it has it or not.
        Self(is_pythons.then(|| unsafe { ffi::PyGILState_Ensure() }))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(before) = self.0.take() {
            // SAFETY: P1: what this thread asked for, once.
            unsafe { ffi::PyGILState_Release(before) };
        }
    }
}

/// The end of a capsule: gives back what nobody has taken out.
///
/// # Safety
/// P1: called by Python, with a capsule that `lend::<M>` made.
unsafe extern "C" fn end_of_capsule<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: P1: a capsule, while Python's lock is held.
    let is_untouched = unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } != 0;
    if !is_untouched {
        return;
    }
    // SAFETY: P1: it has this name.
    let lent = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
    // SAFETY: P1: nobody has taken it out, and the capsule is gone after this.
    unsafe { give_back::<M>(lent.cast()) };
}
