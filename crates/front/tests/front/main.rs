//! The front over real sockets, between a client and an engine that a test controls byte by byte.
//!
//! Nothing depends on timing: tests wait for what they check, and a watchdog ends a test that hangs.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod bodies;
mod cancelling;
mod descriptors;
mod elsewhere;
mod engines;
mod errors;
mod leaving;
mod limits;
mod listing;
mod log;
mod malformed;
mod pages;
mod passthrough;
mod paths;
mod routing;
mod setup;
mod sockets;
mod stored;
mod streams;
mod tls;
mod trials;
