//! `cuInit`, which reads the settings and opens the devices.

use std::ffi::{c_int, c_uint};

use crate::abi::Code;
use crate::calls::SYMBOLS;
use crate::entry::{Requirement, enter};
use crate::{faults, process, state};

const NAME: &str = "cuInit";

/// Whether a caller may name this symbol in a setting.
pub(crate) fn is_symbol(name: &str) -> bool {
    name == NAME || SYMBOLS.iter().any(|symbols| symbols.contains(&name))
}

/// A malformed setting fails the call before it counts.
#[allow(non_snake_case)] // CUDA's name.
#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> c_int {
    if let Err(code) = faults::read_config(is_symbol) {
        return code.0;
    }
    enter(Requirement::early, NAME, || {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        state::open(process::register)
    })
}
