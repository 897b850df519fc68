//! The front over real sockets, between a client and an engine that a test controls byte by byte.
//!
//! Nothing depends on timing: tests wait for what they check, and a watchdog ends a test that hangs.
#![allow(clippy::unwrap_used)]

#[path = "front/bodies.rs"]
mod bodies;
#[path = "front/descriptors.rs"]
mod descriptors;
#[path = "front/elsewhere.rs"]
mod elsewhere;
#[path = "front/errors.rs"]
mod errors;
#[path = "front/leaving.rs"]
mod leaving;
#[path = "front/limits.rs"]
mod limits;
#[path = "front/listing.rs"]
mod listing;
#[path = "front/log.rs"]
mod log;
#[path = "front/malformed.rs"]
mod malformed;
#[path = "front/pages.rs"]
mod pages;
#[path = "front/passthrough.rs"]
mod passthrough;
#[path = "front/routing.rs"]
mod routing;
#[path = "front/setup.rs"]
mod setup;
#[path = "front/sockets.rs"]
mod sockets;
#[path = "front/stored.rs"]
mod stored;
#[path = "front/streams.rs"]
mod streams;
#[path = "front/tls.rs"]
mod tls;
#[path = "front/traces.rs"]
mod traces;
