//! What a replay promises: files that it reads, its reports, its page, and how its models compare with what was measured.
#![allow(clippy::unwrap_used)]

mod cases;
mod measured;
#[cfg(target_os = "linux")]
mod page;
mod read;
