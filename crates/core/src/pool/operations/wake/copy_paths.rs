//! Which path the copies of a wake take: the device's copy engines, or a kernel that reads host memory
//! itself.
//!
//! Right after a sleep the GPU's driver cleans the released memory with the copy engines, in the background.
//! A copy by engine then gets half of the link and prolongs the cleaning. A kernel is not slowed down by it,
//! but is a little slower than an undisturbed engine. So the faster path is found by trying both:
//!
//! ```text
//! engine 64 MiB │ kernel 64 MiB │ the faster, 1 GiB │ ...
//! ```
//!
//! A *burst* is a run of copies by one path, timed from its first copy to the end of its last. Waits for
//! mapping count, since mapping takes several times as long beside a kernel. After a burst by kernel the
//! engine is tried again, since the cleaning ends. A burst that takes far too long is left to itself, and the
//! next one starts beside it. `docs/adr/0013-copies-by-kernel.md` has the figures.
//!
//! Promise: a path has no capacity only while a copy of its burst is in flight, and never for ever.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Granules of a burst that measures a path.
const TRIAL_GRANULES: u64 = 32;

/// Granules of a burst by the faster kernel.
const KERNEL_GRANULES: u64 = 512;

/// Granules of a burst by the faster engine.
const ENGINE_GRANULES: u64 = 2048;

/// Enough that a path never runs dry while memory is mapped.
const IN_FLIGHT_GRANULES_MAX: u64 = 128;

/// How much longer than expected a burst may take. A burst of unknown rate has this long in all.
const OVERRUN_MAX: Duration = Duration::from_millis(20);

/// How many times slower than its path's last burst a burst may be.
const SLOWER_MAX: f64 = 4.0;

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

#[derive(Debug)]
pub(super) struct CopyPaths {
    /// Whether there are two paths, and copies report their end.
    is_choice: bool,
    granule_bytes: u64,
    burst: Burst,
    /// Bytes a second of the last burst.
    engine_rate: Option<f64>,
    kernel_rate: Option<f64>,
}

#[derive(Debug)]
struct Burst {
    path: CopyPath,
    quota_bytes: u64,
    queued_bytes: u64,
    ended_bytes: u64,
    began: Option<Instant>,
    /// Number and bytes of each copy, the oldest first.
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
        if seconds > 0.0 { self.ended_bytes as f64 / seconds } else { f64::INFINITY }
    }
}

impl CopyPaths {
    pub(super) fn new(kernel_copies: bool, granule_bytes: u64) -> Self {
        Self {
            is_choice: kernel_copies,
            granule_bytes,
            burst: Burst::new(CopyPath::Engine, TRIAL_GRANULES * granule_bytes),
            engine_rate: None,
            kernel_rate: None,
        }
    }

    /// The path of the next copy, or `None` while as much is in flight as may be. `has_ended` returns `None` where a copy
    /// does not report its end: the engine then takes all further copies.
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
        let is_complete =
            self.burst.queued_bytes >= self.burst.quota_bytes && self.burst.in_flight.is_empty();
        if is_complete || self.burst.elapsed(now) > self.overrun_max() {
            self.decide(now);
        }
        let Burst { path, quota_bytes, queued_bytes, ended_bytes, .. } = self.burst;
        let has_capacity = queued_bytes - ended_bytes < IN_FLIGHT_GRANULES_MAX * self.granule_bytes;
        (has_capacity && queued_bytes < quota_bytes).then_some(path)
    }

    /// `copy` is the number that `has_ended` gets.
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

    fn decide(&mut self, now: Instant) {
        let (ended, rate) = (self.burst.path, self.burst.rate(now));
        match ended {
            CopyPath::Engine => self.engine_rate = Some(rate),
            CopyPath::Kernel => self.kernel_rate = Some(rate),
        }
        let was_stay = self.burst.quota_bytes > TRIAL_GRANULES * self.granule_bytes;
        let (path, granules) = match (self.engine_rate, self.kernel_rate) {
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

    /// Simulates copying chunks at a rate by path and number. Returns bytes by engine, bytes by kernel, and seconds.
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
    fn an_undisturbed_engine_takes_all_but_a_trial() {
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
    fn a_path_that_does_not_end_leaves_the_rest_to_the_other() {
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
    fn a_burst_ends_before_the_next_begins() {
        let (mut paths, now) = (CopyPaths::new(true, GRANULE), Instant::now());
        for copy in 0..2 {
            assert_eq!(paths.with_capacity(now, |_| Some(false)), Some(CopyPath::Engine));
            paths.queued(now, copy, CHUNK);
        }
        assert_eq!(paths.with_capacity(now, |_| Some(false)), None);
        assert_eq!(paths.with_capacity(now, |copy| Some(copy == 0)), None);
        assert_eq!(paths.with_capacity(now, |_| Some(true)), Some(CopyPath::Kernel));
    }

    #[test]
    fn no_more_is_in_flight_than_the_capacity() {
        let (mut paths, now) = (CopyPaths::new(true, GRANULE), Instant::now());
        let capacity = IN_FLIGHT_GRANULES_MAX * GRANULE;
        // The engine is the faster, and gets a long burst.
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
            assert!(queued <= capacity, "{queued} bytes are in flight");
        }
        assert_eq!(queued, capacity);
    }

    #[test]
    fn capacity_comes_back_whatever_the_copies_do() {
        for (has_ended, bytes) in
            [false, true].into_iter().flat_map(|has| [0, GRANULE, 1 << 30].map(|b| (has, b)))
        {
            let (mut paths, mut now) = (CopyPaths::new(true, GRANULE), Instant::now());
            for copy in 0..3000 {
                let mut looks = 0;
                while paths.with_capacity(now, |_| Some(has_ended)).is_none() {
                    assert!(!has_ended, "nothing is in flight");
                    looks += 1;
                    assert!(looks <= 3, "a burst is waited for without end");
                    now += Duration::from_millis(10);
                }
                paths.queued(now, copy, bytes);
                // Sometimes longer than any burst should take.
                now += Duration::from_millis(if copy % 100 == 0 { 10_000 } else { 0 });
            }
        }
    }

    #[test]
    fn with_one_path_there_is_always_capacity() {
        let now = Instant::now();
        let mut single = CopyPaths::new(false, GRANULE);
        let mut silent = CopyPaths::new(true, GRANULE);
        for copy in 0..100 {
            for paths in [&mut single, &mut silent] {
                assert_eq!(paths.with_capacity(now, |_| None), Some(CopyPath::Engine));
                paths.queued(now, copy, CHUNK);
            }
        }
    }
}
