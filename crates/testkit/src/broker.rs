//! A broker in the process of its pools, and what may happen to one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use poorwill_core::lend::{AskedOf, Broker, BrokerError, GiveUp, Lent};

/// Holds memory of one pool, as [`Broker`] says, and gives up what a test takes.
#[derive(Debug, Default)]
pub struct HeldMemory {
    lent: Mutex<Vec<Lent>>,
    fails: Mutex<bool>,
    asked_bytes: AtomicU64,
    announced_bytes: AtomicU64,
    give_up: GiveUpSlot,
}

#[derive(Default)]
struct GiveUpSlot(Mutex<Option<GiveUp>>);

impl std::fmt::Debug for GiveUpSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GiveUpSlot")
    }
}

impl HeldMemory {
    fn lent(&self) -> MutexGuard<'_, Vec<Lent>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it holds, in bytes.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.lent().iter().map(|lent| lent.bytes).sum()
    }

    /// What of it was dropped by the sleep, in bytes.
    #[must_use]
    pub fn dropped_bytes(&self) -> u64 {
        self.lent().iter().filter(|lent| lent.is_dropped).map(|lent| lent.bytes).sum()
    }

    /// Gives up the oldest until so many bytes are. Returns how many were.
    pub fn give_up(&self, bytes: u64) -> u64 {
        let (mut lent, mut given) = (self.lent(), 0);
        while given < bytes && !lent.is_empty() {
            given += lent.remove(0).bytes;
        }
        given
    }

    /// Has the pool give up so much of what is resident, as a broker does. Returns how much it was.
    pub fn have_given_up(&self, bytes: u64) -> u64 {
        let give_up = self.give_up.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        give_up.map_or(0, |give_up| give_up(bytes))
    }

    /// Takes one of its memories, as another owner would.
    #[must_use]
    pub fn take(&self) -> Option<Lent> {
        self.lent().pop()
    }

    /// Every call fails from now on, and what it held is gone; or it works again.
    pub fn fail(&self, fails: bool) {
        *self.fails.lock().unwrap_or_else(PoisonError::into_inner) = fails;
        if fails {
            self.lent().clear();
        }
    }

    /// How many bytes were asked for.
    #[must_use]
    pub fn asked_bytes(&self) -> u64 {
        self.asked_bytes.load(Ordering::Relaxed)
    }

    /// What the pool would give up besides.
    #[must_use]
    pub fn announced_bytes(&self) -> u64 {
        self.announced_bytes.load(Ordering::Relaxed)
    }

    fn check(&self) -> Result<(), BrokerError> {
        if *self.fails.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(BrokerError { reason: "the broker has ended: start another".into() });
        }
        Ok(())
    }
}

impl Broker for HeldMemory {
    fn lend(&self, memory: Vec<Lent>) -> Result<(), BrokerError> {
        self.check()?;
        let mut lent = self.lent();
        let is_known = |new: &Lent| lent.iter().any(|old| old.id == new.id);
        if memory.iter().any(is_known) {
            return Err(BrokerError { reason: "that is lent already".into() });
        }
        lent.extend(memory);
        Ok(())
    }

    fn take_back(&self, ids: &[u64]) -> Result<Vec<Lent>, BrokerError> {
        self.check()?;
        Ok(self.lent().extract_if(.., |lent| ids.contains(&lent.id)).collect())
    }

    fn attach(&self, give_up: GiveUp) {
        *self.give_up.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(give_up);
    }

    fn announce(&self, bytes: u64) -> Result<(), BrokerError> {
        self.check()?;
        self.announced_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn ask(&self, bytes: u64, _of: AskedOf, _wait_max: Duration) -> Result<u64, BrokerError> {
        self.check()?;
        self.asked_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(self.give_up(bytes))
    }
}
