//! Buffers that are asked for together, page-locked or not: all of them are taken, or none, and made in the background.

use std::sync::Arc;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{ByteSize, DriverErrorKind, HostBuffer, Op, Pending};

use super::arena::{Extent, HostArena, Placed};
use super::budget::Lack;
use super::{BufferPin, SURPLUS_BYTES};
use crate::ledger::of;

/// Of less than this the machine is not asked at the call: it is asked before each slab is made in any case.
const ASKED_FIRST_BYTES: u64 = SURPLUS_BYTES / 16;

/// A buffer that is being made, and why it is not page-locked if it was to be.
pub(crate) type Made = Pending<(HostBuffer, Option<String>)>;

impl HostArena {
    /// Memory of each of these sizes, page-locked or not, made meanwhile by other threads.
    ///
    /// What limits there are (the caller's, control groups', the machine's) is asked about all of it at the call: what
    /// is refused then has made nothing and holds nothing.
    pub(crate) fn alloc_all_as(self: &Arc<Self>, sizes: &[u64], pin: BufferPin) -> DriverResult<Vec<Made>> {
        self.owner.check(Op::HostAlloc)?;
        let placed = match self.place_all(sizes, pin != BufferPin::Never) {
            // What cannot be had page-locked may lie there of the other kind.
            Err(refused) if pin == BufferPin::Auto && self.pageable.get().is_none() => {
                let placed = self.place_all(sizes, false).map_err(|_| refused.clone());
                placed.map(|placed| (placed, Some(refused.kind.to_string())))
            }
            other => other.map(|placed| (placed, None)),
        };
        let ((extents, slabs), because) = placed?;
        self.make_in_background(slabs);
        let pending = |(extent, bytes): (Extent, &u64)| {
            let (arena, bytes, because) = (Arc::clone(self), *bytes, because.clone());
            Pending::new(move || {
                let (piece, why) = arena.as_asked(bytes, pin, extent.wait())?;
                Ok((HostBuffer::new(piece), because.or(why)))
            })
        };
        Ok(extents.into_iter().zip(sizes).map(pending).collect())
    }

    /// A place for each size, if the machine has as much besides.
    fn place_all(self: &Arc<Self>, sizes: &[u64], is_locked: bool) -> DriverResult<Placed> {
        let (extents, slabs) = self.place(sizes, is_locked).map_err(of(Op::HostAlloc))?;
        let bytes: u64 = slabs.iter().map(|slab| slab.bytes).sum();
        if bytes < ASKED_FIRST_BYTES {
            return Ok((extents, slabs));
        }
        let check = || self.budget.check_machine(|| self.books().unmade, true);
        let checked = check().or_else(|lack| {
            let is_worth_it = self.would_help(&lack) && self.give_unused_back(u64::MAX);
            if is_worth_it { check() } else { Err(lack) }
        });
        match checked {
            Ok(()) => Ok((extents, slabs)),
            Err(Lack { reason, .. }) => {
                drop(extents);
                let held = ByteSize(self.books().held);
                let asked_bytes = sizes.iter().sum();
                let reason = format!("{held} held before; {reason}");
                Err(of(Op::HostAlloc)(DriverErrorKind::OutOfHostMemory { asked_bytes, reason }))
            }
        }
    }
}
