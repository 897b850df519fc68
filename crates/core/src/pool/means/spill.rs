//! Moving backups of sleeping tags to disk: on request, and where host memory is short.
//!
//! A sleep may lack host memory after all that only saves time was released. It moves the backups of the longest
//! sleepers first, of any pool in the process. Those of the tags that fall asleep come last. So even a tag sleeps whose
//! backups host memory cannot hold. No lock is held while bytes are written, and no call waits for it.
//!
//! Promise: a backup is in host memory until it is wholly on disk. What fails changes nothing.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use crate::backup::BackupBuffer;
use crate::driver::{DriverError, DriverErrorKind, Op, Pending};
use crate::pool::shared::Shared;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::keys::{Location, TagKey};
use crate::tag::Tag;

const SPILL: &str = "move backups to disk";

/// Extents that are written at a time.
const IN_FLIGHT_MAX: usize = 8;

/// The number of tags that fall asleep: they come last.
const FALLING: u64 = u64::MAX;

/// What was moved, and the first failure.
#[derive(Debug, Default)]
pub(in crate::pool) struct Spilled {
    pub(in crate::pool) bytes: u64,
    pub(in crate::pool) failed: Option<DriverError>,
}

/// A tag with backups that may be moved.
struct Sleeper<'a> {
    pool: &'a Shared,
    tag: TagKey,
    /// The lowest goes first.
    number: u64,
}

impl Shared {
    /// Of `tags`, or of all, those that sleep. Returns the bytes moved.
    pub(in crate::pool) fn spill(&self, tags: Option<&[Tag]>) -> Result<u64> {
        let failed = |source| PoolError::Driver { op: SPILL, source };
        let selected: HashSet<TagKey> =
            self.open_state()?.tags().selected(SPILL, tags)?.into_iter().collect();
        if self.backups().disk().is_none() {
            let reason = "the backups have no disk; open the arena with one".to_owned();
            return Err(failed(DriverError::new(Op::DiskWrite, DriverErrorKind::Unsupported { reason })));
        }
        let mut sleepers = self.sleepers(&[]);
        sleepers.retain(|sleeper| selected.contains(&sleeper.tag));
        let Spilled { bytes, failed: first } = spill_all(sleepers, u64::MAX);
        first.map_or(Ok(bytes), |source| Err(failed(source)))
    }

    /// Moves at least `bytes`, if there are as many: of the tags that sleep here and in `others`, then of `falling`.
    pub(super) fn spill_longest(&self, falling: &[TagKey], others: &[Arc<Self>], bytes: u64) -> Spilled {
        let pools = std::iter::once(self).chain(others.iter().map(|other| &**other));
        let sleepers = pools.flat_map(|pool| {
            let is_here = std::ptr::eq(pool, self);
            pool.sleepers(if is_here { falling } else { &[] })
        });
        spill_all(sleepers.collect(), bytes)
    }

    /// The tags that sleep, unless a call works on them, and `falling`.
    fn sleepers(&self, falling: &[TagKey]) -> Vec<Sleeper<'_>> {
        if self.backups().disk().is_none() || self.driver().check_process().is_err() {
            return Vec::new();
        }
        let state = self.lock_state();
        let asleep = state.tags().iter().filter(|(_, entry)| !entry.is_taken());
        let asleep = asleep.filter_map(|(tag, entry)| Some((tag, entry.sleep_number()?)));
        let falling = falling.iter().map(|tag| (*tag, FALLING));
        asleep.chain(falling).map(|(tag, number)| Sleeper { pool: self, tag, number }).collect()
    }

    /// Ends early where the tag wakes meanwhile.
    fn spill_tag(&self, tag: TagKey, bytes: u64, is_falling: bool, spilled: &mut Spilled) {
        let mut in_flight: VecDeque<(Location, Arc<BackupBuffer>, Pending<BackupBuffer>)> = VecDeque::new();
        let (mut begun_bytes, mut last) = (0, None);
        loop {
            while in_flight.len() < IN_FLIGHT_MAX && begun_bytes < bytes && spilled.failed.is_none() {
                let Some((location, buffer)) = self.next_to_spill(tag, is_falling, last) else { break };
                last = Some(location);
                if let Some(written) = buffer.spill() {
                    begun_bytes += buffer.bytes();
                    in_flight.push_back((location, buffer, written));
                }
            }
            let Some((location, buffer, written)) = in_flight.pop_front() else { return };
            match written.wait() {
                Ok(written) => {
                    let moved_bytes = buffer.bytes();
                    let replaced =
                        self.lock_state().backups_mut().replace_buffer((tag, location), &buffer, written);
                    // The tag may have lost the backup, or stored another, meanwhile.
                    spilled.bytes += if replaced.is_ok() { moved_bytes } else { 0 };
                }
                Err(error) => _ = spilled.failed.get_or_insert(error),
            }
        }
    }

    fn next_to_spill(
        &self,
        tag: TagKey,
        is_falling: bool,
        last: Option<Location>,
    ) -> Option<(Location, Arc<BackupBuffer>)> {
        let state = self.lock_state();
        if is_falling || state.tags().sleeps(tag) { state.backups().next_buffer(tag, last) } else { None }
    }
}

/// A disk that fails ends what its pool moves, and nothing of the others.
fn spill_all(mut sleepers: Vec<Sleeper<'_>>, bytes: u64) -> Spilled {
    sleepers.sort_by_key(|sleeper| sleeper.number);
    let (mut all, mut failing) = (Spilled::default(), Vec::<&Shared>::new());
    for Sleeper { pool, tag, number } in sleepers {
        if all.bytes >= bytes {
            break;
        }
        if failing.iter().any(|other| std::ptr::eq(*other, pool)) {
            continue;
        }
        let mut spilled = Spilled::default();
        pool.spill_tag(tag, bytes - all.bytes, number == FALLING, &mut spilled);
        all.bytes += spilled.bytes;
        if let Some(error) = spilled.failed {
            failing.push(pool);
            all.failed.get_or_insert(error);
        }
    }
    all
}
