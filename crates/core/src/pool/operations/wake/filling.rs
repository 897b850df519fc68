//! What a wake writes where: the bytes of a chunk or an extent, and where they come from.

use std::sync::Arc;

use crate::backup::BackupBuffer;
use crate::digest::Digest;
use crate::driver::{DeviceRange, DriverError, Pending};
use crate::pool::parts::backups::Stored;
use crate::pool::parts::open_copies::OpenCopies;
use crate::tag::Tag;

/// The bytes of a chunk, or of an extent or a part of one.
#[derive(Debug)]
pub(super) struct Filling {
    /// Number of the last mapping in the plan that it writes to.
    pub(super) mapping: usize,
    pub(super) tag: Tag,
    pub(super) range: DeviceRange,
    pub(super) with: With,
}

#[derive(Debug)]
pub(super) enum With {
    Zeros,
    /// With `is_last` the backup is released after the wake.
    Backup {
        buffer: Arc<BackupBuffer>,
        /// The number that its first granule has in the backup.
        first: usize,
        granules: Vec<Option<Stored>>,
        /// Of each granule, whether its bytes are there already, to be compared only.
        in_place: Vec<bool>,
        is_last: bool,
    },
}

impl Filling {
    /// Where the written bytes end.
    pub(super) fn end(&self, granule_bytes: u64) -> u64 {
        match &self.with {
            With::Zeros => self.range.end(),
            With::Backup { granules, .. } => {
                let last = granules.iter().rposition(Option::is_some).unwrap_or(0);
                self.range.addr + (last as u64 + 1) * granule_bytes
            }
        }
    }

    /// Bytes of the whole backup, if it is codes to be copied.
    pub(super) fn code_bytes(&self) -> Option<u64> {
        let With::Backup { buffer, .. } = &self.with else { return None };
        if self.stored_granules(false).is_empty() {
            return None;
        }
        Some(buffer.bytes()).filter(|bytes| *bytes < self.range.bytes)
    }

    /// These granules by their addresses, with their digests, if other devices' copies may serve in place of the backup.
    pub(super) fn wanted_of_peers(
        &self,
        granule_bytes: u64,
        granules: &[usize],
    ) -> Option<Vec<(u64, Digest)>> {
        let With::Backup { granules: stored, .. } = &self.with else { return None };
        let wanted = granules
            .iter()
            .map(|nth| Some((self.range.addr + *nth as u64 * granule_bytes, stored[*nth]?.digest)));
        wanted.collect::<Option<Vec<_>>>().filter(|_| !self.is_on_disk())
    }

    /// Whether its backup is not needed.
    pub(super) fn is_at_peers(&self, copies: &[Arc<OpenCopies>], granule_bytes: u64) -> bool {
        let granules = self.stored_granules(false);
        let wanted = self.wanted_of_peers(granule_bytes, &granules).unwrap_or_default();
        granules.is_empty()
            || !wanted.is_empty() && copies.iter().any(|open| open.has(granule_bytes, &wanted))
    }

    pub(super) fn is_on_disk(&self) -> bool {
        matches!(&self.with, With::Backup { buffer, .. } if buffer.disk_bytes() > 0)
    }

    /// Host memory for it, where it has to be fetched.
    pub(super) fn fetch_bytes(&self) -> u64 {
        match &self.with {
            With::Zeros => 0,
            With::Backup { buffer, .. } => buffer.bytes().min(self.range.bytes),
        }
    }

    /// The stored granules that are to be copied, or those that are in place.
    pub(super) fn stored_granules(&self, are_in_place: bool) -> Vec<usize> {
        let With::Backup { granules, in_place, .. } = &self.with else { return Vec::new() };
        let is_one = |nth: &usize| granules[*nth].is_some() && in_place[*nth] == are_in_place;
        (0..granules.len()).filter(is_one).collect()
    }

    /// `None` where it need not be.
    pub(super) fn fetch(&self, granule_bytes: u64) -> Option<Result<Pending<BackupBuffer>, DriverError>> {
        let With::Backup { buffer, first, .. } = &self.with else { return None };
        if self.stored_granules(false).is_empty() {
            return None;
        }
        let start = *first as u64 * granule_bytes;
        buffer.fetch(start..start + self.range.bytes)
    }

    pub(super) fn stored(&self, granule_bytes: u64) -> impl Iterator<Item = DeviceRange> {
        let granules = match &self.with {
            With::Zeros => &[][..],
            With::Backup { granules, .. } => granules,
        };
        let ranges =
            (0..).map(move |nth| DeviceRange::new(self.range.addr + nth * granule_bytes, granule_bytes));
        ranges.zip(granules).filter_map(|(range, stored)| stored.map(|_| range))
    }
}
