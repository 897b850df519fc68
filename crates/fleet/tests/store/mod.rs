//! The same promises of all that talks to etcd, over a router's store in its place.

#![allow(clippy::duplicate_mod, reason = "each test is there for etcd and for the store")]

#[path = "../etcd/client.rs"]
mod client;
#[path = "../etcd/controller.rs"]
mod controller;
#[path = "../etcd/fleet.rs"]
mod fleet;
#[path = "../etcd/history.rs"]
mod history;
mod limits;
mod lock;
#[path = "../etcd/mirror.rs"]
mod mirror;
mod precedence;
mod same;
mod servers;
#[path = "../etcd/session.rs"]
mod session;
#[path = "../etcd/support.rs"]
mod support;

use self::servers::Servers;

/// Whether a cluster has the same id once its data was lost.
const KEEPS_ITS_ID: bool = false;
