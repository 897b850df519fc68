//! `poorwill_test_fill`: writes a value to a range repeatedly.

use std::ptr;
use std::thread;
use std::time::Duration;

use poorwill_core::DeviceRange;

use super::launch::{Launch, Prepared};
use crate::abi::{CallResult, Code, Params};

/// Between two rounds, so that a test can be faster than a kernel.
const PAUSE: Duration = Duration::from_micros(100);

pub(super) fn prepare(params: &Params, _launch: &Launch) -> CallResult<Prepared> {
    let (address, words) = (params.read::<u64>(0)?, params.read::<u64>(1)?);
    let (value, rounds) = (params.read::<u32>(2)?, params.read::<u32>(3)?);
    let bytes = words.checked_mul(4).ok_or(Code::ILLEGAL_ADDRESS)?;
    if !address.is_multiple_of(4) {
        return Err(Code::MISALIGNED_ADDRESS);
    }
    let range = DeviceRange::new(address, bytes);
    let ranges = if rounds > 0 { vec![range] } else { Vec::new() };
    Ok(Prepared { ranges, work: Box::new(move || fill(range, value, rounds)) })
}

/// `range` stays mapped with access meanwhile.
fn fill(range: DeviceRange, value: u32, rounds: u32) {
    for round in 0..rounds {
        if round > 0 {
            thread::sleep(PAUSE);
        }
        for address in (range.addr..range.end()).step_by(4) {
            let Ok(address) = usize::try_from(address) else { return };
            let word = ptr::with_exposed_provenance_mut::<u32>(address);
            // SAFETY: F3, the word is device memory that is mapped with access while this runs, and aligned.
            unsafe { word.write_volatile(value) };
        }
    }
}
