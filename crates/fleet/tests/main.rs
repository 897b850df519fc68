//! What a fleet promises, over a real etcd and by itself.
#![allow(clippy::unwrap_used)]

#[cfg(target_os = "linux")]
mod etcd;
mod policy;
mod records;
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "a test's figures are small"
)]
mod simulated;
mod simulation;
#[cfg(target_os = "linux")]
mod store;
#[cfg(target_os = "linux")]
mod tls;
