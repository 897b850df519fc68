//! The streams of callers: unknown ones are refused, and ended ones forgotten.
//!
//! Work on a stream unknown to the driver could not be awaited, so its memory would be moved under it. A
//! stream that has ended has no work left.

use crate::driver::{DriverErrorKind, StreamId};
use crate::pool::shared::Shared;
use crate::pool::state::PoolState;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::handle::AllocRequest;
use crate::pool::tools::keys::{ListKey, TagKey};

impl Shared {
    /// To be called without locks.
    pub(in crate::pool) fn check_stream(&self, op: &'static str, stream: StreamId) -> Result<()> {
        if stream == StreamId::DEFAULT {
            return Ok(());
        }
        self.driver().check_stream(stream).map_err(|source| match source.kind {
            DriverErrorKind::UnknownHandle { .. } => PoolError::UnknownStream { op, stream },
            DriverErrorKind::WrongProcess { .. } => PoolError::WrongProcess(source),
            _ => PoolError::Driver { op, source },
        })
    }

    /// Whether work on a stream may still be under way.
    pub(in crate::pool) fn may_exist(&self, stream: StreamId) -> bool {
        let unknown = |kind| matches!(kind, DriverErrorKind::UnknownHandle { .. });
        !self.driver().check_stream(stream).is_err_and(|error| unknown(error.kind))
    }

    /// Creates the list if need be.
    #[inline]
    pub(in crate::pool) fn list_of(
        &self,
        state: &mut PoolState,
        tag: TagKey,
        request: &AllocRequest,
    ) -> Result<ListKey> {
        match state.heap_mut().find_list(tag, request.stream) {
            Some(list) => Ok(list),
            None => state.make_list(tag, request, |stream| self.may_exist(stream)),
        }
    }
}
