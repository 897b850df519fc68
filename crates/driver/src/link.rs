//! Bandwidth of the link to a device, and scratch memory to measure it with. Uses no pool.

use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use poorwill_core::driver::{BackingId, MovePart, Result};
use poorwill_core::peer::PeerMemory;
use poorwill_core::{CopyPart, DeviceRange, Driver, StreamId};

/// Copies in each direction; the fastest counts.
const COPIES: usize = 5;

/// Mappings that one call opens or unmaps.
const MAPPINGS_PER_CALL: usize = 32;

/// Measured bandwidth, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LinkSpeed {
    /// Allocation of the host memory for the copies; on a GPU this includes page-locking.
    pub pin_bytes_per_s: f64,
    /// The fastest copy to the device.
    pub to_device_bytes_per_s: f64,
    /// The fastest copy to the host.
    pub to_host_bytes_per_s: f64,
}

/// Copies `bytes` in one part on one stream, several times in each direction. Takes as much device memory
/// outside any pool, and as much host memory.
///
/// # Errors
/// What the driver reports. Nothing stays allocated.
pub fn measure(driver: &dyn Driver, bytes: u64) -> Result<LinkSpeed> {
    let mut memory = Scratch::reserve(driver, bytes)?;
    memory.map_backings(&[bytes])?;
    let parts = [CopyPart { device: memory.range, host_offset: 0 }];
    let (pin_s, mut buffer) = timed(|| driver.host_alloc(bytes))?;
    buffer.fill(1); // Pages never written occupy no memory.
    let buffer = Arc::new(buffer);
    let (mut to_device_s, mut to_host_s) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..COPIES {
        let (seconds, ()) =
            timed(|| driver.copy_to_device(StreamId::DEFAULT, Arc::clone(&buffer), &parts)?.wait())?;
        to_device_s = to_device_s.min(seconds);
    }
    let mut buffer = match Arc::into_inner(buffer) {
        Some(buffer) => buffer,
        None => driver.host_alloc(bytes)?,
    };
    for _ in 0..COPIES {
        let seconds;
        (seconds, buffer) = timed(|| driver.copy_to_host(StreamId::DEFAULT, buffer, &parts)?.wait())?;
        to_host_s = to_host_s.min(seconds);
    }
    Ok(LinkSpeed {
        pin_bytes_per_s: rate(bytes, pin_s),
        to_device_bytes_per_s: rate(bytes, to_device_s),
        to_host_bytes_per_s: rate(bytes, to_host_s),
    })
}

/// Copies `bytes` to the device in one part, half of it over its own link and half over the `nth` of
/// [others](poorwill_core::DeviceInfo::links), several times. Returns the bytes per second of the fastest.
///
/// # Errors
/// What the driver reports. Nothing stays allocated.
pub fn measure_with(driver: &dyn Driver, nth: usize, bytes: u64) -> Result<f64> {
    let other = driver.stream_create_over_link(nth)?;
    let measured = measure_halves(driver, other, bytes);
    driver.stream_destroy(other).and(measured)
}

fn measure_halves(driver: &dyn Driver, other: StreamId, bytes: u64) -> Result<f64> {
    let mut memory = Scratch::reserve(driver, bytes)?;
    memory.map_backings(&[bytes])?;
    let half = bytes / 2;
    let part = |at: u64, bytes: u64| {
        [CopyPart { device: DeviceRange::new(memory.range.addr + at, bytes), host_offset: at }]
    };
    let mut buffer = driver.host_alloc(bytes)?;
    buffer.fill(1);
    let (buffer, mut best_s) = (Arc::new(buffer), f64::INFINITY);
    for _ in 0..COPIES {
        let (seconds, ()) = timed(|| {
            let over = driver.copy_to_device(other, Arc::clone(&buffer), &part(half, bytes - half))?;
            let own = driver.copy_to_device(StreamId::DEFAULT, Arc::clone(&buffer), &part(0, half));
            over.wait().and(own?.wait())
        })?;
        best_s = best_s.min(seconds);
    }
    Ok(rate(bytes, best_s))
}

/// Copies `bytes`, whole granules, from another device's memory, several times. Returns the bytes per second of the fastest.
///
/// # Errors
/// What the drivers report. Nothing stays allocated.
pub fn measure_memory(driver: &dyn Driver, peer: &dyn PeerMemory, bytes: u64) -> Result<f64> {
    let mut memory = Scratch::reserve(driver, bytes)?;
    memory.map_backings(&[bytes])?;
    let descriptor = peer.create(bytes)?;
    let mut other = Scratch::reserve(driver, bytes)?;
    other.map_imported(driver.import(descriptor.as_fd(), bytes)?)?;
    let (part, mut best_s) = (MovePart { to: memory.range, from: other.range.addr }, f64::INFINITY);
    for _ in 0..COPIES {
        let (seconds, ()) = timed(|| driver.copy_within(StreamId::DEFAULT, &[part])?.wait())?;
        best_s = best_s.min(seconds);
    }
    Ok(rate(bytes, best_s))
}

/// Device memory outside any pool. Dropping it releases what the driver allows.
pub struct Scratch<'a> {
    driver: &'a dyn Driver,
    range: DeviceRange,
    backings: Vec<BackingId>,
    /// Ranges of the backings, in the same order.
    mapped: Vec<DeviceRange>,
}

impl fmt::Debug for Scratch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch")
            .field("range", &self.range)
            .field("mappings", &self.mapped.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Scratch<'a> {
    /// Reserves addresses without memory.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn reserve(driver: &'a dyn Driver, bytes: u64) -> Result<Self> {
        let range = driver.reserve(bytes)?;
        Ok(Self { driver, range, backings: Vec::new(), mapped: Vec::new() })
    }

    /// The reserved range.
    #[must_use]
    pub fn range(&self) -> DeviceRange {
        self.range
    }

    /// Creates and maps backings of these sizes, which are whole granules, from the start of the range. Each
    /// call opens 32.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn map_backings(&mut self, sizes: &[u64]) -> Result<()> {
        let mut at = self.range.addr;
        for run in sizes.chunks(MAPPINGS_PER_CALL) {
            let start = at;
            for bytes in run {
                let backing = self.driver.create(*bytes)?;
                self.backings.push(backing);
                let range = DeviceRange::new(at, *bytes);
                self.driver.map(range, backing)?;
                self.mapped.push(range);
                at = range.end();
            }
            self.driver.set_access(DeviceRange::new(start, at - start))?;
        }
        Ok(())
    }

    /// Maps all of the range to memory that was imported.
    fn map_imported(&mut self, backing: BackingId) -> Result<()> {
        self.backings.push(backing);
        self.driver.map(self.range, backing)?;
        self.mapped.push(self.range);
        self.driver.set_access(self.range)
    }

    /// Unmaps everything, 32 mappings with each call, and releases it.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn unmap_all(&mut self) -> Result<()> {
        for (ranges, backings) in
            self.mapped.chunks(MAPPINGS_PER_CALL).zip(self.backings.chunks(MAPPINGS_PER_CALL))
        {
            let (start, end) = (ranges[0].addr, ranges[ranges.len() - 1].end());
            self.driver.unmap(DeviceRange::new(start, end - start))?;
            backings.iter().try_for_each(|backing| self.driver.release(*backing))?;
        }
        self.mapped.clear();
        self.backings.clear();
        Ok(())
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        // A failed call may have left some of it. What is gone already is refused.
        for range in &self.mapped {
            let _ = self.driver.unmap(*range);
        }
        for backing in &self.backings {
            let _ = self.driver.release(*backing);
        }
        let _ = self.driver.unreserve(self.range);
    }
}

fn timed<T>(action: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let started = Instant::now();
    let outcome = action()?;
    Ok((started.elapsed().as_secs_f64(), outcome))
}

#[allow(clippy::cast_precision_loss)] // Sizes of memory are far below where a float begins to round to whole bytes.
fn rate(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds.max(1e-9)
}
