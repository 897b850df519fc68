//! The types of the C interface: codes, structs, and wrappers of a C caller's pointers. As in the fake
//! libcuda, Rust code never constructs the wrappers (rule F1 of `docs/unsafe.md`).

use std::ffi::{CStr, c_char, c_uint};

/// An `nvmlReturn_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) c_uint);

pub(crate) type CallResult<T = ()> = Result<T, Code>;

impl Code {
    pub(crate) const UNINITIALIZED: Self = Self(1);
    pub(crate) const INVALID_ARGUMENT: Self = Self(2);
    pub(crate) const NOT_SUPPORTED: Self = Self(3);
    pub(crate) const NOT_FOUND: Self = Self(6);
    pub(crate) const INSUFFICIENT_SIZE: Self = Self(7);
    pub(crate) const ARGUMENT_VERSION_MISMATCH: Self = Self(25);
    pub(crate) const UNKNOWN: Self = Self(999);
}

pub(crate) fn text(code: c_uint) -> &'static CStr {
    match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        9 => c"Driver Not Loaded",
        15 => c"GPU is lost",
        25 => c"Argument version mismatch",
        999 => c"Unknown Error",
        _ => c"An error that the fake NVML has no text for",
    }
}

/// `nvmlDevice_t`: looked up, never dereferenced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Handle(pub(crate) usize);

/// `nvmlMemory_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Memory {
    pub(crate) total_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) used_bytes: u64,
}

/// `nvmlMemory_v2_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct MemoryV2 {
    pub(crate) version: c_uint,
    pub(crate) total_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) used_bytes: u64,
}

impl MemoryV2 {
    /// The size, and the version in the upper byte.
    pub(crate) const VERSION: c_uint = 40 | 2 << 24;
}

/// `nvmlProcessInfo_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ProcessInfo {
    pub(crate) pid: c_uint,
    pub(crate) used_bytes: u64,
    pub(crate) gpu_instance: c_uint,
    pub(crate) compute_instance: c_uint,
}

const _: () = assert!(size_of::<MemoryV2>() == 40 && size_of::<ProcessInfo>() == 24);

/// A C caller's pointer to a value that is written, or read and replaced.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    pub(crate) fn set(&self, value: T) -> CallResult {
        self.check()?;
        // SAFETY: F1, a pointer that is not NULL may be written to.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// For parameters that the caller fills in.
    pub(crate) fn get(&self) -> CallResult<T> {
        self.check()?;
        // SAFETY: F1, a pointer that is not NULL points at a value of its type.
        Ok(unsafe { self.0.read() })
    }

    /// Writes several values; the caller has promised space for as many.
    pub(crate) fn set_list(&self, values: &[T]) -> CallResult {
        self.check()?;
        // SAFETY: F1, there is space for as many values as the caller states, and no Rust reference to it.
        unsafe { self.0.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Ok(())
    }

    fn check(&self) -> CallResult {
        if self.is_null() { Err(Code::INVALID_ARGUMENT) } else { Ok(()) }
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl Out<u8> {
    /// Fails unless the text and a zero fit.
    pub(crate) fn set_text(&self, text: &str, len: c_uint) -> CallResult {
        self.check()?;
        let bytes = [text.as_bytes(), &[0]].concat();
        if usize::try_from(len).is_ok_and(|len| bytes.len() <= len) {
            self.set_list(&bytes)
        } else {
            Err(Code::INSUFFICIENT_SIZE)
        }
    }
}

#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(&self) -> CallResult<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: F1, texts end with a zero.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}
