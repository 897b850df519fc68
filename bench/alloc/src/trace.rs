//! The trace of frees and allocations: sizes and victims from a fixed seed, the same on every machine.
//!
//! Sizes are log-uniform from 512 bytes to 1 MiB. Half of the blocks are below 23 KiB, and each doubling has
//! the same share, so no size class dominates. In that range allocators differ by their bookkeeping. Below it
//! all round up alike; above it the driver's calls dominate, and engines have few such blocks. Sizes are
//! arbitrary bytes; each allocator rounds them.
//!
//! Victims are uniform over the live blocks, so neither an order of frees nor the caches help.

use std::iter;

use fastrand::Rng;

const BYTES_MIN: u32 = 512;
/// 512 bytes to 1 MiB.
const DOUBLINGS: u32 = 11;

const SEED: u64 = 0x5007_1e57;

/// One free–alloc pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pair {
    /// Index of the live block that is freed; the new one takes its index.
    pub(crate) victim: u32,
    /// Size of the new block.
    pub(crate) bytes: u32,
}

/// An endless trace.
#[derive(Debug, Clone)]
pub(crate) struct Trace {
    live: u32,
    random: Rng,
}

impl Trace {
    /// The trace for this many live blocks.
    pub(crate) fn new(live: u32) -> Self {
        Self { live, random: Rng::with_seed(SEED) }
    }

    /// Sizes of the initial blocks.
    pub(crate) fn fill(&mut self) -> Vec<u32> {
        (0..self.live).map(|_| self.bytes()).collect()
    }

    /// The next `count` pairs.
    pub(crate) fn pairs(&mut self, count: u32) -> Vec<Pair> {
        let pair = || Pair { victim: self.random.u32(..self.live), bytes: self.bytes() };
        iter::repeat_with(pair).take(count as usize).collect()
    }

    /// A size with density 1/x: a random doubling, then uniform sizes within it, each kept with the
    /// probability (the doubling's beginning)/x. Integers only, so that all machines agree.
    fn bytes(&mut self) -> u32 {
        let least = BYTES_MIN << self.random.u32(..DOUBLINGS);
        loop {
            let bytes = least + self.random.u32(..least);
            if self.random.u32(..bytes) < least {
                return bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trace_is_the_same_every_time() {
        let (mut one, mut other) = (Trace::new(1000), Trace::new(1000));
        assert_eq!(one.fill(), other.fill());
        assert_eq!(one.pairs(5000), other.pairs(5000));
        // And on every machine.
        let first = Trace::new(1000).fill();
        assert_eq!(first[..4], [31_454, 616_654, 33_434, 13_212]);
    }

    #[test]
    fn pairs_go_on_where_the_last_ones_ended() {
        let mut whole = Trace::new(10);
        let mut parts = whole.clone();
        assert_eq!([parts.pairs(3), parts.pairs(4)].concat(), whole.pairs(7));
    }

    #[test]
    fn sizes_are_log_uniform() {
        const COUNT: u32 = 200_000;
        let mut sizes = Trace::new(COUNT).fill();
        sizes.sort_unstable();
        assert!(sizes[0] >= 512 && sizes[sizes.len() - 1] < 1 << 20);
        // Quantile q of a log-uniform size is 512·2048^q, and a 64th of the doublings is 13 % in size.
        for part in 1..16 {
            let quantile = f64::from(sizes[(COUNT / 16 * part) as usize]);
            let expected = 512.0 * 2048f64.powf(f64::from(part) / 16.0);
            assert!((quantile / expected - 1.0).abs() < 0.05, "{part}/16: {quantile}, not {expected}");
        }
        // Within a doubling too: half of it lies below its start times √2.
        let within =
            |from: f64, to: f64| sizes.iter().filter(|s| (from..to).contains(&f64::from(**s))).count();
        let (lower, upper) = (within(65536.0, 92681.9), within(92681.9, 131_072.0));
        assert!(lower.abs_diff(upper) * 20 < lower + upper, "{lower} and {upper}");
    }

    #[test]
    fn victims_are_live_and_all_get_their_turn() {
        let mut turns = [0u32; 100];
        Trace::new(100).pairs(100_000).iter().for_each(|pair| turns[pair.victim as usize] += 1);
        assert!(turns.iter().all(|turns| (800..1200).contains(turns)), "{turns:?}");
        assert!(Trace::new(1).pairs(100).iter().all(|pair| pair.victim == 0));
    }
}
