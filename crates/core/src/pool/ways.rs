//! Which way a wake's copies take: the device's copy engines, a kernel, or both.
//!
//! Right after a sleep a GPU's driver cleans what was released, in the background and with the copy engines; a copy
//! that takes an engine then gets half of the link, and a kernel that reads the host memory itself gets what is left.
//! By both ways at once the link is full whatever the engines do besides. Which way has how much of the link is found
//! out as it goes: each has room for so many bytes in flight, and the next copy takes the one with the fewest.
//!
//! A wake that creates far more memory than it copies into (a cache that fills the card) waits for that cleaning,
//! because the driver hands out clean memory only. Its copies would take the engines from the cleaning, so all of them
//! go by kernel. `docs/adr/0013-copies-by-kernel.md` has the figures.

use std::collections::VecDeque;

/// How many times as much as a wake copies it may create besides, before its copies leave the engines alone.
const UNCOPIED_RATIO_MAX: u64 = 2;

/// Copies that may be in flight on each of two ways, in granules (256 MiB on a GPU): enough that none runs dry while
/// memory is mapped, and little enough that both end at about the same time.
const ROOM_GRANULES: u64 = 128;

/// How a copy reaches the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Engine,
    Kernel,
}

/// The ways of one wake, and what is in flight on them.
#[derive(Debug)]
pub(super) struct Ways {
    lots: Vec<Lot>,
    /// Where the last copy went.
    last: Option<Way>,
    /// Most bytes that are in flight on one of them when another copy is.
    room_bytes: u64,
}

/// Copies of one way, the oldest first, with their bytes.
#[derive(Debug)]
struct Lot {
    way: Way,
    flying: VecDeque<(usize, u64)>,
    flying_bytes: u64,
}

impl Ways {
    /// The ways of a wake that copies into `copied_bytes` of memory, and creates `created_bytes` of memory for these and
    /// for what is not copied into, on a device with granules of `granule_bytes`.
    pub(super) fn of_wake(
        kernel_copies: bool,
        copied_bytes: u64,
        created_bytes: u64,
        granule_bytes: u64,
    ) -> Self {
        let uncopied_bytes = created_bytes.saturating_sub(copied_bytes);
        let ways: &[Way] = if !kernel_copies {
            &[Way::Engine]
        } else if uncopied_bytes > copied_bytes.saturating_mul(UNCOPIED_RATIO_MAX) {
            &[Way::Kernel]
        } else {
            &[Way::Engine, Way::Kernel]
        };
        let lot = |way: &Way| Lot { way: *way, flying: VecDeque::new(), flying_bytes: 0 };
        Self {
            lots: ways.iter().map(lot).collect(),
            last: None,
            room_bytes: ROOM_GRANULES.saturating_mul(granule_bytes),
        }
    }

    /// The way with the fewest bytes in flight, or the next in turn, if it has room. `has_ended` says of a copy whether
    /// it has ended, if that can be told; where it cannot, there is always room, and the ways share by bytes. A way that
    /// is alone always has room, and nothing is asked.
    pub(super) fn with_room(&mut self, mut has_ended: impl FnMut(usize) -> Option<bool>) -> Option<Way> {
        if let [only] = &self.lots[..] {
            return Some(only.way);
        }
        let mut is_known = true;
        for lot in &mut self.lots {
            while let Some((copy, bytes)) = lot.flying.front().copied() {
                match has_ended(copy) {
                    Some(true) => {
                        lot.flying.pop_front();
                        lot.flying_bytes -= bytes;
                        continue;
                    }
                    Some(false) => {}
                    None => is_known = false,
                }
                break;
            }
        }
        let freest = self.lots.iter().min_by_key(|lot| (lot.flying_bytes, self.last == Some(lot.way)))?;
        (freest.flying_bytes < self.room_bytes || !is_known).then_some(freest.way)
    }

    /// A copy of so many bytes is in flight on `way`, by the number that `with_room` asks about.
    pub(super) fn queued(&mut self, way: Way, copy: usize, bytes: u64) {
        self.last = Some(way);
        if let Some(lot) = self.lots.iter_mut().find(|lot| lot.way == way) {
            lot.flying.push_back((copy, bytes));
            lot.flying_bytes += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const GRANULE: u64 = 2 << 20;
    const CHUNK: u64 = 32 << 20;

    fn ways(kernel_copies: bool, copied_bytes: u64, created_bytes: u64) -> Vec<Way> {
        let ways = Ways::of_wake(kernel_copies, copied_bytes, created_bytes, GRANULE);
        ways.lots.iter().map(|lot| lot.way).collect()
    }

    #[test]
    fn what_is_created_besides_decides() {
        let both = vec![Way::Engine, Way::Kernel];
        // Weights alone, with a small cache, with twice as much, and a byte more.
        assert_eq!(ways(true, 30 * GIB, 30 * GIB), both);
        assert_eq!(ways(true, 30 * GIB, 34 * GIB), both);
        assert_eq!(ways(true, 15 * GIB, 45 * GIB), both);
        assert_eq!(ways(true, 15 * GIB, 45 * GIB + 1), [Way::Kernel]);
        assert_eq!(ways(true, 15 * GIB, 120 * GIB), [Way::Kernel]);
        // Into memory that is there; nothing at all; figures that no machine has.
        assert_eq!(ways(true, 15 * GIB, 0), both);
        assert_eq!(ways(true, 0, 0), both);
        assert_eq!(ways(true, u64::MAX, u64::MAX), both);
        assert_eq!(ways(false, 15 * GIB, 120 * GIB), [Way::Engine]);
    }

    /// Queues copies of a chunk each, up to a hundred, as long as there is room. Returns how many took each way.
    fn queue(ways: &mut Ways, next: &mut usize, has_ended: impl Fn(usize) -> Option<bool>) -> [usize; 2] {
        let mut counts = [0; 2];
        while let Some(way) = ways.with_room(&has_ended).filter(|_| counts.iter().sum::<usize>() < 100) {
            ways.queued(way, *next, CHUNK);
            *next += 1;
            counts[usize::from(way == Way::Kernel)] += 1;
        }
        counts
    }

    #[test]
    fn each_way_gets_what_it_has_room_for() {
        let mut ways = Ways::of_wake(true, GIB, GIB, GRANULE);
        let mut next = 0;
        assert_eq!(queue(&mut ways, &mut next, |_| Some(false)), [8, 8], "eight chunks each");
        assert_eq!(ways.with_room(|_| Some(false)), None);
        // They took turns, the engine first. Now the kernel's first five end, and one of the engine's.
        let ended = |copy: usize| Some(copy == 0 || copy % 2 == 1 && copy < 10);
        assert_eq!(queue(&mut ways, &mut next, ended), [1, 5]);
        assert_eq!(queue(&mut ways, &mut next, |copy| Some(copy < 16)), [7, 3]);
    }

    #[test]
    fn what_cannot_be_told_is_shared_by_bytes() {
        let mut ways = Ways::of_wake(true, GIB, GIB, GRANULE);
        ways.queued(Way::Engine, 0, 2 * CHUNK);
        assert_eq!(queue(&mut ways, &mut 1, |_| None), [49, 51]);
    }

    #[test]
    fn a_way_that_is_alone_has_room() {
        for mut alone in [Ways::of_wake(false, GIB, GIB, GRANULE), Ways::of_wake(true, GIB, 9 * GIB, GRANULE)]
        {
            let counts = queue(&mut alone, &mut 0, |_| Some(false));
            assert_eq!(counts.iter().sum::<usize>(), 100);
        }
    }
}
