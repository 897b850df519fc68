//! Lent memory: what sleeping engines leave on their GPUs until another process needs it.
//!
//! The service serves its user's broker on a thread, unless another process does. [`Lenders`] is what it uses of a broker,
//! its own or another one. [`WithLent`](crate::measure::WithLent) counts with it.
//!
//! Promise: without a broker, or with one that does not answer, all goes on as if nothing were lent.

mod lenders;
mod link;
mod memory_names;
mod served;

pub use self::lenders::{LendError, Lender, Lenders, Lent, LentTotals};
pub use self::link::BrokerLink;
pub use self::memory_names::{MemoryNames, of_devices, of_simulated, simulated_folder};
pub use self::served::ServedBroker;
