//! This node in its fleet: it publishes what it has, and takes placements.
//!
//! Its own decisions stay its own: a placement says which models it may serve and keeps awake, and the policy does
//! everything else. Without etcd it gets no new placement, and everything stays as it was.
//!
//! A hot model gives way to a request that finds no other room, unless an operator pinned it.
//!
//! Promises:
//!
//! - A request is served if its model was placed here by the last order. All others get 421, and a router takes them
//!   elsewhere.
//! - No model is let go without an order that says so. An absent one says nothing.
//! - Of two nodes with one name the second serves nothing from when it knows until the lease of the first has ended.

mod agent;
mod orders;
mod owned;
mod pace;
mod preparations;
mod published;

pub use poorwill::proc::hostname;

pub use self::agent::{Agent, FleetError};
pub use self::orders::OrdersError;
pub use self::owned::{Membership, NotReady, Owned};
