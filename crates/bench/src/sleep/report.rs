//! What a run found. Sizes in bytes, times in seconds.

use poorwill::{HostMemoryInfo, PrepareReport, SleepReport, WakeReport};
use serde::Serialize;

use super::fraction::Fraction;
use super::limits::Limits;
use super::plan::Kind;
use super::ratios::Ratios;
use crate::figures::Spread;

/// In how many of the clean cycles a GPU rests between the sleep and the wake.
pub(super) const RESTED_CYCLES: u32 = 5;

/// What sleeping and waking cost. One shape in Rust and JSON. Figures are absent that a run did not come to because
/// the load was not the same after a wake.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The device, as the command line names its kind.
    pub device: String,
    /// The load.
    pub bytes: u64,
    /// The link to the device: [`Limits::to_device_bytes_per_s`] in GiB.
    pub link_gib_per_s: f64,
    /// The sleep with no backup, and no host memory to put one in.
    pub first_sleep_s: Option<f64>,
    /// The first sleep of a load whose backups were made in the background.
    pub prepared_sleep_s: Option<f64>,
    /// A later sleep with nothing changed: the median of all.
    pub clean_sleep_s: Option<f64>,
    /// Which part of the granules that lie wholly inside tensors was written before the changed sleep.
    pub changed_fraction: Fraction,
    /// A later sleep after that.
    pub changed_sleep_s: Option<f64>,
    /// A wake that verifies what it does by default, on a GPU every granule: the median over the first five clean cycles, in which a GPU
    /// rests for a moment between the sleep and the wake ([`Spreads::wake_at_once_s`] has the others).
    pub wake_s: Option<f64>,
    /// A sleep in which everything is dropped: the quickest of [`Dropping`].
    pub drop_s: Option<f64>,
    /// A wake with nothing to copy: the quickest of [`Dropping`].
    pub wake_empty_s: Option<f64>,
    /// What each of these copied.
    pub copied_bytes: CopiedBytes,
    /// All host memory that the driver holds for backups after the cycles, in use or not.
    pub host_bytes: Option<u64>,
    /// Whether everything compared was the same, at the same addresses.
    pub verified: bool,
    /// What was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<String>,
    /// Whether any block was at another address after any wake.
    pub moved: bool,
    /// Its name for people.
    pub device_name: String,
    /// Whether the device computes digests at the speed of its memory; where not, every sleep copies everything.
    pub fast_digests: bool,
    /// Of how many tensors the load is.
    pub tensors: usize,
    /// Allocating and writing it.
    pub load_s: f64,
    /// The limits of the machine.
    pub limits: Limits,
    /// Each figure beside what the limits make of it.
    pub ratios: Ratios,
    /// What the preparation did.
    pub prepare: Option<PrepareReport>,
    /// How many granules were written before the changed sleep.
    pub changed_granules: u64,
    /// How many times it slept and woke with nothing changed.
    pub clean_cycles: u32,
    /// The cycles with a copy, in their order; of the clean ones the first three and the last.
    pub cycles: Vec<Cycle>,
    /// How the figures of the clean cycles varied.
    pub spreads: Option<Spreads>,
    /// Cycles without a copy.
    pub dropping: Option<Dropping>,
    /// What is held before and after the clean cycles.
    pub memory: Memory,
}

/// What was copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CopiedBytes {
    /// By the first sleep.
    pub first: Option<u64>,
    /// By the prepared sleep itself; [`Report::prepare`] has what was copied before.
    pub prepared: Option<u64>,
    /// By the clean sleep that copied most.
    pub clean: Option<u64>,
    /// By the changed sleep.
    pub changed: Option<u64>,
    /// By the wake of a clean cycle that copied most.
    pub wake: Option<u64>,
}

/// One sleep at level 1 and one wake.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cycle {
    /// What the sleep met.
    pub kind: Kind,
    /// Which of its kind, from 1.
    pub number: u32,
    /// What the sleep says of itself.
    pub sleep: SleepReport,
    /// What the wake says of itself: it verified every granule after the changed sleep, else what it does by default.
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
    /// The wake, less what it says of waiting for digests.
    pub wake_without_verify_s: f64,
    /// What the link alone would have taken for what was copied, over [`Cycle::wake_s`].
    pub wake_link_ratio: f64,
}

/// Figures of the clean cycles.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spreads {
    /// [`Cycle::sleep_s`].
    pub sleep_s: Spread,
    /// [`Cycle::wake_s`], in the first five.
    pub wake_s: Spread,
    /// [`Cycle::wake_without_verify_s`], in the first five.
    pub wake_without_verify_s: Spread,
    /// Of wakes right after the sleep, while a GPU cleans what was given back: those of the first and the prepared
    /// sleep, and of the clean ones behind the fifth.
    pub wake_at_once_s: Spread,
}

/// Cycles in which everything is dropped and nothing is copied.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Dropping {
    /// Each of them.
    pub cycles: Vec<DropCycle>,
}

/// One sleep and one wake without a copy, by the clock.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DropCycle {
    /// The sleep.
    pub drop_s: f64,
    /// The wake.
    pub wake_empty_s: f64,
}

/// What is held with the load awake, before and after the clean cycles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Before the first of all sleeps.
    pub before: Held,
    /// After the first clean cycle, which leaves backups for the next sleep.
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
    /// Host memory of the driver.
    pub host: HostMemoryInfo,
}

impl Report {
    /// The first reported cycle of a kind.
    #[must_use]
    pub fn cycle(&self, kind: Kind) -> Option<&Cycle> {
        self.cycles.iter().find(|cycle| cycle.kind == kind)
    }

    /// Over how many cycles [`Report::wake_s`] is the median.
    #[must_use]
    pub fn rested_cycles(&self) -> u32 {
        self.clean_cycles.min(RESTED_CYCLES)
    }

    pub(super) fn note(&mut self, mismatch: Option<String>) {
        self.verified &= mismatch.is_none();
        self.mismatch = self.mismatch.take().or(mismatch);
    }

    /// Takes a cycle into the figures.
    pub(super) fn add(&mut self, cycle: &Cycle) {
        let (sleep_s, copied) = (Some(cycle.sleep_s), Some(cycle.sleep.copied_bytes));
        let most = |so_far: Option<u64>, bytes| so_far.max(Some(bytes));
        match cycle.kind {
            Kind::First => (self.first_sleep_s, self.copied_bytes.first) = (sleep_s, copied),
            Kind::Prepared => (self.prepared_sleep_s, self.copied_bytes.prepared) = (sleep_s, copied),
            Kind::Changed => (self.changed_sleep_s, self.copied_bytes.changed) = (sleep_s, copied),
            Kind::Clean => {
                self.clean_cycles = cycle.number;
                self.copied_bytes.clean = most(self.copied_bytes.clean, cycle.sleep.copied_bytes);
                self.copied_bytes.wake = most(self.copied_bytes.wake, cycle.wake.copied_bytes);
            }
        }
    }

    pub(super) fn add_spreads(&mut self, spreads: Option<Spreads>) {
        self.spreads = spreads;
        self.clean_sleep_s = spreads.map(|spreads| spreads.sleep_s.median);
        self.wake_s = spreads.map(|spreads| spreads.wake_s.median);
    }

    pub(super) fn add_dropping(&mut self, cycles: Vec<DropCycle>) {
        let least = |figure: fn(&DropCycle) -> f64| cycles.iter().map(figure).min_by(f64::total_cmp);
        self.drop_s = least(|cycle| cycle.drop_s);
        self.wake_empty_s = least(|cycle| cycle.wake_empty_s);
        self.dropping = Some(Dropping { cycles });
    }
}
