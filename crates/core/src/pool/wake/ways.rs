//! Which way a wake's copies take: the device's copy engines, or a kernel that reads host memory itself.
//!
//! Right after a sleep a GPU's driver cleans what was released, in the background and with the copy engines; a copy
//! that takes an engine then gets half of the link, and makes the cleaning last longer. A kernel is held up by neither,
//! but has a little less of the link than an engine that is left alone. So the faster of the two is found by trying:
//!
//! ```text
//! engine 64 MiB │ kernel 64 MiB │ the faster, 1 GiB │ ...
//! ```
//!
//! Copies go in *spells*, each by one way and timed as a whole, from its first copy until its last has ended. After
//! each the rates decide the next. Waiting for memory to be mapped counts: beside a kernel that takes several times as
//! long. While the kernel is the faster, the engine is tried again now and then, for the cleaning ends; while the engine
//! is, the kernel is not. A spell that takes far longer than it should is left to itself, and the next begins beside it,
//! by the rates of what has ended by then. `docs/adr/0013-copies-by-kernel.md` has the figures.
//!
//! Promise: room is refused only while something of the spell is in flight, and not for ever.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Granules (of 2 MiB on a GPU) of a spell that finds out what a way is worth.
const TRIAL_GRANULES: u64 = 32;

/// Granules of a spell by the kernel, as the faster: the engine is tried again then.
const KERNEL_GRANULES: u64 = 512;

/// Granules of a spell by the engine, as the faster.
const ENGINE_GRANULES: u64 = 2048;

/// Granules that may be in flight: enough that a way never runs dry while memory is mapped.
const ROOM_GRANULES: u64 = 128;

/// How long a spell may take beyond what it should, before it is left to itself. One whose rate is not known has no
/// longer: where the link is so slow that this ends a trial, what has ended by then tells the rate as well.
const PATIENCE: Duration = Duration::from_millis(20);

/// How much slower than before a spell may be, for as long.
const SLOWER_MAX: f64 = 4.0;

/// How a copy reaches the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Engine,
    Kernel,
}

impl Way {
    fn other(self) -> Self {
        match self {
            Self::Engine => Self::Kernel,
            Self::Kernel => Self::Engine,
        }
    }
}

/// The ways of one wake.
#[derive(Debug)]
pub(super) struct Ways {
    /// Whether there are two, and copies tell when they have ended.
    is_choice: bool,
    granule_bytes: u64,
    spell: Spell,
    /// Bytes a second, as each was last seen.
    engine_rate: Option<f64>,
    kernel_rate: Option<f64>,
}

/// Copies by one way, one after the other.
#[derive(Debug)]
struct Spell {
    way: Way,
    quota_bytes: u64,
    queued_bytes: u64,
    ended_bytes: u64,
    began: Option<Instant>,
    /// Those in flight, the oldest first, with their bytes.
    flying: VecDeque<(usize, u64)>,
}

impl Spell {
    fn new(way: Way, quota_bytes: u64) -> Self {
        Self { way, quota_bytes, queued_bytes: 0, ended_bytes: 0, began: None, flying: VecDeque::new() }
    }

    fn elapsed(&self, now: Instant) -> Duration {
        self.began.map_or(Duration::ZERO, |began| now.saturating_duration_since(began))
    }

    /// Bytes a second of what has ended.
    #[allow(clippy::cast_precision_loss)] // A rate.
    fn rate(&self, now: Instant) -> f64 {
        let seconds = self.elapsed(now).as_secs_f64();
        // In no time at all it was as fast as anything.
        if seconds > 0.0 { self.ended_bytes as f64 / seconds } else { f64::INFINITY }
    }
}

impl Ways {
    /// The ways of a wake, on a device whose kernels copy or do not.
    pub(super) fn new(kernel_copies: bool, granule_bytes: u64) -> Self {
        Self {
            is_choice: kernel_copies,
            granule_bytes,
            spell: Spell::new(Way::Engine, TRIAL_GRANULES * granule_bytes),
            engine_rate: None,
            kernel_rate: None,
        }
    }

    /// The way of the next copy, once there is room for it. `has_ended` says of a copy whether it has; where one cannot
    /// tell, the engine takes all that follows.
    pub(super) fn with_room(
        &mut self,
        now: Instant,
        mut has_ended: impl FnMut(usize) -> Option<bool>,
    ) -> Option<Way> {
        while self.is_choice
            && let Some((copy, bytes)) = self.spell.flying.front().copied()
        {
            match has_ended(copy) {
                Some(true) => {
                    self.spell.flying.pop_front();
                    self.spell.ended_bytes += bytes;
                }
                Some(false) => break,
                None => self.is_choice = false,
            }
        }
        if !self.is_choice {
            return Some(Way::Engine);
        }
        if self.spell.queued_bytes >= self.spell.quota_bytes && self.spell.flying.is_empty() {
            self.decide(now);
        } else if self.spell.elapsed(now) > self.patience() {
            // Whatever holds it up, the rest goes on.
            self.decide(now);
        }
        let Spell { way, quota_bytes, queued_bytes, ended_bytes, .. } = self.spell;
        let has_room = queued_bytes - ended_bytes < ROOM_GRANULES * self.granule_bytes;
        (has_room && queued_bytes < quota_bytes).then_some(way)
    }

    /// A copy of so many bytes is in flight on the spell's way, by the number that `with_room` asks about.
    pub(super) fn queued(&mut self, now: Instant, copy: usize, bytes: u64) {
        if self.is_choice {
            self.spell.began.get_or_insert(now);
            self.spell.queued_bytes += bytes;
            self.spell.flying.push_back((copy, bytes));
        }
    }

    #[allow(clippy::cast_precision_loss)] // A rate.
    fn patience(&self) -> Duration {
        let rate = match self.spell.way {
            Way::Engine => self.engine_rate,
            Way::Kernel => self.kernel_rate,
        };
        let known = rate.filter(|rate| *rate > 0.0).map_or(0.0, |rate| self.spell.quota_bytes as f64 / rate);
        PATIENCE + Duration::try_from_secs_f64(known * SLOWER_MAX).unwrap_or(Duration::MAX / 2)
    }

    /// Ends the spell, and begins the next.
    fn decide(&mut self, now: Instant) {
        let (ended, rate) = (self.spell.way, self.spell.rate(now));
        match ended {
            Way::Engine => self.engine_rate = Some(rate),
            Way::Kernel => self.kernel_rate = Some(rate),
        }
        let was_stay = self.spell.quota_bytes > TRIAL_GRANULES * self.granule_bytes;
        let (way, granules) = match (self.engine_rate, self.kernel_rate) {
            // What has not been tried, and the engine after each spell by the kernel.
            (Some(_), Some(_)) if ended == Way::Kernel && was_stay => (Way::Engine, TRIAL_GRANULES),
            (Some(engine), Some(kernel)) if engine >= kernel => (Way::Engine, ENGINE_GRANULES),
            (Some(_), Some(_)) => (Way::Kernel, KERNEL_GRANULES),
            _ => (ended.other(), TRIAL_GRANULES),
        };
        self.spell = Spell::new(way, granules * self.granule_bytes);
    }
}

#[cfg(test)]
#[allow(clippy::cast_precision_loss)] // Rates, too.
mod tests {
    use super::*;

    const GRANULE: u64 = 2 << 20;
    const CHUNK: u64 = 32 << 20;
    const GIB: f64 = (1_u64 << 30) as f64;

    /// Copies chunks one after the other by the way that is told, at rates that depend on how much was copied. Returns
    /// the bytes by engine and by kernel, and the seconds that it took.
    fn copy(chunks: usize, rate: impl Fn(Way, usize) -> f64) -> (u64, u64, f64) {
        let (mut ways, begin) = (Ways::new(true, GRANULE), Instant::now());
        let mut ends: Vec<Duration> = Vec::new();
        let (mut now, mut by_engine, mut by_kernel) = (Duration::ZERO, 0, 0);
        while ends.len() < chunks {
            match ways.with_room(begin + now, |copy| Some(ends[copy] <= now)) {
                Some(way) => {
                    let seconds = CHUNK as f64 / rate(way, ends.len());
                    let free = ends.last().copied().unwrap_or_default().max(now);
                    ends.push(free + Duration::from_secs_f64(seconds));
                    ways.queued(begin + now, ends.len() - 1, CHUNK);
                    *(if way == Way::Engine { &mut by_engine } else { &mut by_kernel }) += CHUNK;
                }
                None => now += Duration::from_micros(100),
            }
        }
        let seconds = ends.last().copied().unwrap_or_default().as_secs_f64();
        (by_engine, by_kernel, seconds)
    }

    #[test]
    fn an_engine_that_is_left_alone_takes_all_but_a_trial() {
        let rate = |way, _| if way == Way::Engine { 51.5 * GIB } else { 47.4 * GIB };
        let (by_engine, by_kernel, seconds) = copy(960, rate);
        assert_eq!(by_kernel, 64 << 20);
        assert_eq!(by_engine + by_kernel, 960 * CHUNK);
        assert!(seconds < 30.0 * GIB / (50.5 * GIB), "{seconds}");
    }

    #[test]
    fn while_the_driver_cleans_the_kernel_takes_most_and_the_engine_the_rest() {
        // The first tenth is copied while the engine has half of the link.
        let rate = |way, nth| match way {
            Way::Engine if nth < 96 => 25.7 * GIB,
            Way::Engine => 51.5 * GIB,
            Way::Kernel => 47.4 * GIB,
        };
        let (by_engine, by_kernel, seconds) = copy(960, rate);
        assert!((80 * CHUNK..=140 * CHUNK).contains(&by_kernel), "{by_kernel}");
        assert_eq!(by_engine + by_kernel, 960 * CHUNK);
        assert!(seconds < 30.0 * GIB / (50.0 * GIB), "{seconds}");
        // And when it never ends.
        let (_, by_kernel, seconds) = copy(960, |way, _| if way == Way::Engine { 25.7 } else { 47.4 } * GIB);
        assert!(by_kernel > 860 * CHUNK && seconds < 30.0 * GIB / (44.0 * GIB), "{by_kernel} {seconds}");
    }

    #[test]
    fn a_way_that_does_not_end_leaves_the_rest_to_the_other() {
        for held in [Way::Engine, Way::Kernel] {
            let (mut ways, mut now) = (Ways::new(true, GRANULE), Instant::now());
            let mut taken: Vec<Way> = Vec::new();
            while taken.len() < 960 {
                match ways.with_room(now, |copy| Some(taken[copy] != held)) {
                    Some(way) => {
                        ways.queued(now, taken.len(), CHUNK);
                        taken.push(way);
                    }
                    None => now += Duration::from_millis(1),
                }
            }
            let count = taken.iter().filter(|way| **way == held).count();
            assert!((1..120).contains(&count), "{held:?} {count}");
        }
    }

    #[test]
    fn a_spell_ends_before_the_next_begins() {
        let (mut ways, now) = (Ways::new(true, GRANULE), Instant::now());
        for copy in 0..2 {
            assert_eq!(ways.with_room(now, |_| Some(false)), Some(Way::Engine));
            ways.queued(now, copy, CHUNK);
        }
        assert_eq!(ways.with_room(now, |_| Some(false)), None);
        assert_eq!(ways.with_room(now, |copy| Some(copy == 0)), None);
        assert_eq!(ways.with_room(now, |_| Some(true)), Some(Way::Kernel));
    }

    /// What is in flight is enough to keep a way busy, and little enough to be taken to the other soon.
    #[test]
    fn no_more_is_in_flight_than_there_is_room_for() {
        let (mut ways, now) = (Ways::new(true, GRANULE), Instant::now());
        let room = ROOM_GRANULES * GRANULE;
        // Both are tried, and the engine is the faster: what follows is a long spell of its own.
        for (copy, way) in [(0, Way::Engine), (1, Way::Engine), (2, Way::Kernel), (3, Way::Kernel)] {
            let later = now + Duration::from_millis(if copy < 2 { 1 } else { 2 } * copy as u64);
            assert_eq!(ways.with_room(later, |_| Some(true)), Some(way));
            ways.queued(later, copy, CHUNK);
        }
        let later = now + Duration::from_millis(10);
        let mut queued = 0;
        while ways.with_room(later, |copy| Some(copy < 4)).is_some() {
            ways.queued(later, 4, CHUNK);
            queued += CHUNK;
            assert!(queued <= room, "{queued} bytes are in flight");
        }
        assert_eq!(queued, room);
    }

    #[test]
    fn room_comes_in_the_end_whatever_the_copies_do() {
        for (has_ended, bytes) in
            [false, true].into_iter().flat_map(|has| [0, GRANULE, 1 << 30].map(|b| (has, b)))
        {
            let (mut ways, mut now) = (Ways::new(true, GRANULE), Instant::now());
            for copy in 0..3000 {
                let mut looks = 0;
                while ways.with_room(now, |_| Some(has_ended)).is_none() {
                    assert!(!has_ended, "nothing is in flight");
                    looks += 1;
                    assert!(looks <= 3, "patience ends");
                    now += Duration::from_millis(10);
                }
                ways.queued(now, copy, bytes);
                // As while memory is mapped, for longer than any spell should take.
                now += Duration::from_millis(if copy % 100 == 0 { 10_000 } else { 0 });
            }
        }
    }

    #[test]
    fn where_there_is_no_choice_there_is_always_room() {
        let now = Instant::now();
        let mut alone = Ways::new(false, GRANULE);
        let mut untold = Ways::new(true, GRANULE);
        for copy in 0..100 {
            for ways in [&mut alone, &mut untold] {
                assert_eq!(ways.with_room(now, |_| None), Some(Way::Engine));
                ways.queued(now, copy, CHUNK);
            }
        }
    }
}
