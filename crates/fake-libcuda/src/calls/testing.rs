//! The symbols that CUDA does not have: calls that fail on demand, and a count of what there is.

use std::ffi::c_int;

use crate::abi::{Census, Code, Name, Out};
use crate::entry::{Gate, enter, is_symbol};
use crate::{faults, world};

/// From now on counts the calls that a machine could make fail, and has those number `first` to
/// `first + count - 1`, counted from 0, do nothing but fail with `CUDA_ERROR_UNKNOWN`. The process's: callers
/// take turns.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeArm(first: u64, count: u64) {
    faults::arm(first, count);
}

/// Stops what `poorwillFakeArm` began; gives how many calls were counted.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeDisarm() -> u64 {
    faults::disarm()
}

/// The name of the call with this number, of those that were counted since `poorwillFakeArm`; zeros fill the place.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeCalled(number: u64, out: Out<[u8; 64]>) -> c_int {
    enter(Gate::free, "poorwillFakeCalled", || {
        let name = faults::called(number).ok_or(Code::NOT_FOUND)?;
        let mut bytes = [0; 64];
        bytes.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
        out.set(bytes)
    })
}

/// From now on calls of this symbol wait, until another is named, or `poorwillFakeLetGo` is called.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeHold(symbol: Name) -> c_int {
    enter(Gate::free, "poorwillFakeHold", || {
        let symbol = symbol.text()?;
        if !is_symbol(&symbol) {
            return Err(Code::NOT_FOUND);
        }
        faults::hold(Some(symbol));
        Ok(())
    })
}

/// Has the calls that wait go on.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeLetGo() {
    faults::hold(None);
}

/// How many calls wait now.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeHeld() -> u64 {
    faults::held()
}

/// What there is on a device.
#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeCensus(device: c_int, out: Out<Census>) -> c_int {
    enter(Gate::free, "poorwillFakeCensus", || out.set(world::get()?.census(device)?))
}
