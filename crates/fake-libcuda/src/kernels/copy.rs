//! `poorwill_copy`: copies between registered host memory and the device.

use std::ptr;

use poorwill_core::DeviceRange;
use poorwill_driver::cuda::COPY_PAGE_BYTES;

use super::launch::{Launch, Prepared};
use crate::abi::{CallResult, Code, Params};
use crate::memory::HOST_WINDOW;
use crate::state;

/// Maximum threads per block, as in the entry's `maxntid`.
const THREADS_MAX: u32 = 512;

/// The alignment of the kernel's loads and stores.
const ALIGNMENT: u64 = 16;

pub(super) fn prepare(params: &Params, launch: &Launch) -> CallResult<Prepared> {
    let (to, from, bytes) = (params.read::<u64>(0)?, params.read::<u64>(1)?, params.read::<u64>(2)?);
    let Launch { grid: [_, 1, 1], block: [threads, 1, 1], .. } = *launch else {
        return Err(Code::INVALID_VALUE);
    };
    if threads > THREADS_MAX || threads % 32 != 0 || !bytes.is_multiple_of(COPY_PAGE_BYTES as u64) {
        return Err(Code::INVALID_VALUE);
    }
    if ![to, from].iter().all(|address| address.is_multiple_of(ALIGNMENT)) {
        return Err(Code::MISALIGNED_ADDRESS);
    }
    let mut ranges = Vec::new();
    if bytes == 0 {
        return Ok(Prepared { ranges, work: Box::new(|| ()) });
    }
    let len = usize::try_from(bytes).map_err(|_| Code::ILLEGAL_ADDRESS)?;
    let mut pointer = |address: u64| -> CallResult<usize> {
        if address & HOST_WINDOW != 0 {
            return state::get()?.host_address(address, len);
        }
        ranges.push(DeviceRange::new(address, bytes));
        usize::try_from(address).map_err(|_| Code::ILLEGAL_ADDRESS)
    };
    let (to, from) = (pointer(to)?, pointer(from)?);
    if to.abs_diff(from) < len {
        return Err(Code::INVALID_VALUE);
    }
    Ok(Prepared { ranges, work: Box::new(move || copy(to, from, len)) })
}

fn copy(to: usize, from: usize, len: usize) {
    let from = ptr::with_exposed_provenance::<u8>(from);
    let to = ptr::with_exposed_provenance_mut::<u8>(to);
    // SAFETY: F3 and F4. Each is device memory that is mapped with access while this runs, or registered host memory
    // that the caller keeps until the kernel has finished. No Rust reference writes to one or points to the other
    // meanwhile, and they do not overlap.
    unsafe { ptr::copy_nonoverlapping(from, to, len) };
}
