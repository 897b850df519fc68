//! Runs a load in an arena.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Instant;

use poorwill::{AllocRequest, Arena, BlockId, PoolError, Tag, chain};

use super::load::{Load, Step};
use super::report::ChurnReport;
use crate::figures::ratio;

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChurnPlan {
    /// The load.
    pub load: Load,
    /// Seed of its sizes.
    pub seed: u64,
    /// A later round first frees everything, without a trim.
    pub rounds: NonZeroU32,
    /// Every size is divided by this.
    pub divisor: NonZeroU64,
}

impl ChurnPlan {
    /// One round of `load` with seed 0, at full size.
    #[must_use]
    pub fn new(load: Load) -> Self {
        Self { load, seed: 0, rounds: NonZeroU32::MIN, divisor: NonZeroU64::MIN }
    }

    /// One round.
    #[must_use]
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = self.load.steps(self.seed);
        for step in &mut steps {
            if let Step::Alloc { bytes } = step {
                *bytes = (*bytes / self.divisor).max(1);
            }
        }
        steps
    }
}

/// Called after each step; its error ends the run.
pub type ChurnObserver<'a> = &'a mut dyn FnMut(&ChurnProgress) -> Result<(), PoolError>;

/// A finished step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChurnProgress {
    /// Through all rounds; a free between rounds is a step, too.
    pub step: usize,
    /// What it did.
    pub event: ChurnEvent,
    /// Counted through all rounds.
    pub block: usize,
    /// Size of the block.
    pub bytes: u64,
    /// Live bytes after the step.
    pub live_bytes: u64,
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChurnEvent {
    /// Allocated a block.
    Alloc,
    /// Freed a block.
    Free,
}

/// Runs a load in an otherwise unused arena, then frees and trims everything.
///
/// A failed allocation ends the load, and is reported.
///
/// # Errors
/// Other failures of the pool, and errors of `observer`; everything is freed where possible.
pub fn run(arena: &Arena, plan: &ChurnPlan, observer: ChurnObserver<'_>) -> Result<ChurnReport, PoolError> {
    let mut run =
        ChurnRun { arena, observer, blocks: Vec::new(), steps: 0, live_bytes: 0, peak_live_bytes: 0 };
    let report = run.measure(plan);
    let cleared = run.clear();
    let report = report?;
    cleared.map(|()| report)
}

struct ChurnRun<'a> {
    arena: &'a Arena,
    observer: ChurnObserver<'a>,
    /// All that were allocated; `None` after a free.
    blocks: Vec<Option<(BlockId, u64)>>,
    steps: usize,
    live_bytes: u64,
    peak_live_bytes: u64,
}

impl ChurnRun<'_> {
    fn measure(&mut self, plan: &ChurnPlan) -> Result<ChurnReport, PoolError> {
        let steps = plan.steps();
        let (mut failed, mut created_bytes) = (None, Vec::new());
        let mut before_bytes = self.arena.stats()?.created_bytes;
        let started = Instant::now();
        for _ in 0..plan.rounds.get() {
            failed = self.round(&steps)?;
            let now_bytes = self.arena.stats()?.created_bytes;
            created_bytes.push(now_bytes - before_bytes);
            before_bytes = now_bytes;
            if failed.is_some() {
                break;
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        let peak_mapped_bytes = self.arena.stats()?.peak_mapped_bytes;
        self.arena.trim()?;
        let held_bytes = self.arena.stats()?.mapped_bytes;
        Ok(ChurnReport {
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

    /// Returns the failed allocation that ended the round.
    fn round(&mut self, steps: &[Step]) -> Result<Option<PoolError>, PoolError> {
        (0..self.blocks.len()).try_for_each(|block| self.free(block))?;
        let first = self.blocks.len();
        for step in steps {
            match *step {
                Step::Alloc { bytes } => match self.arena.alloc(&AllocRequest::new(bytes, Tag::weights())) {
                    Ok(block) => self.allocated(block.id, bytes)?,
                    Err(error) => return Ok(Some(error)),
                },
                Step::Free { block } => self.free(first + block)?,
            }
        }
        Ok(None)
    }

    fn allocated(&mut self, id: BlockId, bytes: u64) -> Result<(), PoolError> {
        self.blocks.push(Some((id, bytes)));
        self.live_bytes += bytes;
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes);
        self.observe(ChurnEvent::Alloc, self.blocks.len() - 1, bytes)
    }

    fn free(&mut self, block: usize) -> Result<(), PoolError> {
        let Some((id, bytes)) = self.blocks[block] else { return Ok(()) };
        self.arena.free(id)?;
        self.blocks[block] = None;
        self.live_bytes -= bytes;
        self.observe(ChurnEvent::Free, block, bytes)
    }

    fn observe(&mut self, event: ChurnEvent, block: usize, bytes: u64) -> Result<(), PoolError> {
        self.steps += 1;
        (self.observer)(&ChurnProgress { step: self.steps, event, block, bytes, live_bytes: self.live_bytes })
    }

    fn clear(&self) -> Result<(), PoolError> {
        let freed = self.blocks.iter().flatten().map(|(id, _)| self.arena.free(*id));
        // Every block is tried, also after a failure.
        let freed = freed.fold(Ok(()), Result::and);
        freed.and(self.arena.trim().map(drop))
    }
}
