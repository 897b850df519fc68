//! Making space: what is tried for a request that lacks memory, before it is refused.

use super::events::Waited;
use crate::pool::shared::{MemoryGuard, Shared};
use crate::pool::state::PoolState;
use crate::pool::tools::cancel;
use crate::pool::tools::deadline::Wait;
use crate::pool::tools::error::{Awaited, Result};
use crate::pool::tools::keys::TagKey;

#[derive(Debug, Default)]
pub(in crate::pool) struct Retry {
    reclaimed: bool,
    /// Others were asked for what they lend.
    asked: bool,
    joined: bool,
    seen: u64,
    /// Whether the device had enough by its own figure when it refused last.
    had_enough: bool,
}

#[derive(Debug, Clone, Copy)]
pub(in crate::pool) enum Lack {
    Limit,
    /// The device: so much is still missing, and whether any of it is in mappings larger than a chunk.
    Device {
        absent_bytes: u64,
        has_spans: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pool) enum Next {
    Again,
    /// Try again with no mapping larger than a chunk.
    InChunks,
    Refuse,
}

impl Retry {
    pub(in crate::pool) fn look(&mut self, shared: &Shared) {
        self.seen = shared.lock_state().heap().clocks().version();
    }

    /// After a shortage: takes scratch memory, reclaims, settles for smaller mappings, or waits without locks for anything that may
    /// release memory.
    pub(in crate::pool) fn after(
        &mut self,
        shared: &Shared,
        mut memory: MemoryGuard<'_>,
        lack: Lack,
        wait: Wait<'_>,
    ) -> Result<Next> {
        // First what a wake can do without. What the driver refuses stays, and other memory is tried.
        if shared.scratch().take(&mut memory).0 > 0 {
            return Ok(Next::Again);
        }
        if let Lack::Device { absent_bytes, has_spans } = lack {
            if !std::mem::replace(&mut self.reclaimed, true) && shared.reclaim(&mut memory, u64::MAX).0 > 0 {
                return Ok(Next::Again);
            }
            let has_enough = has_spans && shared.obtainable_bytes().is_ok_and(|bytes| bytes >= absent_bytes);
            let had_enough = std::mem::replace(&mut self.had_enough, has_enough);
            if has_enough {
                self.forget();
                // The last attempt had enough too, but not in large chunks.
                return Ok(if had_enough { Next::InChunks } else { Next::Again });
            }
        }
        drop(memory);
        if !std::mem::replace(&mut self.asked, true) {
            let given_bytes = match lack {
                Lack::Device { absent_bytes, .. } => {
                    // Enough may be free, and not in one piece.
                    let obtainable_bytes = shared.obtainable_bytes().unwrap_or(0);
                    let lacking_bytes = absent_bytes.saturating_sub(obtainable_bytes);
                    let bytes = if lacking_bytes == 0 { absent_bytes } else { lacking_bytes };
                    shared.ask(bytes, wait.deadline)
                }
                Lack::Limit => shared.give_up_own(wait.needed_bytes),
            };
            if given_bytes > 0 {
                self.forget();
                return Ok(Next::Again);
            }
        }
        if self.relieve(shared, wait)? {
            return Ok(Next::Again);
        }
        cancel::check(wait.op)?;
        self.forget();
        Ok(Next::Refuse)
    }

    /// Earlier attempts may help now.
    fn forget(&mut self) {
        *self = Self { had_enough: self.had_enough, ..Self::default() };
    }

    /// Returns false when nothing is left that could release memory.
    fn relieve(&mut self, shared: &Shared, wait: Wait<'_>) -> Result<bool> {
        let state = shared.open_state()?;
        let busy = state.tags_to_wait_for();
        if !busy.is_empty() {
            if wait.deadline.has_passed(shared.driver()) {
                let awaited = Awaited::Calls(state.tags().names(&busy));
                drop(state);
                return Err(shared.timed_out(wait, awaited));
            }
            // The end of that call notifies. Frees and completed events meanwhile do not.
            drop(shared.wait_briefly(state)?);
            self.forget();
            return Ok(true);
        }
        drop(state);
        match shared.wait_for_event(self.seen, wait.deadline)? {
            Waited::Progress => {
                self.forget();
                // Other threads may free and allocate forever.
                return Ok(!wait.deadline.has_passed(shared.driver()));
            }
            Waited::TimedOut(streams) => return Err(shared.timed_out(wait, Awaited::Work(streams))),
            Waited::NothingPending | Waited::Captured => {}
        }
        self.reclaimed = false;
        if !std::mem::replace(&mut self.joined, true) {
            shared.open_state()?.heap_mut().join_lists();
            return Ok(true);
        }
        Ok(false)
    }
}

impl PoolState {
    /// Tags that fall asleep, or whose freed memory is being copied: their end may release memory.
    fn tags_to_wait_for(&self) -> Vec<TagKey> {
        let falling = self.tags().iter().filter(|(_, entry)| entry.falls_asleep()).map(|(tag, _)| tag);
        let mut tags: Vec<TagKey> = falling.chain(self.heap().copying_freed()).collect();
        tags.sort_unstable();
        tags.dedup();
        tags
    }
}
