//! Holds: the physical pages of a tag are registered outside the pool.
//!
//! A network card (NIXL, UCX, Mooncake, `ibv_reg_mr`), another process (a dma-buf, an exported handle) or
//! another device goes on using the pages after a remapping.
//!
//! Promise: a held tag is awake and its memory stays in place. Sleep, discard and closing the pool are
//! refused before any change. Freed memory of the tag serves only its own blocks.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use crate::pool::shared::Shared;
use crate::pool::state::PoolState;
use crate::pool::tools::error::Result;
use crate::tag::Tag;

const HOLD: &str = "hold the memory of a tag";

/// A held tag.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::kv_cache()))?;
/// let _hold = arena.hold(&Tag::kv_cache(), "mlx5_0")?;
/// assert_eq!(arena.held()?[0].holders, ["mlx5_0"]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HeldTag {
    /// The tag.
    pub tag: Tag,
    /// Names, each once.
    pub holders: Vec<String>,
    /// Free memory that stays because of the hold.
    pub reclaimable_bytes: u64,
}

/// Keeps a tag's memory in place until dropped. It may outlive the pool; the last hold then releases its
/// memory.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, PoolError, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::kv_cache()))?;
/// let hold = arena.hold(&Tag::kv_cache(), "mlx5_0")?; // Before the network card registers it.
/// let refused = arena.sleep(&SleepRequest::all(Level::One)).unwrap_err();
/// assert!(matches!(refused, PoolError::Held { .. }));
/// drop(hold); // Once it is deregistered.
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// # Ok(())
/// # }
/// ```
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

    /// The holder's name.
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
        // Before the lock, as in [`Shared::open_state`].
        if self.shared.driver().check_process().is_err() {
            return;
        }
        let mut state = self.shared.lock_state();
        state.end_hold(&self.tag, &self.holder);
        let is_last = state.holds().is_orphaned() && !state.holds().is_any_held();
        self.shared.had_again(state);
        if is_last {
            // As when a pool is dropped: no caller takes the error.
            let _ = self.shared.close();
        }
    }
}

impl Shared {
    pub(in crate::pool) fn hold(self: &Arc<Self>, tag: &Tag, holder: Arc<str>) -> Result<Hold> {
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
        // Any call that was moving reclaimable memory out of the tag has ended after this.
        drop(self.lock_memory()?);
        Ok(hold)
    }

    /// After the pool's own work has ended: releases everything, or leaves that to the last hold.
    pub(in crate::pool) fn orphan(&self) {
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

impl PoolState {
    pub(in crate::pool) fn held(&self) -> Vec<HeldTag> {
        let held = self.holds().all().map(|(tag, holders)| HeldTag {
            tag: tag.clone(),
            holders: holders.map(ToOwned::to_owned).collect(),
            reclaimable_bytes: self.tags().find(tag).map_or(0, |key| self.heap().reclaimable_bytes_of(key)),
        });
        held.collect()
    }
}
