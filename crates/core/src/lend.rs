//! Lending: the memory of sleeping tags leaves the device only when it is needed elsewhere.
//!
//! A pool that sleeps may give descriptors of its memory to a [`Broker`]. That keeps the memory in use until its owner takes
//! it back, or another owner needs it. Whatever is lent has a current backup, or was dropped by the sleep. So a broker
//! can give memory up at any time without a question, and when a broker ends, time is lost and no byte.
//!
//! A backup of bytes that change all the time would be made in vain by most sleeps. Such memory stays with the pool: it is
//! *resident*. The broker knows how much that is, and has the pool [back it up and release it](crate::Pool::give_up) when
//! others need it.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Memory of a sleeping tag, by the number that its pool gave it.
///
/// ```
/// use poorwill::lend::Lent;
///
/// fn bytes_of(lent: &[Lent]) -> u64 {
///     lent.iter().map(|lent| lent.bytes).sum()
/// }
/// # assert_eq!(bytes_of(&[]), 0);
/// ```
#[derive(Debug)]
pub struct Lent {
    /// Unique among what its pool lends.
    pub id: u64,
    /// In bytes.
    pub bytes: u64,
    /// Its sleep dropped what it holds, so losing it costs least.
    pub is_dropped: bool,
    /// From [`Driver::export`](crate::Driver::export).
    pub descriptor: OwnedFd,
}

/// Why a broker cannot be used, in its own words.
///
/// ```
/// use poorwill::lend::BrokerError;
///
/// let error = BrokerError { reason: "it has ended: start another".into() };
/// assert_eq!(error.to_string(), "it has ended: start another");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct BrokerError {
    /// What happened, and what to do.
    pub reason: String,
}

/// Whose memory is asked for.
///
/// ```
/// use poorwill::lend::AskedOf;
///
/// assert_ne!(AskedOf::All, AskedOf::Others);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskedOf {
    /// Lent memory of other pools, then of this one, and then what is resident elsewhere.
    All,
    /// That of other pools, lent or resident.
    Others,
}

/// Has a pool give up so many bytes of resident memory, and returns how many it gave up; see
/// [`Pool::give_up`](crate::Pool::give_up). It may take as long as a backup.
pub type GiveUp = Arc<dyn Fn(u64) -> u64 + Send + Sync>;

/// Holds memory that one pool lends, beside that of others. No call waits for long, whatever became of the broker: each has a
/// deadline of its own. After an error the pool goes on as it would without a broker.
///
/// ```
/// use std::time::Duration;
///
/// use poorwill::lend::{AskedOf, Broker, BrokerError, GiveUp, Lent};
/// use poorwill::{Arena, Config};
///
/// /// Takes nothing, so that sleeps release.
/// #[derive(Debug)]
/// struct Closed;
///
/// impl Broker for Closed {
///     fn attach(&self, _: GiveUp) {}
///
///     fn lend(&self, _: Vec<Lent>) -> Result<(), BrokerError> {
///         Err(BrokerError { reason: "it is closed".into() })
///     }
///
///     fn take_back(&self, _: &[u64]) -> Result<Vec<Lent>, BrokerError> {
///         Ok(Vec::new())
///     }
///
///     fn announce(&self, _: u64) -> Result<(), BrokerError> {
///         Err(BrokerError { reason: "it is closed".into() })
///     }
///
///     fn ask(&self, _: u64, _: AskedOf, _: Duration) -> Result<u64, BrokerError> {
///         Ok(0)
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.pool().lend_through(std::sync::Arc::new(Closed))?;
/// # Ok(())
/// # }
/// ```
pub trait Broker: Send + Sync + fmt::Debug {
    /// Takes descriptors of memory of a pool that sleeps.
    ///
    /// # Errors
    /// Nothing was taken.
    fn lend(&self, memory: Vec<Lent>) -> Result<(), BrokerError>;

    /// Gives back what is still there of this.
    ///
    /// # Errors
    /// Nothing comes back, now or later.
    fn take_back(&self, ids: &[u64]) -> Result<Vec<Lent>, BrokerError>;

    /// Called once, before anything else: whom to ask for what is announced. When the broker is lost, all of it is to be given
    /// up, since others could not ask for it.
    fn attach(&self, give_up: GiveUp);

    /// Says how much this pool would give up besides. It replaces what was said before.
    ///
    /// # Errors
    /// The pool will not be asked.
    fn announce(&self, bytes: u64) -> Result<(), BrokerError>;

    /// Has memory given up until so many bytes are. Returns how many were.
    ///
    /// # Errors
    /// Nothing is known to be given up.
    fn ask(&self, bytes: u64, of: AskedOf, wait_max: Duration) -> Result<u64, BrokerError>;
}
