//! Giving host memory back: when asked to, and under pressure.
//!
//! Backups of tags that are awake only save time, namely the next copy of what has not changed. They go when their owner
//! says so, and when a sleep, of this pool or of another one of the process, lacks host memory: first those of its own
//! pool, then those of pools that use the same driver or store, then all others', whose drivers give back what they keep
//! for later. Backups of what sleeps are never touched. A preparation, which only saves time as well, takes nobody's
//! backups, only what other drivers keep and nobody uses.
//!
//! No lock is held while another pool is called, so that two that lack memory at once do not wait for each other. Whoever
//! prepares a sleep, in whichever pool, makes way meanwhile.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::deadline::Deadline;
use super::error::{PoolError, Result};
use super::keys::TagKey;
use super::per_process::{FORKS, PerProcess};
use super::shared::{Shared, SharedAccess, Starving};
use super::state::State;
use crate::driver::{DriverError, DriverErrorKind};
use crate::tag::{Tag, TagState};

const DROP: &str = "drop backups";

/// The pools of each process. Locked to look at the list, and not while a pool is called.
static POOLS: PerProcess<Mutex<Vec<Weak<Shared>>>> =
    PerProcess::new([const { Mutex::new(Vec::new()) }; FORKS]);

/// How far another pool is from one that lacks host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Distance {
    /// It has its host memory from the same driver or store.
    SameStore,
    /// It is of the same process.
    SameProcess,
}

impl Shared {
    /// See [`super::Pool::drop_backups`].
    pub(super) fn drop_backups(&self, tags: Option<&[Tag]>) -> Result<u64> {
        self.open_state()?.check_droppable(tags)?;
        let deadline = Deadline::begin(self.driver(), None);
        let (_, exclusive) = self.exclusive(DROP, tags, TagState::is_held, false, deadline)?;
        // Others may have been waited for.
        self.open_state()?.check_droppable(tags)?;
        let held_bytes = self.backups().held_bytes();
        let failed = |source| PoolError::Driver { op: "give host memory back", source };
        let (_, lost) = self.release_backups_of_awake(exclusive.tags()).map_err(failed)?;
        drop(exclusive);
        self.backups().trim().map_err(failed)?;
        if !lost.is_empty() {
            return Err(PoolError::Lost { op: DROP, lost });
        }
        Ok(held_bytes.saturating_sub(self.backups().held_bytes()))
    }

    /// The same for all tags that are awake and that nobody works on, except for those that fall asleep.
    fn release_idle_backups(&self, falling: &[TagKey]) -> u64 {
        let shared_accesses = self.shared_accesses(|state, tag| {
            !state.is_closed() && state.backups().has(tag) && !falling.contains(&tag)
        });
        let tags: Vec<TagKey> = shared_accesses.iter().map(SharedAccess::tag).collect();
        // What cannot be looked at stays.
        self.release_backups_of_awake(&tags).map_or(0, |(bytes, _)| bytes)
    }

    /// From now on other pools of the process may have this one's host memory when they lack some.
    pub(super) fn lend_host_memory(self: &Arc<Self>) {
        let mut all = POOLS.here().lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|pool| pool.strong_count() > 0);
        all.push(Arc::downgrade(self));
    }

    /// The others of this process, at this distance.
    fn others(&self, distance: Distance) -> Vec<Arc<Self>> {
        let all = POOLS.here().lock().unwrap_or_else(PoisonError::into_inner).clone();
        let others =
            all.iter().filter_map(Weak::upgrade).filter(|other| !std::ptr::eq(&raw const **other, self));
        others.filter(|other| self.distance(other) == distance).collect()
    }

    /// The host has too little memory for `bytes` of backups of a sleep: once more, whenever something has gone that only
    /// saves time.
    pub(super) fn with_host_memory<T>(
        &self,
        falling: &[TagKey],
        bytes: u64,
        mut again: impl FnMut() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let _starving = self.starve();
        self.await_preparation();
        self.release_idle_backups(falling);
        let mut done = again();
        for distance in [Distance::SameStore, Distance::SameProcess] {
            if !done.as_ref().is_err_and(is_lacking) || !self.may_help(distance, bytes) {
                return done;
            }
            let others = self.others(distance);
            let _starving: Vec<Starving<'_>> = others.iter().map(|other| other.starve()).collect();
            // Each of them, also once one has given.
            if others.iter().filter(|other| other.give_host_memory(distance)).count() > 0 {
                done = again();
            }
        }
        done
    }

    /// Whether more host memory is to be had when pools at this distance have less.
    fn may_help(&self, distance: Distance, bytes: u64) -> bool {
        // What others have in stores of theirs is no part of this one's own limit.
        distance == Distance::SameStore || self.backups().allows(bytes)
    }

    /// The same for what only saves time itself, once it has failed: nobody loses a backup to it.
    pub(super) fn with_cached_host_memory<T>(
        &self,
        bytes: u64,
        first: Result<T, DriverError>,
        again: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let far = Distance::SameProcess;
        if !first.as_ref().is_err_and(is_lacking) || !self.may_help(far, bytes) {
            return first;
        }
        let giving = self.others(far).iter().filter(|other| other.give_cached_host_memory()).count();
        if giving > 0 { again() } else { first }
    }

    fn distance(&self, other: &Self) -> Distance {
        let same_driver =
            std::ptr::addr_eq(Arc::as_ptr(self.shared_driver()), Arc::as_ptr(other.shared_driver()));
        let same_store = std::ptr::addr_eq(Arc::as_ptr(self.backups()), Arc::as_ptr(other.backups()));
        if same_driver || same_store { Distance::SameStore } else { Distance::SameProcess }
    }

    /// Waits until nobody prepares a sleep who has not seen that one is starving.
    fn await_preparation(&self) {
        drop(self.preparing());
    }

    /// Lets go of what only saves this pool time, for another one. Whether it had anything.
    fn give_host_memory(&self, distance: Distance) -> bool {
        if self.driver().check_process().is_err() {
            return false;
        }
        self.await_preparation();
        if self.open_state().is_err() {
            return false;
        }
        let released_bytes = self.release_idle_backups(&[]);
        let is_far = distance == Distance::SameProcess;
        (is_far && self.give_cached_host_memory()) || released_bytes > 0
    }

    /// Gives host memory back that the store keeps for later. Whether there was any.
    fn give_cached_host_memory(&self) -> bool {
        if self.driver().check_process().is_err() {
            return false;
        }
        let held_bytes = self.backups().held_bytes();
        // Whatever it could not do, it has less now or not.
        let _ = self.backups().trim();
        self.backups().held_bytes() < held_bytes
    }
}

impl State {
    /// Refuses tags that are named and of which the backup is all there is.
    fn check_droppable(&self, tags: Option<&[Tag]>) -> Result<()> {
        let named = tags.map(|tags| self.tags().selected(DROP, Some(tags))).transpose()?.unwrap_or_default();
        let mut entries = named.into_iter().map(|tag| self.tags().get(tag));
        let asleep = entries.find(|entry| entry.state() == TagState::AsleepBackedUp);
        asleep.map_or(Ok(()), |entry| {
            Err(PoolError::Asleep { op: DROP, tag: entry.name().clone(), state: entry.state() })
        })
    }
}

/// Whether the host has too little memory.
pub(super) fn is_lacking(error: &DriverError) -> bool {
    matches!(error.kind, DriverErrorKind::OutOfHostMemory { .. })
}
