//! `cudaMalloc` and `cudaFree`, in place of the runtime's.

use std::arch::naked_asm;
use std::ffi::{c_int, c_void};
use std::ptr;

use crate::code::{Failure, Result, SUCCESS};
use crate::message::guarded;
use crate::runtime::{self, Caller};
use crate::saver::saver;
use crate::thread::{self, Inside, Region};

/// Jumps to a function with one more argument, the [`Caller`], in the register that is named for this machine.
#[cfg(target_arch = "x86_64")]
macro_rules! jump_with_caller {
    ($to:ident, $x86_64:literal, $aarch64:literal) => {
        naked_asm!(concat!("mov ", $x86_64, ", [rsp]"), "jmp {to}", to = sym $to)
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! jump_with_caller {
    ($to:ident, $x86_64:literal, $aarch64:literal) => {
        naked_asm!(concat!("mov ", $aarch64, ", x30"), "b {to}", to = sym $to)
    };
}

/// Inside of a region memory that can be paused, elsewhere the runtime's.
///
/// # Safety
/// As the runtime's: `out` can be written.
#[unsafe(no_mangle)]
#[unsafe(naked)] // N3.
unsafe extern "C" fn cudaMalloc(out: *mut *mut c_void, bytes: usize) -> c_int {
    jump_with_caller!(malloc, "rdx", "x2")
}

/// Frees memory of regions, and hands the rest to the runtime.
///
/// # Safety
/// As the runtime's.
#[unsafe(no_mangle)]
#[unsafe(naked)] // N3.
unsafe extern "C" fn cudaFree(pointer: *mut c_void) -> c_int {
    jump_with_caller!(free, "rsi", "x1")
}

/// # Safety
/// As [`cudaMalloc`].
unsafe extern "C" fn malloc(out: *mut *mut c_void, bytes: usize, caller: Caller) -> c_int {
    guarded(
        |code| code,
        || {
            let region = thread::region()?;
            match region.filter(|_| bytes > 0 && !out.is_null()) {
                // SAFETY: N2, as the caller promises.
                None => unsafe { runtime::malloc(out, bytes, caller) },
                Some(region) => {
                    let addr = alloc(&region, bytes as u64, caller)?;
                    // SAFETY: not NULL, and the caller's.
                    unsafe { out.write(ptr::with_exposed_provenance_mut(addr)) };
                    Ok(SUCCESS)
                }
            }
        },
    )
}

fn alloc(region: &Region, bytes: u64, caller: Caller) -> Result<usize> {
    let _inside = Inside::enter();
    let claim = saver().claim()?;
    let device = runtime::device(caller)?;
    if thread::is_new_on(device) {
        runtime::make_current(caller)?;
    }
    let ordinal = u32::try_from(device).map_err(|error| Failure::Argument(error.to_string()))?;
    let addr = saver().alloc(&claim, region, ordinal, bytes)?;
    usize::try_from(addr).map_err(|error| Failure::Argument(error.to_string()))
}

/// # Safety
/// As [`cudaFree`].
unsafe extern "C" fn free(pointer: *mut c_void, caller: Caller) -> c_int {
    guarded(
        |code| code,
        || {
            let is_ours = !pointer.is_null() && {
                let _inside = Inside::enter();
                saver().free(pointer.addr() as u64)?
            };
            // SAFETY: N2, as the caller promises.
            if is_ours { Ok(SUCCESS) } else { unsafe { runtime::free(pointer, caller) } }
        },
    )
}
