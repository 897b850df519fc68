//! Reading and writing blocks: copies that the pool queues for its caller.
//!
//! A tag does not fall asleep while a copy of its bytes is being queued; whoever does that, or brings memory in for
//! a new block, is a [`Guest`] of the tag.

use std::sync::Arc;

use super::error::PoolError;
use super::handle::BlockId;
use super::state::TagKey;
use super::{Pool, Result, Shared};
use crate::driver::{CopyPart, DeviceRange, HostBuffer, Pending, StreamId};

impl Pool {
    /// Queues a copy of `bytes` of `src` (from `src_offset` on) into a block at `offset`. It is a use of the block
    /// on `stream`, as [`Pool::record_use`] says.
    ///
    /// # Errors
    /// `StaleBlock`, `OutOfBlock`, `Asleep`; what the driver says.
    pub fn write(
        &self,
        stream: StreamId,
        block: BlockId,
        offset: u64,
        src: Arc<HostBuffer>,
        src_offset: u64,
        bytes: u64,
    ) -> Result<Pending<()>> {
        let access = Access { op: "write", stream, block, offset, bytes, writing: true };
        let (device, _guest) = self.shared.reach(&access)?;
        let parts = [CopyPart { device, host_offset: src_offset }];
        let copy = self.shared.driver.copy_to_device(stream, src, &parts);
        copy.map_err(|source| PoolError::Driver { op: "write", source })
    }

    /// Queues a copy of `bytes` of a block, from `offset` on, into `dst` at `dst_offset`. It is a use of the block on
    /// `stream`, as [`Pool::record_use`] says.
    ///
    /// # Errors
    /// `StaleBlock`, `OutOfBlock`, `Asleep`; `Undefined` when the bytes were dropped and not restored, `Lost` when
    /// some were lost with their backup; what the driver says.
    pub fn read(
        &self,
        stream: StreamId,
        block: BlockId,
        offset: u64,
        dst: HostBuffer,
        dst_offset: u64,
        bytes: u64,
    ) -> Result<Pending<HostBuffer>> {
        let access = Access { op: "read", stream, block, offset, bytes, writing: false };
        let (device, _guest) = self.shared.reach(&access)?;
        let parts = [CopyPart { device, host_offset: dst_offset }];
        let copy = self.shared.driver.copy_to_host(stream, dst, &parts);
        copy.map_err(|source| PoolError::Driver { op: "read", source })
    }
}

/// A part of a block that is to be read or written.
#[derive(Debug, Clone, Copy)]
struct Access {
    op: &'static str,
    stream: StreamId,
    block: BlockId,
    offset: u64,
    bytes: u64,
    writing: bool,
}

/// Keeps a tag from falling asleep while a copy is being queued.
#[derive(Debug)]
pub(super) struct Guest<'a> {
    pub(super) shared: &'a Shared,
    pub(super) tag: TagKey,
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        self.shared.state.lock_anyway().tag_mut(self.tag).gate.leave();
        self.shared.state.ring();
    }
}

impl Shared {
    /// The device range of a part of a block whose bytes are there, and stay there while the guest is.
    fn reach(&self, access: &Access) -> Result<(DeviceRange, Guest<'_>)> {
        let Access { op, stream, block, offset, bytes, writing } = *access;
        let mut state = self.open_state()?;
        let (entry, tag) = loop {
            let entry = state.live_block(op, block)?;
            let tag = state.lane(entry.lane).tag;
            if !state.tag(tag).gate.is_closed() {
                break (entry, tag);
            }
            state = self.wait(state)?;
        };
        state.check_awake(op, tag)?;
        let whole = DeviceRange::new(entry.addr, entry.requested_bytes());
        let outside = PoolError::OutOfBlock { op, offset, bytes, block, block_bytes: whole.bytes };
        let part = whole.slice(offset, bytes).ok_or(outside)?;
        if !writing {
            state.check_defined(op, tag, part)?;
        }
        state.record_use(block, entry.lane, stream);
        state.tag_mut(tag).gate.enter();
        Ok((part, Guest { shared: self, tag }))
    }
}
