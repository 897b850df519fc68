//! Taking an arena through cycles of sleep and wake.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Instant;

use poorwill_core::{
    ByteSize, DriverError, Dropped, InvalidTag, Level, PoolConfig, PoolError, SleepRequest, Tag, TagPolicy,
    WakeRequest,
};

use super::limits::{Limits, Pieces};
use super::load::{Load, count, sizes};
use super::report::{Cycle, CycleReport, DropCycle, Dropping, Held, Memory, Spread};
use crate::arena::Arena;
use crate::machine::resident_bytes;

/// How many cycles there are without a copy.
const DROP_CYCLES: usize = 3;

/// Up to how many cycles the bytes are compared after each.
const COMPARED_MAX: u32 = 5;

/// How many of the first cycles are reported one by one.
const REPORTED_FIRST: u32 = 3;

/// Most tensors of a load: about 79 TiB of layers.
const TENSORS_MAX: u64 = 1_000_000;

/// The tag of the cycles without a copy.
const DISCARDABLE: &str = "bench-discardable";

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// How much to load: whole layers of 496 MiB until this is reached, or one layer that is smaller throughout.
    pub bytes: NonZeroU64,
    /// How many times to sleep and wake.
    pub cycles: NonZeroU32,
    /// [`PoolConfig::chunk_granules`] of the arena: bare calls of the driver are measured with chunks of the same
    /// size.
    pub chunk_granules: u64,
}

impl Plan {
    /// Three cycles with `bytes` bytes in an arena with the default chunks.
    #[must_use]
    pub fn new(bytes: NonZeroU64) -> Self {
        let cycles = NonZeroU32::MIN.saturating_add(2);
        Self { bytes, cycles, chunk_granules: PoolConfig::default().chunk_granules }
    }
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Measuring limits.
    Limits,
    /// Loading.
    Load,
    /// This cycle, from 1.
    Cycle(u32),
    /// Cycles without a copy.
    Drop,
}

/// Why a run failed. What differs after a wake is no failure: the report says it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CycleError {
    /// The device has too little memory for the load, or its budget is too small.
    #[error(
        "cannot load {}: the device has {} free, and the budget allows {}; load less, {}",
        ByteSize(*asked_bytes),
        ByteSize(*free_bytes),
        ByteSize(*limit_bytes),
        if asked_bytes <= free_bytes { "or raise the budget" } else { "or use a larger device" }
    )]
    TooLarge {
        /// Size of the load.
        asked_bytes: u64,
        /// What the device has free.
        free_bytes: u64,
        /// What the arena may map.
        limit_bytes: u64,
    },
    /// The load would have more tensors than can be kept track of here.
    #[error(
        "cannot load {}: that takes {tensors} tensors, and {tensors_max} is the most; load less",
        ByteSize(*asked_bytes)
    )]
    TooManyTensors {
        /// Size of the load.
        asked_bytes: u64,
        /// How many tensors it takes.
        tensors: u64,
        /// How many there may be.
        tensors_max: u64,
    },
    /// A call of the driver failed that no pool had made.
    #[error("cannot measure the limits of the device: {0}")]
    Limits(#[source] DriverError),
    /// The device would not say what it has free.
    #[error(transparent)]
    Device(#[from] DriverError),
    /// A call of the pool failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The tag of the cycles without a copy has no good name.
    #[error(transparent)]
    Tag(#[from] InvalidTag),
}

/// Takes an arena that is used for nothing else through a plan. At its end everything is freed and trimmed.
///
/// # Errors
/// See [`CycleError`]. Everything that can be freed is freed also then.
pub fn run(arena: &Arena, plan: &Plan, observer: &mut dyn FnMut(Stage)) -> Result<CycleReport, CycleError> {
    arena.trim()?;
    // The limits are measured with memory beside the pool's, before it has any: its limit holds for both.
    let (free_bytes, limit_bytes) = (arena.driver().memory_info()?.free_bytes, arena.limit_bytes());
    let fits = |asked_bytes| {
        let too_large = CycleError::TooLarge { asked_bytes, free_bytes, limit_bytes };
        if asked_bytes > free_bytes.min(limit_bytes) { Err(too_large) } else { Ok(()) }
    };
    fits(plan.bytes.get())?;
    let (asked_bytes, tensors) = (plan.bytes.get(), count(plan.bytes.get()));
    if tensors > TENSORS_MAX {
        return Err(CycleError::TooManyTensors { asked_bytes, tensors, tensors_max: TENSORS_MAX });
    }
    let sizes = sizes(asked_bytes);
    let pieces = Pieces::of(&sizes, arena.driver().info().granule_bytes, plan.chunk_granules);
    fits(pieces.bytes())?;

    observer(Stage::Limits);
    let limits = Limits::measure(&**arena.driver(), &pieces).map_err(CycleError::Limits)?;
    let mut load = Load::new(arena);
    let report = cycles(arena, plan, &sizes, limits, &mut load, observer);
    let cleared = load.clear();
    let mut report = report?;
    cleared?;
    if report.mismatch.is_none() {
        observer(Stage::Drop);
        let dropping = dropping(arena, &sizes, &report.limits, &mut load);
        let cleared = load.clear();
        let (dropping, moved) = dropping?;
        cleared?;
        report.dropping = Some(dropping);
        report.note(moved.then(|| "a block moved while it was dropped".into()), moved);
    }
    Ok(report)
}

fn cycles(
    arena: &Arena,
    plan: &Plan,
    sizes: &[u64],
    limits: Limits,
    load: &mut Load<'_>,
    observer: &mut dyn FnMut(Stage),
) -> Result<CycleReport, CycleError> {
    observer(Stage::Load);
    let (load_s, ()) = timed(|| {
        load.take(sizes, &Tag::weights())?;
        load.fill()
    })?;
    let before = held(arena)?;
    let info = arena.driver().info();
    let mut report = CycleReport {
        device: info.id.clone(),
        device_name: info.name.clone(),
        bytes: sizes.iter().sum(),
        tensors: sizes.len(),
        load_s,
        limits,
        cycle_count: 0,
        cycles: Vec::new(),
        sleep_s: None,
        wake_s: None,
        wake_without_verify_s: None,
        wake_link_ratio: None,
        dropping: None,
        memory: Memory { before, after_first: before, after: before },
        moved: false,
        verified: true,
        mismatch: None,
    };
    let mut figures: Vec<[f64; 4]> = Vec::new();
    let last = plan.cycles.get();
    for number in 1..=last {
        observer(Stage::Cycle(number));
        let mut cycle = cycle(arena, number, report.limits.to_device_bytes_per_s)?;
        figures.push([cycle.sleep_s, cycle.wake_s, cycle.wake_without_verify_s, cycle.wake_link_ratio]);
        report.cycle_count = number;
        report.memory.after = held(arena)?;
        if number == 1 {
            report.memory.after_first = report.memory.after;
        }
        cycle.moved = load.is_moved()?;
        let mut mismatch = cycle.moved.then(|| format!("a block moved in cycle {number}"));
        if number == 1 || number == last || last <= COMPARED_MAX {
            let wrong = load.compare()?;
            cycle.verified = Some(wrong.is_none());
            mismatch = mismatch.or(wrong.map(|wrong| format!("after cycle {number} {wrong}")));
        }
        report.note(mismatch, cycle.moved);
        if number <= REPORTED_FIRST || number == last || report.mismatch.is_some() {
            report.cycles.push(cycle);
        }
        if report.mismatch.is_some() {
            break;
        }
    }
    let [sleep_s, wake_s, wake_without_verify_s, ratio] =
        [0, 1, 2, 3].map(|nth| Spread::of(figures.iter().map(|figures| figures[nth])));
    (report.sleep_s, report.wake_s) = (sleep_s, wake_s);
    report.wake_without_verify_s = wake_without_verify_s;
    report.wake_link_ratio = ratio.map(|spread| spread.median);
    Ok(report)
}

fn cycle(arena: &Arena, number: u32, to_device_bytes_per_s: f64) -> Result<Cycle, CycleError> {
    let before = arena.driver().memory_info()?.free_bytes;
    let (sleep_s, sleep) = timed(|| arena.sleep(&SleepRequest::all(Level::One)))?;
    let after = arena.driver().memory_info()?.free_bytes;
    let (wake_s, wake) = timed(|| arena.wake(&WakeRequest::all()))?;
    let wake_without_verify_s = (wake_s - wake.phases.verify_s).max(0.0);
    let link_s = as_float(wake.copied_bytes) / to_device_bytes_per_s;
    Ok(Cycle {
        cycle: number,
        sleep,
        wake,
        sleep_s,
        wake_s,
        device_released_bytes: after.cast_signed().wrapping_sub(before.cast_signed()),
        moved: false,
        verified: None,
        wake_without_verify_s,
        wake_link_ratio: link_s / wake_without_verify_s.max(1e-9),
    })
}

/// Cycles without a copy, and whether a block moved.
fn dropping(
    arena: &Arena,
    sizes: &[u64],
    limits: &Limits,
    load: &mut Load<'_>,
) -> Result<(Dropping, bool), CycleError> {
    let tag = Tag::new(DISCARDABLE)?;
    arena.declare_tag(&tag, TagPolicy::discardable(Dropped::Undefined))?;
    load.take(sizes, &tag)?;
    let mut cycles = Vec::new();
    for _ in 0..DROP_CYCLES {
        let (drop_s, _) = timed(|| arena.sleep(&SleepRequest::all(Level::One)))?;
        let (wake_empty_s, _) = timed(|| arena.wake(&WakeRequest::all()))?;
        cycles.push(DropCycle { drop_s, wake_empty_s });
    }
    let least = |figure: fn(&DropCycle) -> f64| cycles.iter().map(figure).fold(f64::INFINITY, f64::min);
    let (drop_s, wake_empty_s) = (least(|cycle| cycle.drop_s), least(|cycle| cycle.wake_empty_s));
    let dropping = Dropping {
        drop_ratio: drop_s / limits.give_back_s.max(1e-9),
        wake_empty_ratio: wake_empty_s / limits.bring_in_s.max(1e-9),
        drop_s,
        wake_empty_s,
        cycles,
    };
    Ok((dropping, load.is_moved()?))
}

impl CycleReport {
    fn note(&mut self, mismatch: Option<String>, moved: bool) {
        self.moved |= moved;
        self.verified &= mismatch.is_none();
        self.mismatch = self.mismatch.take().or(mismatch);
    }
}

fn held(arena: &Arena) -> Result<Held, CycleError> {
    Ok(Held {
        device_free_bytes: arena.driver().memory_info()?.free_bytes,
        process_resident_bytes: resident_bytes(),
        backup_bytes: arena.stats()?.backup_bytes,
    })
}

fn timed<T>(action: impl FnOnce() -> Result<T, PoolError>) -> Result<(f64, T), PoolError> {
    let started = Instant::now();
    let outcome = action()?;
    Ok((started.elapsed().as_secs_f64(), outcome))
}

/// Sizes of memory are far below where a float begins to round to whole bytes.
#[allow(clippy::cast_precision_loss)]
fn as_float(bytes: u64) -> f64 {
    bytes as f64
}
