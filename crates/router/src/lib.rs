//! A router: the front of a fleet. It sends each request to a node that has its model.
//!
//! It keeps nothing that another router needs, so there may be many of them side by side.
//!
//! Promises:
//!
//! - A request goes to a copy that is awake, if there is one, else where a wake is cheapest.
//! - A request goes elsewhere if its node refuses it, cannot be reached, or loses its lease before the answer has begun.
//!   An answer that has begun is never asked for again.
//! - While etcd cannot be reached, it routes by what it knew last. Nodes refuse what is not theirs any more.
#![forbid(unsafe_code)]

mod backend;
mod choose;
mod config;
mod history;
mod operators;
mod run;
pub mod status;
mod table;
pub mod wishes;

pub use self::config::RouterConfig;
pub use self::run::{RouterError, RouterRunning, begin};
