//! Taking an arena through the phases of a plan.

use std::thread;
use std::time::{Duration, Instant};

use poorwill_core::{Dropped, Level, PoolError, SleepRequest, Tag, TagPolicy, Verify, WakeRequest};

use super::limits::{Limits, Pieces};
use super::load::{Load, buffer_bytes};
use super::plan::{CycleError, Kind, Plan, Stage};
use super::ratios::Ratios;
use super::report::{
    CopiedBytes, Cycle, CycleReport, DropCycle, Held, Memory, RESTED_CYCLES, Spread, Spreads,
};
use super::sizes::{count, sizes};
use crate::arena::Arena;
use crate::link::as_float;
use crate::machine::resident_bytes;

/// How many cycles there are without a copy.
const DROP_CYCLES: usize = 3;

/// How long a GPU rests between a clean sleep and its wake. For a moment after memory was given back, the GPU cleans
/// it with the engines that also copy: a wake right then is a tenth slower.
const REST: Duration = Duration::from_millis(100);

/// Up to how many clean cycles the bytes are compared after each.
const COMPARED_MAX: u32 = 5;

/// How many of the first clean cycles are reported one by one.
const REPORTED_FIRST: u32 = 3;

/// Most tensors of a load: about 79 TiB of layers.
const TENSORS_MAX: u64 = 1_000_000;

/// The tag of the cycles without a copy.
const DISCARDABLE: &str = "bench-discardable";

/// Takes an arena that is used for nothing else through a plan. At its end everything is freed and trimmed.
///
/// # Errors
/// See [`CycleError`]. Everything that can be freed is freed also then.
pub fn run(arena: &Arena, plan: &Plan, observer: &mut dyn FnMut(Stage)) -> Result<CycleReport, CycleError> {
    arena.trim()?;
    // The limits are measured with memory beside the pool's, before it has any: its limit holds for both.
    let (sizes, pieces) = fitting(arena, plan)?;
    observer(Stage::Limits);
    let limits = Limits::measure(&**arena.driver(), &pieces).map_err(CycleError::Limits)?;
    let report = empty_report(arena, plan, &sizes, limits)?;
    let mut run = Run { arena, plan, sizes, load: Load::new(arena), report, observer };
    let outcome = run.phases();
    let cleared = run.load.clear();
    outcome?;
    cleared?;
    let mut report = run.report;
    report.ratios = Ratios::of(&report);
    Ok(report)
}

/// The tensors of a load for which there is room, and what they take.
fn fitting(arena: &Arena, plan: &Plan) -> Result<(Vec<u64>, Pieces), CycleError> {
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
    let needed_bytes = pieces.bytes().saturating_add(buffer_bytes(&sizes));
    match arena.driver().host_memory().limit_bytes {
        Some(limit_bytes) if limit_bytes < needed_bytes => {
            Err(CycleError::HostMemory { asked_bytes, needed_bytes, limit_bytes })
        }
        _ => Ok((sizes, pieces)),
    }
}

struct Run<'a> {
    arena: &'a Arena,
    plan: &'a Plan,
    sizes: Vec<u64>,
    load: Load<'a>,
    report: CycleReport,
    observer: &'a mut dyn FnMut(Stage),
}

impl Run<'_> {
    /// All of them, or as many as it takes to find a byte that is wrong.
    fn phases(&mut self) -> Result<(), CycleError> {
        for phase in [Self::first, Self::prepared, Self::clean, Self::changed, Self::dropping] {
            phase(self)?;
            if self.report.mismatch.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// Nothing is prepared, and no host memory is kept.
    fn first(&mut self) -> Result<(), CycleError> {
        self.report.load_s = self.load_afresh()?;
        self.report.memory.before = held(self.arena)?;
        self.cycle(Kind::First, 1)?;
        Ok(())
    }

    /// The same load in other blocks, which have never slept.
    fn prepared(&mut self) -> Result<(), CycleError> {
        self.load.clear()?;
        self.load_afresh()?;
        (self.observer)(Stage::Prepare);
        let preparation = self.arena.prepare_sleep(&SleepRequest::all(Level::One))?;
        self.report.prepare = Some(preparation.wait()?);
        self.cycle(Kind::Prepared, 1)?;
        Ok(())
    }

    fn clean(&mut self) -> Result<(), CycleError> {
        let (mut sleeps, mut wakes) = (Vec::new(), Vec::new());
        let mut at_once: Vec<f64> = self.report.cycles.iter().map(|cycle| cycle.wake_s).collect();
        for number in 1..=self.plan.cycles.get() {
            let [sleep_s, wake_s, wake_without_verify_s] = self.cycle(Kind::Clean, number)?;
            sleeps.push(sleep_s);
            if number <= RESTED_CYCLES {
                wakes.push([wake_s, wake_without_verify_s]);
            } else {
                at_once.push(wake_s);
            }
            self.report.memory.after = held(self.arena)?;
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
        self.report.add_spreads(spreads());
        Ok(())
    }

    fn changed(&mut self) -> Result<(), CycleError> {
        self.report.changed_granules = self.load.change(self.plan.changed)?;
        self.cycle(Kind::Changed, 1)?;
        self.let_go_of_buffers()?;
        self.report.host_bytes = Some(self.arena.driver().host_memory().held_bytes);
        Ok(())
    }

    fn dropping(&mut self) -> Result<(), CycleError> {
        (self.observer)(Stage::Drop);
        self.load.clear()?;
        let tag = Tag::new(DISCARDABLE)?;
        self.arena.declare_tag(&tag, TagPolicy::discardable(Dropped::Undefined))?;
        self.load.take(&self.sizes, &tag)?;
        let mut cycles = Vec::new();
        for _ in 0..DROP_CYCLES {
            let (drop_s, _) = timed(|| self.arena.sleep(&SleepRequest::all(Level::One)))?;
            let (wake_empty_s, _) = timed(|| self.arena.wake(&WakeRequest::all()))?;
            cycles.push(DropCycle { drop_s, wake_empty_s });
        }
        self.report.add_dropping(cycles);
        if self.load.is_moved()? {
            self.report.moved = true;
            self.report.note(Some("a block moved while it was dropped".into()));
        }
        Ok(())
    }

    /// Takes and writes the load, and leaves no host memory behind. Returns how long taking and writing took.
    fn load_afresh(&mut self) -> Result<f64, CycleError> {
        (self.observer)(Stage::Load);
        let (load_s, ()) = timed(|| {
            self.load.take(&self.sizes, &Tag::weights())?;
            self.load.fill()
        })?;
        self.let_go_of_buffers()?;
        Ok(load_s)
    }

    /// Gives back the host memory that is ours, and what the driver keeps of it.
    fn let_go_of_buffers(&mut self) -> Result<(), CycleError> {
        self.load.rest();
        Ok(self.arena.driver().host_trim()?)
    }

    /// A sleep with the bytes, the wake, and a look at them. Returns the seconds of the sleep, of the wake, and of
    /// the wake without verifying.
    fn cycle(&mut self, kind: Kind, number: u32) -> Result<[f64; 3], CycleError> {
        (self.observer)(Stage::Cycle { kind, number });
        let verify = if kind == Kind::Changed { Verify::All } else { Verify::Sample };
        let mut cycle = self.sleep_and_wake(kind, number, verify)?;
        cycle.moved = self.load.is_moved()?;
        let mut mismatch = cycle.moved.then(|| format!("a block moved in {}", named(kind, number)));
        let last = self.plan.cycles.get();
        if kind != Kind::Clean || number == 1 || number == last || last <= COMPARED_MAX {
            let wrong = self.load.compare()?;
            cycle.verified = Some(wrong.is_none());
            mismatch = mismatch.or(wrong.map(|wrong| format!("after {} {wrong}", named(kind, number))));
        }
        self.report.moved |= cycle.moved;
        self.report.note(mismatch);
        self.report.add(&cycle);
        let figures = [cycle.sleep_s, cycle.wake_s, cycle.wake_without_verify_s];
        if number <= REPORTED_FIRST || number == last || self.report.mismatch.is_some() {
            self.report.cycles.push(cycle);
        }
        Ok(figures)
    }

    fn sleep_and_wake(&self, kind: Kind, number: u32, verify: Verify) -> Result<Cycle, CycleError> {
        let free_bytes = || Ok::<_, CycleError>(self.arena.driver().memory_info()?.free_bytes);
        let before = free_bytes()?;
        let (sleep_s, sleep) = timed(|| self.arena.sleep(&SleepRequest::all(Level::One)))?;
        let after = free_bytes()?;
        if kind == Kind::Clean && number <= RESTED_CYCLES && self.arena.driver().info().id != "host" {
            thread::sleep(REST);
        }
        let (wake_s, wake) = timed(|| self.arena.wake(&WakeRequest::all().verifying(verify)))?;
        let link_s = as_float(wake.copied_bytes) / self.report.limits.to_device_bytes_per_s;
        Ok(Cycle {
            kind,
            number,
            sleep_s,
            wake_s,
            device_released_bytes: after.cast_signed().wrapping_sub(before.cast_signed()),
            moved: false,
            verified: None,
            wake_without_verify_s: (wake_s - wake.phases.verify_s).max(0.0),
            wake_link_ratio: link_s / wake_s.max(1e-9),
            sleep,
            wake,
        })
    }
}

/// How a mismatch names a cycle.
fn named(kind: Kind, number: u32) -> String {
    match kind {
        Kind::First => "the first sleep".into(),
        Kind::Prepared => "the prepared sleep".into(),
        Kind::Clean => format!("clean sleep {number}"),
        Kind::Changed => "the changed sleep".into(),
    }
}

fn empty_report(
    arena: &Arena,
    plan: &Plan,
    sizes: &[u64],
    limits: Limits,
) -> Result<CycleReport, CycleError> {
    let (info, held) = (arena.driver().info(), held(arena)?);
    Ok(CycleReport {
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
        host_bytes: None,
        verified: true,
        mismatch: None,
        moved: false,
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
        dropping: None,
        memory: Memory { before: held, after_first: held, after: held },
    })
}

fn held(arena: &Arena) -> Result<Held, CycleError> {
    Ok(Held {
        device_free_bytes: arena.driver().memory_info()?.free_bytes,
        process_resident_bytes: resident_bytes(),
        backup_bytes: arena.stats()?.backup_bytes,
        host: arena.driver().host_memory(),
    })
}

fn timed<T>(action: impl FnOnce() -> Result<T, PoolError>) -> Result<(f64, T), PoolError> {
    let started = Instant::now();
    let outcome = action()?;
    Ok((started.elapsed().as_secs_f64(), outcome))
}
