//! Promises of all that talks to etcd, over real servers.
//!
//! Nothing here is fast enough or fails: tests wait for what has to come, and compare the order of events.

mod client;
mod controller;
mod endpoints;
mod faults;
mod fleet;
mod foreign;
mod full;
mod hedging;
mod history;
mod members;
mod mirror;
mod session;
mod support;
mod users;

use poorwill_testkit::etcd::Servers;

/// Whether a cluster has the same id once its data was lost.
const KEEPS_ITS_ID: bool = true;
