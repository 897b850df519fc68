//! Which path the copies of a wake take: the device's copy engines, or a kernel that reads host memory
//! itself. Links of other devices are used beside these.
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
//! A link of another device gets the next copy when the own path has its fill. So shares follow what each reaches
//! ([0041](../../../../../../docs/adr/0041-links.md)).
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

/// The same for another device's link.
const LINK_GRANULES_MAX: u64 = 64;

/// Granules that end without links, and with them, before one is compared with the other.
const COMPARED_GRANULES: u64 = 512;

/// How many times as much a wake copies at least, if it compares.
const COMPARED_MIN: u64 = 4;

/// How many times faster a wake is with links, at least, if they pay.
const FASTER_MIN: f64 = 1.2;

/// How much longer than expected a burst may take. A burst of unknown rate has this long in all.
const OVERRUN_MAX: Duration = Duration::from_millis(20);

/// How many times slower than its path's last burst a burst may be.
const SLOWER_MAX: f64 = 4.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyPath {
    Engine,
    Kernel,
    /// The link of another device, by number.
    Link(usize),
}

impl CopyPath {
    fn other(self) -> Self {
        match self {
            Self::Engine | Self::Link(_) => Self::Kernel,
            Self::Kernel => Self::Engine,
        }
    }
}

#[derive(Debug)]
pub(super) struct CopyPaths {
    has_kernel: bool,
    /// Whether copies report their end. Without, the engine takes all.
    reports_ends: bool,
    granule_bytes: u64,
    /// Copies in flight by the engine, and over each link, at most.
    copies_max: (usize, usize),
    /// Of bursts that were left to themselves.
    overdue: VecDeque<(usize, u64)>,
    links: Vec<LinkInFlight>,
    /// So much ends on the own path before any other is used.
    alone_least_bytes: u64,
    gain: Gain,
    burst: Burst,
    /// Bytes a second of the last burst.
    engine_rate: Option<f64>,
    kernel_rate: Option<f64>,
}

/// Another device's link.
#[derive(Debug, Default)]
struct LinkInFlight {
    is_open: bool,
    /// Number and bytes of each copy, the oldest first.
    in_flight: VecDeque<(usize, u64)>,
}

/// What ended on all paths before the first copy over a link, and from then on.
#[derive(Debug, Default)]
struct Gain {
    began: Option<Instant>,
    linked: Option<Instant>,
    alone_bytes: u64,
    together_bytes: u64,
    last_end: Option<Instant>,
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

impl LinkInFlight {
    fn in_flight_bytes(&self) -> u64 {
        self.in_flight.iter().map(|(_, bytes)| bytes).sum()
    }
}

impl Gain {
    fn ended(&mut self, now: Instant, bytes: u64) {
        *if self.linked.is_none() { &mut self.alone_bytes } else { &mut self.together_bytes } += bytes;
        self.last_end = Some(now);
    }

    /// `None` where too little was copied either way.
    #[allow(clippy::cast_precision_loss)] // A rate.
    fn is_enough(&self, least_bytes: u64) -> Option<bool> {
        let (began, linked, end) = (self.began?, self.linked?, self.last_end?);
        let rate = |bytes: u64, from: Instant, to: Instant| {
            let seconds = to.saturating_duration_since(from).as_secs_f64();
            (bytes >= least_bytes && seconds > 0.0).then(|| bytes as f64 / seconds)
        };
        let alone = rate(self.alone_bytes, began, linked)?;
        let together = rate(self.together_bytes, linked, end)?;
        Some(together >= FASTER_MIN * alone)
    }
}

/// Removes what has ended from the front. False: a copy does not report it.
fn retire(
    in_flight: &mut VecDeque<(usize, u64)>,
    has_ended: &mut impl FnMut(usize) -> Option<bool>,
    mut ended: impl FnMut(u64),
) -> bool {
    while let Some((copy, bytes)) = in_flight.front().copied() {
        match has_ended(copy) {
            Some(true) => {
                in_flight.pop_front();
                ended(bytes);
            }
            Some(false) => break,
            None => return false,
        }
    }
    true
}

impl CopyPaths {
    pub(super) fn new(has_kernel: bool, links: usize, granule_bytes: u64) -> Self {
        let quota = if has_kernel { TRIAL_GRANULES } else { ENGINE_GRANULES };
        Self {
            has_kernel,
            reports_ends: has_kernel || links > 0,
            granule_bytes,
            copies_max: (usize::MAX, usize::MAX),
            overdue: VecDeque::new(),
            links: (0..links).map(|_| LinkInFlight::default()).collect(),
            alone_least_bytes: 0,
            gain: Gain::default(),
            burst: Burst::new(CopyPath::Engine, quota * granule_bytes),
            engine_rate: None,
            kernel_rate: None,
        }
    }

    /// Bounds the copies in flight by the engine, and over each link.
    pub(super) fn at_most(mut self, by_engine: usize, over_link: usize) -> Self {
        self.copies_max = (by_engine, over_link);
        self
    }

    /// Leaves the links alone for the first copies of a wake of so many bytes, to tell whether they pay.
    pub(super) fn comparing(mut self, total_bytes: u64) -> Self {
        let least = COMPARED_GRANULES * self.granule_bytes;
        self.alone_least_bytes = if total_bytes >= COMPARED_MIN * least { least } else { 0 };
        self
    }

    pub(super) fn set_open(&mut self, link: usize, is_open: bool) {
        self.links.get_mut(link).into_iter().for_each(|link| link.is_open = is_open);
    }

    /// Whether the links made this wake faster, where that can be said.
    pub(super) fn links_pay(&self) -> Option<bool> {
        self.gain.is_enough(COMPARED_GRANULES * self.granule_bytes)
    }

    /// The path of the next copy, or `None` while as much is in flight as may be. `has_ended` returns `None` where a copy
    /// does not report its end: the engine then takes all further copies.
    pub(super) fn with_capacity(
        &mut self,
        now: Instant,
        mut has_ended: impl FnMut(usize) -> Option<bool>,
    ) -> Option<CopyPath> {
        if self.reports_ends {
            let (gain, ended_bytes) = (&mut self.gain, &mut self.burst.ended_bytes);
            let own = retire(&mut self.burst.in_flight, &mut has_ended, |bytes| {
                *ended_bytes += bytes;
                gain.ended(now, bytes);
            });
            let overdue = retire(&mut self.overdue, &mut has_ended, |bytes| gain.ended(now, bytes));
            let mut links = self.links.iter_mut();
            self.reports_ends = own
                && overdue
                && links
                    .all(|link| retire(&mut link.in_flight, &mut has_ended, |bytes| gain.ended(now, bytes)));
        }
        if !self.reports_ends {
            return Some(CopyPath::Engine);
        }
        let is_complete =
            self.burst.queued_bytes >= self.burst.quota_bytes && self.burst.in_flight.is_empty();
        if is_complete || self.burst.elapsed(now) > self.overrun_max() {
            self.overdue.append(&mut self.burst.in_flight);
            self.decide(now);
        }
        let Burst { path, quota_bytes, queued_bytes, ended_bytes, .. } = self.burst;
        let has_capacity = queued_bytes - ended_bytes < IN_FLIGHT_GRANULES_MAX * self.granule_bytes
            && (path != CopyPath::Engine || self.burst.in_flight.len() < self.copies_max.0);
        let own = (has_capacity && queued_bytes < quota_bytes).then_some(path);
        own.or_else(|| self.link_with_capacity())
    }

    fn link_with_capacity(&self) -> Option<CopyPath> {
        let is_free = |link: &LinkInFlight| {
            link.is_open
                && link.in_flight.len() < self.copies_max.1
                && link.in_flight_bytes() < LINK_GRANULES_MAX * self.granule_bytes
        };
        if self.gain.alone_bytes < self.alone_least_bytes {
            return None;
        }
        self.links.iter().position(is_free).map(CopyPath::Link)
    }

    /// `copy` is the number that `has_ended` gets.
    pub(super) fn queued(&mut self, now: Instant, path: CopyPath, copy: usize, bytes: u64) {
        if !self.reports_ends {
            return;
        }
        self.gain.began.get_or_insert(now);
        if let CopyPath::Link(link) = path {
            self.gain.linked.get_or_insert(now);
            self.links.get_mut(link).into_iter().for_each(|link| {
                link.in_flight.push_back((copy, bytes));
            });
            return;
        }
        self.burst.began.get_or_insert(now);
        self.burst.queued_bytes += bytes;
        self.burst.in_flight.push_back((copy, bytes));
    }

    #[allow(clippy::cast_precision_loss)] // A rate.
    fn overrun_max(&self) -> Duration {
        let rate = match self.burst.path {
            CopyPath::Kernel => self.kernel_rate,
            CopyPath::Engine | CopyPath::Link(_) => self.engine_rate,
        };
        let known = rate.filter(|rate| *rate > 0.0).map_or(0.0, |rate| self.burst.quota_bytes as f64 / rate);
        OVERRUN_MAX + Duration::try_from_secs_f64(known * SLOWER_MAX).unwrap_or(Duration::MAX / 2)
    }

    fn decide(&mut self, now: Instant) {
        let (ended, rate) = (self.burst.path, self.burst.rate(now));
        match ended {
            CopyPath::Kernel => self.kernel_rate = Some(rate),
            CopyPath::Engine | CopyPath::Link(_) => self.engine_rate = Some(rate),
        }
        if !self.has_kernel {
            self.burst = Burst::new(CopyPath::Engine, ENGINE_GRANULES * self.granule_bytes);
            return;
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
        let (mut paths, begin) = (CopyPaths::new(true, 0, GRANULE), Instant::now());
        let mut ends: Vec<Duration> = Vec::new();
        let (mut now, mut by_engine, mut by_kernel) = (Duration::ZERO, 0, 0);
        while ends.len() < chunks {
            match paths.with_capacity(begin + now, |copy| Some(ends[copy] <= now)) {
                Some(path) => {
                    let seconds = CHUNK as f64 / rate(path, ends.len());
                    let free = ends.last().copied().unwrap_or_default().max(now);
                    ends.push(free + Duration::from_secs_f64(seconds));
                    paths.queued(begin + now, path, ends.len() - 1, CHUNK);
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
            _ => 47.4 * GIB,
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

    /// The own path's and each link's bytes a second.
    fn over_links(chunks: usize, own: f64, links: &[f64]) -> (Vec<u64>, f64, Option<bool>) {
        let total = chunks as u64 * CHUNK;
        let mut paths = CopyPaths::new(false, links.len(), GRANULE).comparing(total);
        (0..links.len()).for_each(|link| paths.set_open(link, true));
        let (begin, mut now, mut ends) = (Instant::now(), Duration::ZERO, Vec::<Duration>::new());
        let mut of_path = vec![(Duration::ZERO, 0); links.len() + 1];
        while ends.len() < chunks {
            let Some(path) = paths.with_capacity(begin + now, |copy| Some(ends[copy] <= now)) else {
                now += Duration::from_micros(100);
                continue;
            };
            let nth = if let CopyPath::Link(link) = path { link + 1 } else { 0 };
            let rate = if nth == 0 { own } else { links[nth - 1] };
            let (free, bytes) = &mut of_path[nth];
            *free = (*free).max(now) + Duration::from_secs_f64(CHUNK as f64 / rate);
            *bytes += CHUNK;
            ends.push(*free);
            paths.queued(begin + now, path, ends.len() - 1, CHUNK);
        }
        let end = ends.iter().max().copied().unwrap_or_default();
        while now < end {
            now += Duration::from_micros(100);
            let _ = paths.with_capacity(begin + now, |copy| Some(ends[copy] <= now));
        }
        (of_path.into_iter().map(|(_, bytes)| bytes).collect(), end.as_secs_f64(), paths.links_pay())
    }

    #[test]
    fn shares_follow_what_each_link_reaches() {
        let (shares, seconds, pay) = over_links(960, 51.5 * GIB, &[51.5 * GIB]);
        assert_eq!((shares.iter().sum::<u64>(), pay), (960 * CHUNK, Some(true)));
        assert!(seconds < 30.0 / 100.0 + 0.02, "{seconds}");
        let (shares, seconds, pay) = over_links(960, 50.0 * GIB, &[25.0 * GIB, 12.5 * GIB, 50.0 * GIB]);
        assert!(shares[1] > shares[2] && shares[3] > shares[1], "{shares:?}");
        assert!(seconds < 30.0 / 137.5 + 0.03 && pay == Some(true), "{seconds}");
        // With too little to compare they are used at once, and nothing is said.
        let (shares, _, pay) = over_links(60, 51.5 * GIB, &[51.5 * GIB]);
        assert!(shares[1] >= 20 * CHUNK && pay.is_none(), "{shares:?}");
    }

    #[test]
    fn links_that_share_one_port_with_the_own_do_not_pay() {
        let mut paths = CopyPaths::new(false, 1, GRANULE).comparing(200 * CHUNK);
        paths.set_open(0, true);
        let (begin, mut now, mut queued, mut ended) = (Instant::now(), Duration::ZERO, Vec::new(), 0);
        // Whatever is in flight, one chunk ends every 0.6 ms.
        while ended < 200 {
            while queued.len() < 200
                && let Some(path) = paths.with_capacity(begin + now, |copy| Some(copy < ended))
            {
                paths.queued(begin + now, path, queued.len(), CHUNK);
                queued.push(path);
            }
            now += Duration::from_micros(600);
            ended += 1;
        }
        let _ = paths.with_capacity(begin + now, |copy| Some(copy < ended));
        assert!(queued.contains(&CopyPath::Link(0)));
        assert_eq!(paths.links_pay(), Some(false));
    }

    #[test]
    fn a_path_that_does_not_end_leaves_the_rest_to_the_other() {
        for held in [CopyPath::Engine, CopyPath::Kernel] {
            let (mut paths, mut now) = (CopyPaths::new(true, 0, GRANULE), Instant::now());
            let mut taken: Vec<CopyPath> = Vec::new();
            while taken.len() < 960 {
                match paths.with_capacity(now, |copy| Some(taken[copy] != held)) {
                    Some(path) => {
                        paths.queued(now, path, taken.len(), CHUNK);
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
        let (mut paths, now) = (CopyPaths::new(true, 0, GRANULE), Instant::now());
        for copy in 0..2 {
            assert_eq!(paths.with_capacity(now, |_| Some(false)), Some(CopyPath::Engine));
            paths.queued(now, CopyPath::Engine, copy, CHUNK);
        }
        assert_eq!(paths.with_capacity(now, |_| Some(false)), None);
        assert_eq!(paths.with_capacity(now, |copy| Some(copy == 0)), None);
        assert_eq!(paths.with_capacity(now, |_| Some(true)), Some(CopyPath::Kernel));
    }

    #[test]
    fn no_more_is_in_flight_than_the_capacity() {
        let (mut paths, now) = (CopyPaths::new(true, 0, GRANULE), Instant::now());
        let capacity = IN_FLIGHT_GRANULES_MAX * GRANULE;
        // The engine is the faster, and gets a long burst.
        for (copy, path) in
            [(0, CopyPath::Engine), (1, CopyPath::Engine), (2, CopyPath::Kernel), (3, CopyPath::Kernel)]
        {
            let later = now + Duration::from_millis(if copy < 2 { 1 } else { 2 } * copy as u64);
            assert_eq!(paths.with_capacity(later, |_| Some(true)), Some(path));
            paths.queued(later, path, copy, CHUNK);
        }
        let later = now + Duration::from_millis(10);
        let mut queued = 0;
        while paths.with_capacity(later, |copy| Some(copy < 4)).is_some() {
            paths.queued(later, CopyPath::Engine, 4, CHUNK);
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
            let (mut paths, mut now) = (CopyPaths::new(true, 0, GRANULE), Instant::now());
            for copy in 0..3000 {
                let mut looks = 0;
                while paths.with_capacity(now, |_| Some(has_ended)).is_none() {
                    assert!(!has_ended, "nothing is in flight");
                    looks += 1;
                    assert!(looks <= 3, "a burst is waited for without end");
                    now += Duration::from_millis(10);
                }
                paths.queued(now, CopyPath::Engine, copy, bytes);
                // Sometimes longer than any burst should take.
                now += Duration::from_millis(if copy % 100 == 0 { 10_000 } else { 0 });
            }
        }
    }

    #[test]
    fn with_one_path_there_is_always_capacity() {
        let now = Instant::now();
        let mut single = CopyPaths::new(false, 0, GRANULE);
        let mut silent = CopyPaths::new(true, 0, GRANULE);
        for copy in 0..100 {
            for paths in [&mut single, &mut silent] {
                assert_eq!(paths.with_capacity(now, |_| None), Some(CopyPath::Engine));
                paths.queued(now, CopyPath::Engine, copy, CHUNK);
            }
        }
    }
}
