//! The real CUDA runtime of each caller, found when it is needed. Nothing links it: this library loads into any process.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::{mem, ptr};

use crate::code::{Failure, Result, SUCCESS};
use crate::loader::{LoadedObjects, global_symbol};

type Malloc = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void) -> c_int;
type GetDevice = unsafe extern "C" fn(*mut c_int) -> c_int;

/// Where a call of the runtime returns to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Caller(usize);

const CALLERS_MAX: usize = 64;

struct Symbol {
    name: &'static CStr,
    /// That of the global scope, which calls are bound to where there is one; NULL until it was found.
    global: AtomicPtr<c_void>,
    /// What was found for the first callers where there is none. Others are looked up each time, and a child that was forked
    /// meanwhile may wait for the loader.
    known: [KnownCaller; CALLERS_MAX],
}

struct KnownCaller {
    /// 0 before there is one.
    caller: AtomicUsize,
    /// NULL until it was found.
    found: AtomicPtr<c_void>,
}

static MALLOC: Symbol = Symbol::new(c"cudaMalloc");
static FREE: Symbol = Symbol::new(c"cudaFree");
static GET_DEVICE: Symbol = Symbol::new(c"cudaGetDevice");

impl Symbol {
    const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            global: AtomicPtr::new(ptr::null_mut()),
            known: [const { KnownCaller::new() }; CALLERS_MAX],
        }
    }

    /// The symbol behind this library's own.
    fn address(&self, caller: Caller) -> Result<*mut c_void> {
        if let Some(known) = self.known.iter().find_map(|known| known.of(caller)) {
            return Ok(known);
        }
        let global = self.global.load(Ordering::Relaxed);
        if !global.is_null() {
            return Ok(global);
        }
        if let Some(found) = global_symbol(self.name) {
            self.global.store(found, Ordering::Relaxed);
            return Ok(found);
        }
        let Some(found) = LoadedObjects::behind_own().symbol(self.name, caller.0) else {
            return Err(Failure::NoRuntime { name: self.name.to_str().unwrap_or("the runtime") });
        };
        // Later callers than these are looked up each time.
        let free = self.known.iter().find(|known| known.claim(caller));
        if let Some(known) = free {
            known.found.store(found, Ordering::Release);
        }
        Ok(found)
    }
}

impl KnownCaller {
    const fn new() -> Self {
        Self { caller: AtomicUsize::new(0), found: AtomicPtr::new(ptr::null_mut()) }
    }

    fn of(&self, caller: Caller) -> Option<*mut c_void> {
        if self.caller.load(Ordering::Relaxed) != caller.0 {
            return None;
        }
        let found = self.found.load(Ordering::Acquire);
        (!found.is_null()).then_some(found)
    }

    /// Whether this is the caller's from now on.
    fn claim(&self, caller: Caller) -> bool {
        match self.caller.compare_exchange(0, caller.0, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => true,
            Err(known) => known == caller.0,
        }
    }
}

/// The real `cudaMalloc`.
///
/// # Safety
/// As the runtime's.
pub(crate) unsafe fn malloc(out: *mut *mut c_void, bytes: usize, caller: Caller) -> Result<c_int> {
    let address = MALLOC.address(caller)?;
    // SAFETY: N1.
    let malloc = unsafe { mem::transmute::<*mut c_void, Malloc>(address) };
    // SAFETY: N2, as the caller promises.
    Ok(unsafe { malloc(out, bytes) })
}

/// The real `cudaFree`.
///
/// # Safety
/// As the runtime's.
pub(crate) unsafe fn free(pointer: *mut c_void, caller: Caller) -> Result<c_int> {
    let address = FREE.address(caller)?;
    // SAFETY: N1.
    let free = unsafe { mem::transmute::<*mut c_void, Free>(address) };
    // SAFETY: N2, as the caller promises.
    Ok(unsafe { free(pointer) })
}

/// The calling thread's device.
pub(crate) fn device(caller: Caller) -> Result<c_int> {
    let address = GET_DEVICE.address(caller)?;
    // SAFETY: N1.
    let get_device = unsafe { mem::transmute::<*mut c_void, GetDevice>(address) };
    let mut device = 0;
    // SAFETY: `device` outlives the call.
    let code = unsafe { get_device(&raw mut device) };
    if code == SUCCESS { Ok(device) } else { Err(Failure::Runtime { name: "cudaGetDevice", code }) }
}

/// Makes the context of the calling thread's device current, as the runtime's first call does.
pub(crate) fn make_current(caller: Caller) -> Result<()> {
    // SAFETY: NULL is never freed.
    match unsafe { free(ptr::null_mut(), caller) }? {
        SUCCESS => Ok(()),
        code => Err(Failure::Runtime { name: "cudaFree(NULL)", code }),
    }
}
