//! One cycle of sleep and wake, as everything here runs it that measures cycles.
//!
//! [`run`] puts all tags to sleep and wakes them, both by the clock, has brought back what the wake left undefined, and
//! has the bytes held against what they were before. What the bytes are, only their [`Content`] knows.

use std::thread;
use std::time::Duration;

use poorwill::{
    Arena, DriverError, Level, PoolError, PoolStats, SleepReport, SleepRequest, Verify, WakeReport,
    WakeRequest,
};

use crate::figures::timed;

/// What an arena holds, as whoever put it there knows it.
pub(crate) trait Content {
    /// Why it cannot be restored, or compared.
    type Error: From<PoolError> + From<DriverError>;

    /// A sleep begins.
    fn sleeps(&self) {}

    /// A wake begins with this request, which may be told to tell how far it is.
    fn wakes(&self, request: WakeRequest) -> WakeRequest {
        request
    }

    /// Brings back what a wake has left undefined.
    fn restore(&self) -> Result<(), Self::Error>;

    /// What is not as it was, if anything is.
    fn mismatch(&mut self) -> Result<Option<String>, Self::Error>;
}

/// How a cycle goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct How {
    /// Of the sleep.
    pub(crate) level: Level,
    /// Which granules the wake verifies; `None` is the default of the device.
    pub(crate) verify: Option<Verify>,
    /// How long nothing is done between the two.
    pub(crate) rest: Duration,
    /// Whether the bytes are compared afterwards.
    pub(crate) is_compared: bool,
}

/// What came of a cycle.
#[derive(Debug)]
pub(crate) struct Cycle {
    pub(crate) before: Moment,
    pub(crate) sleep_s: f64,
    pub(crate) sleep: SleepReport,
    pub(crate) asleep: Moment,
    pub(crate) wake_s: f64,
    pub(crate) wake: WakeReport,
    /// How long restoring took, if anything was undefined.
    pub(crate) restore_s: Option<f64>,
    pub(crate) awake: Moment,
    /// What was not as before. None where nothing was found, or nobody looked.
    pub(crate) mismatch: Option<String>,
}

/// What the device has free and the pool holds, at one moment.
#[derive(Debug)]
pub(crate) struct Moment {
    pub(crate) free_bytes: u64,
    pub(crate) stats: PoolStats,
}

impl Moment {
    pub(crate) fn of<E: From<PoolError> + From<DriverError>>(arena: &Arena) -> Result<Self, E> {
        Ok(Self { free_bytes: arena.driver().memory_info()?.free_bytes, stats: arena.stats()? })
    }
}

/// Takes everything that an arena holds through a cycle.
pub(crate) fn run<C: Content>(arena: &Arena, content: &mut C, how: How) -> Result<Cycle, C::Error> {
    let before = Moment::of::<C::Error>(arena)?;
    content.sleeps();
    let (sleep_s, sleep) = timed(|| arena.sleep(&SleepRequest::all(how.level)))?;
    let asleep = Moment::of::<C::Error>(arena)?;
    if !how.rest.is_zero() {
        thread::sleep(how.rest);
    }
    let request = content.wakes(WakeRequest::all().verifying(how.verify));
    let (wake_s, wake) = timed(|| arena.wake(&request))?;
    let restore_s = if wake.undefined_tags.is_empty() { None } else { Some(timed(|| content.restore())?.0) };
    let awake = Moment::of::<C::Error>(arena)?;
    let mismatch = if how.is_compared { content.mismatch()? } else { None };
    Ok(Cycle { before, sleep_s, sleep, asleep, wake_s, wake, restore_s, awake, mismatch })
}
