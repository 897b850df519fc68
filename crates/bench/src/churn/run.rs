//! Taking an arena through a load.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Instant;

use poorwill::{AllocRequest, Arena, BlockId, PoolError, Tag, chain};

use super::load::{Load, Step};
use super::report::Report;
use crate::figures::ratio;

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The load.
    pub load: Load,
    /// Where its sizes come from.
    pub seed: u64,
    /// How many times to run it. Each round but the first begins by freeing all that the last one left, without
    /// a trim.
    pub rounds: NonZeroU32,
    /// Every size of the load is divided by this: 1 is the full size.
    pub divisor: NonZeroU64,
}

impl Plan {
    /// One round of `load` with seed 0, at full size.
    #[must_use]
    pub fn new(load: Load) -> Self {
        Self { load, seed: 0, rounds: NonZeroU32::MIN, divisor: NonZeroU64::MIN }
    }

    /// What one round does.
    #[must_use]
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = self.load.steps(self.seed);
        for step in &mut steps {
            if let Step::Take { bytes } = step {
                *bytes = (*bytes / self.divisor).max(1);
            }
        }
        steps
    }
}

/// Told what was just done. Its error ends the run.
pub type Observer<'a> = &'a mut dyn FnMut(&Moment) -> Result<(), PoolError>;

/// The moment after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// How many steps are done, in all rounds; each free between two rounds is a step.
    pub step: usize,
    /// What was done.
    pub event: Event,
    /// With which block, counted from 0 through all rounds.
    pub block: usize,
    /// Its size.
    pub bytes: u64,
    /// Bytes live now, as the load counts them.
    pub live_bytes: u64,
}

/// What a step does to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// It was allocated.
    Take,
    /// It was freed.
    Give,
}

/// Takes an arena that is used for nothing else through a load. At its end everything is freed and trimmed.
///
/// An allocation that fails ends the load, not the run: the report says so, with the figures until then.
///
/// # Errors
/// What the pool says to anything but an allocation; what `observer` says. Everything that can be freed is
/// freed also then.
pub fn run(arena: &Arena, plan: &Plan, observer: Observer<'_>) -> Result<Report, PoolError> {
    let mut running =
        Running { arena, observer, blocks: Vec::new(), steps: 0, live_bytes: 0, peak_live_bytes: 0 };
    let report = running.measure(plan);
    let cleared = running.clear();
    let report = report?;
    cleared.map(|()| report)
}

struct Running<'a> {
    arena: &'a Arena,
    observer: Observer<'a>,
    /// All that were ever taken; none in the place of one that was given.
    blocks: Vec<Option<(BlockId, u64)>>,
    steps: usize,
    live_bytes: u64,
    peak_live_bytes: u64,
}

impl Running<'_> {
    fn measure(&mut self, plan: &Plan) -> Result<Report, PoolError> {
        let steps = plan.steps();
        let (mut failed, mut created_bytes) = (None, Vec::new());
        let mut before_bytes = self.arena.stats()?.created_bytes;
        let started = Instant::now();
        for _ in 0..plan.rounds.get() {
            failed = self.round(&steps)?;
            let until_now_bytes = self.arena.stats()?.created_bytes;
            created_bytes.push(until_now_bytes - before_bytes);
            before_bytes = until_now_bytes;
            if failed.is_some() {
                break;
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        let peak_mapped_bytes = self.arena.stats()?.peak_mapped_bytes;
        self.arena.trim()?;
        let held_bytes = self.arena.stats()?.mapped_bytes;
        Ok(Report {
            load: plan.load,
            seed: plan.seed,
            rounds: plan.rounds.get(),
            limit_bytes: self.arena.limit_bytes(),
            failed: failed.map(|error| chain(&error)),
            peak_live_bytes: self.peak_live_bytes,
            peak_mapped_bytes,
            peak_ratio: ratio(peak_mapped_bytes, self.peak_live_bytes),
            live_bytes: self.live_bytes,
            held_bytes,
            held_ratio: ratio(held_bytes, self.live_bytes),
            created_bytes,
            seconds,
        })
    }

    /// One round, and the allocation that ended it, if one did.
    fn round(&mut self, steps: &[Step]) -> Result<Option<PoolError>, PoolError> {
        (0..self.blocks.len()).try_for_each(|block| self.give(block))?;
        let first = self.blocks.len();
        for step in steps {
            match *step {
                Step::Take { bytes } => match self.arena.alloc(&AllocRequest::new(bytes, Tag::weights())) {
                    Ok(block) => self.taken(block.id, bytes)?,
                    Err(error) => return Ok(Some(error)),
                },
                Step::Give { block } => self.give(first + block)?,
            }
        }
        Ok(None)
    }

    fn taken(&mut self, id: BlockId, bytes: u64) -> Result<(), PoolError> {
        self.blocks.push(Some((id, bytes)));
        self.live_bytes += bytes;
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes);
        self.observe(Event::Take, self.blocks.len() - 1, bytes)
    }

    fn give(&mut self, block: usize) -> Result<(), PoolError> {
        let Some((id, bytes)) = self.blocks[block] else { return Ok(()) };
        self.arena.free(id)?;
        self.blocks[block] = None;
        self.live_bytes -= bytes;
        self.observe(Event::Give, block, bytes)
    }

    fn observe(&mut self, event: Event, block: usize, bytes: u64) -> Result<(), PoolError> {
        self.steps += 1;
        (self.observer)(&Moment { step: self.steps, event, block, bytes, live_bytes: self.live_bytes })
    }

    /// Frees everything unobserved and gives its memory back.
    fn clear(&self) -> Result<(), PoolError> {
        let freed = self.blocks.iter().flatten().map(|(id, _)| self.arena.free(*id));
        // Every block is tried, whatever became of the one before.
        let freed = freed.fold(Ok(()), Result::and);
        freed.and(self.arena.trim().map(drop))
    }
}
