//! Requests for several buffers: all or none, page-locked or not, made in the background.

use std::sync::Arc;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{ByteSize, DriverErrorKind, HostBuffer, Op, Pending};

use super::BufferPin;
use super::arena::{HostArena, SlabExtent};
use crate::ledger::of;

/// A buffer in the making, with the reason why it is not page-locked, if it should be.
pub type BufferMade = Pending<(HostBuffer, Option<String>)>;

impl HostArena {
    /// The caller's limit and the control groups are checked for all sizes at the call. If they refuse,
    /// nothing was begun. A machine with too little memory now may grow as memory is touched: then all of it
    /// is made before this returns, or nothing remains.
    pub(crate) fn alloc_all_as(
        self: &Arc<Self>,
        sizes: &[u64],
        pin: BufferPin,
    ) -> DriverResult<Vec<BufferMade>> {
        self.owner.check(Op::HostAlloc)?;
        let (extents, because) = match self.take_all(sizes, pin != BufferPin::Never) {
            // Pageable memory may be available instead.
            Err(refused) if pin == BufferPin::Auto && self.pageable.get().is_none() => {
                match self.take_all(sizes, false) {
                    Ok(extents) => (extents, Some(refused.kind.to_string())),
                    Err(_) => return Err(refused),
                }
            }
            other => (other?, None),
        };
        let pending = |(extent, bytes): (SlabExtent, &u64)| {
            let (arena, bytes, because) = (Arc::clone(self), *bytes, because.clone());
            Pending::new(move || {
                let (buffer, why) = arena.resolve_pin(bytes, pin, extent.wait())?;
                Ok((HostBuffer::new(buffer), because.or(why)))
            })
        };
        Ok(extents.into_iter().zip(sizes).map(pending).collect())
    }

    /// Slabs that exist, or will, as far as can be predicted.
    fn take_all(self: &Arc<Self>, sizes: &[u64], is_locked: bool) -> DriverResult<Vec<SlabExtent>> {
        let (extents, slabs) = self.assign(sizes, is_locked).map_err(of(Op::HostAlloc))?;
        let is_uncertain =
            !slabs.is_empty() && self.budget.check_machine(|| self.table().unmade_bytes, false).is_err();
        self.make_in_background(slabs.clone(), None);
        if !is_uncertain {
            return Ok(extents);
        }
        let Some(reason) = slabs.iter().find_map(|slab| slab.wait().err()) else { return Ok(extents) };
        drop(extents);
        self.trim();
        let held = ByteSize(self.table().held_bytes);
        let asked_bytes = sizes.iter().sum();
        let reason = format!("{held} held before; {reason}");
        Err(of(Op::HostAlloc)(DriverErrorKind::OutOfHostMemory { asked_bytes, reason }))
    }
}
