//! Graphs under capture: what the pool defers until the capture has ended.
//!
//! While a stream is being captured, its queued work has not run, and an event recorded there says nothing.
//! Waiting for the device breaks the capture. So the pool records, queries and awaits no event meanwhile.
//! Freed memory queues up, and an operation that must wait for the device is refused. Moving memory and
//! copying on the pool's own streams are harmless.

use std::thread;

use crate::driver::{DriverError, DriverErrorKind, StreamId};
use crate::pool::shared::Shared;
use crate::pool::tools::error::{PoolError, Result};

impl Shared {
    pub(super) fn captured(&self) -> Result<Option<StreamId>, DriverError> {
        self.driver().capturing()
    }

    /// Yes where the driver does not know.
    pub(in crate::pool) fn may_be_captured(&self) -> bool {
        !matches!(self.captured(), Ok(None))
    }

    pub(in crate::pool) fn check_no_capture(&self, op: &'static str) -> Result<()> {
        match self.captured() {
            Ok(None) => Ok(()),
            Ok(Some(stream)) => Err(PoolError::Capturing { op, stream }),
            Err(source) => Err(PoolError::Driver { op, source }),
        }
    }

    /// The error for missing memory, if a capture keeps freed memory from being reused.
    pub(super) fn held_by_capture(&self, op: &str, needed_bytes: u64) -> Option<PoolError> {
        let state = self.lock_state();
        let queued_up = state.heap().clocks().any_pending() || state.heap().is_waiting();
        drop(state);
        let stream = self.captured().ok().flatten().filter(|_| queued_up)?;
        Some(PoolError::HeldByCapture { op: op.to_owned(), needed_bytes, usage: self.usage(), stream })
    }

    /// Waits for copies that a failed sleep or wake has left.
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

    /// Waits for the pool's own work only: work of others may never end.
    pub(in crate::pool) fn settle_own_streams(&self) -> Result<(), DriverError> {
        self.streams().all().try_for_each(|stream| self.driver().stream_synchronize(stream))?;
        self.links().streams().into_iter().try_for_each(|stream| {
            match self.driver().stream_synchronize(stream) {
                // It was destroyed meanwhile, after its work.
                Err(DriverError { kind: DriverErrorKind::UnknownHandle { .. }, .. }) => Ok(()),
                settled => settled,
            }
        })
    }

    /// After a panic (in backup storage or a progress callback), copies may still run, and nothing may be
    /// unmapped under them.
    pub(in crate::pool) fn settle_after_panic(&self) {
        if thread::panicking() {
            // A device that does not answer has nothing to save.
            let _ = self.settle_copies();
        }
    }
}

pub(in crate::pool) fn refused_by_capture(op: &'static str, error: &DriverError) -> Option<PoolError> {
    match error.kind {
        DriverErrorKind::Capturing { stream } => Some(PoolError::Capturing { op, stream }),
        _ => None,
    }
}

pub(super) fn is_captured(error: &DriverError) -> bool {
    matches!(error.kind, DriverErrorKind::Capturing { .. })
}
