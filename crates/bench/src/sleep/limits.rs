//! The limits: the link, reading device memory, making host memory, and bare calls of the driver. No pool is
//! involved.

use poorwill::driver::Result;
use poorwill::{Driver, HostBuffer, Pending, StreamId};
use poorwill_driver::link::{self, Scratch};
use serde::Serialize;

use crate::figures::{rate, timed};
use crate::process::touch;

/// How many times memory comes and goes; the quickest counts.
const ROUNDS: usize = 3;

/// Most that one copy moves.
const LINK_BYTES_MAX: u64 = 1 << 30;

/// Most that digests are computed of at once.
const DIGEST_BYTES_MAX: u64 = 2 << 30;

/// How often host memory is made. The first time, a machine may have to touch it for the first time ever.
const PIN_ROUNDS: usize = 2;

/// The largest handle. One for everything takes longer to release (a GPU's driver cleans it as a whole).
const HANDLE_BYTES_MAX: u64 = 1 << 30;

/// What the machine can do at best.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Limits {
    /// Bytes of each copy over the link, in one piece on one stream.
    pub link_bytes: u64,
    /// From host memory to the device, the quickest of five.
    pub to_device_bytes_per_s: f64,
    /// From the device to host memory, the quickest of five.
    pub to_host_bytes_per_s: f64,
    /// Bytes of device memory that digests were computed of, with one call.
    pub digest_bytes: u64,
    /// Computing them, the quickest of three.
    pub digest_bytes_per_s: f64,
    /// Host memory made at once, in the pieces of the load.
    pub pin_bytes: u64,
    /// Making it while none is kept, until every page is there: the quicker of two.
    pub pin_bytes_per_s: f64,
    /// Whether host memory is page-locked, here and in the cycles: as a rule on a GPU, unless it was left pageable.
    pub pinned: bool,
    /// How many chunks of the pool's size the load takes.
    pub chunks: u64,
    /// The pool's size of a chunk.
    pub chunk_bytes: u64,
    /// How many granules it takes beside them.
    pub granules: u64,
    /// Size of a granule.
    pub granule_bytes: u64,
    /// As few handles as hold as much, none larger than a GiB: what costs the driver least.
    pub handles: usize,
    /// Creating, mapping and opening these: the quickest of three.
    pub bring_in_s: f64,
    /// Unmapping and releasing these: the quickest of three.
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
        let sizes = pieces.sizes();
        let up_to = |bytes| pieces.bytes().min(bytes) / pieces.granule_bytes * pieces.granule_bytes;
        let (link_bytes, digest_bytes) = (up_to(LINK_BYTES_MAX), up_to(DIGEST_BYTES_MAX));
        let link = link::measure(driver, link_bytes)?;
        let digest_s = digest(driver, digest_bytes)?;
        let (pin_s, pinned) = pin(driver, &sizes)?;
        let handles = handles(pieces.bytes());
        let (bring_in_s, give_back_s) = bare(driver, &handles)?;
        Ok(Self {
            link_bytes,
            to_device_bytes_per_s: link.to_device_bytes_per_s,
            to_host_bytes_per_s: link.to_host_bytes_per_s,
            digest_bytes,
            digest_bytes_per_s: rate(digest_bytes, digest_s),
            pin_bytes: pieces.bytes(),
            pin_bytes_per_s: rate(pieces.bytes(), pin_s),
            pinned,
            chunks: pieces.chunks,
            chunk_bytes: pieces.chunk_bytes,
            granules: pieces.granules,
            granule_bytes: pieces.granule_bytes,
            handles: handles.len(),
            bring_in_s,
            give_back_s,
        })
    }
}

/// Seconds of the quickest reading.
fn digest(driver: &dyn Driver, bytes: u64) -> Result<f64> {
    let mut memory = Scratch::reserve(driver, bytes)?;
    memory.bring_in(&[bytes])?;
    driver.zero(StreamId::DEFAULT, memory.range())?.wait()?;
    let mut quickest_s = f64::INFINITY;
    for _ in 0..ROUNDS {
        let (seconds, _) = timed(|| driver.digest(StreamId::DEFAULT, &[memory.range()])?.wait())?;
        quickest_s = quickest_s.min(seconds);
    }
    Ok(quickest_s)
}

/// Seconds of the quicker making, and whether what was made is page-locked. Nothing is kept, before and after.
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

/// Sizes of as few handles as hold `bytes`, whole granules.
fn handles(bytes: u64) -> Vec<u64> {
    let whole = (0..bytes / HANDLE_BYTES_MAX).map(|_| HANDLE_BYTES_MAX);
    whole.chain(Some(bytes % HANDLE_BYTES_MAX).filter(|rest| *rest > 0)).collect()
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
