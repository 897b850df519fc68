//! `cudaMalloc` and `cudaFree`, in place of the runtime's.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::code::{Failure, Result, SUCCESS};
use crate::message::guarded;
use crate::runtime;
use crate::saver::saver;
use crate::thread::{self, Inside, Region};

/// Inside of a region memory that can be paused, elsewhere the runtime's.
///
/// # Safety
/// As the runtime's: `out` can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMalloc(out: *mut *mut c_void, bytes: usize) -> c_int {
    guarded(
        |code| code,
        || {
            let region = thread::region()?;
            match region.filter(|_| bytes > 0 && !out.is_null()) {
                // SAFETY: N2, as the caller promises.
                None => unsafe { runtime::malloc(out, bytes) },
                Some(region) => {
                    let addr = alloc(&region, bytes as u64)?;
                    // SAFETY: not NULL, and the caller's.
                    unsafe { out.write(ptr::with_exposed_provenance_mut(addr)) };
                    Ok(SUCCESS)
                }
            }
        },
    )
}

fn alloc(region: &Region, bytes: u64) -> Result<usize> {
    let _inside = Inside::enter();
    let device = runtime::device()?;
    if thread::is_new_on(device) {
        runtime::make_current()?;
    }
    let ordinal = u32::try_from(device).map_err(|error| Failure::Argument(error.to_string()))?;
    let addr = saver().alloc(region, ordinal, bytes)?;
    usize::try_from(addr).map_err(|error| Failure::Argument(error.to_string()))
}

/// Frees memory of regions, and hands the rest to the runtime.
///
/// # Safety
/// As the runtime's.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaFree(pointer: *mut c_void) -> c_int {
    guarded(
        |code| code,
        || {
            let is_ours = !pointer.is_null() && {
                let _inside = Inside::enter();
                saver().free(pointer.addr() as u64)?
            };
            // SAFETY: N2, as the caller promises.
            if is_ours { Ok(SUCCESS) } else { unsafe { runtime::free(pointer) } }
        },
    )
}
