//! This node in its fleet: it publishes what it has, and takes placements.
//!
//! Its own decisions stay its own: a placement says which models it may serve and keeps awake, and the policy does
//! everything else. Without etcd it gets no new placement, and no model ends.
//!
//! Promises:
//!
//! - A request is served only while the node's lease lives by its own clock and its model is placed here. All others get
//!   421, and a router takes them elsewhere.
//! - A placement of an older controller than the last one is not taken, also after a restart with a state folder.
//! - Two nodes with one name never both serve: the second waits until the lease of the first has ended.

mod agent;
mod owned;
mod preparations;
mod published;

pub use poorwill::proc::hostname;

pub use self::agent::{Agent, FleetError};
pub use self::owned::{Membership, NotReady, Owned};
