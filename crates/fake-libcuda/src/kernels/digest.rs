//! `poorwill_digest` and `poorwill_digest_host`: digests of granules.

use std::ptr;

use poorwill_core::DeviceRange;
use poorwill_core::digest::{Digest, LEAF_BYTES};
use poorwill_driver::cuda::{DIGEST_LEAVES_MAX, DIGEST_LEAVES_MIN};

use super::launch::{Launch, Prepared};
use crate::abi::{CallResult, Code, Params};
use crate::memory::HOST_WINDOW;
use crate::state;

// Maximum threads per block, as in the entries' `maxntid`.
const THREADS_MAX: u32 = 64;
const HOST_THREADS_MAX: u32 = 512;

/// The alignment of the kernel's loads.
const ALIGNMENT: u64 = 16;

/// The arrays of addresses and digests, in host memory.
#[derive(Debug, Clone, Copy)]
struct Arrays {
    granules: usize,
    digests: usize,
    granule_bytes: usize,
}

pub(super) fn prepare(params: &Params, launch: &Launch) -> CallResult<Prepared> {
    prepare_within(THREADS_MAX, params, launch)
}

pub(super) fn prepare_host(params: &Params, launch: &Launch) -> CallResult<Prepared> {
    prepare_within(HOST_THREADS_MAX, params, launch)
}

/// Both kernels read granules in device and host memory.
fn prepare_within(threads_max: u32, params: &Params, launch: &Launch) -> CallResult<Prepared> {
    let (granules, digests) = (params.read::<u64>(0)?, params.read::<u64>(1)?);
    let leaves = params.read::<u32>(2)?;
    let Launch { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes } = *launch else {
        return Err(Code::INVALID_VALUE);
    };
    let fits = threads <= threads_max && u64::from(shared_bytes) >= 16 * u64::from(leaves) + 16;
    if !fits || threads % 32 != 0 || !(DIGEST_LEAVES_MIN..=DIGEST_LEAVES_MAX).contains(&leaves.into()) {
        return Err(Code::INVALID_VALUE);
    }
    let granule_bytes = leaves as usize * LEAF_BYTES;
    if ![granules, digests].iter().all(|array| array.is_multiple_of(ALIGNMENT)) {
        return Err(Code::MISALIGNED_ADDRESS);
    }
    let state = state::get()?;
    let arrays = Arrays {
        granules: state.host_address(granules, 8 * blocks as usize)?,
        digests: state.host_address(digests, 16 * blocks as usize)?,
        granule_bytes,
    };
    let addresses: Vec<u64> = (0..blocks as usize).map(|nth| arrays.address(nth)).collect();
    let mut ranges: Vec<DeviceRange> = Vec::new();
    let mut pointers = Vec::new();
    for address in &addresses {
        if !address.is_multiple_of(ALIGNMENT) {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        if *address & HOST_WINDOW != 0 {
            pointers.push(state.host_address(*address, granule_bytes)?);
        } else {
            match ranges.last_mut().filter(|range| range.end() == *address) {
                Some(before) => before.bytes += granule_bytes as u64,
                None => ranges.push(DeviceRange::new(*address, granule_bytes as u64)),
            }
            pointers.push(usize::try_from(*address).map_err(|_| Code::ILLEGAL_ADDRESS)?);
        }
    }
    Ok(Prepared { ranges, work: Box::new(move || arrays.fill(&addresses, &pointers)) })
}

impl Arrays {
    fn address(&self, nth: usize) -> u64 {
        let from = ptr::with_exposed_provenance::<[u8; 8]>(self.granules + 8 * nth);
        // SAFETY: F4, the array is registered, and the caller keeps it until the kernel has finished.
        u64::from_le_bytes(unsafe { from.read_volatile() })
    }

    fn fill(&self, addresses: &[u64], pointers: &[usize]) {
        let mut bytes = vec![0; self.granule_bytes];
        for (nth, (address, pointer)) in addresses.iter().zip(pointers).enumerate() {
            assert_eq!(self.address(nth), *address, "the addresses were written to under the kernel");
            let from = ptr::with_exposed_provenance::<u8>(*pointer);
            // SAFETY: F3 and F4. The granule is device memory that is mapped with access while this runs, or
            // registered host memory. No Rust reference writes to it meanwhile.
            unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), self.granule_bytes) };
            let digest = Digest::of(&bytes).0.to_le_bytes();
            let to = ptr::with_exposed_provenance_mut::<[u8; 16]>(self.digests + 16 * nth);
            // SAFETY: F4, as for the addresses.
            unsafe { to.write_volatile(digest) };
        }
    }
}
