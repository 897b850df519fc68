//! Taking an arena through the phases of a plan.

use std::time::Duration;

use poorwill::{Arena, Dropped, Level, PoolError, SleepRequest, Tag, TagPolicy, Verify, WakeRequest};

use super::choice::choose;
use super::limits::{Limits, Pieces};
use super::plan::{Error, Kind, Plan, Stage};
use super::ratios::Ratios;
use super::report::{CopiedBytes, Cycle, DropCycle, Held, Memory, RESTED_CYCLES, Report, Spreads};
use super::sizes::{count, sizes};
use crate::blocks::{Blocks, Through, WrongByte, buffer_bytes};
use crate::cycle::{self, Content, How};
use crate::figures::{Spread, as_float, timed};
use crate::process::resident_bytes;

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
/// See [`Error`]. Everything that can be freed is freed also then.
pub fn run(arena: &Arena, plan: &Plan, observer: &mut dyn FnMut(Stage)) -> Result<Report, Error> {
    arena.trim()?;
    // The limits are measured with memory beside the pool's, before it has any: its limit holds for both.
    let (sizes, pieces) = fitting(arena, plan)?;
    observer(Stage::Limits);
    let limits = Limits::measure(&**arena.driver(), &pieces).map_err(Error::Limits)?;
    let report = empty_report(arena, plan, &sizes, limits)?;
    let mut run = Run { arena, plan, sizes, load: Blocks::new(arena, Through::Driver), report, observer };
    let outcome = run.phases();
    let cleared = run.load.clear();
    outcome?;
    cleared?;
    let mut report = run.report;
    report.ratios = Ratios::of(&report);
    Ok(report)
}

/// The tensors of a load for which there is room, and what they take.
fn fitting(arena: &Arena, plan: &Plan) -> Result<(Vec<u64>, Pieces), Error> {
    let (free_bytes, limit_bytes) = (arena.driver().memory_info()?.free_bytes, arena.limit_bytes());
    let fits = |asked_bytes| {
        let too_large = Error::TooLarge { asked_bytes, free_bytes, limit_bytes };
        if asked_bytes > free_bytes.min(limit_bytes) { Err(too_large) } else { Ok(()) }
    };
    fits(plan.bytes.get())?;
    let (asked_bytes, tensors) = (plan.bytes.get(), count(plan.bytes.get()));
    if tensors > TENSORS_MAX {
        return Err(Error::TooManyTensors { asked_bytes, tensors, tensors_max: TENSORS_MAX });
    }
    let sizes = sizes(asked_bytes);
    let pieces = Pieces::of(&sizes, arena.driver().info().granule_bytes, plan.chunk_granules);
    fits(pieces.bytes())?;
    let needed_bytes = pieces.bytes().saturating_add(buffer_bytes(sizes.iter().copied()));
    match arena.driver().host_memory().limit_bytes {
        Some(limit_bytes) if limit_bytes < needed_bytes => {
            Err(Error::HostMemory { asked_bytes, needed_bytes, limit_bytes })
        }
        _ => Ok((sizes, pieces)),
    }
}

struct Run<'a> {
    arena: &'a Arena,
    plan: &'a Plan,
    sizes: Vec<u64>,
    load: Blocks<'a>,
    report: Report,
    observer: &'a mut dyn FnMut(Stage),
}

impl Run<'_> {
    /// All of them, or as many as it takes to find a byte that is wrong.
    fn phases(&mut self) -> Result<(), Error> {
        for phase in [Self::first, Self::prepared, Self::clean, Self::changed, Self::dropping] {
            phase(self)?;
            if self.report.mismatch.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// Nothing is prepared, and no host memory is kept.
    fn first(&mut self) -> Result<(), Error> {
        self.report.load_s = self.load_afresh()?;
        self.report.memory.before = held(self.arena)?;
        self.cycle(Kind::First, 1)?;
        Ok(())
    }

    /// The same load in other blocks, which have never slept.
    fn prepared(&mut self) -> Result<(), Error> {
        self.load.clear()?;
        self.load_afresh()?;
        (self.observer)(Stage::Prepare);
        let preparation = self.arena.prepare_sleep(&SleepRequest::all(Level::One))?;
        self.report.prepare = Some(preparation.wait()?);
        self.cycle(Kind::Prepared, 1)?;
        Ok(())
    }

    fn clean(&mut self) -> Result<(), Error> {
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

    fn changed(&mut self) -> Result<(), Error> {
        let granule_bytes = self.arena.driver().info().granule_bytes;
        let chosen = choose(self.load.as_allocated(), granule_bytes, self.plan.changed);
        self.load.change(&chosen)?;
        self.report.changed_granules = chosen.len() as u64;
        self.cycle(Kind::Changed, 1)?;
        self.let_go_of_buffers()?;
        self.report.host_bytes = Some(self.arena.driver().host_memory().held_bytes);
        Ok(())
    }

    fn dropping(&mut self) -> Result<(), Error> {
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
    fn load_afresh(&mut self) -> Result<f64, Error> {
        (self.observer)(Stage::Load);
        let (load_s, ()) = timed(|| -> Result<(), PoolError> {
            self.load.take(&self.sizes, &Tag::weights())?;
            self.load.fill(&|_| {})
        })?;
        self.let_go_of_buffers()?;
        Ok(load_s)
    }

    /// Gives back the host memory that is ours, and what the driver keeps of it.
    fn let_go_of_buffers(&mut self) -> Result<(), Error> {
        self.load.rest();
        Ok(self.arena.driver().host_trim()?)
    }

    /// A sleep with the bytes, the wake, and a look at them. Returns the seconds of the sleep, of the wake, and of
    /// the wake without verifying.
    fn cycle(&mut self, kind: Kind, number: u32) -> Result<[f64; 3], Error> {
        (self.observer)(Stage::Cycle { kind, number });
        let last = self.plan.cycles.get();
        let is_on_host = self.arena.driver().info().id == "host";
        let is_rested = kind == Kind::Clean && number <= RESTED_CYCLES && !is_on_host;
        let how = How {
            level: Level::One,
            verify: (kind == Kind::Changed).then_some(Verify::All),
            rest: if is_rested { REST } else { Duration::ZERO },
            is_compared: kind != Kind::Clean || number == 1 || number == last || last <= COMPARED_MAX,
        };
        let done = cycle::run(self.arena, &mut self.load, how)?;
        let moved = self.load.is_moved()?;
        let wrong = done.mismatch.as_ref().map(|wrong| format!("after {} {wrong}", named(kind, number)));
        let mismatch = moved.then(|| format!("a block moved in {}", named(kind, number)));
        self.report.moved |= moved;
        self.report.note(mismatch.or(wrong));
        let link_s = as_float(done.wake.copied_bytes) / self.report.limits.to_device_bytes_per_s;
        let [before, after] = [&done.before, &done.asleep].map(|moment| moment.free_bytes.cast_signed());
        let cycle = Cycle {
            kind,
            number,
            sleep_s: done.sleep_s,
            wake_s: done.wake_s,
            device_released_bytes: after.wrapping_sub(before),
            moved,
            verified: how.is_compared.then_some(done.mismatch.is_none()),
            wake_without_verify_s: (done.wake_s - done.wake.phases.verify_s).max(0.0),
            wake_link_ratio: link_s / done.wake_s.max(1e-9),
            sleep: done.sleep,
            wake: done.wake,
        };
        self.report.add(&cycle);
        let figures = [cycle.sleep_s, cycle.wake_s, cycle.wake_without_verify_s];
        if number <= REPORTED_FIRST || number == last || self.report.mismatch.is_some() {
            self.report.cycles.push(cycle);
        }
        Ok(figures)
    }
}

/// The bytes of the load are what was written. No sleep here leaves anything undefined.
impl Content for Blocks<'_> {
    type Error = Error;

    fn restore(&self) -> Result<(), Error> {
        Ok(())
    }

    fn mismatch(&mut self) -> Result<Option<String>, Error> {
        let wrong = self.first_wrong()?;
        Ok(wrong
            .map(|WrongByte { block, at }| format!("byte {at} of tensor {block} is not what was written")))
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

fn empty_report(arena: &Arena, plan: &Plan, sizes: &[u64], limits: Limits) -> Result<Report, Error> {
    let (info, held) = (arena.driver().info(), held(arena)?);
    Ok(Report {
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

fn held(arena: &Arena) -> Result<Held, Error> {
    Ok(Held {
        device_free_bytes: arena.driver().memory_info()?.free_bytes,
        process_resident_bytes: resident_bytes(),
        backup_bytes: arena.stats()?.backup_bytes,
        host: arena.driver().host_memory(),
    })
}
