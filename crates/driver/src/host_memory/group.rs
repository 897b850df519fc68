//! Buffers that are asked for together, page-locked or not: all of them are taken, or none, and made in the background.

use std::sync::Arc;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{ByteSize, DriverErrorKind, HostBuffer, Op, Pending};

use super::BufferPin;
use super::arena::{Extent, HostArena};
use crate::ledger::of;

/// A buffer that is being made; with it comes why it is not page-locked, if it was to be where possible and is not.
pub type BufferMade = Pending<(HostBuffer, Option<String>)>;

impl HostArena {
    /// Memory of each of these sizes, page-locked or not, made meanwhile by other threads.
    ///
    /// The caller's limit and the control groups are asked about all of it at the call: what they refuse was not begun.
    /// Where the machine does not have as much now, it may have memory that grows as it is touched: then all is made
    /// before this returns, or nothing stays of it.
    pub(crate) fn alloc_all_as(
        self: &Arc<Self>,
        sizes: &[u64],
        pin: BufferPin,
    ) -> DriverResult<Vec<BufferMade>> {
        self.owner.check(Op::HostAlloc)?;
        let (extents, because) = match self.take_all(sizes, pin != BufferPin::Never) {
            // What cannot be had page-locked may lie there of the other kind.
            Err(refused) if pin == BufferPin::Auto && self.pageable.get().is_none() => {
                match self.take_all(sizes, false) {
                    Ok(extents) => (extents, Some(refused.kind.to_string())),
                    Err(_) => return Err(refused),
                }
            }
            other => (other?, None),
        };
        let pending = |(extent, bytes): (Extent, &u64)| {
            let (arena, bytes, because) = (Arc::clone(self), *bytes, because.clone());
            Pending::new(move || {
                let (piece, why) = arena.as_asked(bytes, pin, extent.wait())?;
                Ok((HostBuffer::new(piece), because.or(why)))
            })
        };
        Ok(extents.into_iter().zip(sizes).map(pending).collect())
    }

    /// A place for each size, in slabs that are there, or are being made and will be, as far as can be told.
    fn take_all(self: &Arc<Self>, sizes: &[u64], is_locked: bool) -> DriverResult<Vec<Extent>> {
        let (extents, slabs) = self.place(sizes, is_locked).map_err(of(Op::HostAlloc))?;
        let is_in_doubt =
            !slabs.is_empty() && self.budget.check_machine(|| self.books().unmade, false).is_err();
        self.make_in_background(slabs.clone());
        if !is_in_doubt {
            return Ok(extents);
        }
        let Some(reason) = slabs.iter().find_map(|slab| slab.wait().err()) else { return Ok(extents) };
        drop(extents);
        self.trim();
        let held = ByteSize(self.books().held);
        let asked_bytes = sizes.iter().sum();
        let reason = format!("{held} held before; {reason}");
        Err(of(Op::HostAlloc)(DriverErrorKind::OutOfHostMemory { asked_bytes, reason }))
    }
}
