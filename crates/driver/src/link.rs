//! What the link to a device moves at best, and memory to measure it with. No pool is involved.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use poorwill_core::driver::{BackingId, Result};
use poorwill_core::{CopyPart, DeviceRange, Driver, StreamId};

/// How many copies each way; the quickest counts.
const COPIES: usize = 5;

/// How many pieces are opened, and unmapped, with one call.
const RUN_PIECES: usize = 32;

/// What the link moved, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LinkSpeed {
    /// Getting the host memory that the copies use: page-locking it, on a GPU.
    pub pin_bytes_per_s: f64,
    /// The quickest copy to the device.
    pub to_device_bytes_per_s: f64,
    /// The quickest copy from it.
    pub to_host_bytes_per_s: f64,
}

/// Copies `bytes` in one piece on one stream, there and back, several times. Takes as much memory of the device, beside
/// any pool, and of the host.
///
/// # Errors
/// What the driver says. Nothing is kept then.
pub fn measure(driver: &dyn Driver, bytes: u64) -> Result<LinkSpeed> {
    let mut memory = Scratch::reserve(driver, bytes)?;
    memory.bring_in(&[bytes])?;
    let parts = [CopyPart { device: memory.range, host_offset: 0 }];
    let (pin_s, mut buffer) = timed(|| driver.host_alloc(bytes))?;
    buffer.fill(1); // Pages that were never written are no memory.
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

/// Memory of a device to measure with, beside any pool: a reservation, and what is in it. Gone when dropped, as far as
/// the driver lets it.
pub struct Scratch<'a> {
    driver: &'a dyn Driver,
    range: DeviceRange,
    backings: Vec<BackingId>,
    /// Where they are, in the same order, as far as they are mapped.
    mapped: Vec<DeviceRange>,
}

impl fmt::Debug for Scratch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch")
            .field("range", &self.range)
            .field("pieces", &self.mapped.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Scratch<'a> {
    /// Addresses without memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn reserve(driver: &'a dyn Driver, bytes: u64) -> Result<Self> {
        let range = driver.reserve(bytes)?;
        Ok(Self { driver, range, backings: Vec::new(), mapped: Vec::new() })
    }

    /// Where it is.
    #[must_use]
    pub fn range(&self) -> DeviceRange {
        self.range
    }

    /// Creates and maps memory in pieces of these sizes, whole granules, from the beginning on, and opens 32 of them with
    /// a call.
    ///
    /// # Errors
    /// What the driver says.
    pub fn bring_in(&mut self, sizes: &[u64]) -> Result<()> {
        let mut at = self.range.addr;
        for run in sizes.chunks(RUN_PIECES) {
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

    /// Unmaps all of it, 32 pieces with a call, and releases it.
    ///
    /// # Errors
    /// What the driver says.
    pub fn give_back(&mut self) -> Result<()> {
        for (ranges, backings) in self.mapped.chunks(RUN_PIECES).zip(self.backings.chunks(RUN_PIECES)) {
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
        // What a failed call has left. There is nobody to tell of what is refused now; what is gone already is
        // refused, too.
        for range in &self.mapped {
            let _ = self.driver.unmap(*range);
        }
        for backing in &self.backings {
            let _ = self.driver.release(*backing);
        }
        let _ = self.driver.unreserve(self.range);
    }
}

/// How many seconds something took, and what came of it.
fn timed<T>(action: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let started = Instant::now();
    let outcome = action()?;
    Ok((started.elapsed().as_secs_f64(), outcome))
}

/// Bytes per second.
#[allow(clippy::cast_precision_loss)] // Sizes of memory are far below where a float begins to round to whole bytes.
fn rate(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds.max(1e-9)
}
