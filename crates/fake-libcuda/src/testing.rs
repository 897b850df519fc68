//! The symbols that CUDA does not have, as the crate's documentation describes them.

use std::ffi::c_int;

use crate::abi::{Census, Code, Name, Out};
use crate::entry::{Requirement, enter};
use crate::init::is_symbol;
use crate::{faults, state};

#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeArm(first: u64, count: u64) {
    faults::arm(first, count);
}

#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeDisarm() -> u64 {
    faults::disarm()
}

/// The name is padded with zeros.
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

/// Holds until another symbol is named or `poorwillFakeResume` is called.
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

#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeResume() {
    faults::hold(None);
}

#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeHeld() -> u64 {
    faults::held()
}

#[allow(non_snake_case)] // A name beside CUDA's.
#[unsafe(no_mangle)]
extern "C" fn poorwillFakeCensus(device: c_int, out: Out<Census>) -> c_int {
    enter(Requirement::free, "poorwillFakeCensus", || out.set(state::get()?.census(device)?))
}
