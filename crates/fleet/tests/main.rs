//! What a fleet promises, over a real etcd and by itself.
#![allow(clippy::unwrap_used)]

#[cfg(target_os = "linux")]
mod etcd;
mod policy;
mod records;
mod simulated;
mod simulation;
#[cfg(target_os = "linux")]
mod tls;
