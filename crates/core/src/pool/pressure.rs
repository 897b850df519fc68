//! Making room: what is tried, by who needs memory and finds too little, before it is refused.

use super::error::Result;
use super::events::Waited;
use super::physical::PhysicalMemory;
use super::shared::Shared;

/// What has been tried to make room, by who needs some.
#[derive(Debug, Default)]
pub(super) struct Pressure {
    reclaimed: bool,
    joined: bool,
    seen: u64,
}

impl Pressure {
    /// Notes what is known, before looking for memory.
    pub(super) fn look(&mut self, shared: &Shared) {
        self.seen = shared.state.lock_anyway().heap.clocks().news();
    }

    /// The device is full: gives back what is idle, once. Returns whether that was anything.
    pub(super) fn reclaim(&mut self, shared: &Shared, memory: &mut PhysicalMemory) -> bool {
        !std::mem::replace(&mut self.reclaimed, true) && shared.reclaim(memory, u64::MAX).0 > 0
    }

    /// Waits, with nothing held, for anything that may give memory back. Returns false when there is nothing
    /// left that could.
    pub(super) fn relieve(&mut self, shared: &Shared) -> Result<bool> {
        let state = shared.open_state()?;
        if state.heap.is_copying_freed() || state.tags.iter().any(|(_, entry)| entry.falls_asleep()) {
            // Its end rings; what others free meanwhile, and what passes, does not.
            drop(shared.wait_briefly(state)?);
            *self = Self::default();
            return Ok(true);
        }
        drop(state);
        if shared.wait_for_event(self.seen)? == Waited::News {
            *self = Self::default();
            return Ok(true);
        }
        self.reclaimed = false;
        if !std::mem::replace(&mut self.joined, true) {
            shared.open_state()?.heap.join_lanes();
            return Ok(true);
        }
        Ok(false)
    }
}
