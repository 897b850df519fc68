//! What the CUDA driver promises where calls of the library fail, and what is left in the library then.
//!
//! A separate program, over the fake library only: armed faults and counts concern the whole process. So the
//! tests take turns with the [`fake::Fake`].
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

mod changes;
mod codes;
mod copies;
mod digests;
mod ends;
mod fake;
mod faults;
mod uncopied;
mod unentered;
