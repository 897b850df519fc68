//! What measures poorwill, and the inputs that it makes up for that. For the command line and for tests: the library
//! that people import does not depend on it.
//!
//! - [`churn`]: what an arena maps while a model is loaded, beside what is live.
//! - [`sleep`]: what sleeping and waking cost beside the limits of the machine.
//! - [`nap`]: a checkpoint of the user's, put to sleep and woken again and again, and compared with its files.
//! - [`offload`]: what weights in host memory cost a forward pass.
//! - [`load`]: how fast a checkpoint gets into host memory, and what memory that takes.
//! - [`synthetic`]: a checkpoint out of nothing.
//!
//! Each that measures has a `Plan`, tells an observer what it does next, and gives a `Report` with one shape in Rust and
//! JSON: sizes in bytes, times in seconds. Bytes that were not as they should be are no error; the report says it.
#![forbid(unsafe_code)]

#[cfg(unix)]
mod blocks;
pub mod churn;
#[cfg(unix)]
mod cycle;
mod figures;
#[cfg(target_os = "linux")]
pub mod load;
#[cfg(unix)]
pub mod nap;
#[cfg(target_os = "linux")]
pub mod offload;
#[cfg(unix)]
mod pattern;
#[cfg(unix)]
mod process;
#[cfg(unix)]
pub mod sleep;
#[cfg(unix)]
pub mod synthetic;

pub use figures::Spread;
