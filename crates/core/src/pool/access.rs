//! Reading and writing blocks: copies that the pool queues for its caller.

use super::error::{PoolError, Result};
use super::handle::BlockId;
use super::shared::{Shared, SharedAccess};
use crate::driver::{DeviceRange, StreamId};

#[derive(Debug, Clone, Copy)]
pub(super) struct Access {
    pub(super) op: &'static str,
    pub(super) stream: StreamId,
    pub(super) block: BlockId,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) writing: bool,
}

impl Shared {
    /// The device range of a part of a block. Its bytes stay there while the returned access exists.
    pub(super) fn reach(&self, access: &Access) -> Result<(DeviceRange, SharedAccess<'_>)> {
        let Access { op, stream, block, offset, bytes, writing } = *access;
        self.check_stream(op, stream)?;
        let mut state = self.open_state()?;
        let (entry, tag) = loop {
            let (entry, tag) = state.reachable(op, block)?;
            if !state.tags().get(tag).is_taken() {
                break (entry, tag);
            }
            state = self.wait(state)?;
        };
        let whole = DeviceRange::new(entry.addr, entry.requested_bytes());
        let outside = PoolError::OutOfBlock { op, offset, bytes, block, block_bytes: whole.bytes };
        let part = whole.slice(offset, bytes).ok_or(outside)?;
        if !writing {
            state.check_defined(op, tag, part)?;
        }
        state.heap_mut().record_use(block, entry.list, stream, |other| self.may_exist(other));
        let access = SharedAccess::enter(self, &mut state, tag);
        Ok((part, access))
    }
}
