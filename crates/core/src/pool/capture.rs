//! Graphs under capture: what the pool leaves exclusive until the capture has ended.
//!
//! While a stream's work is being captured, nothing that is queued there has run, an event recorded there says
//! nothing, and whoever waits for the device ends the capture with an error. So until it is over the pool records,
//! queries and awaits no event: what is freed queues up, and is caught up with afterwards. What has to wait for the
//! device is refused. Moving memory, and copies on the pool's own streams, do a capture no harm.

use std::thread;

use super::error::{PoolError, Result};
use super::shared::Shared;
use crate::driver::{DriverError, DriverErrorKind, StreamId};

impl Shared {
    /// The stream that is being captured, if any.
    pub(super) fn captured(&self) -> Result<Option<StreamId>, DriverError> {
        self.driver().capturing()
    }

    /// Whether a stream is being captured, for all that is known.
    pub(super) fn may_be_captured(&self) -> bool {
        !matches!(self.captured(), Ok(None))
    }

    /// Refuses what would wait for the device while a stream is being captured.
    pub(super) fn check_no_capture(&self, op: &'static str) -> Result<()> {
        match self.captured() {
            Ok(None) => Ok(()),
            Ok(Some(stream)) => Err(PoolError::Capturing { op, stream }),
            Err(source) => Err(PoolError::Driver { op, source }),
        }
    }

    /// The refusal of who lacks memory that may lie in what was freed, if a capture keeps that from being had.
    pub(super) fn held_by_capture(&self, op: &str, needed_bytes: u64) -> Option<PoolError> {
        let state = self.lock_state();
        let queued_up = state.heap().clocks().any_pending() || state.heap().is_waiting();
        drop(state);
        let stream = self.captured().ok().flatten().filter(|_| queued_up)?;
        Some(PoolError::HeldByCapture { op: op.to_owned(), needed_bytes, usage: self.usage(), stream })
    }

    /// Waits for the copies of a sleep or wake that nobody waits for any more.
    pub(super) fn settle_copies(&self) -> Result<(), DriverError> {
        if self.captured()?.is_none() {
            match self.driver().synchronize() {
                // A capture may have begun just now.
                Err(error) if is_captured(&error) => {}
                settled => return settled,
            }
        }
        self.settle_own_streams()
    }

    /// Waits for whatever the pool has queued itself, and for no work of others: that may never end.
    pub(super) fn settle_own_streams(&self) -> Result<(), DriverError> {
        self.streams().all().try_for_each(|stream| self.driver().stream_synchronize(stream))
    }

    /// For whoever lets go of a tag or a chunk: a panic (of a store of backups, or of who is told of progress) has left
    /// copies that nobody waits for, and nothing may be unmapped under them.
    pub(super) fn settle_after_panic(&self) {
        if thread::panicking() {
            // A device that does not answer has nothing that could be saved.
            let _ = self.settle_copies();
        }
    }
}

/// The refusal of what would wait for the device, where the driver has refused that for a capture that had just begun.
pub(super) fn refused_by_capture(op: &'static str, error: &DriverError) -> Option<PoolError> {
    match error.kind {
        DriverErrorKind::Capturing { stream } => Some(PoolError::Capturing { op, stream }),
        _ => None,
    }
}

/// Whether a call was refused because its stream is being captured.
pub(super) fn is_captured(error: &DriverError) -> bool {
    matches!(error.kind, DriverErrorKind::Capturing { .. })
}
