//! Buffers of backups in host memory and on disk, and how their bytes move from one to the other.
//!
//! Promise: spilling that fails changes nothing. What comes back from a disk is compared with the digests of what was
//! stored, as any backup is.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::disk::{Disk, OnDisk};
use super::footprint::{Footprint, Layout, Slot, granules};
use super::on_disk::SizeOnDisk;
use super::{BackupBuffer, StoredBytes};
use crate::digest::Digest;
use crate::driver::{
    CodePart, CopyPart, DeviceRange, Driver, DriverError, HostBuffer, Op, Pending, Result, Scratch, StreamId,
};

/// Granules that are read at a time.
const READS_MAX: usize = 8;

/// Granules of a raw extent on disk that are fetched at a time: 32 MiB on a GPU.
const FETCHED_GRANULES: u64 = 16;

/// A buffer in host memory of the driver.
#[derive(Debug)]
pub(super) struct HostBackupBuffer {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) buffer: Arc<HostBuffer>,
    /// Where its first byte is in the extent, if it is raw.
    pub(super) offset: u64,
    pub(super) layout: Layout,
    /// Where it can be spilled to.
    pub(super) disk: Option<Arc<dyn Disk>>,
}

impl HostBackupBuffer {
    fn granule_bytes(&self) -> u64 {
        self.driver.info().granule_bytes
    }

    fn stored(&self, place: &Range<u64>) -> Result<&[u8]> {
        let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        self.buffer.get(index(place.start)..index(place.end)).ok_or_else(|| {
            DriverError::invalid(Op::Digest, format!("{place:?} leaves a buffer of {} bytes", self.bytes()))
        })
    }

    /// With offsets in this buffer.
    fn shifted(&self, parts: &[CopyPart]) -> Result<Vec<CopyPart>> {
        let shifted = |part: &CopyPart| {
            let host_offset = part.host_offset.checked_sub(self.offset).ok_or_else(|| {
                let reason = format!("byte {} is before the part that was fetched", part.host_offset);
                DriverError::invalid(Op::CopyToDevice, reason)
            })?;
            Ok(CopyPart { host_offset, ..*part })
        };
        parts.iter().map(shifted).collect()
    }

    /// The slots of the granules of `parts`; `InvalidArgument` where one has none.
    fn slots(
        &self,
        op: Op,
        slots: &[Option<Slot>],
        parts: &[CopyPart],
    ) -> Result<Vec<(usize, Slot, DeviceRange)>> {
        let slot = |(number, granule): (usize, DeviceRange)| {
            let slot = slots.get(number).copied().flatten();
            let missing = || DriverError::invalid(op, format!("granule {number} has no slot in this buffer"));
            slot.map(|slot| (number, slot, granule)).ok_or_else(missing)
        };
        granules(parts, self.granule_bytes()).map(slot).collect()
    }
}

impl StoredBytes for HostBackupBuffer {
    fn bytes(&self) -> u64 {
        self.buffer.len() as u64
    }

    fn is_free(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1
    }

    fn fits(&self, footprint: &Footprint, fresh: &[usize]) -> bool {
        self.layout.with(self.bytes(), footprint, fresh).is_some()
    }

    fn save(
        self: Box<Self>,
        stream: StreamId,
        footprint: &Footprint,
        parts: &[CopyPart],
        digests: Option<&[Digest]>,
    ) -> Result<Pending<(BackupBuffer, Vec<Option<Digest>>)>> {
        let fresh: Vec<usize> = granules(parts, self.granule_bytes()).map(|(number, _)| number).collect();
        let layout = self.layout.with(self.bytes(), footprint, &fresh).ok_or_else(|| {
            let reason = format!(
                "{} bytes do not fit a buffer of {} bytes as it is laid out",
                footprint.bytes(),
                self.bytes()
            );
            DriverError::invalid(Op::Save, reason)
        })?;
        let slots = match &layout {
            Layout::Raw => None,
            Layout::Codes(slots) => Some(self.slots(Op::Save, slots, parts)?),
        };
        let Self { driver, buffer, disk, .. } = *self;
        let buffer = Arc::try_unwrap(buffer)
            .map_err(|_| DriverError::invalid(Op::Save, "the buffer is being read by an earlier copy"))?;
        let Some(fresh) = slots else {
            let saved = match digests.map(<[Digest]>::to_vec) {
                Some(digests) => {
                    driver.copy_to_host(stream, buffer, parts)?.then(|copied| Ok((copied?, digests)))
                }
                None => driver.save(stream, buffer, parts)?,
            };
            return Ok(saved.then(|saved| {
                let (buffer, digests) = saved?;
                let buffer = Self { driver, buffer: Arc::new(buffer), offset: 0, layout, disk };
                Ok((BackupBuffer::new(buffer), digests.into_iter().map(Some).collect()))
            }));
        };
        let slots: Vec<CodePart> = fresh.iter().map(|(_, slot, granule)| slot.whole(*granule)).collect();
        let encoded = driver.encode(stream, buffer, &slots)?;
        Ok(encoded.then(move |encoded| {
            let (buffer, codes) = encoded?;
            let mut layout = layout;
            if let Layout::Codes(slots) = &mut layout {
                for ((number, ..), code) in fresh.iter().zip(&codes) {
                    if let (Some(slot), Some(code)) = (slots[*number].as_mut(), code) {
                        slot.code_bytes = code.bytes;
                    }
                }
            }
            let digests = codes.into_iter().map(|code| code.map(|code| code.digest)).collect();
            let buffer = Self { driver, buffer: Arc::new(buffer), offset: 0, layout, disk };
            Ok((BackupBuffer::new(buffer), digests))
        }))
    }

    fn load(
        &self,
        stream: StreamId,
        parts: &[CopyPart],
        scratch: Option<Scratch>,
    ) -> Result<Pending<Vec<Option<Digest>>>> {
        let buffer = Arc::clone(&self.buffer);
        match &self.layout {
            Layout::Raw => {
                let count = granules(parts, self.granule_bytes()).count();
                let copy = self.driver.copy_to_device(stream, buffer, &self.shifted(parts)?)?;
                Ok(copy.then(move |copied| copied.map(|()| vec![None; count])))
            }
            Layout::Codes(slots) => {
                let slots = self.slots(Op::Decode, slots, parts)?.into_iter();
                let codes: Vec<CodePart> = slots.map(|(_, slot, granule)| slot.code(granule)).collect();
                let decoded = self.driver.decode(stream, buffer, &codes, scratch)?;
                // The host's decoder has not seen what arrived on the device.
                let fast_codec = self.driver.info().fast_codec;
                Ok(decoded.then(move |digests| {
                    Ok(digests?.into_iter().map(|digest| fast_codec.then_some(digest)).collect())
                }))
            }
        }
    }

    fn read_bytes(&self, parts: &[CopyPart]) -> u64 {
        self.layout.read_bytes(granules(parts, self.granule_bytes()))
    }

    fn digest(&self, offset: u64, bytes: u64) -> Result<Digest> {
        let place = self.layout.place(self.bytes(), offset, bytes, self.granule_bytes())?;
        self.layout.digest(self.stored(&place)?, self.granule_bytes())
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let granule_bytes = self.granule_bytes();
        let mut rest = into;
        for piece in self.layout.pieces(self.bytes(), offset, rest.len(), granule_bytes)? {
            let (next, behind) = rest.split_at_mut(piece.bytes);
            piece.copy(self.stored(&piece.place)?, next, &self.layout, granule_bytes)?;
            rest = behind;
        }
        Ok(())
    }

    fn in_host_memory(&self) -> Option<Arc<HostBuffer>> {
        (self.layout == Layout::Raw).then(|| Arc::clone(&self.buffer))
    }

    fn spill(&self) -> Option<Pending<BackupBuffer>> {
        let disk = self.disk.as_ref()?;
        let (driver, layout) = (Arc::clone(&self.driver), self.layout.clone());
        Some(disk.write(Arc::clone(&self.buffer)).then(move |stored| {
            let stored = stored?;
            Ok(BackupBuffer::new(DiskBackupBuffer::new(driver, stored, layout)))
        }))
    }
}

/// A buffer whose bytes are on disk. It is read only: a change needs a buffer in host memory again.
#[derive(Debug)]
pub(super) struct DiskBackupBuffer {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) stored: Arc<dyn OnDisk>,
    pub(super) layout: Layout,
    _size: SizeOnDisk,
}

impl StoredBytes for DiskBackupBuffer {
    fn bytes(&self) -> u64 {
        self.stored.bytes()
    }

    fn disk_bytes(&self) -> u64 {
        self.stored.bytes()
    }

    fn is_free(&self) -> bool {
        Arc::strong_count(&self.stored) == 1
    }

    fn fits(&self, _: &Footprint, _: &[usize]) -> bool {
        false
    }

    fn save(
        self: Box<Self>,
        _: StreamId,
        _: &Footprint,
        _: &[CopyPart],
        _: Option<&[Digest]>,
    ) -> Result<Pending<(BackupBuffer, Vec<Option<Digest>>)>> {
        Err(DriverError::invalid(Op::Save, "a backup on disk is not overwritten; save to a new buffer"))
    }

    fn load(
        &self,
        stream: StreamId,
        parts: &[CopyPart],
        scratch: Option<Scratch>,
    ) -> Result<Pending<Vec<Option<Digest>>>> {
        // No more than that: the host memory that stays free for reads suffices for a part.
        let start = parts.iter().map(|part| part.host_offset).min().unwrap_or(0);
        let end = parts.iter().map(|part| part.host_offset.saturating_add(part.device.bytes)).max();
        self.fetched(start..end.unwrap_or(start))?.wait()?.load(stream, parts, scratch)
    }

    fn read_bytes(&self, parts: &[CopyPart]) -> u64 {
        self.layout.read_bytes(granules(parts, self.driver.info().granule_bytes))
    }

    fn digest(&self, offset: u64, bytes: u64) -> Result<Digest> {
        let granule_bytes = self.driver.info().granule_bytes;
        let place = self.layout.place(self.bytes(), offset, bytes, granule_bytes)?;
        self.layout.digest(&self.queue_read(&place)?.wait()?, granule_bytes)
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let granule_bytes = self.driver.info().granule_bytes;
        let mut rest = into;
        let pieces = self.layout.pieces(self.bytes(), offset, rest.len(), granule_bytes)?;
        let (mut next, mut reads) = (pieces.iter(), VecDeque::new());
        for piece in &pieces {
            while reads.len() < READS_MAX
                && let Some(ahead) = next.next()
            {
                reads.push_back(self.queue_read(&ahead.place)?);
            }
            let Some(read) = reads.pop_front() else { break };
            let (part, behind) = rest.split_at_mut(piece.bytes);
            piece.copy(&read.wait()?, part, &self.layout, granule_bytes)?;
            rest = behind;
        }
        Ok(())
    }

    fn fetch_bytes_max(&self) -> u64 {
        fetch_bytes_max(&*self.driver, &self.layout)
    }

    fn fetch(&self, raw: Range<u64>) -> Option<Result<Pending<BackupBuffer>>> {
        Some(self.fetched(raw))
    }
}

impl DiskBackupBuffer {
    fn new(driver: Arc<dyn Driver>, stored: Arc<dyn OnDisk>, layout: Layout) -> Self {
        let fetched_bytes = stored.bytes().min(fetch_bytes_max(&*driver, &layout));
        let size = SizeOnDisk::new(Arc::clone(&driver), fetched_bytes);
        Self { driver, stored, layout, _size: size }
    }

    fn queue_read(&self, place: &Range<u64>) -> Result<Pending<HostBuffer>> {
        // Not of the driver's host memory: that may be what is lacking.
        let bytes = usize::try_from(place.end - place.start).map_err(|_| {
            DriverError::invalid(Op::DiskRead, format!("{place:?} is more than can be addressed"))
        })?;
        Ok(self.stored.read(place.start, HostBuffer::from(vec![0; bytes])))
    }

    /// Codes come back as a whole.
    fn fetched(&self, raw: Range<u64>) -> Result<Pending<BackupBuffer>> {
        let place = match &self.layout {
            Layout::Raw => raw,
            Layout::Codes(_) => 0..self.bytes(),
        };
        let offset = place.start;
        let into = self.driver.host_alloc(place.end.saturating_sub(offset))?;
        let (driver, layout, stored) =
            (Arc::clone(&self.driver), self.layout.clone(), Arc::clone(&self.stored));
        Ok(self.stored.read(offset, into).then(move |buffer| {
            drop(stored); // Its space was in use until now.
            let buffer = Arc::new(buffer?);
            Ok(BackupBuffer::new(HostBackupBuffer { driver, buffer, offset, layout, disk: None }))
        }))
    }
}

fn fetch_bytes_max(driver: &dyn Driver, layout: &Layout) -> u64 {
    match layout {
        Layout::Raw => driver.info().granule_bytes.saturating_mul(FETCHED_GRANULES),
        Layout::Codes(_) => u64::MAX,
    }
}
