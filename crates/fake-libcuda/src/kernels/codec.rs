//! `poorwill_encode` and `poorwill_decode`: codes of granules, and digests of what is decoded.

use std::ptr;

use poorwill_core::DeviceRange;
use poorwill_core::codec::{self, BLOCK_BYTES};
use poorwill_core::digest::Digest;
use poorwill_driver::cuda::{DIGEST_LEAVES_MAX, DIGEST_LEAVES_MIN};

use super::launch::{Launch, Prepared};
use crate::abi::{CallResult, Code, Params};
use crate::memory::HOST_WINDOW;
use crate::state;

/// Maximum threads per block, as in the entries' `maxntid`.
const THREADS_MAX: u32 = 1024;

/// Shared memory of a warp for escapes.
const STAGE_BYTES: u32 = 1296;

/// Shared memory that a launch may ask for.
const SHARED_BYTES_MAX: u32 = 48 << 10;

/// Alignment of the kernels' loads and stores.
const ALIGNMENT: u64 = 16;

/// Words of an entry of the array, of which three are used.
const ENTRY_WORDS: usize = 4;

/// A launch of either kernel: an array of entries, and one of results, in host memory.
struct CodecArrays {
    entries: Vec<[u64; 3]>,
    results: usize,
    granule_bytes: usize,
}

/// Memory of the device or the host.
struct Places {
    ranges: Vec<DeviceRange>,
}

pub(super) fn prepare_encode(params: &Params, launch: &Launch) -> CallResult<Prepared> {
    let arrays = CodecArrays::of(params, launch, 12, 8)?;
    let mut places = Places { ranges: Vec::new() };
    let mut work = Vec::new();
    for [granule, slot, slot_bytes] in &arrays.entries {
        let granule = places.pointer(*granule, arrays.granule_bytes)?;
        let slot_len = usize::try_from(*slot_bytes).map_err(|_| Code::ILLEGAL_ADDRESS)?;
        let slot = if slot_len == 0 { 0 } else { places.pointer(*slot, slot_len)? };
        work.push((granule, slot, slot_len));
    }
    let CodecArrays { results, granule_bytes, .. } = arrays;
    let encode = move || {
        for (nth, (granule, slot, slot_len)) in work.into_iter().enumerate() {
            let granule = copied(granule, granule_bytes);
            let mut code = vec![0; codec::code_bytes_max(granule_bytes)];
            let bytes = codec::encode(&granule, &mut code).unwrap_or(usize::MAX);
            if bytes <= slot_len {
                write(slot, &code[..bytes]);
            }
            write(results + 8 * nth, &(bytes as u64).to_le_bytes());
        }
    };
    Ok(Prepared { ranges: places.ranges, work: Box::new(encode) })
}

pub(super) fn prepare_decode(params: &Params, launch: &Launch) -> CallResult<Prepared> {
    let arrays = CodecArrays::of(params, launch, 16, 16)?;
    let mut places = Places { ranges: Vec::new() };
    let mut work = Vec::new();
    for [code, code_bytes, granule] in &arrays.entries {
        let code_len = usize::try_from(*code_bytes).map_err(|_| Code::ILLEGAL_ADDRESS)?;
        if !code_bytes.is_multiple_of(ALIGNMENT) {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        let code = if code_len == 0 { 0 } else { places.pointer(*code, code_len)? };
        let granule = match granule {
            0 => None,
            granule => Some(places.pointer(*granule, arrays.granule_bytes)?),
        };
        work.push((code, code_len, granule));
    }
    let CodecArrays { results, granule_bytes, .. } = arrays;
    let decode = move || {
        let mut decoded = vec![0; granule_bytes];
        for (nth, (code, code_len, granule)) in work.into_iter().enumerate() {
            codec::decode(&copied(code, code_len), &mut decoded);
            if let Some(granule) = granule {
                write(granule, &decoded);
            }
            write(results + 16 * nth, &Digest::of(&decoded).0.to_le_bytes());
        }
    };
    Ok(Prepared { ranges: places.ranges, work: Box::new(decode) })
}

impl CodecArrays {
    fn of(params: &Params, launch: &Launch, block_shared: u32, result_bytes: usize) -> CallResult<Self> {
        let (entries, results) = (params.read::<u64>(0)?, params.read::<u64>(1)?);
        let blocks = params.read::<u32>(2)?;
        let Launch { grid: [count, 1, 1], block: [threads, 1, 1], shared_bytes } = *launch else {
            return Err(Code::INVALID_VALUE);
        };
        let needed = block_shared * blocks + 16 + threads / 32 * STAGE_BYTES;
        let fits = threads <= THREADS_MAX && (needed..=SHARED_BYTES_MAX).contains(&shared_bytes);
        if !fits || threads % 32 != 0 || !(DIGEST_LEAVES_MIN..=DIGEST_LEAVES_MAX).contains(&blocks.into()) {
            return Err(Code::INVALID_VALUE);
        }
        if ![entries, results].iter().all(|array| array.is_multiple_of(ALIGNMENT)) {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        let (state, count) = (state::get()?, count as usize);
        let at = state.host_address(entries, 8 * ENTRY_WORDS * count)?;
        let results = state.host_address(results, result_bytes * count)?;
        let word = |nth: usize| {
            let from = ptr::with_exposed_provenance::<[u8; 8]>(at + 8 * nth);
            // SAFETY: F4, the array is registered, and the caller keeps it until the kernel has finished.
            u64::from_le_bytes(unsafe { from.read_volatile() })
        };
        let entry = |nth: usize| [0, 1, 2].map(|field| word(ENTRY_WORDS * nth + field));
        Ok(Self {
            entries: (0..count).map(entry).collect(),
            results,
            granule_bytes: blocks as usize * BLOCK_BYTES,
        })
    }
}

impl Places {
    fn pointer(&mut self, address: u64, len: usize) -> CallResult<usize> {
        if !address.is_multiple_of(ALIGNMENT) {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        if address & HOST_WINDOW != 0 {
            return state::get()?.host_address(address, len);
        }
        self.ranges.push(DeviceRange::new(address, len as u64));
        usize::try_from(address).map_err(|_| Code::ILLEGAL_ADDRESS)
    }
}

fn copied(from: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: F3 and F4. It is device memory that is mapped with access while this runs, or registered host memory that
    // the caller keeps until the kernel has finished. No Rust reference writes to it meanwhile.
    unsafe { ptr::with_exposed_provenance::<u8>(from).copy_to_nonoverlapping(bytes.as_mut_ptr(), len) };
    bytes
}

fn write(to: usize, bytes: &[u8]) {
    let to = ptr::with_exposed_provenance_mut::<u8>(to);
    // SAFETY: as for `copied`; no Rust reference points to it meanwhile.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}
