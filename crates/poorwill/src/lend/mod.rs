//! Lending: memory of a sleeping arena stays on its device until another process needs it.
//!
//! A [`Broker`](crate::broker::Broker) of this user holds descriptors of the memory. A wake takes back what is still there,
//! and copies the rest from backups. Without a broker, sleeps release memory as ever, and their reports say why.

mod lender;
mod lending;
mod peer_copies;

use std::sync::Arc;

use poorwill_core::{Pool, PoolError};

pub use lending::Lending;
pub use peer_copies::PeerCopies;
pub use poorwill_broker::ClientError as LendError;
pub use poorwill_core::lend::{AskedOf, Broker, BrokerError, GiveUp, Lent};

use lender::Lender;
pub(crate) use peer_copies::peers_of;

/// What others' lent memory leaves free of a device: a part of it, and at most so many bytes.
const FREE_PART: u64 = 128;
const FREE_BYTES_MAX: u64 = 1 << 30;

/// Has sleeps of a pool lend through this broker.
pub(crate) fn lend_through(pool: &Pool, lending: &Lending) -> Result<(), PoolError> {
    let memory_name = pool.driver().info().memory_name.clone();
    // Without a name the pool refuses, and says why.
    let lender = Arc::new(Lender::new(lending.clone(), memory_name.unwrap_or_default()));
    pool.lend_through(Arc::clone(&lender) as Arc<_>)?;
    let total_bytes = pool.driver().memory_info().map_or(0, |info| info.total_bytes);
    pool.keep_free((total_bytes / FREE_PART).min(FREE_BYTES_MAX));
    poorwill_broker::raise_descriptor_limit();
    lender.start_early();
    Ok(())
}
