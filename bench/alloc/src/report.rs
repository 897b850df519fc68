//! The output: one JSON object, or a table.

use std::fmt;

use poorwill_core::ByteSize;
use serde::Serialize;

use crate::allocator::{Allocator, Peer};
use crate::measure::{Series, Times};
use crate::survey::Survey;

/// The figures. A pair is one free and one alloc.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    live_blocks: u32,
    /// Median of the rounds, as for the peer.
    poorwill_ns_per_pair: f64,
    /// Of pairs timed one by one, with the clock's own cost.
    poorwill_p99_ns: u64,
    peer: &'static str,
    peer_ns_per_pair: f64,
    /// Poorwill's time divided by the peer's.
    ratio: f64,
    poorwill_extent_bytes: u64,
    peer_extent_bytes: u64,
    /// Peak bytes of live blocks, in whole units: a lower bound of an extent.
    live_bytes: u64,
    /// Of the fastest round.
    poorwill_best_ns_per_pair: f64,
    peer_best_ns_per_pair: f64,
    peer_p99_ns: u64,
    clock_ns: u64,
    rounds: u32,
    pairs_per_round: u32,
}

impl Report {
    pub(crate) fn new(
        live_blocks: u32,
        rounds: u32,
        times: &Times,
        poorwill: &Survey,
        peer: &Survey,
    ) -> Self {
        let (poorwill_ns, peer_ns) = (median(&times.poorwill), median(&times.peer));
        Self {
            live_blocks,
            poorwill_ns_per_pair: rounded(poorwill_ns, 10.0),
            poorwill_p99_ns: times.poorwill.p99_ns,
            peer: Peer::NAME,
            peer_ns_per_pair: rounded(peer_ns, 10.0),
            ratio: rounded(poorwill_ns / peer_ns, 1000.0),
            poorwill_extent_bytes: poorwill.extent_bytes,
            peer_extent_bytes: peer.extent_bytes,
            live_bytes: poorwill.live_bytes.max(peer.live_bytes),
            poorwill_best_ns_per_pair: rounded(best(&times.poorwill), 10.0),
            peer_best_ns_per_pair: rounded(best(&times.peer), 10.0),
            peer_p99_ns: times.peer.p99_ns,
            clock_ns: times.clock_ns,
            rounds,
            pairs_per_round: times.pairs,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { live_blocks, rounds, pairs_per_round, clock_ns, ratio, .. } = self;
        let live = ByteSize(self.live_bytes);
        writeln!(
            f,
            "{live_blocks} live blocks ({live}), {rounds} rounds of {pairs_per_round} pairs of free and alloc"
        )?;
        writeln!(f, "  {:18}{:>10}{:>10}{:>10}  address space", "ns per pair", "median", "best", "p99")?;
        let mut row = |name, median, best, p99, extent_bytes| {
            let extent = ByteSize(extent_bytes);
            writeln!(f, "  {name:18}{median:>10.1}{best:>10.1}{p99:>10}  {extent}")
        };
        row(
            "poorwill",
            self.poorwill_ns_per_pair,
            self.poorwill_best_ns_per_pair,
            self.poorwill_p99_ns,
            self.poorwill_extent_bytes,
        )?;
        row(
            self.peer,
            self.peer_ns_per_pair,
            self.peer_best_ns_per_pair,
            self.peer_p99_ns,
            self.peer_extent_bytes,
        )?;
        writeln!(
            f,
            "  poorwill takes {ratio:.2} times as long; each p99 contains {clock_ns} ns of the clock itself"
        )
    }
}

fn median(series: &Series) -> f64 {
    let mut times = series.ns_per_pair.clone();
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    if times.len().is_multiple_of(2) { (times[middle - 1] + times[middle]) / 2.0 } else { times[middle] }
}

fn best(series: &Series) -> f64 {
    series.ns_per_pair.iter().copied().fold(f64::INFINITY, f64::min)
}

/// To a whole number of `parts`-ths.
fn rounded(value: f64, parts: f64) -> f64 {
    (value * parts).round() / parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_bests() {
        let series = |times: &[f64]| Series { ns_per_pair: times.to_vec(), p99_ns: 0 };
        assert_eq!(median(&series(&[9.0, 1.0, 2.0])), 2.0);
        assert_eq!(median(&series(&[9.0, 1.0, 2.0, 4.0])), 3.0);
        assert_eq!(best(&series(&[9.0, 1.0, 2.0])), 1.0);
    }
}
