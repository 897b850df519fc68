//! The limits: the link, and bare calls of the driver. No pool is involved.

use std::sync::Arc;
use std::time::Instant;

use poorwill_core::driver::{BackingId, Result};
use poorwill_core::{CopyPart, DeviceRange, Driver, StreamId};
use serde::Serialize;

/// How many copies each way; the quickest counts.
const COPIES: usize = 5;

/// How many times memory comes and goes; the quickest counts.
const ROUNDS: usize = 3;

/// How many pieces are opened, and unmapped, with one call.
const RUN_PIECES: usize = 32;

/// Most that one copy moves.
const LINK_BYTES_MAX: u64 = 1 << 30;

/// What the machine can do at best.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Limits {
    /// Bytes of each copy over the link, in one piece on one stream.
    pub link_bytes: u64,
    /// From pinned memory to the device, the quickest of five.
    pub to_device_bytes_per_s: f64,
    /// From the device to pinned memory, the quickest of five.
    pub to_host_bytes_per_s: f64,
    /// How many chunks of the pool's size the load takes.
    pub chunks: u64,
    /// The pool's size of a chunk.
    pub chunk_bytes: u64,
    /// How many granules it takes beside them.
    pub granules: u64,
    /// Size of a granule.
    pub granule_bytes: u64,
    /// Creating and mapping them all, with one call to open 32 of them: the quickest of three.
    pub bring_in_s: f64,
    /// Unmapping them, 32 with one call, and releasing each: the quickest of three.
    pub give_back_s: f64,
}

/// What a load takes from the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pieces {
    pub(super) chunks: u64,
    pub(super) chunk_bytes: u64,
    pub(super) granules: u64,
    pub(super) granule_bytes: u64,
}

impl Pieces {
    /// For tensors of these sizes: whole chunks inside of each, the rest in granules that neighbours share.
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
    /// Measures, and leaves the device as it was.
    pub(super) fn measure(driver: &dyn Driver, pieces: &Pieces) -> Result<Self> {
        let link_bytes = pieces.bytes().min(LINK_BYTES_MAX) / pieces.granule_bytes * pieces.granule_bytes;
        let (to_device_s, to_host_s) = link(driver, link_bytes)?;
        let (bring_in_s, give_back_s) = bare(driver, &pieces.sizes())?;
        Ok(Self {
            link_bytes,
            to_device_bytes_per_s: rate(link_bytes, to_device_s),
            to_host_bytes_per_s: rate(link_bytes, to_host_s),
            chunks: pieces.chunks,
            chunk_bytes: pieces.chunk_bytes,
            granules: pieces.granules,
            granule_bytes: pieces.granule_bytes,
            bring_in_s,
            give_back_s,
        })
    }
}

/// Seconds of the quickest copy to the device, and of the quickest from it.
fn link(driver: &dyn Driver, bytes: u64) -> Result<(f64, f64)> {
    let mut memory = Scratch::reserve(driver, bytes)?;
    memory.bring_in(&[bytes])?;
    let parts = [CopyPart { device: memory.range, host_offset: 0 }];
    let mut buffer = driver.host_alloc(bytes)?;
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
    Ok((to_device_s, to_host_s))
}

/// Seconds of the quickest bringing in, and of the quickest giving back.
fn bare(driver: &dyn Driver, sizes: &[u64]) -> Result<(f64, f64)> {
    let mut memory = Scratch::reserve(driver, sizes.iter().sum())?;
    let (mut bring_in_s, mut give_back_s) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        driver.synchronize()?;
        bring_in_s = bring_in_s.min(timed(|| memory.bring_in(sizes))?.0);
        give_back_s = give_back_s.min(timed(|| memory.give_back())?.0);
    }
    Ok((bring_in_s, give_back_s))
}

/// A reservation, and what is in it. Gone when dropped, as far as the driver lets it.
struct Scratch<'a> {
    driver: &'a dyn Driver,
    range: DeviceRange,
    backings: Vec<BackingId>,
    /// Where they are, in the same order, as far as they are mapped.
    mapped: Vec<DeviceRange>,
}

impl<'a> Scratch<'a> {
    fn reserve(driver: &'a dyn Driver, bytes: u64) -> Result<Self> {
        let range = driver.reserve(bytes)?;
        Ok(Self { driver, range, backings: Vec::new(), mapped: Vec::new() })
    }

    /// Memory in pieces of these sizes from the beginning on.
    fn bring_in(&mut self, sizes: &[u64]) -> Result<()> {
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

    /// All of it.
    fn give_back(&mut self) -> Result<()> {
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

fn timed<T>(action: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let started = Instant::now();
    let outcome = action()?;
    Ok((started.elapsed().as_secs_f64(), outcome))
}

/// Sizes of memory are far below where a float begins to round to whole bytes.
#[allow(clippy::cast_precision_loss)]
fn rate(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds.max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::super::load::sizes;
    use super::*;

    const GRANULE_BYTES: u64 = 2 << 20;

    #[test]
    fn the_pieces_of_a_layer() {
        // Chunks of 32 MiB: 3, 2, 7 and 3 and a half; the norms share a granule.
        let pieces = Pieces::of(&sizes((496 << 20) + (32 << 10)), GRANULE_BYTES, 16);
        assert_eq!((pieces.chunks, pieces.granules), (15, 9));
        assert_eq!(pieces.bytes(), 498 << 20);
        let pieces = Pieces::of(&sizes(24 << 30), GRANULE_BYTES, 16);
        assert_eq!((pieces.chunks, pieces.granules), (50 * 15, 50 * 8 + 1));
        let pieces = Pieces::of(&[1, GRANULE_BYTES], GRANULE_BYTES, 1);
        assert_eq!((pieces.chunks, pieces.granules), (0, 2));
    }
}
