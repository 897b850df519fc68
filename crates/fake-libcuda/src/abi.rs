//! The types of the C interface: result codes, structs, and wrappers of a C caller's pointers.
//!
//! Rust code never constructs the wrappers (rule F1 of `docs/unsafe.md`). Safe code can therefore call an
//! entry that takes an [`Out`] only with a pointer from C, which the C caller vouches for.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;

use poorwill_core::{DriverError, DriverErrorKind};

/// A `CUresult` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) c_int);

pub(crate) type CallResult<T = ()> = Result<T, Code>;

macro_rules! codes {
    ($($value:literal $name:ident $text:literal;)+) => {
        #[allow(dead_code)] // Some are only looked up by number.
        impl Code {
            $(pub(crate) const $name: Self = Self($value);)+
        }

        const NAMES: &[(c_int, &CStr, &CStr)] = &[
            (0, c"CUDA_SUCCESS", c"no error"),
            $(($value, codes!(@c concat!("CUDA_ERROR_", stringify!($name), "\0")), codes!(@c concat!($text, "\0")))),+
        ];
    };
    (@c $text:expr) => {
        match CStr::from_bytes_with_nul($text.as_bytes()) {
            Ok(text) => text,
            Err(_) => panic!("a name with a zero in it"),
        }
    };
}

codes! {
    1 INVALID_VALUE "invalid argument";
    2 OUT_OF_MEMORY "out of memory";
    3 NOT_INITIALIZED "initialization error";
    4 DEINITIALIZED "driver shutting down";
    100 NO_DEVICE "no CUDA-capable device is detected";
    101 INVALID_DEVICE "invalid device ordinal";
    200 INVALID_IMAGE "device kernel image is invalid";
    201 INVALID_CONTEXT "invalid device context";
    205 MAP_FAILED "mapping of buffer object failed";
    206 UNMAP_FAILED "unmapping of buffer object failed";
    208 ALREADY_MAPPED "resource already mapped";
    209 NO_BINARY_FOR_GPU "no kernel image is available for execution on the device";
    218 INVALID_PTX "a PTX JIT compilation failed";
    304 OPERATING_SYSTEM "OS call failed or operation not supported on this OS";
    400 INVALID_HANDLE "invalid resource handle";
    401 ILLEGAL_STATE "the operation cannot be performed in the present state";
    500 NOT_FOUND "named symbol not found";
    600 NOT_READY "device not ready";
    700 ILLEGAL_ADDRESS "an illegal memory access was encountered";
    709 CONTEXT_IS_DESTROYED "context is destroyed";
    712 HOST_MEMORY_ALREADY_REGISTERED "part or all of the requested memory range is already mapped";
    713 HOST_MEMORY_NOT_REGISTERED "pointer does not correspond to a registered memory region";
    716 MISALIGNED_ADDRESS "misaligned address";
    719 LAUNCH_FAILED "unspecified launch failure";
    800 NOT_PERMITTED "operation not permitted";
    801 NOT_SUPPORTED "operation not supported";
    900 STREAM_CAPTURE_UNSUPPORTED "operation not permitted when stream is capturing";
    901 STREAM_CAPTURE_INVALIDATED "operation failed due to a previous error during capture";
    905 STREAM_CAPTURE_ISOLATION "dependency created on uncaptured work in another stream";
    906 STREAM_CAPTURE_IMPLICIT "operation would make the legacy stream depend on a capturing blocking stream";
    907 CAPTURED_EVENT "operation not permitted on an event last recorded in a capturing stream";
    908 STREAM_CAPTURE_WRONG_THREAD "attempt to terminate a thread-local capture sequence from another thread";
    999 UNKNOWN "unknown error";
}

pub(crate) fn names(code: c_int) -> Option<(&'static CStr, &'static CStr)> {
    NAMES.iter().find(|(value, ..)| *value == code).map(|(_, name, text)| (*name, *text))
}

impl From<DriverError> for Code {
    fn from(error: DriverError) -> Self {
        match error.kind {
            DriverErrorKind::OutOfMemory { .. }
            | DriverErrorKind::OutOfAddressSpace { .. }
            | DriverErrorKind::OutOfHostMemory { .. } => Self::OUT_OF_MEMORY,
            DriverErrorKind::Busy { .. } => Self::ILLEGAL_ADDRESS,
            DriverErrorKind::UnknownHandle { .. } => Self::INVALID_HANDLE,
            DriverErrorKind::WrongProcess { .. } => Self::NOT_INITIALIZED,
            DriverErrorKind::Unsupported { .. } => Self::NOT_SUPPORTED,
            DriverErrorKind::InvalidArgument { .. }
            | DriverErrorKind::NotMapped { .. }
            | DriverErrorKind::AlreadyMapped { .. } => Self::INVALID_VALUE,
            _ => Self::UNKNOWN,
        }
    }
}

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const LOCATION_DEVICE: c_int = 1;

/// `CUmemAllocationProp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_int,
    pub(crate) requested_handle_types: c_int,
    pub(crate) location: Location,
    pub(crate) win32_handle_meta_data: *mut c_void,
    pub(crate) compression_type: u8,
    pub(crate) gpu_direct_rdma_capable: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AccessDesc {
    pub(crate) location: Location,
    pub(crate) flags: c_int,
}

/// The arguments of `cuCheckpointProcessLock` and its like.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct CheckpointArgs {
    pub(crate) timeout_ms: u32,
    pub(crate) reserved_0: u32,
    pub(crate) reserved_1: [u64; 7],
}

const _: () = assert!(size_of::<AllocationProp>() == 32 && size_of::<AccessDesc>() == 12);
const _: () = assert!(size_of::<CheckpointArgs>() == 64);

/// The objects of a device, as counted by `poorwillFakeCensus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Census {
    /// Reservations of addresses.
    pub reservations: u64,
    /// Backings that hold memory: not released, or released and still mapped.
    pub backings: u64,
    /// Mappings of backings.
    pub mappings: u64,
    /// Streams that are not destroyed.
    pub streams: u64,
    /// Events that are not destroyed.
    pub events: u64,
    /// Captures that have not ended.
    pub captures: u64,
    /// Graphs that are not destroyed.
    pub graphs: u64,
    /// Registered ranges of host memory.
    pub registered_host_ranges: u64,
    /// Retain count of the primary context, plus other contexts.
    pub contexts_retained: u64,
    /// Memory of this process, in bytes.
    pub held_bytes: u64,
    /// Calls that wait for all of the device's work.
    pub calls_that_wait: u64,
}

#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the value; fails for NULL.
    pub(crate) fn set(&self, value: T) -> CallResult {
        self.check()?;
        // SAFETY: F1, a pointer that is not NULL may be written to.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Fails for NULL. Called before an object is created, whose handle could not be returned.
    pub(crate) fn check(&self) -> CallResult {
        if self.is_null() { Err(Code::INVALID_VALUE) } else { Ok(()) }
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl Out<c_char> {
    /// Writes as much of `text` as fits, with a zero after it.
    pub(crate) fn set_text(&self, text: &str, len: c_int) -> CallResult {
        let text_len_max = usize::try_from(len).ok().filter(|len| *len > 0).ok_or(Code::INVALID_VALUE)?;
        self.check()?;
        let text = &text.as_bytes()[..text.len().min(text_len_max - 1)];
        let pointer = self.0.cast::<u8>();
        // SAFETY: F1, there are `len` bytes at the pointer, and `text` is shorter.
        unsafe { pointer.copy_from_nonoverlapping(text.as_ptr(), text.len()) };
        // SAFETY: F1, as above.
        let end = unsafe { pointer.add(text.len()) };
        // SAFETY: F1, as above.
        unsafe { end.write(0) };
        Ok(())
    }
}

#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(&self) -> CallResult<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: F1, a pointer that is not NULL points at a value of its type.
        Ok(unsafe { self.0.read() })
    }

    pub(crate) fn list(&self, count: usize) -> CallResult<Vec<T>> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: F1, the caller passes as many values as it says.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) }.to_vec())
    }
}

/// A C caller's pointer to a value that is read and replaced.
#[repr(transparent)]
pub(crate) struct InOut<T>(*mut T);

impl<T: Copy> InOut<T> {
    pub(crate) fn get(&self) -> CallResult<T> {
        In(self.0.cast_const()).get()
    }

    pub(crate) fn set(&self, value: T) -> CallResult {
        Out(self.0).set(value)
    }
}

/// The image of a module: text that ends with a zero.
#[repr(transparent)]
pub(crate) struct Image(*const c_void);

impl Image {
    pub(crate) fn text(&self) -> CallResult<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: F1, an image that is no text begins with bytes that say so and holds a zero, as ELF files do.
        let text = unsafe { CStr::from_ptr(self.0.cast()) };
        text.to_str().map(str::to_owned).map_err(|_| Code::INVALID_IMAGE)
    }
}

#[repr(transparent)]
pub(crate) struct Name(*const c_char);

impl Name {
    pub(crate) fn text(&self) -> CallResult<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: F1, names end with a zero.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// Host memory that a copy will touch, once the stream reaches it.
#[repr(transparent)]
pub(crate) struct HostPointer(*mut c_void);

impl HostPointer {
    pub(crate) fn addr(&self) -> usize {
        self.0.expose_provenance()
    }
}

/// A file descriptor as the bits of a pointer.
#[repr(transparent)]
pub(crate) struct Descriptor(*mut c_void);

impl Descriptor {
    pub(crate) fn get(&self) -> CallResult<BorrowedFd<'_>> {
        let descriptor = RawFd::try_from(self.0.addr()).map_err(|_| Code::INVALID_VALUE)?;
        // SAFETY: F1, the caller's descriptor, open during the call; one that is not is an error of the system's.
        Ok(unsafe { BorrowedFd::borrow_raw(descriptor) })
    }
}

pub(crate) type HostFn = Option<extern "C" fn(UserData)>;

/// The argument of a host function.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct UserData(*mut c_void);

// SAFETY: F1, the caller knows that a host function runs on another thread.
unsafe impl Send for UserData {}

/// The parameters of a kernel: a pointer to each.
#[repr(transparent)]
pub(crate) struct Params(*mut *mut c_void);

impl Params {
    /// The kernel's function names the type that its PTX declares.
    pub(crate) fn read<T: Scalar>(&self, nth: usize) -> CallResult<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: F2, the caller passes as many pointers as the kernel has parameters.
        let slot = unsafe { self.0.add(nth) };
        // SAFETY: F2, as above.
        let pointer = unsafe { slot.read() };
        if pointer.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: F2, it points at a value of the parameter's type; any bits are one.
        Ok(unsafe { ptr::read_unaligned(pointer.cast::<T>()) })
    }
}

/// Types for which any bits are a valid value.
pub(crate) trait Scalar: Copy {}
impl Scalar for u32 {}
impl Scalar for u64 {}

/// A parameter that must be NULL here.
#[repr(transparent)]
pub(crate) struct Unused(*mut c_void);

impl Unused {
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}
