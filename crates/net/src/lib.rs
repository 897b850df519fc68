//! What the services share of the network.
//!
//! [`accept`](mod@accept) takes and serves connections, a [`listener`] is their task, [`client`] sends requests, and [`tls`] secures both.
//! [`site`] tells requests by pages of other sites from others. [`descriptors`] raises the limit of open files.
#![forbid(unsafe_code)]

pub mod accept;
pub mod client;
pub mod descriptors;
mod host;
pub mod listener;
pub mod site;
pub mod tls;

pub use self::host::hostname;
