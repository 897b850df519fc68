//! Limits of the machine, measured without a pool.

use poorwill::driver::Result;
use poorwill::{Driver, HostBuffer, Pending, StreamId};
use poorwill_driver::link::{self, Scratch};
use serde::Serialize;

use crate::figures::{rate, timed};
use crate::process::touch;

/// The fastest counts.
const ROUNDS: usize = 3;

/// Largest copy.
const LINK_BYTES_MAX: u64 = 1 << 30;

/// Most digested at once.
const DIGEST_BYTES_MAX: u64 = 2 << 30;

/// The first allocation may touch memory for the first time since boot.
const PIN_ROUNDS: usize = 2;

/// A larger one takes longer to release: a GPU's driver clears it as a whole.
const HANDLE_BYTES_MAX: u64 = 1 << 30;

/// The best that the machine can do.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Limits {
    /// Size of each copy.
    pub link_bytes: u64,
    /// Host to device, fastest of five.
    pub to_device_bytes_per_s: f64,
    /// Device to host, fastest of five.
    pub to_host_bytes_per_s: f64,
    /// Digested with one call.
    pub digest_bytes: u64,
    /// Rate of digests, fastest of three.
    pub digest_bytes_per_s: f64,
    /// Host memory allocated at once, in the sizes of backups.
    pub pin_bytes: u64,
    /// Rate until every page is resident, faster of two; nothing is cached.
    pub pin_bytes_per_s: f64,
    /// Whether host memory is page-locked.
    pub pinned: bool,
    /// Chunks of the load.
    pub chunks: u64,
    /// Size of a chunk in the pool.
    pub chunk_bytes: u64,
    /// Granules beside the chunks.
    pub granules: u64,
    /// Size of a granule.
    pub granule_bytes: u64,
    /// Fewest handles for the load, each at most 1 GiB.
    pub handles: usize,
    /// Create, map and set access for these: fastest of three.
    pub map_s: f64,
    /// Unmap and release these: fastest of three.
    pub unmap_s: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Footprint {
    pub(super) chunks: u64,
    pub(super) chunk_bytes: u64,
    pub(super) granules: u64,
    pub(super) granule_bytes: u64,
}

impl Footprint {
    /// Whole chunks inside each tensor, the rest in shared granules.
    pub(super) fn of(sizes: &[u64], granule_bytes: u64, chunk_granules: u64) -> Self {
        let chunk_bytes = granule_bytes.saturating_mul(chunk_granules.max(1));
        let chunks_of = |bytes: u64| if chunk_bytes > granule_bytes { bytes / chunk_bytes } else { 0 };
        let chunks: u64 = sizes.iter().map(|bytes| chunks_of(*bytes)).sum();
        let rests = sizes.iter().map(|bytes| bytes - chunks_of(*bytes) * chunk_bytes);
        let (granules, tail_bytes) = rests.fold((0, 0), |(granules, tail_bytes), rest| {
            (granules + rest / granule_bytes, tail_bytes + rest % granule_bytes)
        });
        Self { chunks, chunk_bytes, granules: granules + tail_bytes.div_ceil(granule_bytes), granule_bytes }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.chunks * self.chunk_bytes + self.granules * self.granule_bytes
    }

    fn sizes(&self) -> Vec<u64> {
        let chunks = (0..self.chunks).map(|_| self.chunk_bytes);
        chunks.chain((0..self.granules).map(|_| self.granule_bytes)).collect()
    }
}

impl Limits {
    /// Leaves the device as it was.
    pub(super) fn measure(driver: &dyn Driver, footprint: &Footprint) -> Result<Self> {
        let sizes = footprint.sizes();
        let up_to = |bytes| footprint.bytes().min(bytes) / footprint.granule_bytes * footprint.granule_bytes;
        let (link_bytes, digest_bytes) = (up_to(LINK_BYTES_MAX), up_to(DIGEST_BYTES_MAX));
        let link = link::measure(driver, link_bytes)?;
        let digest_s = digest(driver, digest_bytes)?;
        let (pin_s, pinned) = pin(driver, &sizes)?;
        let handles = handles(footprint.bytes());
        let (map_s, unmap_s) = map_and_unmap(driver, &handles)?;
        Ok(Self {
            link_bytes,
            to_device_bytes_per_s: link.to_device_bytes_per_s,
            to_host_bytes_per_s: link.to_host_bytes_per_s,
            digest_bytes,
            digest_bytes_per_s: rate(digest_bytes, digest_s),
            pin_bytes: footprint.bytes(),
            pin_bytes_per_s: rate(footprint.bytes(), pin_s),
            pinned,
            chunks: footprint.chunks,
            chunk_bytes: footprint.chunk_bytes,
            granules: footprint.granules,
            granule_bytes: footprint.granule_bytes,
            handles: handles.len(),
            map_s,
            unmap_s,
        })
    }
}

fn digest(driver: &dyn Driver, bytes: u64) -> Result<f64> {
    let mut memory = Scratch::reserve(driver, bytes)?;
    memory.map_backings(&[bytes])?;
    driver.zero(StreamId::DEFAULT, memory.range())?.wait()?;
    let mut quickest_s = f64::INFINITY;
    for _ in 0..ROUNDS {
        let (seconds, _) = timed(|| driver.digest(StreamId::DEFAULT, &[memory.range()])?.wait())?;
        quickest_s = quickest_s.min(seconds);
    }
    Ok(quickest_s)
}

/// Seconds of the faster allocation, and whether it is page-locked.
fn pin(driver: &dyn Driver, sizes: &[u64]) -> Result<(f64, bool)> {
    let (mut quickest_s, mut pinned) = (f64::INFINITY, false);
    for _ in 0..PIN_ROUNDS {
        driver.host_trim()?;
        let (seconds, buffers) = timed(|| {
            let made = driver.host_alloc_all(sizes)?.into_iter().map(Pending::wait);
            let mut buffers = made.collect::<Result<Vec<HostBuffer>>>()?;
            pinned = driver.host_memory().pinned_bytes > 0;
            if !pinned {
                buffers.iter_mut().for_each(|buffer| touch(buffer));
            }
            Ok(buffers)
        })?;
        quickest_s = quickest_s.min(seconds);
        drop(buffers);
    }
    driver.host_trim()?;
    Ok((quickest_s, pinned))
}

fn handles(bytes: u64) -> Vec<u64> {
    let whole = (0..bytes / HANDLE_BYTES_MAX).map(|_| HANDLE_BYTES_MAX);
    whole.chain(Some(bytes % HANDLE_BYTES_MAX).filter(|rest| *rest > 0)).collect()
}

fn map_and_unmap(driver: &dyn Driver, sizes: &[u64]) -> Result<(f64, f64)> {
    let mut memory = Scratch::reserve(driver, sizes.iter().sum())?;
    let (mut map_s, mut unmap_s) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        driver.synchronize()?;
        map_s = map_s.min(timed(|| memory.map_backings(sizes))?.0);
        unmap_s = unmap_s.min(timed(|| memory.unmap_all())?.0);
    }
    Ok((map_s, unmap_s))
}

#[cfg(test)]
mod tests {
    use super::super::sizes::sizes;
    use super::*;

    const GRANULE_BYTES: u64 = 2 << 20;

    #[test]
    fn handles_are_few_and_hold_everything() {
        assert_eq!(handles((2 << 30) + (6 << 20)), [1 << 30, 1 << 30, 6 << 20]);
        assert_eq!((handles(1 << 30), handles(GRANULE_BYTES)), (vec![1 << 30], vec![GRANULE_BYTES]));
    }

    #[test]
    fn the_footprint_of_a_layer() {
        // Chunks of 32 MiB: 3, 2, 7 and 3 and a half; the norms share a granule.
        let footprint = Footprint::of(&sizes((496 << 20) + (32 << 10)), GRANULE_BYTES, 16);
        assert_eq!((footprint.chunks, footprint.granules), (15, 9));
        assert_eq!(footprint.bytes(), 498 << 20);
        let footprint = Footprint::of(&sizes(24 << 30), GRANULE_BYTES, 16);
        assert_eq!((footprint.chunks, footprint.granules), (50 * 15, 50 * 8 + 1));
        let footprint = Footprint::of(&[1, GRANULE_BYTES], GRANULE_BYTES, 1);
        assert_eq!((footprint.chunks, footprint.granules), (0, 2));
    }
}
