//! The front over real sockets, between a client and an engine that are both told what to do byte by byte.
//!
//! Nothing here depends on how long something takes: what is to be seen is waited for, and a watchdog ends what hangs.
#![allow(clippy::unwrap_used)]

#[path = "front/bodies.rs"]
mod bodies;
#[path = "front/errors.rs"]
mod errors;
#[path = "front/leaving.rs"]
mod leaving;
#[path = "front/log.rs"]
mod log;
#[path = "front/malformed.rs"]
mod malformed;
#[path = "front/routing.rs"]
mod routing;
#[path = "front/setup.rs"]
mod setup;
#[path = "front/streams.rs"]
mod streams;
