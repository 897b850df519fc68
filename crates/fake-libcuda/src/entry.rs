//! What every symbol does around its own work.
//!
//! Each symbol of [`entries!`] counts its call, fails or waits for a test, and refuses to work before
//! `cuInit` and inside a host function. A panic becomes `CUDA_ERROR_UNKNOWN`: none crosses into C.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::{CallResult, Code};
use crate::{faults, process, state};

/// What a symbol requires, and whether it counts as one that a machine can make fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types)] // Keywords of `entries!`.
pub(crate) enum Requirement {
    /// Needs `cuInit`; counts, and waits while this process is locked.
    call,
    /// Needs `cuInit`; counts. It looks at queued work, also while this process is locked. A checkpointed one ends.
    look,
    /// Needs `cuInit`; counts. It looks at memory, also while this process is locked. A checkpointed one gets an error.
    figure,
    /// Needs `cuInit`; counts. It is about another process.
    other,
    /// Needs `cuInit`; does not count.
    stack,
    /// Needs nothing; counts.
    early,
    /// Needs nothing; does not count.
    free,
}

pub(crate) fn enter(
    requirement: Requirement,
    symbol: &'static str,
    body: impl FnOnce() -> CallResult,
) -> i32 {
    let run = AssertUnwindSafe(|| {
        if requirement != Requirement::free && IN_HOST_FUNCTION.get() {
            return Err(Code::NOT_PERMITTED);
        }
        if !matches!(requirement, Requirement::early | Requirement::free) {
            state::get()?;
        }
        let is_counted = !matches!(requirement, Requirement::stack | Requirement::free);
        faults::on_call(symbol, is_counted)?;
        let _call = match requirement {
            Requirement::call => process::enter()?,
            Requirement::look => process::look(symbol)?,
            Requirement::figure => process::look_at_memory()?,
            _ => None,
        };
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

/// Runs a host function, in which symbols refuse to work.
pub(crate) fn run_host_function(function: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    function();
    IN_HOST_FUNCTION.set(false);
}

/// Defines symbols: `REQUIREMENT NAME(ARGUMENTS) { BODY }`; the body returns an [`CallResult`].
macro_rules! entries {
    ($($(#[$attribute:meta])* $requirement:ident $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)+) => {
        pub(super) const SYMBOLS: &[&str] = &[$(stringify!($name)),+];

        $(
            $(#[$attribute])*
            #[allow(non_snake_case)] // CUDA's name.
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $kind),*) -> std::ffi::c_int {
                $crate::entry::enter($crate::entry::Requirement::$requirement, stringify!($name), || $body)
            }
        )+
    };
}
pub(crate) use entries;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_does_not_cross_into_c() {
        assert_eq!(enter(Requirement::free, "test", || panic!("on purpose")), 999);
        assert_eq!(enter(Requirement::free, "test", || Err(Code::NOT_FOUND)), 500);
        assert_eq!(enter(Requirement::call, "test", || Ok(())), 3, "cuInit was not called here");
    }
}
