//! Making room: what is tried, by who needs memory and finds too little, before it is refused.

use super::deadline::Wait;
use super::error::{Awaited, Result};
use super::events::Waited;
use super::keys::TagKey;
use super::physical::PhysicalMemory;
use super::shared::Shared;
use super::state::State;

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
        self.seen = shared.lock_state().heap().clocks().news();
    }

    /// The device is full: gives back what is idle, once. Returns whether that was anything.
    pub(super) fn reclaim(&mut self, shared: &Shared, memory: &mut PhysicalMemory) -> bool {
        !std::mem::replace(&mut self.reclaimed, true) && shared.reclaim(memory, u64::MAX).0 > 0
    }

    /// Waits, with nothing held, for anything that may give memory back. Returns false when there is nothing
    /// left that could.
    ///
    /// # Errors
    /// `TimedOut` when it may still come, and the deadline has passed.
    pub(super) fn relieve(&mut self, shared: &Shared, wait: Wait<'_>) -> Result<bool> {
        let state = shared.open_state()?;
        let busy = state.tags_to_wait_for();
        if !busy.is_empty() {
            if wait.deadline.has_passed(shared.driver()) {
                let awaited = Awaited::Calls(state.tags().names(&busy));
                drop(state);
                return Err(shared.timed_out(wait, awaited));
            }
            // Its end rings; what others free meanwhile, and what passes, does not.
            drop(shared.wait_briefly(state)?);
            *self = Self::default();
            return Ok(true);
        }
        drop(state);
        match shared.wait_for_event(self.seen, wait.deadline)? {
            Waited::News => {
                *self = Self::default();
                return Ok(true);
            }
            Waited::TooLong(streams) => return Err(shared.timed_out(wait, Awaited::Work(streams))),
            Waited::InVain | Waited::Captured => {}
        }
        self.reclaimed = false;
        if !std::mem::replace(&mut self.joined, true) {
            shared.open_state()?.heap_mut().join_lanes();
            return Ok(true);
        }
        Ok(false)
    }
}

impl State {
    /// Tags that fall asleep, or of which freed memory is being copied: their end may give memory back.
    fn tags_to_wait_for(&self) -> Vec<TagKey> {
        let falling = self.tags().iter().filter(|(_, entry)| entry.falls_asleep()).map(|(tag, _)| tag);
        let mut tags: Vec<TagKey> = falling.chain(self.heap().copying_freed()).collect();
        tags.sort_unstable();
        tags.dedup();
        tags
    }
}
