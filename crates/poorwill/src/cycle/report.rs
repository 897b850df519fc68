//! What a run found. Sizes in bytes, times in seconds.

use poorwill_core::{SleepReport, WakeReport};
use serde::Serialize;

use super::limits::Limits;

/// What sleeping and waking cost. One shape in Rust and JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CycleReport {
    /// The device, as the command line names its kind.
    pub device: String,
    /// Its name for people.
    pub device_name: String,
    /// The load.
    pub bytes: u64,
    /// Of how many tensors it is.
    pub tensors: usize,
    /// Allocating and writing it.
    pub load_s: f64,
    /// The limits of the machine.
    pub limits: Limits,
    /// How many times it slept and woke.
    pub cycle_count: u32,
    /// The first three of them, and the last.
    pub cycles: Vec<Cycle>,
    /// [`Cycle::sleep_s`] over all of them.
    pub sleep_s: Option<Spread>,
    /// [`Cycle::wake_s`] over all of them.
    pub wake_s: Option<Spread>,
    /// [`Cycle::wake_without_verify_s`] over all of them.
    pub wake_without_verify_s: Option<Spread>,
    /// Median of [`Cycle::wake_link_ratio`].
    pub wake_link_ratio: Option<f64>,
    /// Cycles without a copy. None where the load was not the same after a wake.
    pub dropping: Option<Dropping>,
    /// What is held before and after.
    pub memory: Memory,
    /// Whether any block was at another address after any wake.
    pub moved: bool,
    /// Whether everything compared was the same, at the same addresses.
    pub verified: bool,
    /// What was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<String>,
}

/// One sleep at level 1 and one wake.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cycle {
    /// Which, from 1.
    pub cycle: u32,
    /// What the sleep says of itself.
    pub sleep: SleepReport,
    /// What the wake says of itself.
    pub wake: WakeReport,
    /// The sleep, by the clock.
    pub sleep_s: f64,
    /// The wake, by the clock.
    pub wake_s: f64,
    /// By how much the device's free memory rose from before the sleep until after it. Other processes move it.
    pub device_released_bytes: i64,
    /// Whether any block was at another address after the wake.
    pub moved: bool,
    /// Whether every byte was the same after the wake. None where nobody looked.
    pub verified: Option<bool>,
    /// The wake, less what it says of verifying.
    pub wake_without_verify_s: f64,
    /// What the link alone would have taken for what was copied, over [`Cycle::wake_without_verify_s`].
    pub wake_link_ratio: f64,
}

/// Cycles in which everything is dropped and nothing is copied.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Dropping {
    /// Each of them.
    pub cycles: Vec<DropCycle>,
    /// The quickest sleep.
    pub drop_s: f64,
    /// The quickest wake.
    pub wake_empty_s: f64,
    /// The quickest sleep over [`Limits::give_back_s`].
    pub drop_ratio: f64,
    /// The quickest wake over [`Limits::bring_in_s`].
    pub wake_empty_ratio: f64,
}

/// One sleep and one wake without a copy, by the clock.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DropCycle {
    /// The sleep.
    pub drop_s: f64,
    /// The wake.
    pub wake_empty_s: f64,
}

/// What is held with the load awake, before and after the cycles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Before the first cycle.
    pub before: Held,
    /// After the first, which leaves backups for the next sleep.
    pub after_first: Held,
    /// After the last.
    pub after: Held,
}

/// What is held at one moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Held {
    /// What the device has free.
    pub device_free_bytes: u64,
    /// What this process has resident, where the system tells.
    pub process_resident_bytes: Option<u64>,
    /// What the pool's backups take of host memory.
    pub backup_bytes: u64,
}

/// How a figure varied.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The least.
    pub min: f64,
    /// The one in the middle; of two, their mean.
    pub median: f64,
    /// The most.
    pub max: f64,
}

impl Spread {
    /// That of `figures`, if there are any.
    pub(super) fn of(figures: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = figures.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Some(Self { min, median: f64::midpoint(middle.0, middle.1), max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads() {
        assert_eq!(Spread::of([]), None);
        for (figures, min, median, max) in [
            (&[2.0][..], 2.0, 2.0, 2.0),
            (&[3.0, 1.0], 1.0, 2.0, 3.0),
            (&[9.0, 1.0, 4.0], 1.0, 4.0, 9.0),
            (&[4.0, 1.0, 2.0, 8.0], 1.0, 3.0, 8.0),
        ] {
            assert_eq!(Spread::of(figures.iter().copied()), Some(Spread { min, median, max }));
        }
    }
}
