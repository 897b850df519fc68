//! Checkpoints as they come: whole, sharded, torn, hostile, and changing under the reader.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod differential;
mod files;
mod folders;
mod headers;
mod indexes;
mod reading;
