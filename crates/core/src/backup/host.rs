//! Backups in host memory of the device's driver.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::disk::DiskBackupBuffer;
use super::footprint::{Layout, Slot, granules};
use super::{BackupBuffer, Backups, Compress, Disk, DiskInfo, Extent, Footprint, StoredBytes};
use crate::codec;
use crate::digest::Digest;
use crate::driver::{
    CodePart, CopyPart, DeviceRange, Driver, DriverError, HostBuffer, Op, Pending, Result, Scratch, StreamId,
};

/// One that is read, and one that is copied to the device.
const RESERVED_BUFFERS: usize = 2;

/// Backups in the driver's host memory, pinned where possible. With a disk, twice the largest buffer stays free, so
/// that a wake can always read from there.
///
/// ```
/// use poorwill::Device;
/// use poorwill::backup::{Backups, HostBackups};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backups = HostBackups::new(Device::open(&"host:64MiB".parse()?)?.driver());
/// assert_eq!(backups.held_bytes(), 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HostBackups {
    driver: Arc<dyn Driver>,
    compress: Compress,
    disk: Option<Arc<dyn Disk>>,
    /// The largest buffer so far.
    largest_bytes: AtomicU64,
}

impl HostBackups {
    /// In host memory of `driver`, raw.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, compress: Compress::Off, disk: None, largest_bytes: AtomicU64::new(0) }
    }

    /// Sets whether they are stored as codes.
    #[must_use]
    pub fn compressing(mut self, compress: Compress) -> Self {
        self.compress = compress;
        self
    }

    /// Sets the disk that backups spill to under pressure.
    #[must_use]
    pub fn spilling_to(mut self, disk: impl Into<Option<Arc<dyn Disk>>>) -> Self {
        self.disk = disk.into();
        self
    }

    fn encodes(&self) -> bool {
        let info = self.driver.info();
        match self.compress {
            Compress::Auto => info.fast_codec,
            Compress::Off => false,
            Compress::Always => codec::supports(info.granule_bytes),
        }
    }
}

impl Backups for HostBackups {
    fn measures(&self) -> bool {
        self.encodes()
    }

    fn plan(&self, stream: StreamId, extents: &[Extent<'_>]) -> Result<Vec<Footprint>> {
        if !self.encodes() {
            return Ok(extents.iter().map(|extent| Footprint::raw(extent.range.bytes)).collect());
        }
        let granule_bytes = self.driver.info().granule_bytes;
        let granule = |extent: &Extent<'_>, number: usize| {
            DeviceRange::new(extent.range.addr + number as u64 * granule_bytes, granule_bytes)
        };
        let granules =
            extents.iter().flat_map(|extent| extent.live.iter().map(|number| granule(extent, *number)));
        let granules: Vec<DeviceRange> = granules.collect();
        let measured = self.driver.encoded_bytes(stream, &granules)?.wait()?;
        if measured.len() != granules.len() {
            let reason =
                format!("{} granules were measured, and {} sizes came back", granules.len(), measured.len());
            return Err(DriverError::invalid(Op::Encode, reason));
        }
        let mut rest = &measured[..];
        let footprint = |extent: &Extent<'_>| {
            let (code_bytes, behind) = rest.split_at(extent.live.len());
            rest = behind;
            Footprint::measured(extent, granule_bytes, code_bytes)
        };
        Ok(extents.iter().map(footprint).collect())
    }

    fn buffers(&self, footprints: &[Footprint]) -> Result<Vec<Pending<BackupBuffer>>> {
        let mut sizes: Vec<u64> = footprints.iter().map(Footprint::bytes).collect();
        let new_max_bytes = sizes.iter().copied().max().unwrap_or(0);
        if self.disk.is_some() {
            // What is on disk comes back through a reserve. It is dropped at once, and stays free.
            let largest_bytes = self.largest_bytes.load(Ordering::Relaxed).max(new_max_bytes);
            sizes.extend([largest_bytes; RESERVED_BUFFERS]);
        }
        let buffers = self.driver.host_alloc_all(&sizes)?.into_iter().zip(footprints);
        // A refused request raises no reserve.
        self.largest_bytes.fetch_max(new_max_bytes, Ordering::Relaxed);
        let buffer = |(buffer, footprint): (Pending<HostBuffer>, &Footprint)| {
            let (driver, disk) = (Arc::clone(&self.driver), self.disk.clone());
            let layout = footprint.layout.clone();
            buffer.then(|buffer| {
                Ok(BackupBuffer::new(HostBackupBuffer { driver, buffer: Arc::new(buffer?), layout, disk }))
            })
        };
        Ok(buffers.map(buffer).collect())
    }

    fn trim(&self) -> Result<()> {
        self.driver.host_trim()
    }

    fn held_bytes(&self) -> u64 {
        self.driver.host_memory().held_bytes
    }

    fn disk(&self) -> Option<DiskInfo> {
        self.disk.as_ref().map(|disk| disk.info())
    }

    fn allows(&self, bytes: u64) -> bool {
        let info = self.driver.host_memory();
        info.limit_bytes.is_none_or(|limit| info.used_bytes.saturating_add(bytes) <= limit)
    }
}

#[derive(Debug)]
pub(super) struct HostBackupBuffer {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) buffer: Arc<HostBuffer>,
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
                let buffer = Self { driver, buffer: Arc::new(buffer), layout, disk };
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
            Ok((BackupBuffer::new(Self { driver, buffer: Arc::new(buffer), layout, disk }), digests))
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
                let copy = self.driver.copy_to_device(stream, buffer, parts)?;
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
        Some(
            disk.write(Arc::clone(&self.buffer)).then(move |stored| {
                Ok(BackupBuffer::new(DiskBackupBuffer { driver, stored: stored?, layout }))
            }),
        )
    }
}
