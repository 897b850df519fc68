//! Reading backups in host memory: copies of any range, and views in place.
//!
//! The state lock is held only to find what is stored. The buffers are shared while they are read. So a sleep stores to
//! other ones, and what a wake, a spill or a close drops stays until the read has ended.
//!
//! Promise: a read gives the bytes of the block that it names, equal to their digests, or an error.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ScopedJoinHandle};

use super::backup_view::{BackupView, Viewed};
use crate::backup::BackupBuffer;
use crate::digest::Digest;
use crate::driver::DeviceRange;
use crate::pool::parts::backups::{Backup, Stored};
use crate::pool::shared::Shared;
use crate::pool::state::PoolState;
use crate::pool::tools::error::{BackupProblem, PoolError, Result};
use crate::pool::tools::keys::{SegmentKey, TagKey};
use crate::tag::{Tag, TagState};

const READ: &str = "read the backup";
const VIEW: &str = "view the backup";

const READERS_MAX: usize = 4;

/// Granules that a reader takes at a time.
const RUN_MAX: usize = 16;

/// Stored granules of one buffer.
struct Run {
    buffer: Arc<BackupBuffer>,
    /// On the device, in whole granules.
    range: DeviceRange,
    /// In the buffer.
    offset: u64,
    digests: Vec<Digest>,
    /// The part of `range` that is wanted: all of it, or a part of one granule.
    wanted: DeviceRange,
}

/// Whose bytes are read, for errors.
struct Owner {
    op: &'static str,
    tag: Tag,
    state: TagState,
}

struct Found {
    owner: Owner,
    key: TagKey,
    segment: SegmentKey,
}

impl Owner {
    fn problem(&self, range: DeviceRange, problem: BackupProblem) -> PoolError {
        let Self { op, tag, state } = self;
        PoolError::Backup { op, range, tag: tag.clone(), state: *state, problem }
    }
}

impl Shared {
    pub(in crate::pool) fn read_backup(&self, addr: u64, into: &mut [u8]) -> Result<()> {
        let range = DeviceRange::new(addr, into.len() as u64);
        let (owner, runs) = {
            let state = self.open_state()?;
            if into.is_empty() {
                return Ok(());
            }
            let found = state.block_of(READ, range)?;
            let runs = state.runs_in(&found, range)?;
            (found.owner, runs)
        };
        let (mut parts, mut rest) = (Vec::with_capacity(runs.len()), into);
        for run in runs {
            let bytes = usize::try_from(run.wanted.bytes).unwrap_or(usize::MAX).min(rest.len());
            let (part, behind) = rest.split_at_mut(bytes);
            parts.push((run, part));
            rest = behind;
        }
        let granule_bytes = self.shape().granule_bytes;
        in_parallel(parts, &|(run, into)| run.read(&owner, granule_bytes, into))
    }

    pub(in crate::pool) fn view_backup(&self, range: DeviceRange) -> Result<BackupView> {
        let state = self.open_state()?;
        let found = state.block_of(VIEW, range)?;
        let problem = |problem| found.owner.problem(range, problem);
        let mut extents = state.backups().touching(found.key, found.segment, range);
        let Some((at, backup)) = extents.next() else { return Err(problem(BackupProblem::NotStored)) };
        if extents.next().is_some() {
            return Err(problem(BackupProblem::Split));
        }
        let granules = state.stored_of(&found, range)?;
        let Some(((first_addr, _), granule_bytes)) =
            granules.first().copied().zip(usize::try_from(self.shape().granule_bytes).ok())
        else {
            return Err(problem(BackupProblem::NotStored));
        };
        // Shared under the lock: from now on the buffer is in use.
        let Some(memory) = backup.buffer.in_host_memory() else {
            let is_on_disk = backup.buffer.disk_bytes() > 0;
            return Err(problem(if is_on_disk { BackupProblem::OnDisk } else { BackupProblem::NotRaw }));
        };
        let Owner { tag, state: tag_state, .. } = &found.owner;
        let viewed = Viewed {
            memory,
            range,
            tag: tag.clone(),
            state: *tag_state,
            first_addr,
            first: usize::try_from(first_addr - at).unwrap_or(usize::MAX),
            granule_bytes,
            digests: granules.iter().map(|(_, stored)| stored.digest).collect(),
        };
        BackupView::of(viewed).ok_or_else(|| problem(BackupProblem::NotRaw))
    }
}

impl PoolState {
    /// The tag of the live block that `range` lies in.
    fn block_of(&self, op: &'static str, range: DeviceRange) -> Result<Found> {
        let outside = PoolError::OutsideBlocks { op, range };
        let key = self.heap().segments().of_addr(range.addr);
        let Some(segment) = self.heap().segments().get(key) else { return Err(outside) };
        match &self.heap().live_parts(range)[..] {
            [(_, _, part)] if *part == range => {}
            _ => return Err(outside),
        }
        let entry = self.tags().get(segment.tag());
        let owner = Owner { op, tag: entry.name().clone(), state: entry.state() };
        Ok(Found { owner, key: segment.tag(), segment: key })
    }

    /// The granules that `range` touches, by address; an error where one is not stored.
    fn stored_of(&self, found: &Found, range: DeviceRange) -> Result<Vec<(u64, Stored)>> {
        let granule_bytes = self.heap().shape().granule_bytes;
        let (mut next, mut granules) = (range.addr - range.addr % granule_bytes, Vec::new());
        let problem =
            |addr, problem| Err(found.owner.problem(DeviceRange::new(addr, granule_bytes), problem));
        for (at, Backup { granules: stored, .. }) in self.backups().touching(found.key, found.segment, range)
        {
            let granules_of = (0..).map(|nth| at + nth * granule_bytes).zip(stored);
            for (addr, stored) in granules_of {
                if addr + granule_bytes <= range.addr || addr >= range.end() {
                    continue;
                }
                match stored {
                    Some(_) if addr != next => break,
                    Some(stored) if stored.has_new_block => return problem(addr, BackupProblem::NewBlock),
                    Some(stored) => granules.push((addr, *stored)),
                    None => return problem(addr, BackupProblem::NotStored),
                }
                next = addr + granule_bytes;
            }
        }
        if next < range.end() { problem(next, BackupProblem::NotStored) } else { Ok(granules) }
    }

    /// What is to be read, in order. Whole granules are together, a part of one is alone.
    fn runs_in(&self, found: &Found, range: DeviceRange) -> Result<Vec<Run>> {
        let granule_bytes = self.heap().shape().granule_bytes;
        let granules = self.stored_of(found, range)?;
        let (mut granules, mut runs) = (granules.into_iter().peekable(), Vec::<Run>::new());
        for (at, backup) in self.backups().touching(found.key, found.segment, range) {
            let end = at + backup.granules.len() as u64 * granule_bytes;
            let mut is_open = false;
            while let Some((addr, stored)) = granules.next_if(|(addr, _)| *addr < end) {
                let granule = DeviceRange::new(addr, granule_bytes);
                let wanted = within(granule, range);
                let last = runs.last_mut().filter(|run| is_open && run.digests.len() < RUN_MAX);
                is_open = wanted == granule;
                match last.filter(|_| is_open) {
                    Some(run) => {
                        run.range.bytes += granule_bytes;
                        run.wanted = run.range;
                        run.digests.push(stored.digest);
                    }
                    None => runs.push(Run {
                        buffer: Arc::clone(&backup.buffer),
                        range: granule,
                        offset: addr - at,
                        digests: vec![stored.digest],
                        wanted,
                    }),
                }
            }
        }
        Ok(runs)
    }
}

fn within(range: DeviceRange, outer: DeviceRange) -> DeviceRange {
    let start = range.addr.max(outer.addr);
    DeviceRange::new(start, range.end().min(outer.end()).saturating_sub(start))
}

impl Run {
    fn read(&self, owner: &Owner, granule_bytes: u64, into: &mut [u8]) -> Result<()> {
        let failed = |source| PoolError::Driver { op: READ, source };
        let index = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut all = Vec::new();
        let is_part = self.wanted != self.range;
        let bytes = if is_part {
            all.resize(index(self.range.bytes), 0);
            &mut all[..]
        } else {
            &mut *into
        };
        self.buffer.read(self.offset, bytes).map_err(failed)?;
        let granules = bytes.chunks(index(granule_bytes)).zip(&self.digests);
        if let Some((nth, _)) =
            granules.enumerate().find(|(_, (bytes, expected))| Digest::of(bytes) != **expected)
        {
            let granule = DeviceRange::new(self.range.addr + nth as u64 * granule_bytes, granule_bytes);
            return Err(owner.problem(granule, BackupProblem::Spoiled));
        }
        if is_part {
            let skip = index(self.wanted.addr - self.range.addr);
            into.copy_from_slice(&all[skip..skip + into.len()]);
        }
        Ok(())
    }
}

/// Does all, on several threads where there is much. Returns the first failure.
fn in_parallel<T: Send>(all: Vec<T>, act: &(impl Fn(T) -> Result<()> + Sync)) -> Result<()> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let readers = cores.min(READERS_MAX).min(all.len() / 2).max(1);
    if readers == 1 {
        return all.into_iter().try_for_each(act);
    }
    let queue = Mutex::new(all.into_iter());
    let work = || {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(next) = next else { return Ok(()) };
            act(next)?;
        }
    };
    thread::scope(|scope| {
        // Where no thread is to be had, this one does it all.
        let reader = |_| thread::Builder::new().name("poorwill-read".into()).spawn_scoped(scope, work).ok();
        let others: Vec<_> = (1..readers).filter_map(reader).collect();
        let first = work();
        let join = |reader: ScopedJoinHandle<'_, Result<()>>| {
            reader.join().unwrap_or_else(|panic| resume_unwind(panic))
        };
        others.into_iter().map(join).fold(first, Result::and)
    })
}
