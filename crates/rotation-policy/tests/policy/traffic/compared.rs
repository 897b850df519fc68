//! Rules compared over the same traffic: ten models with traces of requests, and twenty of which four are busy.

use std::time::Duration;

use poorwill_rotation_policy::Rules;

use super::machine::{Arrival, Client, Cost, GIB, Load, MIB, Traffic};

/// Turns by time alone, as the rotation began with: the baseline.
pub(crate) fn by_time(rules: &mut Rules) {
    (rules.turn_per_swap, rules.grace, rules.residence_min) = (0, Duration::ZERO, Duration::from_secs(2));
}

/// What engines on an H200 took: with weights in host memory, and with weights that are read again.
pub(crate) fn on_an_h200(level: usize, need_gib: u64) -> Cost {
    let cost = [Cost::of_millis(168, 112, 302), Cost::of_millis(863, 119, 316)][level - 1];
    Cost { need_bytes: need_gib * GIB, ..cost }
}

/// Ten models of which one fits, and ten of which two or three fit.
pub(crate) fn ten_models(needs_gib: [u64; 10]) -> Vec<Cost> {
    needs_gib.iter().enumerate().map(|(nth, need)| on_an_h200(1 + nth % 2, *need)).collect()
}

pub(crate) const ALONE: [u64; 10] = [70; 10];
pub(crate) const MIXED: [u64; 10] = [38, 20, 70, 20, 38, 20, 38, 70, 20, 20];

/// Answers of half a second in the median, and 16 at a time.
pub(crate) fn load(per_second: f64) -> Load {
    Load { per_second, models: 10, median: Duration::from_millis(550), sigma: 1.0 }
}

/// Over several traces.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) answered: u64,
    pub(crate) refused: u64,
    pub(crate) served: Duration,
    /// Of the time.
    pub(crate) in_swaps: f64,
    /// Of all requests, shortest first.
    pub(crate) waits: Vec<Duration>,
    pub(crate) aborted: u64,
    pub(crate) largest_gap: Duration,
}

impl Outcome {
    /// What this share of the requests waited at most, in percent.
    pub(crate) fn wait(&self, percent: usize) -> Duration {
        self.waits[(self.waits.len() - 1) * percent / 100]
    }
}

pub(crate) fn outcome(needs_gib: [u64; 10], per_second: f64, run: Run, change: fn(&mut Rules)) -> Outcome {
    over(run, load(per_second), |trace| {
        // What waits is refused after `wait_max` only.
        Traffic::new(&ten_models(needs_gib), &[], trace, |_, rules| {
            (rules.running_max, rules.queue_max) = (16, 1 << 20);
            change(rules);
        })
    })
}

fn over(run: Run, load: Load, traffic: impl Fn(Vec<Arrival>) -> Traffic) -> Outcome {
    let mut all = Outcome::default();
    let mut swapping = Duration::ZERO;
    for seed in 0..run.traces {
        let mut traffic = traffic(load.trace(seed, run.time));
        traffic.run(run.time);
        (all.answered, all.refused) = (all.answered + traffic.answered, all.refused + traffic.refused);
        (all.served, swapping) = (all.served + traffic.served, swapping + traffic.swapping);
        all.aborted += traffic.aborted.unwrap_or_default();
        all.largest_gap = all.largest_gap.max(traffic.largest_gap);
        all.waits.extend(traffic.waits());
    }
    all.waits.sort_unstable();
    let time = run.time.as_secs_f64() * f64::from(u32::try_from(run.traces).unwrap());
    all.in_swaps = swapping.as_secs_f64() / time;
    all
}

/// An engine that sleeps and wakes as fast as memory is copied.
pub(crate) fn fast() -> Cost {
    Cost::of_millis(70, 60, 0)
}

/// Ten models of which one fits, with answers of twenty seconds in the median, 16 at a time of each model.
pub(crate) fn long_answers(per_second: f64, run: Run, change: fn(&mut Rules)) -> Outcome {
    let load = Load { per_second, models: 10, median: Duration::from_secs(20), sigma: 0.6 };
    over(run, load, |trace| {
        let change = |_: usize, rules: &mut Rules| {
            (rules.running_max, rules.queue_max) = (16, 1 << 20);
            change(rules);
        };
        Traffic::new(&[fast(); 10], &[], trace, change).of_long_answers()
    })
}

pub(crate) fn by_slices(rules: &mut Rules) {
    rules.slice_max = Some(Duration::from_secs(2));
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    pub(crate) traces: u64,
    pub(crate) time: Duration,
}

/// The rules as they are if nothing is set.
pub(crate) fn by_cost(_: &mut Rules) {}

/// Twenty models of an H200: four are asked for all the time, and the others now and then. Asleep, each still holds
/// 1.2 GiB.
pub(crate) fn twenty_models(need_gib: u64, time: Duration, change: impl Fn(&mut Rules)) -> Traffic {
    let residue_bytes = GIB * 12 / 10;
    let cost = Cost { residue_bytes, ..on_an_h200(1, need_gib) };
    let client = |model: usize| {
        let gap = if model < 4 { 1 } else { 600 + 60 * u64::try_from(model).unwrap() };
        Client { model, gap: Duration::from_secs(gap), takes: Duration::from_millis(500) }
    };
    let clients: Vec<Client> = (0..20).map(client).collect();
    let change = |_: usize, rules: &mut Rules| {
        rules.wait_max = Duration::from_secs(36_000);
        change(rules);
    };
    let mut traffic = Traffic::new(&[cost; 20], &clients, Vec::new(), change).on(139 * GIB);
    traffic.run(time);
    traffic
}

pub(crate) fn hibernates(rules: &mut Rules) {
    rules.can_hibernate = true;
}

/// Six models that are started and stopped, by their rank in demand: five language models of which two fit, and a small
/// one, the third in rank. Starts take 2.65 s, and requests come at 4 a second.
pub(crate) fn six_started(
    seed: u64,
    time: Duration,
    [language_mib, small_mib]: [u64; 2],
    change: fn(&mut Rules),
) -> Traffic {
    let language = Cost { need_bytes: language_mib * MIB, ..Cost::of_millis(2400, 80, 250) };
    let small = Cost { need_bytes: small_mib * MIB, ..Cost::of_millis(1200, 80, 50) };
    let costs = [language, language, small, language, language, language];
    let load = Load { per_second: 4.0, models: 6, median: Duration::from_millis(100), sigma: 0.8 };
    let trace = load.trace(seed, time);
    let mut traffic = Traffic::new(&costs, &[], trace, |_, rules| {
        (rules.can_sleep, rules.can_restart) = (false, true);
        change(rules);
    })
    .on(560 * MIB);
    traffic.run(time);
    traffic
}

/// Needs of these models with which the small one fits beside two of the others, as measured, and as configured.
pub(crate) const MEASURED_MIB: [u64; 2] = [205, 140];
pub(crate) const CONFIGURED_MIB: [u64; 2] = [230, 150];
