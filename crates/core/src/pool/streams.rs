//! The streams of callers: one that does not exist is refused, and one that is gone is forgotten.
//!
//! What is queued on a stream that the driver does not know could not be waited for, so what it uses would be moved under
//! its work. A stream that was known once and is not any more has no work left.

use super::error::{PoolError, Result};
use super::handle::AllocRequest;
use super::keys::{ListKey, TagKey};
use super::shared::Shared;
use super::state::State;
use crate::driver::{DriverErrorKind, StreamId};

impl Shared {
    /// Refuses a stream that does not exist. For whoever holds nothing.
    pub(super) fn check_stream(&self, op: &'static str, stream: StreamId) -> Result<()> {
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
    pub(super) fn may_exist(&self, stream: StreamId) -> bool {
        let unknown = |kind| matches!(kind, DriverErrorKind::UnknownHandle { .. });
        !self.driver().check_stream(stream).is_err_and(|error| unknown(error.kind))
    }

    /// The list of a request whose tag is `tag`, made if need be.
    #[inline]
    pub(super) fn list_of(&self, state: &mut State, tag: TagKey, request: &AllocRequest) -> Result<ListKey> {
        match state.heap_mut().find_list(tag, request.stream) {
            Some(list) => Ok(list),
            None => state.make_list(tag, request, |stream| self.may_exist(stream)),
        }
    }
}
