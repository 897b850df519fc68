//! The suites and stand-ins themselves.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod injector;
mod slice;
