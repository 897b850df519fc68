//! Runs the phases of a plan in an arena.

use std::time::Duration;

use poorwill::{Arena, Dropped, Level, PoolError, SleepRequest, Tag, TagPolicy, Verify, WakeRequest};

use super::aims::ratios;
use super::choice::choose;
#[cfg(target_os = "linux")]
use super::disk::{DiskCycle, DiskCycles, plain_read};
use super::limits::{Footprint, Limits};
use super::plan::{CycleKind, SleepError, SleepPlan, SleepStage};
use super::ratios::Ratios;
use super::report::{
    CopiedBytes, DropCycle, Dropping, MemoryTrend, MemoryUse, RESTED_CYCLES, SleepBenchReport, SleepCycle,
    Spreads,
};
use super::sizes::{count, sizes};
use crate::blocks::{Blocks, CopyBuffer, WrongByte, buffer_bytes};
use crate::cycle::{self, Content, CycleOptions};
use crate::figures::{Spread, as_float, ratio, timed};
use crate::process::resident_bytes;

const DROP_CYCLES: usize = 3;

#[cfg(target_os = "linux")]
const DISK_CYCLES: usize = 4;

/// A GPU clears released memory with its copy engines; a wake right then is a tenth slower.
const REST: Duration = Duration::from_millis(100);

/// With more clean cycles only the first and the last are compared.
const COMPARED_MAX: u32 = 5;

const REPORTED_FIRST: u32 = 3;

/// About 79 TiB of layers.
const TENSORS_MAX: u64 = 1_000_000;

const DISCARDABLE: &str = "bench-discardable";

/// Runs a plan in an otherwise unused arena, then frees and trims everything.
///
/// # Errors
/// See [`SleepError`]; everything is freed where possible.
pub fn run(
    arena: &Arena,
    plan: &SleepPlan,
    observer: &mut dyn FnMut(SleepStage),
) -> Result<SleepBenchReport, SleepError> {
    arena.trim()?;
    // Before the pool has memory: the arena's limit holds for both.
    let (sizes, footprint) = check_fit(arena, plan)?;
    observer(SleepStage::Limits);
    let limits = Limits::measure(&**arena.driver(), &footprint).map_err(SleepError::Limits)?;
    let report = empty_report(arena, plan, &sizes, limits)?;
    let load = Blocks::new(arena, CopyBuffer::Driver).holding(plan.contents);
    let mut run = SleepRun { arena, plan, sizes, load, report, observer };
    let outcome = run.phases();
    let cleared = run.load.clear();
    outcome?;
    cleared?;
    let mut report = run.report;
    report.ratios = ratios(&report);
    Ok(report)
}

fn check_fit(arena: &Arena, plan: &SleepPlan) -> Result<(Vec<u64>, Footprint), SleepError> {
    let (free_bytes, limit_bytes) = (arena.driver().memory_info()?.free_bytes, arena.limit_bytes());
    let fits = |asked_bytes| {
        let too_large = SleepError::TooLarge { asked_bytes, free_bytes, limit_bytes };
        if asked_bytes > free_bytes.min(limit_bytes) { Err(too_large) } else { Ok(()) }
    };
    fits(plan.bytes.get())?;
    let (asked_bytes, tensors) = (plan.bytes.get(), count(plan.bytes.get()));
    if tensors > TENSORS_MAX {
        return Err(SleepError::TooManyTensors { asked_bytes, tensors, tensors_max: TENSORS_MAX });
    }
    let sizes = sizes(asked_bytes);
    let footprint = Footprint::of(&sizes, arena.driver().info().granule_bytes, plan.chunk_granules);
    fits(footprint.bytes())?;
    let needed_bytes = footprint.bytes().saturating_add(buffer_bytes(sizes.iter().copied()));
    match arena.driver().host_memory().limit_bytes {
        Some(limit_bytes) if limit_bytes < needed_bytes => {
            Err(SleepError::HostMemory { asked_bytes, needed_bytes, limit_bytes })
        }
        _ => Ok((sizes, footprint)),
    }
}

struct SleepRun<'a> {
    arena: &'a Arena,
    plan: &'a SleepPlan,
    sizes: Vec<u64>,
    load: Blocks<'a>,
    report: SleepBenchReport,
    observer: &'a mut dyn FnMut(SleepStage),
}

impl SleepRun<'_> {
    /// Stops at the first mismatch.
    fn phases(&mut self) -> Result<(), SleepError> {
        for phase in [Self::first, Self::prepared, Self::clean, Self::changed, Self::on_disk, Self::dropping]
        {
            phase(self)?;
            if self.report.mismatch.is_some() {
                break;
            }
        }
        Ok(())
    }

    fn first(&mut self) -> Result<(), SleepError> {
        self.report.load_s = self.load_again()?;
        self.report.memory.before = memory_use(self.arena)?;
        self.cycle(CycleKind::First, 1)?;
        Ok(())
    }

    /// The same load in other blocks, which have never slept.
    fn prepared(&mut self) -> Result<(), SleepError> {
        self.load.clear()?;
        self.load_again()?;
        (self.observer)(SleepStage::Prepare);
        let preparation = self.arena.prepare_sleep(&SleepRequest::all(Level::One))?;
        self.report.prepare = Some(preparation.wait()?);
        self.cycle(CycleKind::Prepared, 1)?;
        Ok(())
    }

    fn clean(&mut self) -> Result<(), SleepError> {
        let (mut sleeps, mut wakes) = (Vec::new(), Vec::new());
        let mut at_once: Vec<f64> = self.report.cycles.iter().map(|cycle| cycle.wake_s).collect();
        for number in 1..=self.plan.cycles.get() {
            let [sleep_s, wake_s, wake_without_verify_s] = self.cycle(CycleKind::Clean, number)?;
            sleeps.push(sleep_s);
            if number <= RESTED_CYCLES {
                wakes.push([wake_s, wake_without_verify_s]);
            } else {
                at_once.push(wake_s);
            }
            self.report.memory.after = memory_use(self.arena)?;
            if number == 1 {
                self.report.memory.after_first = self.report.memory.after;
            }
            if self.report.mismatch.is_some() {
                break;
            }
        }
        let wakes = |nth: usize| Spread::of(wakes.iter().map(|figures: &[f64; 2]| figures[nth]));
        let spreads = || {
            let (sleep_s, wake_s) = (Spread::of(sleeps)?, wakes(0)?);
            let (wake_without_verify_s, wake_at_once_s) = (wakes(1)?, Spread::of(at_once)?);
            Some(Spreads { sleep_s, wake_s, wake_without_verify_s, wake_at_once_s })
        };
        self.add_spreads(spreads());
        Ok(())
    }

    fn changed(&mut self) -> Result<(), SleepError> {
        let granule_bytes = self.arena.driver().info().granule_bytes;
        let chosen = choose(self.load.as_allocated(), granule_bytes, self.plan.changed);
        self.load.change(&chosen)?;
        self.report.changed_granules = chosen.len() as u64;
        self.cycle(CycleKind::Changed, 1)?;
        self.trim_host_memory()?;
        self.report.host_bytes = Some(self.arena.driver().host_memory().held_bytes);
        Ok(())
    }

    #[cfg(target_os = "linux")]
    fn on_disk(&mut self) -> Result<(), SleepError> {
        let Some(folder) = &self.plan.disk else { return Ok(()) };
        (self.observer)(SleepStage::OnDisk);
        let mut cycles = Vec::new();
        let mut disk = None;
        for _ in 0..DISK_CYCLES {
            self.arena.sleep(&SleepRequest::all(Level::One))?;
            // What is on disk already stays there.
            let (spill_s, spilled_bytes) = timed(|| self.arena.spill(None))?;
            disk = disk.or(self.arena.stats()?.disk);
            let (wake_s, wake) = timed(|| self.arena.wake(&WakeRequest::all()))?;
            let failed = |source| SleepError::PlainRead { folder: folder.clone(), source };
            let (plain_read_s, plain_read_bytes) = plain_read(folder).map_err(failed)?;
            let read_bytes = wake.disk_read_bytes;
            cycles.push(DiskCycle {
                spill_s,
                spilled_bytes,
                wake_s,
                read_bytes,
                plain_read_s,
                plain_read_bytes,
            });
            if let Some(wrong) = self.load.mismatch()? {
                self.note(Some(format!("after a wake from disk {wrong}")));
                break;
            }
            self.load.release_buffer();
        }
        let read_ratio = DiskCycle::ratio(&cycles);
        self.report.on_disk = disk.map(|disk| DiskCycles { disk, cycles, read_ratio });
        Ok(())
    }

    #[cfg(not(target_os = "linux"))]
    fn on_disk(&mut self) -> Result<(), SleepError> {
        Ok(())
    }

    fn dropping(&mut self) -> Result<(), SleepError> {
        (self.observer)(SleepStage::Drop);
        self.load.clear()?;
        let tag = Tag::new(DISCARDABLE)?;
        self.arena.declare_tag(&tag, TagPolicy::discardable(Dropped::Undefined))?;
        self.load.alloc(&self.sizes, &tag)?;
        let mut cycles = Vec::new();
        for _ in 0..DROP_CYCLES {
            let (drop_s, _) = timed(|| self.arena.sleep(&SleepRequest::all(Level::One)))?;
            let (wake_empty_s, _) = timed(|| self.arena.wake(&WakeRequest::all()))?;
            cycles.push(DropCycle { drop_s, wake_empty_s });
        }
        self.add_dropping(cycles);
        if self.load.is_moved()? {
            self.report.moved = true;
            self.note(Some("a block moved while it was dropped".into()));
        }
        Ok(())
    }

    fn load_again(&mut self) -> Result<f64, SleepError> {
        (self.observer)(SleepStage::Load);
        let (load_s, ()) = timed(|| -> Result<(), PoolError> {
            self.load.alloc(&self.sizes, &Tag::weights())?;
            self.load.fill(&|_| {})
        })?;
        self.trim_host_memory()?;
        Ok(load_s)
    }

    fn trim_host_memory(&mut self) -> Result<(), SleepError> {
        self.load.release_buffer();
        Ok(self.arena.driver().host_trim()?)
    }

    /// Seconds of the sleep, the wake, and the wake without verifying.
    fn cycle(&mut self, kind: CycleKind, number: u32) -> Result<[f64; 3], SleepError> {
        (self.observer)(SleepStage::Cycle { kind, number });
        let last = self.plan.cycles.get();
        let is_on_host = self.arena.driver().info().id == "host";
        let is_rested = kind == CycleKind::Clean && number <= RESTED_CYCLES && !is_on_host;
        let options = CycleOptions {
            level: Level::One,
            verify: (kind == CycleKind::Changed).then_some(Verify::All),
            pause: if is_rested { REST } else { Duration::ZERO },
            compare: kind != CycleKind::Clean || number == 1 || number == last || last <= COMPARED_MAX,
        };
        let done = cycle::run(self.arena, &mut self.load, options)?;
        let moved = self.load.is_moved()?;
        let wrong = done.mismatch.as_ref().map(|wrong| format!("after {} {wrong}", cycle_name(kind, number)));
        let mismatch = moved.then(|| format!("a block moved in {}", cycle_name(kind, number)));
        self.report.moved |= moved;
        self.note(mismatch.or(wrong));
        let link_s = as_float(done.wake.copied_bytes) / self.report.limits.to_device_bytes_per_s;
        let [before, after] = [&done.before, &done.asleep].map(|moment| moment.free_bytes.cast_signed());
        let cycle = SleepCycle {
            kind,
            number,
            sleep_s: done.sleep_s,
            wake_s: done.wake_s,
            device_released_bytes: after.wrapping_sub(before),
            moved,
            verified: options.compare.then_some(done.mismatch.is_none()),
            wake_without_verify_s: (done.wake_s - done.wake.phases.verify_s).max(0.0),
            wake_link_ratio: link_s / done.wake_s.max(1e-9),
            sleep: done.sleep,
            wake: done.wake,
        };
        self.add(&cycle);
        let figures = [cycle.sleep_s, cycle.wake_s, cycle.wake_without_verify_s];
        if number <= REPORTED_FIRST || number == last || self.report.mismatch.is_some() {
            self.report.cycles.push(cycle);
        }
        Ok(figures)
    }

    fn note(&mut self, mismatch: Option<String>) {
        self.report.verified &= mismatch.is_none();
        self.report.mismatch = self.report.mismatch.take().or(mismatch);
    }

    fn add(&mut self, cycle: &SleepCycle) {
        let (sleep_s, copied) = (Some(cycle.sleep_s), Some(cycle.sleep.copied_bytes));
        let most = |so_far: Option<u64>, bytes| so_far.max(Some(bytes));
        match cycle.kind {
            CycleKind::First => {
                (self.report.first_sleep_s, self.report.copied_bytes.first) = (sleep_s, copied);
                self.report.stored_bytes = Some(cycle.sleep.stored_bytes);
                self.report.stored_ratio = ratio(cycle.sleep.stored_bytes, cycle.sleep.copied_bytes);
            }
            CycleKind::Prepared => {
                (self.report.prepared_sleep_s, self.report.copied_bytes.prepared) = (sleep_s, copied);
            }
            CycleKind::Changed => {
                (self.report.changed_sleep_s, self.report.copied_bytes.changed) = (sleep_s, copied);
            }
            CycleKind::Clean => {
                self.report.clean_cycles = cycle.number;
                self.report.copied_bytes.clean =
                    most(self.report.copied_bytes.clean, cycle.sleep.copied_bytes);
                self.report.copied_bytes.wake = most(self.report.copied_bytes.wake, cycle.wake.copied_bytes);
                self.report.read_bytes = most(self.report.read_bytes, cycle.wake.read_bytes);
            }
        }
    }

    fn add_spreads(&mut self, spreads: Option<Spreads>) {
        self.report.spreads = spreads;
        self.report.clean_sleep_s = spreads.map(|spreads| spreads.sleep_s.median);
        self.report.wake_s = spreads.map(|spreads| spreads.wake_s.median);
    }

    fn add_dropping(&mut self, cycles: Vec<DropCycle>) {
        let least = |figure: fn(&DropCycle) -> f64| cycles.iter().map(figure).min_by(f64::total_cmp);
        self.report.drop_s = least(|cycle| cycle.drop_s);
        self.report.wake_empty_s = least(|cycle| cycle.wake_empty_s);
        self.report.dropping = Some(Dropping { cycles });
    }
}

/// No sleep here leaves anything undefined.
impl Content for Blocks<'_> {
    type Error = SleepError;

    fn restore(&self) -> Result<(), SleepError> {
        Ok(())
    }

    fn mismatch(&mut self) -> Result<Option<String>, SleepError> {
        let wrong = self.first_wrong()?;
        Ok(wrong.map(|WrongByte { block, offset }| {
            format!("byte {offset} of tensor {block} is not what was written")
        }))
    }
}

fn cycle_name(kind: CycleKind, number: u32) -> String {
    match kind {
        CycleKind::First => "the first sleep".into(),
        CycleKind::Prepared => "the prepared sleep".into(),
        CycleKind::Clean => format!("clean sleep {number}"),
        CycleKind::Changed => "the changed sleep".into(),
    }
}

fn empty_report(
    arena: &Arena,
    plan: &SleepPlan,
    sizes: &[u64],
    limits: Limits,
) -> Result<SleepBenchReport, SleepError> {
    let (info, held) = (arena.driver().info(), memory_use(arena)?);
    Ok(SleepBenchReport {
        device: info.id.clone(),
        bytes: sizes.iter().sum(),
        link_gib_per_s: limits.to_device_bytes_per_s / as_float(1 << 30),
        first_sleep_s: None,
        prepared_sleep_s: None,
        clean_sleep_s: None,
        changed_fraction: plan.changed,
        changed_sleep_s: None,
        wake_s: None,
        drop_s: None,
        wake_empty_s: None,
        copied_bytes: CopiedBytes::default(),
        stored_bytes: None,
        read_bytes: None,
        stored_ratio: None,
        host_bytes: None,
        verified: true,
        mismatch: None,
        moved: false,
        contents: plan.contents,
        device_name: info.name.clone(),
        fast_digests: info.fast_digests,
        tensors: sizes.len(),
        load_s: 0.0,
        limits,
        ratios: Ratios::default(),
        prepare: None,
        changed_granules: 0,
        clean_cycles: 0,
        cycles: Vec::new(),
        spreads: None,
        #[cfg(target_os = "linux")]
        on_disk: None,
        dropping: None,
        memory: MemoryTrend { before: held, after_first: held, after: held },
    })
}

fn memory_use(arena: &Arena) -> Result<MemoryUse, SleepError> {
    let stats = arena.stats()?;
    Ok(MemoryUse {
        device_free_bytes: arena.driver().memory_info()?.free_bytes,
        process_resident_bytes: resident_bytes(),
        backup_bytes: stats.backup_bytes,
        backup_raw_bytes: stats.backup_raw_bytes,
        host: arena.driver().host_memory(),
    })
}
