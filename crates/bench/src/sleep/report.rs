//! Result of a run.

use poorwill::{HostMemoryInfo, PrepareReport, SleepReport, WakeReport};
use serde::Serialize;

#[cfg(target_os = "linux")]
use super::disk::DiskCycles;
use super::fraction::Fraction;
use super::limits::Limits;
use super::plan::CycleKind;
use super::ratios::Ratios;
use crate::contents::Contents;
use crate::figures::Spread;

/// In these clean cycles, a GPU rests before the wake.
pub(super) const RESTED_CYCLES: u32 = 5;

/// Cost of sleep and wake. Figures after a mismatch are `None`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SleepBenchReport {
    /// Kind of device, as on the command line.
    pub device: String,
    /// Size of the load.
    pub bytes: u64,
    /// Host to device, in GiB.
    pub link_gib_per_s: f64,
    /// Without backups or cached host memory.
    pub first_sleep_s: Option<f64>,
    /// With backups made in the background.
    pub prepared_sleep_s: Option<f64>,
    /// Nothing changed: the median.
    pub clean_sleep_s: Option<f64>,
    /// Fraction of granules that changed.
    pub changed_fraction: Fraction,
    /// After that change.
    pub changed_sleep_s: Option<f64>,
    /// A wake with the device's default verification (GPU: every granule): median of the first five clean
    /// cycles, with the GPU rested.
    pub wake_s: Option<f64>,
    /// Fastest sleep of [`Dropping`].
    pub drop_s: Option<f64>,
    /// Fastest wake of [`Dropping`].
    pub wake_empty_s: Option<f64>,
    /// Bytes copied by each sleep and wake.
    pub copied_bytes: CopiedBytes,
    /// Written to backups by the first sleep.
    pub stored_bytes: Option<u64>,
    /// Most that a wake of a clean cycle read from backups.
    pub read_bytes: Option<u64>,
    /// [`Self::stored_bytes`] over the bytes that were copied.
    pub stored_ratio: Option<f64>,
    /// Host memory for backups after the cycles, also cached.
    pub host_bytes: Option<u64>,
    /// Whether bytes and addresses were the same.
    pub verified: bool,
    /// What differed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<String>,
    /// Whether any block moved.
    pub moved: bool,
    /// What the load was filled with.
    pub contents: Contents,
    /// Name of the device.
    pub device_name: String,
    /// Whether digests run at memory speed; otherwise every sleep copies everything.
    pub fast_digests: bool,
    /// Tensors of the load.
    pub tensors: usize,
    /// Allocating and writing the load.
    pub load_s: f64,
    /// The limits of the machine.
    pub limits: Limits,
    /// Figures beside their limits.
    pub ratios: Ratios,
    /// Result of the preparation.
    pub prepare: Option<PrepareReport>,
    /// Granules that changed.
    pub changed_granules: u64,
    /// Clean cycles that ran.
    pub clean_cycles: u32,
    /// Of the clean cycles the first three and the last.
    pub cycles: Vec<SleepCycle>,
    /// Spread of the clean cycles.
    pub spreads: Option<Spreads>,
    /// Wakes from disk, where there is one.
    #[cfg(target_os = "linux")]
    pub on_disk: Option<DiskCycles>,
    /// Cycles that drop everything.
    pub dropping: Option<Dropping>,
    /// Memory before and after the clean cycles.
    pub memory: MemoryTrend,
}

/// Copied bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CopiedBytes {
    /// By the first sleep.
    pub first: Option<u64>,
    /// Without [`SleepBenchReport::prepare`].
    pub prepared: Option<u64>,
    /// Most by a clean sleep.
    pub clean: Option<u64>,
    /// By the changed sleep.
    pub changed: Option<u64>,
    /// Most by a wake of a clean cycle.
    pub wake: Option<u64>,
}

/// One sleep at level 1 and one wake.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SleepCycle {
    /// Its kind.
    pub kind: CycleKind,
    /// Number within its kind, from 1.
    pub number: u32,
    /// Result of the sleep.
    pub sleep: SleepReport,
    /// Verified every granule after the changed sleep, else the device's default.
    pub wake: WakeReport,
    /// Time of the sleep.
    pub sleep_s: f64,
    /// Time of the wake.
    pub wake_s: f64,
    /// Rise of free device memory; other processes affect it.
    pub device_released_bytes: i64,
    /// Whether any block moved.
    pub moved: bool,
    /// `None` if not compared.
    pub verified: Option<bool>,
    /// Without the wait for digests.
    pub wake_without_verify_s: f64,
    /// Link time of the copied bytes over [`SleepCycle::wake_s`].
    pub wake_link_ratio: f64,
}

/// Spread of the clean cycles.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spreads {
    /// [`SleepCycle::sleep_s`].
    pub sleep_s: Spread,
    /// [`SleepCycle::wake_s`] of the first five.
    pub wake_s: Spread,
    /// [`SleepCycle::wake_without_verify_s`] of the first five.
    pub wake_without_verify_s: Spread,
    /// Wakes right after the sleep, while a GPU clears released memory.
    pub wake_at_once_s: Spread,
}

/// Cycles that drop everything and copy nothing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Dropping {
    /// In order.
    pub cycles: Vec<DropCycle>,
}

/// A cycle without a copy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DropCycle {
    /// Time of the sleep.
    pub drop_s: f64,
    /// Time of the wake.
    pub wake_empty_s: f64,
}

/// Memory with the load awake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryTrend {
    /// Before the first sleep.
    pub before: MemoryUse,
    /// After the first clean cycle.
    pub after_first: MemoryUse,
    /// After the last cycle.
    pub after: MemoryUse,
}

/// Memory at one moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryUse {
    /// Free on the device.
    pub device_free_bytes: u64,
    /// Resident, where the system reports it.
    pub process_resident_bytes: Option<u64>,
    /// Backups of the pool.
    pub backup_bytes: u64,
    /// What they are backups of.
    pub backup_raw_bytes: u64,
    /// Host memory of the driver.
    pub host: HostMemoryInfo,
}

impl SleepBenchReport {
    /// The first reported cycle of a kind.
    #[must_use]
    pub fn cycle(&self, kind: CycleKind) -> Option<&SleepCycle> {
        self.cycles.iter().find(|cycle| cycle.kind == kind)
    }

    /// Cycles in the median [`SleepBenchReport::wake_s`].
    #[must_use]
    pub fn rested_cycles(&self) -> u32 {
        self.clean_cycles.min(RESTED_CYCLES)
    }
}
