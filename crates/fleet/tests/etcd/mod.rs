//! Promises of all that talks to etcd, over real servers.
//!
//! Nothing here is fast enough or fails: tests wait for what has to come, and compare the order of events.

mod client;
mod controller;
mod faults;
mod fleet;
mod foreign;
mod full;
mod history;
mod mirror;
mod session;
mod support;
