//! What came of a run.

use super::world::Counts;

/// A request that has waited for longer is given up.
const WAIT_MAX_MS: u64 = 120_000;

#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) name: &'static str,
    hours: u64,
    waits_ms: Vec<u32>,
    pub(crate) counts: Counts,
    /// Requests that waited for too long.
    pub(crate) given_up: usize,
    /// Requests that were on a node that died, or were sent to one.
    pub(crate) failed: usize,
    /// Requests that no placement was there for.
    pub(crate) refused: usize,
    /// Requests that still waited in the end.
    pub(crate) unanswered: usize,
}

impl Figures {
    pub(crate) const HEADER: &str = "| policy | answered | of them at once | waited p50 | p99 | p99.9 | cold starts, of them waited for | \
        wakes from memory | from disk | swaps per hour | failed with their node | given up after 2 min, or without a node |\n\
        |---|---|---|---|---|---|---|---|---|---|---|---|";

    /// Counts a request whose turn it is. Whether it is still there.
    pub(crate) fn waited(&mut self, wait_ms: u64) -> bool {
        let is_there = wait_ms <= WAIT_MAX_MS;
        if is_there {
            self.waits_ms.push(wait_ms as u32);
        } else {
            self.given_up += 1;
        }
        is_there
    }

    pub(crate) fn finish(&mut self, name: &'static str, hours: u64, counts: &Counts) {
        (self.name, self.hours, self.counts) = (name, hours, *counts);
        self.waits_ms.sort_unstable();
    }

    pub(crate) fn answered(&self) -> usize {
        self.waits_ms.len()
    }

    /// How long requests waited: all but so many of a thousand waited for less.
    pub(crate) fn wait_ms(&self, per_mille: usize) -> u64 {
        let last = self.waits_ms.len().saturating_sub(1);
        self.waits_ms.get(last * (1_000 - per_mille) / 1_000).copied().unwrap_or_default().into()
    }

    pub(crate) fn row(&self) -> String {
        let seconds = |per_mille| self.wait_ms(per_mille) as f64 / 1e3;
        let Counts { wakes, reloads, starts, starts_waited, swaps } = self.counts;
        format!(
            "| {} | {} | {:.2} % | {:.2} s | {:.2} s | {:.2} s | {starts}, {starts_waited} | {wakes} | {reloads} | {} | {} | {} |",
            self.name,
            self.answered(),
            self.waits_ms.partition_point(|wait| *wait == 0) as f64 * 100.0 / self.answered().max(1) as f64,
            seconds(500),
            seconds(10),
            seconds(1),
            swaps / self.hours.max(1),
            self.failed,
            self.given_up + self.refused,
        )
    }
}
