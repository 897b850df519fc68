//! A router: its configuration, and its operators' listener over a real etcd.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

#[path = "../../../front/tests/operator_client/mod.rs"]
mod client;
mod config;
mod operators;
