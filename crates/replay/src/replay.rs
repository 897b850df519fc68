//! Replays a trace through an allocator.

use ::poorwill::{OpenError, PoolError};

use crate::allocators::{self, Allocator, Segment, Setup};
use crate::card::Card;
use crate::trace::{Step, Trace};

/// The phase in which weights are loaded, as vLLM's plugin and the cases name it. Others are for people alone.
const LOAD: &str = "load";

/// What an allocator did for a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The allocator.
    pub setup: Setup,
    /// Its card.
    pub card: Card,
    /// What it had mapped after each step that was replayed.
    pub mapped_bytes: Vec<u64>,
    /// Where it had mapped most.
    pub peak: Instant,
    /// What it has mapped at the end, when whatever can go back has.
    pub held_bytes: u64,
    /// What is live then.
    pub live_bytes: u64,
    /// Where it ended, if memory lacked.
    pub failure: Option<Failure>,
}

impl Run {
    /// Whether all of the trace fits.
    #[must_use]
    pub const fn fits(&self) -> bool {
        self.failure.is_none()
    }
}

/// A step, with what was mapped and live after it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Instant {
    /// The step.
    pub step: usize,
    /// Mapped memory.
    pub mapped_bytes: u64,
    /// What of it had been asked for.
    pub live_bytes: u64,
}

/// A block that could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Its step.
    pub step: usize,
    /// Its size.
    pub asked_bytes: u64,
    /// What was mapped and live then.
    pub at: Instant,
}

/// The addresses of an allocator after a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    /// The step.
    pub step: usize,
    /// By address.
    pub segments: Vec<Segment>,
}

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// It does not open on a card of this size.
    #[error("Poorwill's pool cannot be opened for the replay")]
    Open(#[source] Box<OpenError>),
    /// Poorwill's pool failed otherwise than by a lack of memory.
    #[error("step {step}: Poorwill's pool failed in the replay")]
    Pool {
        /// The step.
        step: usize,
        /// The cause.
        #[source]
        source: Box<PoolError>,
    },
}

impl ReplayError {
    fn pool(step: usize, source: PoolError) -> Self {
        Self::Pool { step, source: Box::new(source) }
    }
}

impl From<OpenError> for ReplayError {
    fn from(error: OpenError) -> Self {
        Self::Open(Box::new(error))
    }
}

/// Replays a trace on an empty card, until it ends or memory lacks.
///
/// # Errors
/// Only of Poorwill's pool, where addresses lack: they are 4 PiB.
pub fn replay(trace: &Trace, setup: &Setup, card: Card) -> Result<Run, ReplayError> {
    Replayer::new(trace, allocators::open(setup, card, trace)?).run(setup, card)
}

/// The addresses after these steps, which rise, as far as the trace fits.
///
/// # Errors
/// As of [`replay`].
pub fn moments(
    trace: &Trace,
    setup: &Setup,
    card: Card,
    steps: &[usize],
) -> Result<Vec<Moment>, ReplayError> {
    Replayer::new(trace, allocators::open(setup, card, trace)?).moments(steps)
}

/// A trace on its way through an allocator.
pub(crate) struct Replayer<'t> {
    trace: &'t Trace,
    allocator: Box<dyn Allocator>,
    step: usize,
    /// Of `trace.phases`, those that have begun.
    begun: usize,
    live_bytes: u64,
}

impl<'t> Replayer<'t> {
    /// The allocator is empty.
    pub(crate) fn new(trace: &'t Trace, allocator: Box<dyn Allocator>) -> Self {
        Self { trace, allocator, step: 0, begun: 0, live_bytes: 0 }
    }

    /// All of [`replay`](fn@replay).
    pub(crate) fn run(mut self, setup: &Setup, card: Card) -> Result<Run, ReplayError> {
        let mut run = Run {
            setup: *setup,
            card,
            mapped_bytes: Vec::with_capacity(self.trace.steps.len()),
            peak: Instant::default(),
            held_bytes: 0,
            live_bytes: 0,
            failure: None,
        };
        while let Some(outcome) = self.next()? {
            match outcome {
                Ok(now) => {
                    run.mapped_bytes.push(now.mapped_bytes);
                    if now.mapped_bytes > run.peak.mapped_bytes {
                        run.peak = now;
                    }
                }
                Err(failure) => {
                    run.failure = Some(failure);
                    break;
                }
            }
        }
        (run.held_bytes, run.live_bytes) = (self.trimmed()?, self.live_bytes);
        Ok(run)
    }

    /// All of [`moments`].
    pub(crate) fn moments(mut self, steps: &[usize]) -> Result<Vec<Moment>, ReplayError> {
        let mut found = Vec::with_capacity(steps.len());
        let mut wanted = steps.iter().copied().peekable();
        while let Some(last) = wanted.peek().copied() {
            let step = self.step;
            match self.next()? {
                Some(Ok(_)) if step == last => {
                    let segments = self.allocator.layout();
                    found.push(Moment {
                        step,
                        segments: segments.map_err(|error| ReplayError::pool(step, error))?,
                    });
                    while wanted.next_if(|next| *next <= step).is_some() {}
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => break,
            }
        }
        Ok(found)
    }

    /// Carries out the next step; `None` behind the last one.
    fn next(&mut self) -> Result<Option<Result<Instant, Failure>>, ReplayError> {
        let Some(step) = self.trace.steps.get(self.step).copied() else { return Ok(None) };
        let at = self.step;
        while self.trace.phases.get(self.begun).is_some_and(|phase| phase.from <= at) {
            let before = self.begun.checked_sub(1).map(|before| &*self.trace.phases[before].name);
            if before == Some(LOAD) {
                self.allocator.load_ends().map_err(|error| ReplayError::pool(at, error))?;
            }
            self.begun += 1;
        }
        let outcome = match step {
            Step::Alloc(number) => {
                let block = self.trace.block(number);
                let has_memory =
                    self.allocator.alloc(number, block).map_err(|error| ReplayError::pool(at, error))?;
                if !has_memory {
                    let now = self.now(at)?;
                    return Ok(Some(Err(Failure { step: at, asked_bytes: block.bytes, at: now })));
                }
                self.live_bytes += block.bytes;
                Ok(())
            }
            Step::Free(number) => {
                self.live_bytes -= self.trace.block(number).bytes;
                self.allocator.free(number)
            }
            Step::EmptyCache => self.allocator.empty_cache(),
        };
        outcome.map_err(|error| ReplayError::pool(at, error))?;
        self.step += 1;
        self.now(at).map(Ok).map(Some)
    }

    fn trimmed(&mut self) -> Result<u64, ReplayError> {
        let (step, allocator) = (self.step, &mut self.allocator);
        let trimmed = allocator.load_ends().and_then(|()| allocator.empty_cache());
        trimmed.map_err(|error| ReplayError::pool(step, error))?;
        self.mapped(step)
    }

    fn now(&self, step: usize) -> Result<Instant, ReplayError> {
        Ok(Instant { step, mapped_bytes: self.mapped(step)?, live_bytes: self.live_bytes })
    }

    fn mapped(&self, step: usize) -> Result<u64, ReplayError> {
        self.allocator.mapped_bytes().map_err(|error| ReplayError::pool(step, error))
    }
}
