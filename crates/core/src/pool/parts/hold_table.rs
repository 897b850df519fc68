//! Which holders hold which tags.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::pool::tools::error::{PoolError, Result};
use crate::tag::Tag;

#[derive(Debug, Default)]
pub(in crate::pool) struct Holds {
    /// How many holds each holder has.
    tags: BTreeMap<Tag, BTreeMap<Arc<str>, usize>>,
    /// Whether the pool is gone, and the last hold must release its memory.
    is_orphaned: bool,
}

impl Holds {
    pub(in crate::pool) fn is_held(&self, tag: &Tag) -> bool {
        self.tags.contains_key(tag)
    }

    pub(in crate::pool) fn is_any_held(&self) -> bool {
        !self.tags.is_empty()
    }

    /// All held tags, each with the names of its holders.
    pub(in crate::pool) fn all(&self) -> impl Iterator<Item = (&Tag, impl Iterator<Item = &str>)> {
        self.tags.iter().map(|(tag, holders)| (tag, holders.keys().map(|holder| &**holder)))
    }

    pub(in crate::pool) fn orphan(&mut self) {
        self.is_orphaned = true;
    }

    pub(in crate::pool) fn is_orphaned(&self) -> bool {
        self.is_orphaned
    }

    pub(in crate::pool) fn begin(&mut self, tag: &Tag, holder: &Arc<str>) {
        *self.tags.entry(tag.clone()).or_default().entry(Arc::clone(holder)).or_default() += 1;
    }

    pub(in crate::pool) fn end(&mut self, tag: &Tag, holder: &Arc<str>) {
        let Some(holders) = self.tags.get_mut(tag) else { return };
        if let Some(count) = holders.get_mut(holder) {
            *count -= 1;
        }
        holders.retain(|_, count| *count > 0);
        if holders.is_empty() {
            self.tags.remove(tag);
        }
    }

    pub(in crate::pool) fn check_all(&self, op: &'static str) -> Result<()> {
        self.check(op, self.tags.keys())
    }

    /// Refuses `op`, which would take memory from these tags.
    pub(in crate::pool) fn check<'a>(
        &self,
        op: &'static str,
        tags: impl IntoIterator<Item = &'a Tag>,
    ) -> Result<()> {
        let held = tags.into_iter().find_map(|tag| self.tags.get_key_value(tag));
        held.map_or(Ok(()), |(tag, holders)| {
            let holders: Vec<&str> = holders.keys().map(|holder| &**holder).collect();
            Err(PoolError::Held { op, tag: tag.clone(), holders: holders.join(", ") })
        })
    }
}
