//! A disk for backups: one unnamed file in a folder.
//!
//! The file has no name, so nothing is left of it when the process ends, however it ends. Transfers
//! bypass the page cache where the file system allows it. `io_uring` does them where the kernel has it, and otherwise a few
//! threads. The disk's information says which, and why not the other.
//!
//! - `file` opens the file and reserves its space.
//! - `transfer` owns its memory and its place until it ends.
//! - `ring` and `threads` do the transfers.
//!
//! Promises: a transfer is complete or an error. Space is reserved before it is written, so that a full disk is
//! noticed in time, and given back when the bytes are dropped.

mod config;
#[cfg(target_os = "linux")]
mod file;
#[cfg(target_os = "linux")]
mod file_disk;
#[cfg(target_os = "linux")]
mod refused;
#[cfg(target_os = "linux")]
mod ring;
#[cfg(target_os = "linux")]
mod space;
#[cfg(target_os = "linux")]
mod task;
#[cfg(all(test, target_os = "linux"))]
mod tests;
#[cfg(target_os = "linux")]
mod threads;
#[cfg(target_os = "linux")]
mod transfer;

pub use self::config::{DiskConfig, DiskIo};
#[cfg(target_os = "linux")]
pub use self::file_disk::FileDisk;
