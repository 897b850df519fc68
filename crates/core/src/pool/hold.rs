//! Holds: somebody outside of the pool has the physical pages of a tag registered.
//!
//! A network card's driver (by NIXL, UCX, Mooncake, `ibv_reg_mr`), another process (by a dma-buf or an exported handle)
//! or another device may have been given the pages behind addresses of a tag. It goes on using them whatever is mapped
//! there later, so memory that left would be read and written as if it were still the tag's. Whoever registers memory
//! takes a [`Hold`], and ends it when it has deregistered.
//!
//! Promise: while a tag is held, it is awake, and none of its memory leaves the address at which it is: a sleep or a
//! discard of it and closing the pool are refused before anything has happened, and what is freed in it serves blocks of
//! the same tag where it is, and nobody else.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::error::Result;
use super::shared::Shared;
use super::state::State;
use crate::tag::Tag;

const HOLD: &str = "hold the memory of a tag";

/// A tag that is held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HeldTag {
    /// The tag.
    pub tag: Tag,
    /// Who holds it, by name, each once.
    pub holders: Vec<String>,
    /// Memory that serves no block, in bytes, and stays because of the hold.
    pub reclaimable_bytes: u64,
}

/// Keeps the memory of a tag where it is until this is dropped.
///
/// It may outlive the pool, whose memory then goes back with the last hold.
#[must_use = "the memory is held for as long as this lives"]
pub struct Hold {
    shared: Arc<Shared>,
    tag: Tag,
    holder: Arc<str>,
}

impl Hold {
    /// What is held.
    #[must_use]
    pub fn tag(&self) -> &Tag {
        &self.tag
    }

    /// By whom.
    #[must_use]
    pub fn holder(&self) -> &str {
        &self.holder
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").field("tag", &self.tag).field("holder", &self.holder).finish_non_exhaustive()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // In a forked child the lock may be held by a thread that does not exist there.
        if self.shared.driver().check_process().is_err() {
            return;
        }
        let mut state = self.shared.lock_state();
        state.end_hold(&self.tag, &self.holder);
        let is_last = state.holds().is_orphaned() && !state.holds().is_any_held();
        self.shared.had_again(state);
        if is_last {
            // As when a pool is dropped: nobody is left to tell.
            let _ = self.shared.close();
        }
    }
}

impl Shared {
    /// See [`super::Pool::hold`].
    pub(super) fn hold(self: &Arc<Self>, tag: &Tag, holder: Arc<str>) -> Result<Hold> {
        let mut state = self.open_state()?;
        let keys = loop {
            let keys = state.tags().selected(HOLD, Some(std::slice::from_ref(tag)))?;
            if !keys.iter().any(|key| state.tags().get(*key).is_taken()) {
                break keys;
            }
            state = self.wait(state)?;
        };
        for key in keys {
            state.tags().check_awake(HOLD, key)?;
            state.begin_hold(key, &holder);
        }
        drop(state);
        let hold = Hold { shared: Arc::clone(self), tag: tag.clone(), holder };
        // Whoever was taking reclaimable memory of the tag out has done so.
        drop(self.lock_memory()?);
        Ok(hold)
    }

    /// The pool is gone, and no work of its own is left. What is held outlives it: the last hold gives it back.
    pub(super) fn orphan(&self) {
        let is_any_held = {
            let mut state = self.lock_state();
            state.orphan_holds();
            state.holds().is_any_held()
        };
        if !is_any_held {
            let _ = self.close();
        }
    }
}

impl State {
    /// The tags that are held.
    pub(super) fn held(&self) -> Vec<HeldTag> {
        let held = self.holds().all().map(|(tag, holders)| HeldTag {
            tag: tag.clone(),
            holders: holders.map(ToOwned::to_owned).collect(),
            reclaimable_bytes: self.tags().find(tag).map_or(0, |key| self.heap().reclaimable_bytes_of(key)),
        });
        held.collect()
    }
}
