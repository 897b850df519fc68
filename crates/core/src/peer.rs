//! Idle memory of other devices, for second copies of what sleeps.
//!
//! Memory of a device's neighbour is read some seven times as fast as host memory. A sleep may leave a copy of what it backs
//! up there. The neighbour's [`Broker`] holds it, and gives it up as soon as a process needs that memory. So a copy costs
//! its neighbour nothing, and losing it costs its owner time and no byte.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::driver::Result;
use crate::lend::Broker;

/// Memory of another device, which this device can map.
///
/// ```
/// use std::os::fd::OwnedFd;
///
/// use poorwill::driver::{DriverError, DriverErrorKind, Op};
/// use poorwill::peer::PeerMemory;
///
/// /// Is always full.
/// #[derive(Debug)]
/// struct Full;
///
/// impl PeerMemory for Full {
///     fn memory_name(&self) -> &str {
///         "GPU-0"
///     }
///
///     fn idle_bytes(&self) -> Result<u64, DriverError> {
///         Ok(0)
///     }
///
///     fn create(&self, asked_bytes: u64) -> Result<OwnedFd, DriverError> {
///         Err(DriverError::new(Op::Create, DriverErrorKind::OutOfMemory { asked_bytes, free_bytes: 0 }))
///     }
/// }
/// # assert_eq!(Full.idle_bytes().unwrap(), 0);
/// ```
pub trait PeerMemory: Send + Sync + fmt::Debug {
    /// That device's [`memory_name`](crate::DeviceInfo::memory_name).
    fn memory_name(&self) -> &str;

    /// What may be taken now. It leaves an eighth of that device free, for what asks no broker.
    ///
    /// # Errors
    /// Nothing says how much is free there.
    fn idle_bytes(&self) -> Result<u64>;

    /// Takes `bytes`, whole granules. They stay in use until the descriptor is closed, and all that was
    /// [imported](crate::Driver::import) from it is gone.
    ///
    /// # Errors
    /// `OutOfMemory`; what that device reports.
    fn create(&self, bytes: u64) -> Result<OwnedFd>;
}

/// A neighbour with memory for copies.
///
/// ```
/// use std::sync::Arc;
///
/// use poorwill::lend::Broker;
/// use poorwill::peer::{Peer, PeerMemory};
///
/// fn names(peers: &[Peer]) -> Vec<&str> {
///     peers.iter().map(|peer| peer.memory.memory_name()).collect()
/// }
/// # assert!(names(&[]).is_empty());
/// ```
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its memory.
    pub memory: Arc<dyn PeerMemory>,
    /// That device's, for this pool alone.
    pub broker: Arc<dyn Broker>,
}
