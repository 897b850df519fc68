//! Replays a trace through an allocator.

use ::poorwill::{OpenError, PoolError};

use crate::allocators::{self, Allocator, Segment, Setup};
use crate::card::Card;
use crate::claim;
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
    /// How often PyTorch gave back all that was free, and tried again; `None` for other allocators.
    pub retries: Option<u64>,
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

/// A block or claims that could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Its step.
    pub step: usize,
    /// Its size.
    pub asked_bytes: u64,
    /// Whether these are the claims from this step on.
    pub is_claim: bool,
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
    Replayer::new(trace, allocators::open(setup, card, trace)?, card).run(setup, card)
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
    Replayer::new(trace, allocators::open(setup, card, trace)?, card).moments(steps)
}

/// A trace on its way through an allocator.
pub(crate) struct Replayer<'t> {
    trace: &'t Trace,
    allocator: Box<dyn Allocator>,
    step: usize,
    /// Of `trace.phases`, those that have begun.
    begun: usize,
    live_bytes: u64,
    usable_bytes: u64,
    /// Sums of claims that are still to come, the next one last.
    claims: Vec<(usize, u64)>,
    claimed_bytes: u64,
}

impl<'t> Replayer<'t> {
    /// The allocator is empty.
    pub(crate) fn new(trace: &'t Trace, allocator: Box<dyn Allocator>, card: Card) -> Self {
        let usable_bytes = card.usable_bytes();
        let mut claims = claim::sums(&trace.claims);
        claims.reverse();
        Self { trace, allocator, step: 0, begun: 0, live_bytes: 0, usable_bytes, claims, claimed_bytes: 0 }
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
            retries: None,
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
        run.retries = self.allocator.retries();
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
        let at = self.step;
        self.begin_phases()?;
        if let Some(failure) = self.claim()? {
            return Ok(Some(Err(failure)));
        }
        let Some(step) = self.trace.steps.get(at).copied() else { return Ok(None) };
        let outcome = match step {
            Step::Alloc(number) => {
                let block = self.trace.block(number);
                let has_memory =
                    self.allocator.alloc(number, block).map_err(|error| ReplayError::pool(at, error))?;
                if !has_memory {
                    let now = self.now(at)?;
                    let asked_bytes = block.bytes;
                    return Ok(Some(Err(Failure { step: at, asked_bytes, is_claim: false, at: now })));
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

    fn begin_phases(&mut self) -> Result<(), ReplayError> {
        let at = self.step;
        while self.trace.phases.get(self.begun).is_some_and(|phase| phase.from <= at) {
            let before = self.begun.checked_sub(1).map(|before| &*self.trace.phases[before].name);
            if before == Some(LOAD) {
                self.allocator.load_ends().map_err(|error| ReplayError::pool(at, error))?;
            }
            self.begun += 1;
        }
        Ok(())
    }

    /// Makes the claims of this step, if the allocator leaves enough for them.
    fn claim(&mut self) -> Result<Option<Failure>, ReplayError> {
        let (at, mut claimed) = (self.step, None);
        while let Some((_, bytes)) = self.claims.pop_if(|(from, _)| *from <= at) {
            claimed = Some(bytes);
        }
        let Some(claimed_bytes) = claimed else { return Ok(None) };
        let asked_bytes = claimed_bytes.saturating_sub(self.claimed_bytes);
        self.claimed_bytes = claimed_bytes;
        let left = self.usable_bytes.checked_sub(claimed_bytes);
        let limited = self.allocator.limit(left.unwrap_or(0));
        let fits = limited.map_err(|error| ReplayError::pool(at, error))? && left.is_some();
        let failure = |at: Instant| Failure { step: at.step, asked_bytes, is_claim: true, at };
        if fits { Ok(None) } else { self.now(at).map(failure).map(Some) }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Claim;
    use crate::trace::{Block, TraceBuilder};

    const MIB: u64 = 1 << 20;

    /// 600 MiB live and 400 cached, which may go back, and then a claim.
    fn claimed(setup: &str, empties: bool, claim_mib: u64) -> Run {
        let mut trace = TraceBuilder::new("a");
        for (key, mib) in [(1, 600), (2, 400)] {
            trace.alloc(key, Block { bytes: mib * MIB, stream: 0, pool: 0, stack: 0 }).unwrap();
        }
        trace.free(2).unwrap();
        if empties {
            trace.empty_cache();
        }
        let graphs = Claim {
            name: "graphs".into(),
            bytes: claim_mib * MIB,
            from_step: trace.len(),
            to_step: usize::MAX,
        };
        let trace = Trace { claims: vec![graphs], ..trace.finish(None) };
        let card = Card { total_bytes: 1100 * MIB, taken_bytes: 0, budget_bytes: None };
        replay(&trace, &setup.parse().unwrap(), card).unwrap()
    }

    /// No driver asks PyTorch for what it has cached.
    #[test]
    fn nothing_goes_back_for_a_claim() {
        for setup in ["pytorch", "pytorch:expandable_segments:True", "poorwill"] {
            assert!(claimed(setup, false, 50).fits(), "{setup}");
            let run = claimed(setup, false, 380);
            let failure = run.failure.unwrap();
            assert!(failure.is_claim && failure.at.mapped_bytes >= 1000 * MIB, "{setup}: {failure:?}");
            let run = claimed(setup, true, 380);
            assert!(run.fits() && run.retries.unwrap_or(0) == 0, "{setup}: {run:?}");
        }
    }
}
