//! A store that a router has in its memory, so that a small fleet needs no etcd.
//!
//! It speaks the part of etcd's JSON gateway that [`etcd`](crate::etcd) uses, and forgets all when its process ends. To
//! its clients it is another etcd then. That costs seconds and no request: nodes serve on by their last orders, enter anew,
//! and a controller places anew. What operators wished, drains and pins, has to be said again.
//!
//! Promises:
//!
//! - A transaction is carried out as a whole or not at all, and has one revision. What is answered to a read was so at one
//!   revision. A watch tells every change from its first revision on, in order, or that it ends.
//! - A lease ends no earlier than it was granted for behind its last renewal. Time in which the process stood still does
//!   not count, since nothing could be renewed in it.
//! - What it does not know of etcd's API it refuses. So it does with what is beyond its [limits](StoreLimits), as a whole. What
//!   it has can be written again, as long as it grows no larger. There is room again for what is removed.
//! - Without an `Authorization` that it gave for its password, it answers nothing but `/health`. It answers no browser.
//!
//! Several routers may have one each, and all of the fleet name them in the same order. The first one that can be reached
//! counts: see [`precedence`]. Each time that a store begins to serve it is empty, and has another cluster id.
//!
//! In a partition each side has one that serves, and clients follow the first one that they reach. Both sides elect a
//! controller, and each places its models on the nodes that it sees. That is harmless. Nodes compare orders of one cluster
//! id only, absence orders nothing, and a model that is served on both sides answers the same. Behind the partition, the
//! later store refuses again, and its clients enter the first one.

mod calls;
mod gateway;
mod limits;
mod lock;
pub mod precedence;
mod refusal;
mod serve;
mod state;
mod watches;

pub use self::limits::StoreLimits;
pub use self::lock::Lock;
pub use self::serve::StoreService;
