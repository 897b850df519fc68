//! The suites and fixtures themselves.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod injector;
mod slice;
