//! Which path a wake's copies take: the device's copy engines, or a kernel that reads host memory itself.
//!
//! Right after a sleep a GPU's driver cleans what was released, in the background and with the copy engines; a copy
//! that takes an engine then gets half of the link, and makes the cleaning last longer. A kernel is held up by neither,
//! but has a little less of the link than an engine that is left exclusive. So the faster of the two is found by trying:
//!
//! ```text
//! engine 64 MiB │ kernel 64 MiB │ the faster, 1 GiB │ ...
//! ```
//!
//! Copies go in *spells*, each by one path and timed as a whole, from its first copy until its last has ended. After
//! each the rates decide the next. Waiting for memory to be mapped counts: beside a kernel that takes several times as
//! long. While the kernel is the faster, the engine is tried again now and then, for the cleaning ends; while the engine
//! is, the kernel is not. A burst that takes far longer than it should is left to itself, and the next begins beside it,
//! by the rates of what has ended by then. `docs/adr/0013-copies-by-kernel.md` has the figures.
//!
//! Promise: buffer is refused only while something of the burst is in flight, and not for ever.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Granules (of 2 MiB on a GPU) of a burst that finds out what a path is worth.
const TRIAL_GRANULES: u64 = 32;

/// Granules of a burst by the kernel, as the faster: the engine is tried again then.
const KERNEL_GRANULES: u64 = 512;

/// Granules of a burst by the engine, as the faster.
const ENGINE_GRANULES: u64 = 2048;

/// Granules that may be in flight: enough that a path never runs dry while memory is mapped.
const IN_FLIGHT_GRANULES_MAX: u64 = 128;

/// How long a burst may take beyond what it should, before it is left to itself. One whose rate is not known has no
/// longer: where the link is so slow that this ends a trial, what has ended by then tells the rate as well.
const OVERRUN_MAX: Duration = Duration::from_millis(20);

/// How much slower than before a burst may be, for as long.
const SLOWER_MAX: f64 = 4.0;

/// How a copy reaches the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyPath {
    Engine,
    Kernel,
}

impl CopyPath {
    fn other(self) -> Self {
        match self {
            Self::Engine => Self::Kernel,
            Self::Kernel => Self::Engine,
        }
    }
}

/// The paths of one wake.
#[derive(Debug)]
pub(super) struct CopyPaths {
    /// Whether there are two, and copies on_progress when they have ended.
    is_choice: bool,
    granule_bytes: u64,
    burst: Burst,
    /// Bytes a second, as each was last seen.
    engine_rate: Option<f64>,
    kernel_rate: Option<f64>,
}

/// Copies by one path, one after the other.
#[derive(Debug)]
struct Burst {
    path: CopyPath,
    quota_bytes: u64,
    queued_bytes: u64,
    ended_bytes: u64,
    began: Option<Instant>,
    /// Those in flight, the oldest first, with their bytes.
    in_flight: VecDeque<(usize, u64)>,
}

impl Burst {
    fn new(path: CopyPath, quota_bytes: u64) -> Self {
        Self { path, quota_bytes, queued_bytes: 0, ended_bytes: 0, began: None, in_flight: VecDeque::new() }
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

impl CopyPaths {
    /// The paths of a wake, on a device whose kernels copy or do not.
    pub(super) fn new(kernel_copies: bool, granule_bytes: u64) -> Self {
        Self {
            is_choice: kernel_copies,
            granule_bytes,
            burst: Burst::new(CopyPath::Engine, TRIAL_GRANULES * granule_bytes),
            engine_rate: None,
            kernel_rate: None,
        }
    }

    /// The path of the next copy, once there is buffer for it. `has_ended` says of a copy whether it has; where one cannot
    /// on_progress, the engine takes all that follows.
    pub(super) fn with_capacity(
        &mut self,
        now: Instant,
        mut has_ended: impl FnMut(usize) -> Option<bool>,
    ) -> Option<CopyPath> {
        while self.is_choice
            && let Some((copy, bytes)) = self.burst.in_flight.front().copied()
        {
            match has_ended(copy) {
                Some(true) => {
                    self.burst.in_flight.pop_front();
                    self.burst.ended_bytes += bytes;
                }
                Some(false) => break,
                None => self.is_choice = false,
            }
        }
        if !self.is_choice {
            return Some(CopyPath::Engine);
        }
        if self.burst.queued_bytes >= self.burst.quota_bytes && self.burst.in_flight.is_empty() {
            self.decide(now);
        } else if self.burst.elapsed(now) > self.overrun_max() {
            // Whatever holds it up, the rest goes on.
            self.decide(now);
        }
        let Burst { path, quota_bytes, queued_bytes, ended_bytes, .. } = self.burst;
        let has_capacity = queued_bytes - ended_bytes < IN_FLIGHT_GRANULES_MAX * self.granule_bytes;
        (has_capacity && queued_bytes < quota_bytes).then_some(path)
    }

    /// A copy of so many bytes is in flight on the burst's path, by the number that `with_capacity` asks about.
    pub(super) fn queued(&mut self, now: Instant, copy: usize, bytes: u64) {
        if self.is_choice {
            self.burst.began.get_or_insert(now);
            self.burst.queued_bytes += bytes;
            self.burst.in_flight.push_back((copy, bytes));
        }
    }

    #[allow(clippy::cast_precision_loss)] // A rate.
    fn overrun_max(&self) -> Duration {
        let rate = match self.burst.path {
            CopyPath::Engine => self.engine_rate,
            CopyPath::Kernel => self.kernel_rate,
        };
        let known = rate.filter(|rate| *rate > 0.0).map_or(0.0, |rate| self.burst.quota_bytes as f64 / rate);
        OVERRUN_MAX + Duration::try_from_secs_f64(known * SLOWER_MAX).unwrap_or(Duration::MAX / 2)
    }

    /// Ends the burst, and begins the next.
    fn decide(&mut self, now: Instant) {
        let (ended, rate) = (self.burst.path, self.burst.rate(now));
        match ended {
            CopyPath::Engine => self.engine_rate = Some(rate),
            CopyPath::Kernel => self.kernel_rate = Some(rate),
        }
        let was_stay = self.burst.quota_bytes > TRIAL_GRANULES * self.granule_bytes;
        let (path, granules) = match (self.engine_rate, self.kernel_rate) {
            // What has not been tried, and the engine after each burst by the kernel.
            (Some(_), Some(_)) if ended == CopyPath::Kernel && was_stay => (CopyPath::Engine, TRIAL_GRANULES),
            (Some(engine), Some(kernel)) if engine >= kernel => (CopyPath::Engine, ENGINE_GRANULES),
            (Some(_), Some(_)) => (CopyPath::Kernel, KERNEL_GRANULES),
            _ => (ended.other(), TRIAL_GRANULES),
        };
        self.burst = Burst::new(path, granules * self.granule_bytes);
    }
}

#[cfg(test)]
#[allow(clippy::cast_precision_loss)] // Rates, too.
mod tests {
    use super::*;

    const GRANULE: u64 = 2 << 20;
    const CHUNK: u64 = 32 << 20;
    const GIB: f64 = (1_u64 << 30) as f64;

    /// Copies chunks one after the other by the path that is told, at rates that depend on how much was copied. Returns
    /// the bytes by engine and by kernel, and the seconds that it took.
    fn copy(chunks: usize, rate: impl Fn(CopyPath, usize) -> f64) -> (u64, u64, f64) {
        let (mut paths, begin) = (CopyPaths::new(true, GRANULE), Instant::now());
        let mut ends: Vec<Duration> = Vec::new();
        let (mut now, mut by_engine, mut by_kernel) = (Duration::ZERO, 0, 0);
        while ends.len() < chunks {
            match paths.with_capacity(begin + now, |copy| Some(ends[copy] <= now)) {
                Some(path) => {
                    let seconds = CHUNK as f64 / rate(path, ends.len());
                    let free = ends.last().copied().unwrap_or_default().max(now);
                    ends.push(free + Duration::from_secs_f64(seconds));
                    paths.queued(begin + now, ends.len() - 1, CHUNK);
                    *(if path == CopyPath::Engine { &mut by_engine } else { &mut by_kernel }) += CHUNK;
                }
                None => now += Duration::from_micros(100),
            }
        }
        let seconds = ends.last().copied().unwrap_or_default().as_secs_f64();
        (by_engine, by_kernel, seconds)
    }

    #[test]
    fn an_engine_that_is_left_alone_takes_all_but_a_trial() {
        let rate = |path, _| if path == CopyPath::Engine { 51.5 * GIB } else { 47.4 * GIB };
        let (by_engine, by_kernel, seconds) = copy(960, rate);
        assert_eq!(by_kernel, 64 << 20);
        assert_eq!(by_engine + by_kernel, 960 * CHUNK);
        assert!(seconds < 30.0 * GIB / (50.5 * GIB), "{seconds}");
    }

    #[test]
    fn while_the_driver_cleans_the_kernel_takes_most_and_the_engine_the_rest() {
        // The first tenth is copied while the engine has half of the link.
        let rate = |path, nth| match path {
            CopyPath::Engine if nth < 96 => 25.7 * GIB,
            CopyPath::Engine => 51.5 * GIB,
            CopyPath::Kernel => 47.4 * GIB,
        };
        let (by_engine, by_kernel, seconds) = copy(960, rate);
        assert!((80 * CHUNK..=140 * CHUNK).contains(&by_kernel), "{by_kernel}");
        assert_eq!(by_engine + by_kernel, 960 * CHUNK);
        assert!(seconds < 30.0 * GIB / (50.0 * GIB), "{seconds}");
        // And when it never ends.
        let (_, by_kernel, seconds) =
            copy(960, |path, _| if path == CopyPath::Engine { 25.7 } else { 47.4 } * GIB);
        assert!(by_kernel > 860 * CHUNK && seconds < 30.0 * GIB / (44.0 * GIB), "{by_kernel} {seconds}");
    }

    #[test]
    fn a_way_that_does_not_end_leaves_the_rest_to_the_other() {
        for held in [CopyPath::Engine, CopyPath::Kernel] {
            let (mut paths, mut now) = (CopyPaths::new(true, GRANULE), Instant::now());
            let mut taken: Vec<CopyPath> = Vec::new();
            while taken.len() < 960 {
                match paths.with_capacity(now, |copy| Some(taken[copy] != held)) {
                    Some(path) => {
                        paths.queued(now, taken.len(), CHUNK);
                        taken.push(path);
                    }
                    None => now += Duration::from_millis(1),
                }
            }
            let count = taken.iter().filter(|path| **path == held).count();
            assert!((1..120).contains(&count), "{held:?} {count}");
        }
    }

    #[test]
    fn a_spell_ends_before_the_next_begins() {
        let (mut paths, now) = (CopyPaths::new(true, GRANULE), Instant::now());
        for copy in 0..2 {
            assert_eq!(paths.with_capacity(now, |_| Some(false)), Some(CopyPath::Engine));
            paths.queued(now, copy, CHUNK);
        }
        assert_eq!(paths.with_capacity(now, |_| Some(false)), None);
        assert_eq!(paths.with_capacity(now, |copy| Some(copy == 0)), None);
        assert_eq!(paths.with_capacity(now, |_| Some(true)), Some(CopyPath::Kernel));
    }

    /// What is in flight is enough to keep a path busy, and little enough to be taken to the other soon.
    #[test]
    fn no_more_is_in_flight_than_there_is_room_for() {
        let (mut paths, now) = (CopyPaths::new(true, GRANULE), Instant::now());
        let buffer = IN_FLIGHT_GRANULES_MAX * GRANULE;
        // Both are tried, and the engine is the faster: what follows is a long burst of its own.
        for (copy, path) in
            [(0, CopyPath::Engine), (1, CopyPath::Engine), (2, CopyPath::Kernel), (3, CopyPath::Kernel)]
        {
            let later = now + Duration::from_millis(if copy < 2 { 1 } else { 2 } * copy as u64);
            assert_eq!(paths.with_capacity(later, |_| Some(true)), Some(path));
            paths.queued(later, copy, CHUNK);
        }
        let later = now + Duration::from_millis(10);
        let mut queued = 0;
        while paths.with_capacity(later, |copy| Some(copy < 4)).is_some() {
            paths.queued(later, 4, CHUNK);
            queued += CHUNK;
            assert!(queued <= buffer, "{queued} bytes are in flight");
        }
        assert_eq!(queued, buffer);
    }

    #[test]
    fn room_comes_in_the_end_whatever_the_copies_do() {
        for (has_ended, bytes) in
            [false, true].into_iter().flat_map(|has| [0, GRANULE, 1 << 30].map(|b| (has, b)))
        {
            let (mut paths, mut now) = (CopyPaths::new(true, GRANULE), Instant::now());
            for copy in 0..3000 {
                let mut looks = 0;
                while paths.with_capacity(now, |_| Some(has_ended)).is_none() {
                    assert!(!has_ended, "nothing is in flight");
                    looks += 1;
                    assert!(looks <= 3, "overrun_max ends");
                    now += Duration::from_millis(10);
                }
                paths.queued(now, copy, bytes);
                // As while memory is mapped, for longer than any burst should take.
                now += Duration::from_millis(if copy % 100 == 0 { 10_000 } else { 0 });
            }
        }
    }

    #[test]
    fn where_there_is_no_choice_there_is_always_room() {
        let now = Instant::now();
        let mut exclusive = CopyPaths::new(false, GRANULE);
        let mut untold = CopyPaths::new(true, GRANULE);
        for copy in 0..100 {
            for paths in [&mut exclusive, &mut untold] {
                assert_eq!(paths.with_capacity(now, |_| None), Some(CopyPath::Engine));
                paths.queued(now, copy, CHUNK);
            }
        }
    }
}
