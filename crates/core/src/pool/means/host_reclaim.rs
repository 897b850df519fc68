//! Releasing host memory: on request, and under pressure.
//!
//! Backups of awake tags only save time. They are dropped on request, or when a sleep of any pool in the
//! process lacks host memory. First go those of its own pool, then of pools with the same driver or storage,
//! then all others and what their drivers cache. Backups of sleeping tags are never dropped; where there is a
//! disk they are moved there ([`super::spill`]). A preparation only saves time too, so it takes cached memory only.
//!
//! No lock is held while another pool is called, so two pools that lack memory do not wait for each other.
//! Preparations give way meanwhile, in every pool.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::spill::Spilled;
use crate::driver::{DriverError, DriverErrorKind};
use crate::per_process::{FORKS, PerProcess};
use crate::pool::shared::{Shared, SharedAccess, Starving};
use crate::pool::state::PoolState;
use crate::pool::tools::deadline::Deadline;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::keys::TagKey;
use crate::tag::{Tag, TagState};

const DROP: &str = "drop backups";

/// What is moved to disk between two attempts.
const SPILL_BYTES_MAX: u64 = 1 << 30;

/// Not locked while a pool is called.
static POOLS: PerProcess<Mutex<Vec<Weak<Shared>>>> =
    PerProcess::new([const { Mutex::new(Vec::new()) }; FORKS]);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Distance {
    /// Same driver or backup storage.
    SameStore,
    SameProcess,
}

impl Shared {
    pub(in crate::pool) fn drop_backups(&self, tags: Option<&[Tag]>) -> Result<u64> {
        self.open_state()?.check_droppable(tags)?;
        let deadline = Deadline::begin(self.driver(), None);
        let (_, exclusive) = self.exclusive(DROP, tags, TagState::is_held, false, deadline)?;
        // The wait for access may have taken time.
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

    /// Drops the backups of all unused awake tags, except those that fall asleep.
    fn release_idle_backups(&self, falling: &[TagKey]) -> u64 {
        let falling: HashSet<TagKey> = falling.iter().copied().collect();
        let shared_accesses = self.shared_accesses(|state, tag| {
            !state.is_closed() && state.backups().has(tag) && !falling.contains(&tag)
        });
        let tags: Vec<TagKey> = shared_accesses.iter().map(SharedAccess::tag).collect();
        // What cannot be inspected stays.
        self.release_backups_of_awake(&tags).map_or(0, |(bytes, _)| bytes)
    }

    /// Lets other pools of the process take this one's host memory under pressure.
    pub(in crate::pool) fn lend_host_memory(self: &Arc<Self>) {
        let mut all = POOLS.here().lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|pool| pool.strong_count() > 0);
        all.push(Arc::downgrade(self));
    }

    fn others(&self, distance: Distance) -> Vec<Arc<Self>> {
        let all = POOLS.here().lock().unwrap_or_else(PoisonError::into_inner).clone();
        let others =
            all.iter().filter_map(Weak::upgrade).filter(|other| !std::ptr::eq(&raw const **other, self));
        others.filter(|other| self.distance(other) == distance).collect()
    }

    /// Retries a request for `bytes` of host memory, of a sleep or a wake from disk, whenever some was released.
    pub(in crate::pool) fn with_host_memory<T>(
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
                break;
            }
            let others = self.others(distance);
            let _starving: Vec<Starving<'_>> = others.iter().map(|other| other.starve()).collect();
            // Also after one has released memory.
            if others.iter().filter(|other| other.release_host_memory(distance)).count() > 0 {
                done = again();
            }
        }
        while let Err(error) = done.as_ref()
            && is_lacking(error)
        {
            let spilled = self.spill_for(falling, bytes);
            if spilled.bytes == 0 {
                return done.map_err(|error| {
                    spilled.failed.map_or(error.clone(), |disk| lacking_too(&error, &disk))
                });
            }
            done = again();
        }
        done
    }

    /// Moves backups to disk, in any pool whose host memory helps this one.
    fn spill_for(&self, falling: &[TagKey], bytes: u64) -> Spilled {
        let near = self.others(Distance::SameStore);
        let helps = self.may_help(Distance::SameProcess, bytes);
        let far = if helps { self.others(Distance::SameProcess) } else { Vec::new() };
        let others: Vec<Arc<Self>> = near.into_iter().chain(far.iter().cloned()).collect();
        let spilled = self.spill_longest(falling, &others, bytes.min(SPILL_BYTES_MAX));
        far.iter().for_each(|other| _ = other.release_cached_host_memory());
        spilled
    }

    fn may_help(&self, distance: Distance, bytes: u64) -> bool {
        // Storage of other pools does not count against this one's own limit.
        distance == Distance::SameStore || self.backups().allows(bytes)
    }

    /// For requests that only save time themselves: takes no backups.
    pub(in crate::pool) fn with_cached_host_memory<T>(
        &self,
        bytes: u64,
        first: Result<T, DriverError>,
        again: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let far = Distance::SameProcess;
        if !first.as_ref().is_err_and(is_lacking) || !self.may_help(far, bytes) {
            return first;
        }
        let releasing = self.others(far).iter().filter(|other| other.release_cached_host_memory()).count();
        if releasing > 0 { again() } else { first }
    }

    fn distance(&self, other: &Self) -> Distance {
        let same_driver =
            std::ptr::addr_eq(Arc::as_ptr(self.shared_driver()), Arc::as_ptr(other.shared_driver()));
        let same_store = std::ptr::addr_eq(Arc::as_ptr(self.backups()), Arc::as_ptr(other.backups()));
        if same_driver || same_store { Distance::SameStore } else { Distance::SameProcess }
    }

    /// Waits until no preparation is left that began before the lack was announced.
    fn await_preparation(&self) {
        drop(self.preparing());
    }

    /// Returns whether anything was released.
    fn release_host_memory(&self, distance: Distance) -> bool {
        if self.driver().check_process().is_err() {
            return false;
        }
        self.await_preparation();
        if self.open_state().is_err() {
            return false;
        }
        let released_bytes = self.release_idle_backups(&[]);
        let is_far = distance == Distance::SameProcess;
        (is_far && self.release_cached_host_memory()) || released_bytes > 0
    }

    /// The same for host memory that the storage caches.
    fn release_cached_host_memory(&self) -> bool {
        if self.driver().check_process().is_err() {
            return false;
        }
        let held_bytes = self.backups().held_bytes();
        // The result shows in the held bytes, also after an error.
        let _ = self.backups().trim();
        self.backups().held_bytes() < held_bytes
    }
}

impl PoolState {
    /// Refuses named tags whose backup is the only copy.
    fn check_droppable(&self, tags: Option<&[Tag]>) -> Result<()> {
        let named = tags.map(|tags| self.tags().selected(DROP, Some(tags))).transpose()?.unwrap_or_default();
        let mut entries = named.into_iter().map(|tag| self.tags().get(tag));
        let asleep = entries.find(|entry| entry.state() == TagState::AsleepBackedUp);
        asleep.map_or(Ok(()), |entry| {
            Err(PoolError::Asleep { op: DROP, tag: entry.name().clone(), state: entry.state() })
        })
    }
}

/// Host memory is lacking, and so is the disk.
fn lacking_too(error: &DriverError, disk: &DriverError) -> DriverError {
    let DriverErrorKind::OutOfHostMemory { asked_bytes, reason } = &error.kind else { return error.clone() };
    let reason = format!("{reason}; backups cannot be moved to disk either ({disk})");
    DriverError::new(error.op, DriverErrorKind::OutOfHostMemory { asked_bytes: *asked_bytes, reason })
}

pub(in crate::pool) fn is_lacking(error: &DriverError) -> bool {
    matches!(error.kind, DriverErrorKind::OutOfHostMemory { .. })
}
