//! An untimed run that checks that no blocks overlap, and measures their address space.
//!
//! Its length is fixed, so its figures depend only on the number of live blocks.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::BenchResult;
use crate::allocator::{Allocator, Extent, UNIT_BYTES, named};
use crate::trace::Trace;

/// Average replacements of each live block.
const TURNS: u32 = 8;

/// Checks of reserved address space during one turn. A check is slow, and at most a thousandth of the blocks
/// change in between.
const SAMPLES_PER_TURN: usize = 1024;

/// Result of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Survey {
    /// Peak bytes of live blocks, in whole units.
    pub(crate) live_bytes: u64,
    /// Peak address space.
    pub(crate) extent_bytes: u64,
}

impl Survey {
    /// Fills a fresh allocator and replaces its blocks, checking each.
    pub(crate) fn of<A: Allocator>(allocator: A, live: u32) -> BenchResult<Self> {
        let mut watch = Watch { allocator, places: Places::default(), live_bytes: 0, most: Self::default() };
        named::<A, _>(watch.run(live))?;
        Ok(watch.most)
    }
}

/// An allocator with its live blocks.
struct Watch<A> {
    allocator: A,
    places: Places,
    live_bytes: u64,
    most: Survey,
}

impl<A: Allocator> Watch<A> {
    fn run(&mut self, live: u32) -> BenchResult<()> {
        let mut trace = Trace::new(live);
        let stride = (live as usize).div_ceil(SAMPLES_PER_TURN);
        let mut blocks = Vec::with_capacity(live as usize);
        for sizes in trace.fill().chunks(stride) {
            for bytes in sizes {
                blocks.push(self.alloc(*bytes)?);
            }
            self.sample()?;
        }
        for _ in 0..TURNS {
            for pairs in trace.pairs(live).chunks(stride) {
                for pair in pairs {
                    let block = &mut blocks[pair.victim as usize];
                    self.free(*block)?;
                    *block = self.alloc(pair.bytes)?;
                }
                self.sample()?;
            }
        }
        Ok(())
    }

    fn alloc(&mut self, bytes: u32) -> BenchResult<A::Handle> {
        let block = self.allocator.alloc(bytes)?;
        let range = self.allocator.range(block)?;
        if range.end - range.start < u64::from(bytes) {
            return Err(format!("a block of {bytes} bytes has only {range:x?}").into());
        }
        self.live_bytes += range.end - range.start;
        self.most.live_bytes = self.most.live_bytes.max(self.live_bytes);
        self.places.take(range)?;
        Ok(block)
    }

    fn free(&mut self, block: A::Handle) -> BenchResult<()> {
        let range = self.allocator.range(block)?;
        self.live_bytes -= range.end - range.start;
        self.places.leave(&range)?;
        self.allocator.free(block)
    }

    fn sample(&mut self) -> BenchResult<()> {
        let extent_bytes = match self.allocator.extent()? {
            Extent::Reserved(bytes) => bytes,
            Extent::ToHighestBlock => self.places.highest_end,
        };
        self.most.extent_bytes = self.most.extent_bytes.max(extent_bytes);
        Ok(())
    }
}

/// Ranges of live blocks, which never overlap.
#[derive(Debug, Default)]
struct Places {
    /// Ends by starts.
    taken: BTreeMap<u64, u64>,
    /// Of all blocks so far.
    highest_end: u64,
}

impl Places {
    fn take(&mut self, range: Range<u64>) -> BenchResult<()> {
        let before = self.taken.range(..range.end).next_back();
        if let Some((start, end)) = before.filter(|(_, end)| **end > range.start) {
            return Err(format!("a block at {range:x?} overlaps a live one at {:x?}", *start..*end).into());
        }
        let unit = u64::from(UNIT_BYTES);
        if range.is_empty() || !range.start.is_multiple_of(unit) || !range.end.is_multiple_of(unit) {
            return Err(format!("a block at {range:x?} does not begin and end on units of {unit}").into());
        }
        self.highest_end = self.highest_end.max(range.end);
        self.taken.insert(range.start, range.end);
        Ok(())
    }

    fn leave(&mut self, range: &Range<u64>) -> BenchResult<()> {
        if self.taken.remove(&range.start) == Some(range.end) {
            Ok(())
        } else {
            Err(format!("a live block has moved to {range:x?}").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::{Peer, Poorwill};

    const LIVE: u32 = 300;

    #[test]
    fn both_allocators_keep_their_blocks_apart() {
        let poorwill = Survey::of(Poorwill::open().unwrap(), LIVE).unwrap();
        let peer = Survey::of(Peer::new(LIVE), LIVE).unwrap();
        assert_eq!(poorwill.live_bytes, peer.live_bytes, "both round to the same units");
        for survey in [poorwill, peer] {
            assert!(survey.live_bytes > u64::from(LIVE * UNIT_BYTES), "{survey:?}");
            assert!(survey.extent_bytes >= survey.live_bytes, "{survey:?}");
        }
    }

    #[test]
    fn surveys_repeat() {
        let survey = || Survey::of(Poorwill::open().unwrap(), LIVE).unwrap();
        assert_eq!(survey(), survey());
    }

    #[test]
    fn a_broken_allocator_is_found() {
        for (distance, bytes, complaint) in [
            (0, 1 << 20, "overlaps"),
            (1 << 20, (1 << 20) + 512, "overlaps"),
            (1 << 20, 512, "has only"),
            (1 << 20, (1 << 20) - 1, "does not begin and end"),
            (0, 0, "no room"),
        ] {
            let error = Survey::of(Row { distance, bytes, next: 0 }, LIVE).unwrap_err().to_string();
            assert!(error.starts_with("row: ") && error.contains(complaint), "{error}");
        }
        let sound = Survey::of(Row { distance: 1 << 20, bytes: 1 << 20, next: 0 }, LIVE).unwrap();
        let blocks = u64::from(LIVE);
        assert_eq!(
            sound,
            Survey { live_bytes: blocks << 20, extent_bytes: (blocks * (u64::from(TURNS) + 1)) << 20 }
        );
    }

    #[test]
    fn a_block_that_moves_is_found() {
        let mut places = Places::default();
        places.take(512..1024).unwrap();
        assert!(places.leave(&(512..1536)).is_err());
    }

    /// Puts blocks of one size in a row and takes nothing back.
    struct Row {
        distance: u64,
        bytes: u64,
        next: u64,
    }

    impl Allocator for Row {
        const NAME: &'static str = "row";
        type Handle = u64;

        fn alloc(&mut self, _: u32) -> BenchResult<u64> {
            if self.bytes == 0 {
                return Err("no room".into());
            }
            self.next += self.distance;
            Ok(self.next - self.distance)
        }

        fn free(&mut self, _: u64) -> BenchResult<()> {
            Ok(())
        }

        fn range(&self, start: u64) -> BenchResult<Range<u64>> {
            Ok(start..start + self.bytes)
        }

        fn extent(&self) -> BenchResult<Extent> {
            Ok(Extent::ToHighestBlock)
        }
    }
}
