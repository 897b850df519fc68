//! The share of time in which each GPU swaps models.
//!
//! A GPU swaps while at least one of its models is between two rests: it starts, wakes, is tested, sleeps or stops. A
//! model that drains still answers, so that is no swap yet.
//!
//! Promises: time of several models counts once. The recent window is as long as it says: memory is bounded, and the
//! window is shorter where swaps are very many.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use poorwill_rotation_policy::{Gpu, StageName};
use tokio::time::Instant;

use super::snapshot::Swapping;

/// Stages outside of a swap.
pub(crate) const RESTS: [StageName; 6] = [
    StageName::Unknown,
    StageName::Cold,
    StageName::Asleep,
    StageName::Hibernating,
    StageName::Ready,
    StageName::Quarantined,
];

/// What is recent.
const RECENT: Duration = Duration::from_secs(600);
const KEPT_MAX: usize = 4096;

fn is_swap(stage: StageName) -> bool {
    !RESTS.contains(&stage) && stage != StageName::Draining
}

#[derive(Debug)]
pub(super) struct SwapTimes {
    began: Instant,
    gpus: BTreeMap<Gpu, GpuTimes>,
}

#[derive(Debug)]
struct GpuTimes {
    /// Its models that are between two rests.
    models: usize,
    /// When the first of them began.
    since: Instant,
    /// The last times with such models.
    kept: VecDeque<(Instant, Instant)>,
    /// Before this, some may be missing.
    known_from: Instant,
    /// All of them, up to now.
    total: Duration,
}

impl SwapTimes {
    pub(super) fn new(began: Instant) -> Self {
        Self { began, gpus: BTreeMap::new() }
    }

    /// A model on these GPUs has changed its stage.
    pub(super) fn changed(&mut self, gpus: &[Gpu], before: StageName, after: StageName) {
        let (now, began) = (Instant::now(), self.began);
        for gpu in gpus {
            let gpu = self.gpus.entry(*gpu).or_insert_with(|| GpuTimes::new(began));
            match (is_swap(before), is_swap(after)) {
                (false, true) => gpu.begins(now),
                (true, false) => gpu.ends(now),
                _ => {}
            }
        }
    }

    pub(super) fn of(&self, gpu: Gpu) -> Swapping {
        let now = Instant::now();
        let known = self.gpus.get(&gpu);
        let total = known.map_or(Duration::ZERO, |of| of.total + of.current(now));
        let from = known.map_or(self.began, |of| of.known_from);
        let from = now.checked_sub(RECENT).map_or(from, |recent| from.max(recent));
        let recent = known.map_or(Duration::ZERO, |of| of.behind(from, now));
        let uptime = now.duration_since(self.began);
        Swapping {
            recent_share: share(recent, now.duration_since(from)),
            recent_window_s: now.duration_since(from).as_secs_f64(),
            share: share(total, uptime),
            total_s: total.as_secs_f64(),
        }
    }
}

impl GpuTimes {
    fn new(began: Instant) -> Self {
        Self { models: 0, since: began, kept: VecDeque::new(), known_from: began, total: Duration::ZERO }
    }

    fn begins(&mut self, now: Instant) {
        if self.models == 0 {
            self.since = now;
        }
        self.models += 1;
    }

    fn ends(&mut self, now: Instant) {
        self.models = self.models.saturating_sub(1);
        if self.models > 0 {
            return;
        }
        self.total += now.duration_since(self.since);
        self.kept.push_back((self.since, now));
        while let Some((_, ended)) = self.kept.front()
            && (self.kept.len() > KEPT_MAX || now.duration_since(*ended) >= RECENT)
        {
            self.known_from = *ended;
            self.kept.pop_front();
        }
    }

    /// Of the swap that goes on.
    fn current(&self, now: Instant) -> Duration {
        if self.models > 0 { now.duration_since(self.since) } else { Duration::ZERO }
    }

    fn behind(&self, from: Instant, now: Instant) -> Duration {
        let current = (self.models > 0).then_some((self.since, now));
        let all = self.kept.iter().copied().chain(current);
        all.map(|(begins, ends)| ends.saturating_duration_since(begins.max(from))).sum()
    }
}

fn share(part: Duration, whole: Duration) -> f64 {
    if whole.is_zero() { 0.0 } else { part.as_secs_f64() / whole.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAGES: [StageName; 6] = [
        StageName::Asleep,
        StageName::Waking,
        StageName::Canary,
        StageName::Ready,
        StageName::Draining,
        StageName::Stopping,
    ];

    fn whole(seconds: f64) -> u64 {
        format!("{seconds:.0}").parse().unwrap()
    }

    /// Against a record of each second, with models on one GPU and on two.
    #[tokio::test(start_paused = true)]
    async fn shares_are_those_of_a_record_of_each_second() {
        let mut random = fastrand::Rng::with_seed(7);
        let places = [&[Gpu(0)][..], &[Gpu(0), Gpu(1)], &[Gpu(1)]];
        for _ in 0..20 {
            let mut times = SwapTimes::new(Instant::now());
            let mut stages = [StageName::Unknown; 3];
            let mut seconds: [Vec<bool>; 2] = Default::default();
            for _ in 0..random.usize(..200) {
                let model = random.usize(..3);
                let stage = STAGES[random.usize(..STAGES.len())];
                times.changed(places[model], stages[model], stage);
                stages[model] = stage;
                let passed = random.u64(..20);
                tokio::time::advance(Duration::from_secs(passed)).await;
                for (gpu, seconds) in seconds.iter_mut().enumerate() {
                    let swaps = (0..3).any(|nth| places[nth].contains(&Gpu(gpu)) && is_swap(stages[nth]));
                    seconds.extend((0..passed).map(|_| swaps));
                }
            }
            for (gpu, seconds) in seconds.iter().enumerate() {
                let of = times.of(Gpu(gpu));
                let count =
                    |seconds: &[bool]| u64::try_from(seconds.iter().filter(|is| **is).count()).unwrap();
                let recent = &seconds[seconds.len().saturating_sub(600)..];
                assert_eq!(whole(of.recent_window_s), u64::try_from(recent.len()).unwrap());
                assert_eq!(whole(of.recent_share * of.recent_window_s), count(recent));
                assert_eq!(whole(of.total_s), count(seconds));
                assert_eq!(
                    whole(of.share * f64::from(u32::try_from(seconds.len()).unwrap())),
                    count(seconds)
                );
            }
            assert_eq!(times.of(Gpu(7)).total_s.to_bits(), 0_f64.to_bits());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_window_is_shorter_where_swaps_are_very_many() {
        let mut times = SwapTimes::new(Instant::now());
        for _ in 0..2 * KEPT_MAX {
            times.changed(&[Gpu(0)], StageName::Asleep, StageName::Waking);
            tokio::time::advance(Duration::from_millis(20)).await;
            times.changed(&[Gpu(0)], StageName::Waking, StageName::Asleep);
            tokio::time::advance(Duration::from_millis(20)).await;
        }
        let of = times.of(Gpu(0));
        assert!(of.recent_window_s < 200.0 && (of.recent_share - 0.5).abs() < 0.01, "{of:?}");
        assert!((of.share - 0.5).abs() < 1e-9, "{of:?}");
        assert_eq!(times.gpus[&Gpu(0)].kept.len(), KEPT_MAX);
    }
}
