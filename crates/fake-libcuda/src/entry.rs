//! The way into the library: what every symbol does before and around its own work.
//!
//! [`entries!`] defines symbols. Each counts its call, fails or waits where a test wants that, refuses to work
//! before `cuInit` and inside a host function, and turns a panic into `CUDA_ERROR_UNKNOWN`: no panic crosses the
//! border to C.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::{Code, Outcome};
use crate::{faults, world};

/// What a symbol needs, and whether it counts as one that a machine can make fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types)] // They stand in front of the symbols like keywords.
pub(crate) enum Gate {
    /// Needs `cuInit`; counts.
    call,
    /// Needs `cuInit`; does not count.
    stack,
    /// Needs nothing; counts.
    early,
    /// Needs nothing; does not count.
    free,
}

/// All symbols of CUDA's that there are.
pub(crate) fn is_symbol(name: &str) -> bool {
    crate::calls::SYMBOLS.iter().any(|symbols| symbols.contains(&name))
}

/// Does what all symbols do, around `body`.
pub(crate) fn enter(gate: Gate, symbol: &'static str, body: impl FnOnce() -> Outcome) -> i32 {
    let run = AssertUnwindSafe(|| {
        if gate != Gate::free && IN_HOST_FUNCTION.get() {
            return Err(Code::NOT_PERMITTED);
        }
        if matches!(gate, Gate::call | Gate::stack) {
            world::get()?;
        }
        if symbol == "cuInit" {
            faults::config()?;
        }
        faults::consult(symbol, matches!(gate, Gate::call | Gate::early))?;
        body()
    });
    match catch_unwind(run) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code.0,
        Err(_) => Code::UNKNOWN.0,
    }
}

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs a host function; symbols that it calls refuse to work.
pub(crate) fn as_host_function(function: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    function();
    IN_HOST_FUNCTION.set(false);
}

/// Defines symbols: `GATE NAME(ARGUMENTS) { BODY }`, where the body gives an [`Outcome`].
macro_rules! entries {
    ($($(#[$attribute:meta])* $gate:ident $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)+) => {
        /// The symbols that this file defines.
        pub(super) const SYMBOLS: &[&str] = &[$(stringify!($name)),+];

        $(
            $(#[$attribute])*
            #[allow(non_snake_case)] // CUDA's name.
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $kind),*) -> std::ffi::c_int {
                $crate::entry::enter($crate::entry::Gate::$gate, stringify!($name), || $body)
            }
        )+
    };
}
pub(crate) use entries;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_does_not_cross_the_border() {
        assert_eq!(enter(Gate::free, "test", || panic!("on purpose")), 999);
        assert_eq!(enter(Gate::free, "test", || Err(Code::NOT_FOUND)), 500);
        assert_eq!(enter(Gate::call, "test", || Ok(())), 3, "nobody has called cuInit here");
    }
}
