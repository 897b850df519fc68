//! A router: the front of a fleet. It sends each request to a node that has its model.
//!
//! It keeps nothing that another router needs, so there may be many of them side by side.
//!
//! Promises:
//!
//! - A request goes to a copy that is awake, if there is one, else where a wake is cheapest.
//! - Requests with the same beginning go to the same awake copy while its load is near the mean. What goes on from a
//!   stored response goes where that was made, if this router saw it.
//! - A request goes elsewhere if its node refuses it, cannot be reached, or loses its lease before the answer has begun.
//!   An answer that has begun is never asked for again.
//! - Where all nodes refuse a request, its client gets the refusal of a living one.
//! - A request that waits where its model is not awake goes elsewhere once it is awake there.
//! - While etcd cannot be reached, it routes by what it knew last. Nodes refuse what is not theirs any more. So it does for
//!   some seconds behind a loss of etcd's data, until nodes have entered anew.
//! - With `[store]`, it keeps the fleet's records itself, and no etcd is needed.
#![forbid(unsafe_code)]

mod backend;
mod check;
mod choose;
mod config;
mod history;
mod loads;
mod operators;
mod queue;
mod reader;
pub mod rendezvous;
mod run;
pub mod status;
mod store;
mod table;
mod trust;
pub mod wishes;

pub use self::check::{Checked, check};
pub use self::config::{FleetConfig, RouterConfig};
pub use self::run::{RouterError, RouterRunning, begin};
pub use self::store::StoreSettings;
