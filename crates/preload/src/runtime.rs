//! The real CUDA runtime, found when it is needed. Nothing links it: this library loads into any process.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{mem, ptr};

use crate::code::{Failure, Result, SUCCESS};

type Malloc = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void) -> c_int;
type GetDevice = unsafe extern "C" fn(*mut c_int) -> c_int;

/// Names of the runtime, where it was loaded for one library only.
const LIBRARIES: [&CStr; 3] = [c"libcudart.so.13", c"libcudart.so.12", c"libcudart.so.11.0"];

struct Symbol {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

static MALLOC: Symbol = Symbol::new(c"cudaMalloc");
static FREE: Symbol = Symbol::new(c"cudaFree");
static GET_DEVICE: Symbol = Symbol::new(c"cudaGetDevice");

impl Symbol {
    const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The symbol behind this library's own.
    fn address(&self) -> Result<*mut c_void> {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return Ok(known);
        }
        // SAFETY: the name is a terminated text.
        let mut found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        for library in LIBRARIES {
            if !found.is_null() {
                break;
            }
            // SAFETY: a terminated text; nothing is loaded, so no code runs.
            let library = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
            if !library.is_null() {
                // SAFETY: the handle is that of an open library, and it is never closed.
                found = unsafe { libc::dlsym(library, self.name.as_ptr()) };
            }
        }
        if found.is_null() {
            return Err(Failure::NoRuntime { name: self.name.to_str().unwrap_or("the runtime") });
        }
        self.found.store(found, Ordering::Relaxed);
        Ok(found)
    }
}

/// The real `cudaMalloc`.
///
/// # Safety
/// As the runtime's.
pub(crate) unsafe fn malloc(out: *mut *mut c_void, bytes: usize) -> Result<c_int> {
    let address = MALLOC.address()?;
    // SAFETY: N1.
    let malloc = unsafe { mem::transmute::<*mut c_void, Malloc>(address) };
    // SAFETY: N2, as the caller promises.
    Ok(unsafe { malloc(out, bytes) })
}

/// The real `cudaFree`.
///
/// # Safety
/// As the runtime's.
pub(crate) unsafe fn free(pointer: *mut c_void) -> Result<c_int> {
    let address = FREE.address()?;
    // SAFETY: N1.
    let free = unsafe { mem::transmute::<*mut c_void, Free>(address) };
    // SAFETY: N2, as the caller promises.
    Ok(unsafe { free(pointer) })
}

/// The calling thread's device.
pub(crate) fn device() -> Result<c_int> {
    let address = GET_DEVICE.address()?;
    // SAFETY: N1.
    let get_device = unsafe { mem::transmute::<*mut c_void, GetDevice>(address) };
    let mut device = 0;
    // SAFETY: `device` outlives the call.
    let code = unsafe { get_device(&raw mut device) };
    if code == SUCCESS { Ok(device) } else { Err(Failure::Runtime { name: "cudaGetDevice", code }) }
}

/// Makes the context of the calling thread's device current, as the runtime's first call does.
pub(crate) fn make_current() -> Result<()> {
    // SAFETY: NULL is never freed.
    match unsafe { free(ptr::null_mut()) }? {
        SUCCESS => Ok(()),
        code => Err(Failure::Runtime { name: "cudaFree(NULL)", code }),
    }
}
