//! A backup in place: host memory that a caller reads without a copy.
//!
//! Promise: the bytes stay where they are, as they are, as long as the view lives. It shares the buffer, so no sleep
//! writes to it.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::digest::Digest;
use crate::driver::{DeviceRange, HostBuffer};
use crate::pool::tools::error::{BackupProblem, PoolError, Result};
use crate::tag::{Tag, TagState};

/// Bytes of a backup, as [`Pool::view_backup`](crate::Pool::view_backup) found them. Clones share them. Access in a forked
/// child panics.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, StoredAs, Tag, WakeRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.declare_backups(&Tag::weights(), StoredAs::Viewable)?;
/// let block = arena.alloc(&AllocRequest::new(8 << 20, Tag::weights()))?;
/// arena.write_all(block.id, 0, b"version 1")?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// let view = arena.view_backup(block.range)?;
/// arena.wake(&WakeRequest::all())?;
/// arena.write_all(block.id, 0, b"version 2")?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// view.verify()?;
/// assert_eq!(view[..9], *b"version 1");
/// assert_eq!(arena.view_backup(block.range)?[..9], *b"version 2");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct BackupView {
    memory: Arc<HostBuffer>,
    /// Of the view, in `memory`.
    bytes: Range<usize>,
    range: DeviceRange,
    tag: Tag,
    state: TagState,
    /// Whole granules that the view touches: the first one's offset in `memory`, then their digests.
    first: usize,
    granule_bytes: usize,
    digests: Arc<[Digest]>,
}

/// What a view is made of.
pub(in crate::pool) struct Viewed {
    pub(in crate::pool) memory: Arc<HostBuffer>,
    pub(in crate::pool) range: DeviceRange,
    pub(in crate::pool) tag: Tag,
    pub(in crate::pool) state: TagState,
    /// Of the first granule, on the device and in `memory`.
    pub(super) first_addr: u64,
    pub(in crate::pool) first: usize,
    pub(in crate::pool) granule_bytes: usize,
    pub(super) digests: Vec<Digest>,
}

impl BackupView {
    /// `None` where it leaves the memory.
    pub(in crate::pool) fn of(viewed: Viewed) -> Option<Self> {
        let Viewed { memory, range, tag, state, first_addr, first, granule_bytes, digests } = viewed;
        let start = first.checked_add(usize::try_from(range.addr.checked_sub(first_addr)?).ok()?)?;
        let end = start.checked_add(usize::try_from(range.bytes).ok()?)?;
        memory.get(start..end)?;
        memory.get(first..first.checked_add(granule_bytes.checked_mul(digests.len())?)?)?;
        let digests = digests.into();
        Some(Self { memory, bytes: start..end, range, tag, state, first, granule_bytes, digests })
    }

    /// The device range that it is the backup of.
    #[must_use]
    pub fn range(&self) -> DeviceRange {
        self.range
    }

    /// Compares all granules that it touches with their digests.
    ///
    /// # Errors
    /// `Backup` with the first spoiled granule.
    pub fn verify(&self) -> Result<()> {
        let granules = self.memory[self.first..].chunks(self.granule_bytes).zip(&*self.digests);
        let spoiled = granules.enumerate().find(|(_, (bytes, expected))| Digest::of(bytes) != **expected);
        spoiled.map_or(Ok(()), |(nth, _)| {
            let before = (self.bytes.start - self.first) as u64;
            let addr = self.range.addr - before + (nth * self.granule_bytes) as u64;
            Err(PoolError::Backup {
                op: "verify the backup",
                range: DeviceRange::new(addr, self.granule_bytes as u64),
                tag: self.tag.clone(),
                state: self.state,
                problem: BackupProblem::Spoiled,
            })
        })
    }
}

impl Deref for BackupView {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory[self.bytes.clone()]
    }
}

impl AsRef<[u8]> for BackupView {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for BackupView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackupView")
            .field("range", &self.range)
            .field("tag", &self.tag)
            .finish_non_exhaustive()
    }
}
