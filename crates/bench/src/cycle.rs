//! One timed cycle of sleep and wake of all tags.
//!
//! [`run`] restores what the wake left undefined and compares the bytes. Only the [`Content`] knows the
//! expected bytes.

use std::thread;
use std::time::Duration;

use poorwill::{
    Arena, DriverError, Level, PoolError, PoolStats, SleepReport, SleepRequest, Verify, WakeReport,
    WakeRequest,
};

use crate::figures::timed;

/// The bytes in an arena.
pub(crate) trait Content {
    /// Why it cannot be restored or compared.
    type Error: From<PoolError> + From<DriverError>;

    /// Before a sleep.
    fn before_sleep(&self) {}

    /// Between a sleep and its wake.
    fn while_asleep(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// May add a progress callback.
    fn before_wake(&self, request: WakeRequest) -> WakeRequest {
        request
    }

    /// Restores what a wake left undefined.
    fn restore(&self) -> Result<(), Self::Error>;

    fn mismatch(&mut self) -> Result<Option<String>, Self::Error>;
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct CycleOptions {
    pub(crate) level: Level,
    /// `None` is the device's default.
    pub(crate) verify: Option<Verify>,
    /// Pause between the sleep and the wake.
    pub(crate) pause: Duration,
    pub(crate) compare: bool,
}

#[derive(Debug)]
pub(crate) struct CycleOutcome {
    pub(crate) before: MemoryState,
    pub(crate) sleep_s: f64,
    pub(crate) sleep: SleepReport,
    pub(crate) asleep: MemoryState,
    pub(crate) wake_s: f64,
    pub(crate) wake: WakeReport,
    /// `None` if nothing was undefined.
    pub(crate) restore_s: Option<f64>,
    pub(crate) awake: MemoryState,
    /// `None` without a difference or comparison.
    pub(crate) mismatch: Option<String>,
}

#[derive(Debug)]
pub(crate) struct MemoryState {
    pub(crate) free_bytes: u64,
    pub(crate) stats: PoolStats,
}

impl MemoryState {
    pub(crate) fn of<E: From<PoolError> + From<DriverError>>(arena: &Arena) -> Result<Self, E> {
        Ok(Self { free_bytes: arena.driver().memory_info()?.free_bytes, stats: arena.stats()? })
    }
}

pub(crate) fn run<C: Content>(
    arena: &Arena,
    content: &mut C,
    options: CycleOptions,
) -> Result<CycleOutcome, C::Error> {
    let before = MemoryState::of::<C::Error>(arena)?;
    content.before_sleep();
    let (sleep_s, sleep) = timed(|| arena.sleep(&SleepRequest::all(options.level)))?;
    let asleep = MemoryState::of::<C::Error>(arena)?;
    if !options.pause.is_zero() {
        thread::sleep(options.pause);
    }
    content.while_asleep()?;
    let request = content.before_wake(WakeRequest::all().verifying(options.verify));
    let (wake_s, wake) = timed(|| arena.wake(&request))?;
    let restore_s = if wake.undefined_tags.is_empty() { None } else { Some(timed(|| content.restore())?.0) };
    let awake = MemoryState::of::<C::Error>(arena)?;
    let mismatch = if options.compare { content.mismatch()? } else { None };
    Ok(CycleOutcome { before, sleep_s, sleep, asleep, wake_s, wake, restore_s, awake, mismatch })
}
