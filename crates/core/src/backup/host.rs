//! Backups in host memory of the device's driver.

use std::sync::Arc;

use super::buffers::HostBackupBuffer;
use super::{BackupBuffer, Backups, Compress, Disk, DiskInfo, Extent, Footprint, on_disk};
use crate::bytes::ByteSize;
use crate::codec;
use crate::driver::{
    DeviceRange, Driver, DriverError, DriverErrorKind, HostBuffer, Op, Pending, Result, StreamId,
};

/// One that is read into, and one that is copied to the device.
const RESERVED_BUFFERS: usize = 2;

/// Backups in the driver's host memory, pinned where possible. While some are on disk, twice the longest read stays free,
/// so that a wake can always read them.
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
}

impl HostBackups {
    /// In host memory of `driver`, raw.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, compress: Compress::Off, disk: None }
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

    /// What is on disk comes back through a reserve. It is dropped at once, and stays free.
    fn alloc_beside_reserve(&self, mut sizes: Vec<u64>) -> Result<Vec<Pending<HostBuffer>>> {
        let Some(largest_bytes) = on_disk::largest_bytes(&self.driver) else {
            return self.driver.host_alloc_all(&sizes);
        };
        let (count, bytes) = (sizes.len(), sizes.iter().sum());
        sizes.extend([largest_bytes; RESERVED_BUFFERS]);
        let mut buffers = self.driver.host_alloc_all(&sizes).map_err(|mut error| {
            if let DriverErrorKind::OutOfHostMemory { reason, .. } = &mut error.kind {
                let reserve = ByteSize(largest_bytes.saturating_mul(RESERVED_BUFFERS as u64));
                *reason = format!(
                    "{} for backups, and {reserve} to read others from disk: {reason}",
                    ByteSize(bytes)
                );
            }
            error
        })?;
        buffers.truncate(count);
        Ok(buffers)
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
        let buffers = self.alloc_beside_reserve(sizes)?.into_iter().zip(footprints);
        let buffer = |(buffer, footprint): (Pending<HostBuffer>, &Footprint)| {
            let (driver, disk) = (Arc::clone(&self.driver), self.disk.clone());
            let layout = footprint.layout.clone();
            buffer.then(|buffer| {
                Ok(BackupBuffer::new(HostBackupBuffer {
                    driver,
                    buffer: Arc::new(buffer?),
                    offset: 0,
                    layout,
                    disk,
                }))
            })
        };
        Ok(buffers.map(buffer).collect())
    }

    fn make_ahead(&self, sizes: &[u64]) {
        self.driver.host_make_ahead(sizes);
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
