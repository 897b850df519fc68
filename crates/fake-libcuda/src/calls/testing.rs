//! The symbols that CUDA does not have: injected failures, and a count of objects.

use std::ffi::c_int;

use crate::abi::{Census, Code, Name, Out};
use crate::entry::{Requirement, enter, is_symbol};
use crate::{faults, state};

/// Starts counting calls that a machine can make fail. The calls `first` to `first + count - 1`, counted from 0, do
/// nothing but fail with `CUDA_ERROR_UNKNOWN`. Per process: tests take turns.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeArm(first: u64, count: u64) {
    faults::arm(first, count);
}

/// Stops what `poorwillFakeArm` started, and returns how many calls were counted.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeDisarm() -> u64 {
    faults::disarm()
}

/// The name of the call with this number since `poorwillFakeArm`, padded with zeros.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeCalled(number: u64, out: Out<[u8; 64]>) -> c_int {
    enter(Requirement::free, "poorwillFakeCalled", || {
        let name = faults::called(number).ok_or(Code::NOT_FOUND)?;
        let mut bytes = [0; 64];
        bytes.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
        out.set(bytes)
    })
}

/// Blocks calls of this symbol, until another is named or `poorwillFakeResume` is called.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeHold(symbol: Name) -> c_int {
    enter(Requirement::free, "poorwillFakeHold", || {
        let symbol = symbol.text()?;
        if !is_symbol(&symbol) {
            return Err(Code::NOT_FOUND);
        }
        faults::hold(Some(symbol));
        Ok(())
    })
}

/// Unblocks the blocked calls.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeResume() {
    faults::hold(None);
}

/// How many calls are blocked.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeHeld() -> u64 {
    faults::held()
}

/// Counts the objects of a device.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeCensus(device: c_int, out: Out<Census>) -> c_int {
    enter(Requirement::free, "poorwillFakeCensus", || out.set(state::get()?.census(device)?))
}
