//! The cost of a free–alloc pair in both allocators, in one run.
//!
//! Both are filled and warmed up until the gaps between their blocks are stable. In each round both replay
//! the same pairs. They alternate in going first, so that drift affects both. An untimed part before each
//! timed one restores an allocator's data in the caches. Sizes and victims are computed before the clock
//! starts.

use std::hint::black_box;
use std::time::Instant;

use crate::BenchResult;
use crate::allocator::{Allocator, named};
use crate::trace::{Pair, Trace};

/// Fewest pairs timed together, so that the clock and the scheduler do not matter.
const PAIRS_MIN: u32 = 100_000;

/// Pairs per live block before the first round.
const WARM_UP: u32 = 2;

/// What was timed.
#[derive(Debug)]
pub(crate) struct Times {
    pub(crate) poorwill: Series,
    pub(crate) peer: Series,
    /// Pairs of one round, and of the pass that times each.
    pub(crate) pairs: u32,
    /// Median cost of timing one pair.
    pub(crate) clock_ns: u64,
}

/// The times of one allocator.
#[derive(Debug, Default)]
pub(crate) struct Series {
    /// Of each round.
    pub(crate) ns_per_pair: Vec<f64>,
    /// With the clock's own cost.
    pub(crate) p99_ns: u64,
}

/// Times two fresh allocators.
pub(crate) fn both<A: Allocator, B: Allocator>(
    poorwill: A,
    peer: B,
    live: u32,
    rounds: u32,
) -> BenchResult<Times> {
    let pairs = live.max(PAIRS_MIN);
    let mut trace = Trace::new(live);
    let sizes = trace.fill();
    let (mut poorwill, mut peer) = (Full::new(poorwill, &sizes)?, Full::new(peer, &sizes)?);
    for _ in 0..WARM_UP {
        let pairs = trace.pairs(live);
        poorwill.replay(&pairs)?;
        peer.replay(&pairs)?;
    }
    let mut times =
        Times { poorwill: Series::default(), peer: Series::default(), pairs, clock_ns: clock_ns() };
    for round in 0..rounds {
        let (before, timed) = (trace.pairs(live), trace.pairs(pairs));
        let mut ours = || poorwill.ns_per_pair(&before, &timed).map(|ns| times.poorwill.ns_per_pair.push(ns));
        let mut theirs = || peer.ns_per_pair(&before, &timed).map(|ns| times.peer.ns_per_pair.push(ns));
        if round % 2 == 0 {
            ours()?;
            theirs()?;
        } else {
            theirs()?;
            ours()?;
        }
    }
    let (before, timed) = (trace.pairs(live), trace.pairs(pairs));
    times.poorwill.p99_ns = poorwill.p99_ns(&before, &timed)?;
    times.peer.p99_ns = peer.p99_ns(&before, &timed)?;
    Ok(times)
}

/// An allocator with its live blocks.
struct Full<A: Allocator> {
    allocator: A,
    blocks: Vec<A::Handle>,
}

impl<A: Allocator> Full<A> {
    fn new(mut allocator: A, sizes: &[u32]) -> BenchResult<Self> {
        let blocks = named::<A, _>(sizes.iter().map(|bytes| allocator.alloc(*bytes)).collect())?;
        Ok(Self { allocator, blocks })
    }

    fn ns_per_pair(&mut self, before: &[Pair], timed: &[Pair]) -> BenchResult<f64> {
        self.replay(before)?;
        let started = Instant::now();
        self.replay(timed)?;
        let pairs = u32::try_from(timed.len())?;
        Ok(started.elapsed().as_secs_f64() * 1e9 / f64::from(pairs))
    }

    fn p99_ns(&mut self, before: &[Pair], timed: &[Pair]) -> BenchResult<u64> {
        self.replay(before)?;
        let mut times = Vec::with_capacity(timed.len());
        for pair in timed {
            let started = Instant::now();
            named::<A, _>(self.step(*pair))?;
            times.push(ns_since(started));
        }
        Ok(percentile(times, 99))
    }

    fn replay(&mut self, pairs: &[Pair]) -> BenchResult<()> {
        named::<A, _>(pairs.iter().try_for_each(|pair| self.step(*pair)))
    }

    fn step(&mut self, pair: Pair) -> BenchResult<()> {
        let block = &mut self.blocks[pair.victim as usize];
        self.allocator.free(*block)?;
        *block = black_box(self.allocator.alloc(pair.bytes)?);
        Ok(())
    }
}

fn clock_ns() -> u64 {
    let times = (0..PAIRS_MIN).map(|_| ns_since(Instant::now())).collect();
    percentile(times, 50)
}

fn ns_since(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// The smallest time that `percent` of all do not exceed.
fn percentile(mut times: Vec<u64>, percent: usize) -> u64 {
    times.sort_unstable();
    let rank = (times.len() * percent).div_ceil(100);
    times.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_occurred() {
        assert_eq!(percentile((1..=200).rev().collect(), 99), 198);
        assert_eq!(percentile((1..=200).collect(), 50), 100);
        assert_eq!(percentile(vec![7], 99), 7);
        assert_eq!(percentile(vec![], 99), 0);
    }
}
