//! Reading and writing blocks: copies that the pool queues for its caller.

use crate::driver::{DeviceRange, StreamId};
use crate::pool::shared::{Shared, SharedAccess};
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::handle::BlockId;

#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Access {
    pub(in crate::pool) op: &'static str,
    pub(in crate::pool) stream: StreamId,
    pub(in crate::pool) block: BlockId,
    pub(in crate::pool) offset: u64,
    pub(in crate::pool) bytes: u64,
    pub(in crate::pool) writing: bool,
}

impl Shared {
    /// The device range of a part of a block. Its bytes stay there while the returned access exists.
    pub(in crate::pool) fn reach(&self, access: &Access) -> Result<(DeviceRange, SharedAccess<'_>)> {
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
