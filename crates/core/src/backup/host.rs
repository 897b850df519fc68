//! Backups in host memory of the device's driver.

use std::sync::Arc;

use super::footprint::{Layout, Slot, granules};
use super::{BackupBuffer, Backups, Extent, Footprint, StoredBytes};
use crate::codec;
use crate::digest::Digest;
use crate::driver::{
    CodePart, CopyPart, DeviceRange, Driver, DriverError, DriverErrorKind, HostBuffer, Op, Pending, Result,
    Scratch, StreamId,
};

/// Whether backups are stored as codes ([`crate::codec`]), extent by extent, where these save a tenth.
///
/// ```
/// use poorwill::backup::Compress;
///
/// assert_eq!("always".parse(), Ok(Compress::Always));
/// assert_eq!(Compress::default().to_string(), "auto");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compress {
    /// On devices that encode faster than their link ([`DeviceInfo::fast_codec`](crate::DeviceInfo)).
    #[default]
    Auto,
    /// Never.
    Off,
    /// On every device whose granules have a code, by the processor where there is no kernel.
    Always,
}

/// A word that is none of `auto`, `off`, `always`.
///
/// ```
/// use poorwill::backup::Compress;
///
/// let error = "on".parse::<Compress>().unwrap_err();
/// assert_eq!(error.to_string(), "`on` is none of auto, off, always");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is none of auto, off, always")]
pub struct UnknownCompress(pub String);

impl std::str::FromStr for Compress {
    type Err = UnknownCompress;

    fn from_str(word: &str) -> std::result::Result<Self, UnknownCompress> {
        [Self::Auto, Self::Off, Self::Always]
            .into_iter()
            .find(|compress| compress.as_str() == word)
            .ok_or_else(|| UnknownCompress(word.to_owned()))
    }
}

impl std::fmt::Display for Compress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl Compress {
    fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Always => "always",
        }
    }
}

/// Backups in the driver's host memory, pinned where possible.
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
}

impl HostBackups {
    /// In host memory of `driver`, raw.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, compress: Compress::Off }
    }

    /// Sets whether they are stored as codes.
    #[must_use]
    pub fn compressing(mut self, compress: Compress) -> Self {
        self.compress = compress;
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
        let sizes: Vec<u64> = footprints.iter().map(Footprint::bytes).collect();
        let buffers = self.driver.host_alloc_all(&sizes)?.into_iter().zip(footprints);
        let buffer = |(buffer, footprint): (Pending<HostBuffer>, &Footprint)| {
            let (driver, layout) = (Arc::clone(&self.driver), footprint.layout.clone());
            buffer.then(|buffer| {
                Ok(BackupBuffer::new(HostBackupBuffer { driver, buffer: Arc::new(buffer?), layout }))
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

    fn allows(&self, bytes: u64) -> bool {
        let info = self.driver.host_memory();
        info.limit_bytes.is_none_or(|limit| info.used_bytes.saturating_add(bytes) <= limit)
    }
}

#[derive(Debug)]
struct HostBackupBuffer {
    driver: Arc<dyn Driver>,
    buffer: Arc<HostBuffer>,
    layout: Layout,
}

impl HostBackupBuffer {
    fn granule_bytes(&self) -> u64 {
        self.driver.info().granule_bytes
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
        let Self { driver, buffer, .. } = *self;
        let buffer = Arc::try_unwrap(buffer)
            .map_err(|_| DriverError::invalid(Op::Save, "the buffer is being read by an earlier copy"))?;
        let Some(fresh) = slots else {
            let saved = driver.save(stream, buffer, parts)?;
            return Ok(saved.then(|saved| {
                let (buffer, digests) = saved?;
                let buffer = Self { driver, buffer: Arc::new(buffer), layout };
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
            Ok((BackupBuffer::new(Self { driver, buffer: Arc::new(buffer), layout }), digests))
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
        let granules = granules(parts, self.granule_bytes());
        match &self.layout {
            Layout::Raw => granules.map(|(_, granule)| granule.bytes).sum(),
            Layout::Codes(slots) => granules
                .filter_map(|(number, _)| slots.get(number).copied().flatten())
                .map(|slot| slot.code_bytes)
                .sum(),
        }
    }

    fn digest(&self, offset: u64, bytes: u64) -> Result<Digest> {
        let outside = |len: u64| {
            let reason = format!("{bytes} bytes at {offset} leave a buffer of {len}");
            DriverError::new(Op::Digest, DriverErrorKind::InvalidArgument { reason })
        };
        let slice = |start: u64, len: u64| {
            let start = usize::try_from(start).ok()?;
            self.buffer.get(start..start.checked_add(usize::try_from(len).ok()?)?)
        };
        let Layout::Codes(slots) = &self.layout else {
            return slice(offset, bytes).map(Digest::of).ok_or_else(|| outside(self.bytes()));
        };
        let granule_bytes = self.granule_bytes();
        let of_extent = || outside(slots.len() as u64 * granule_bytes);
        let number = usize::try_from(offset / granule_bytes).map_err(|_| of_extent())?;
        let is_granule = offset.is_multiple_of(granule_bytes) && bytes == granule_bytes;
        let slot = slots.get(number).copied().flatten().filter(|_| is_granule).ok_or_else(of_extent)?;
        let code = slice(slot.offset, slot.code_bytes).ok_or_else(of_extent)?;
        let mut granule = vec![0; usize::try_from(granule_bytes).map_err(|_| of_extent())?];
        codec::decode(code, &mut granule);
        Ok(Digest::of(&granule))
    }
}
