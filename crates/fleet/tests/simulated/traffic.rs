//! Who asks for what, and what fails, from a seed.

use std::f64::consts::TAU;

use super::world::{Size, World};

const DAY_MS: f64 = 86_400_000.0;
const ANSWER_MS: f64 = 4_000.0;

pub(crate) struct Traffic {
    rng: fastrand::Rng,
    of_bursts: fastrand::Rng,
    /// Of its own, since policies answer in different orders.
    of_answers: fastrand::Rng,
    /// The sum of the weights up to each model.
    sums: Vec<f64>,
    /// When a model's day begins, as a part of a day.
    phases: Vec<f64>,
    gap_ms: f64,
    burst_gap_ms: f64,
}

fn exponential(rng: &mut fastrand::Rng, mean_ms: f64) -> u64 {
    (-mean_ms * (1.0 - rng.f64()).ln()).round() as u64
}

impl Traffic {
    pub(crate) fn new(world: &World, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x5eed);
        let size = world.size();
        let mut ranks: Vec<usize> = (1..=size.models).collect();
        rng.shuffle(&mut ranks);
        let mut sum = 0.0;
        let sums = ranks.iter().map(|rank| {
            sum += 1.0 / *rank as f64;
            sum
        });
        let sums = sums.collect();
        // Three parts of the world.
        let phases = (0..size.models).map(|_| match rng.u32(..20) {
            0..12 => 0.25,
            12..17 => 0.0,
            _ => 0.6,
        });
        let phases = phases.collect();
        let (of_bursts, of_answers) = (rng.fork(), rng.fork());
        // A burst brings a tenth of the busiest time's requests.
        let gap_ms = 1_000.0 / size.per_second;
        Self { rng, of_bursts, of_answers, sums, phases, gap_ms, burst_gap_ms: gap_ms * 10.0 }
    }

    /// Until the next request at the busiest time. At others, some of them are none.
    pub(crate) fn gap_ms(&mut self) -> u64 {
        exponential(&mut self.rng, self.gap_ms)
    }

    /// Which model is asked for, if any at this time of its day.
    pub(crate) fn model(&mut self, now: u64) -> Option<usize> {
        let all = self.sums.last().copied().unwrap_or_default();
        let at = self.rng.f64() * all;
        let model = self.sums.partition_point(|sum| *sum <= at).min(self.sums.len() - 1);
        let day = now as f64 / DAY_MS - self.phases[model];
        let share = (1.0 + 0.7 * (day * TAU).sin()) / 1.7;
        (self.rng.f64() < share).then_some(model)
    }

    /// A model that many ask for at once, and until when.
    pub(crate) fn burst(&mut self, now: u64) -> (usize, u64) {
        let model = self.of_bursts.usize(..self.sums.len());
        (model, now + self.of_bursts.u64(60_000..300_000))
    }

    pub(crate) fn until_burst_ms(&mut self) -> u64 {
        exponential(&mut self.of_bursts, 300_000.0)
    }

    pub(crate) fn burst_gap_ms(&mut self) -> u64 {
        exponential(&mut self.of_bursts, self.burst_gap_ms)
    }

    pub(crate) fn answer_ms(&mut self) -> u64 {
        exponential(&mut self.of_answers, ANSWER_MS).max(1)
    }
}

/// When each node fails: one in twenty in a day, and a whole domain once.
pub(crate) fn failures(size: Size, seed: u64) -> Vec<(u64, usize)> {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0xfa11);
    let from = size.hours_before * super::HOUR_MS;
    let counted = size.hours * super::HOUR_MS;
    let single = size.nodes.div_ceil(20);
    let mut all: Vec<(u64, usize)> =
        (0..single).map(|_| (from + rng.u64(..counted), rng.usize(..size.nodes))).collect();
    all.extend((0..size.nodes_of_domain()).map(|node| (from + counted * 6 / 10, node)));
    all
}
