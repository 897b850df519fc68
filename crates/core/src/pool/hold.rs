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

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::error::PoolError;
use super::state::{State, TagKey};
use super::{CLOSE, Pool, Result, Shared};
use crate::tag::Tag;

const HOLD: &str = "hold the memory of a tag";

/// Who holds which tags.
#[derive(Debug, Default)]
pub(super) struct Holds {
    /// How many holds each holder has.
    tags: BTreeMap<Tag, BTreeMap<Arc<str>, usize>>,
    /// Whether the pool is gone, and the last hold has to give its memory back.
    is_orphaned: bool,
}

impl Holds {
    pub(super) fn is_held(&self, tag: &Tag) -> bool {
        self.tags.contains_key(tag)
    }

    /// All that are held.
    pub(super) fn tags(&self) -> impl Iterator<Item = &Tag> {
        self.tags.keys()
    }

    fn begin(&mut self, tag: &Tag, holder: &Arc<str>) {
        *self.tags.entry(tag.clone()).or_default().entry(Arc::clone(holder)).or_default() += 1;
    }

    fn end(&mut self, tag: &Tag, holder: &Arc<str>) {
        let Some(holders) = self.tags.get_mut(tag) else { return };
        if let Some(count) = holders.get_mut(holder) {
            *count -= 1;
        }
        holders.retain(|_, count| *count > 0);
        self.tags.retain(|_, holders| !holders.is_empty());
    }

    /// Refuses `op`, which would take memory from these tags.
    fn check<'a>(&self, op: &'static str, tags: impl IntoIterator<Item = &'a Tag>) -> Result<()> {
        let held = tags.into_iter().find_map(|tag| self.tags.get_key_value(tag));
        held.map_or(Ok(()), |(tag, holders)| {
            let holders: Vec<&str> = holders.keys().map(|holder| &**holder).collect();
            Err(PoolError::Held { op, tag: tag.clone(), holders: holders.join(", ") })
        })
    }
}

/// A tag that is held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HeldTag {
    /// The tag.
    pub tag: Tag,
    /// Who holds it, by name, each once.
    pub holders: Vec<String>,
    /// Memory that serves no block, in bytes, and stays because of the hold.
    pub idle_bytes: u64,
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
        if self.shared.driver.check_process().is_err() {
            return;
        }
        let mut state = self.shared.state.lock_anyway();
        state.holds.end(&self.tag, &self.holder);
        let is_last = state.holds.is_orphaned && state.holds.tags.is_empty();
        self.shared.had_again(state);
        if is_last {
            // As when a pool is dropped: nobody is left to tell.
            let _ = self.shared.close();
        }
    }
}

impl Pool {
    /// Says that somebody else has the physical memory of a tag registered, `holder` by name, until the guard is
    /// dropped. Take it before registering, drop it after deregistering. Meanwhile a sleep or a discard that means the
    /// tag, also one that means all, and [`Pool::close`] are refused, naming the holder; memory that is freed in the tag
    /// stays where it is, for blocks of the tag. Holds add up: of one holder as well. Waits for whoever puts the tag to
    /// sleep or wakes it.
    ///
    /// # Errors
    /// `UnknownTag`; `Asleep` for a tag that has no memory now.
    pub fn hold(&self, tag: &Tag, holder: impl Into<String>) -> Result<Hold> {
        let holder: Arc<str> = holder.into().into();
        let mut state = self.shared.open_state()?;
        let key = loop {
            let keys = state.selected(HOLD, Some(std::slice::from_ref(tag)))?;
            match keys.first().filter(|key| state.tag(**key).gate.is_closed()) {
                Some(_) => state = self.shared.wait(state)?,
                None => break keys,
            }
        };
        key.into_iter().try_for_each(|key| state.check_awake(HOLD, key))?;
        state.holds.begin(tag, &holder);
        drop(state);
        Ok(Hold { shared: Arc::clone(&self.shared), tag: tag.clone(), holder })
    }

    /// The tags that are held, and by whom; none where nobody holds any.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn held(&self) -> Result<Vec<HeldTag>> {
        let state = self.shared.open_state()?;
        let held = state.holds.tags.iter().map(|(tag, holders)| HeldTag {
            tag: tag.clone(),
            holders: holders.keys().map(ToString::to_string).collect(),
            idle_bytes: state.find_tag(tag).map_or(0, |key| state.idle_bytes_of(key)),
        });
        Ok(held.collect())
    }
}

impl State {
    /// Whether the memory of a tag has to stay where it is.
    pub(super) fn is_pinned(&self, tag: TagKey) -> bool {
        self.holds.is_held(&self.tag(tag).tag)
    }

    /// Refuses `op`, which would take memory from these tags.
    pub(super) fn check_unheld(&self, op: &'static str, tags: &[TagKey]) -> Result<()> {
        self.holds.check(op, tags.iter().map(|tag| &self.tag(*tag).tag))
    }
}

impl Shared {
    /// For who is refused at the limit.
    pub(super) fn what_helps(&self) -> &'static str {
        if self.state.lock_anyway().idle().pinned_bytes > 0 {
            "end the hold of a tag, whose freed memory stays where it is, free or put to sleep what is live, or raise the \
             limit, or the budget that it comes from"
        } else {
            "free or put to sleep what is live, or raise the limit, or the budget that it comes from"
        }
    }

    /// Refuses new work from now on, unless a tag is held.
    pub(super) fn close_unheld(&self) -> Result<()> {
        let mut state = self.state.lock_anyway();
        state.holds.check(CLOSE, state.holds.tags())?;
        state.closed = true;
        Ok(())
    }

    /// The pool is gone, and no work of its own is left. What is held outlives it: the last hold gives it back.
    pub(super) fn orphan(&self) {
        let is_held = {
            let mut state = self.state.lock_anyway();
            state.holds.is_orphaned = true;
            !state.holds.tags.is_empty()
        };
        if !is_held {
            let _ = self.close();
        }
    }
}
