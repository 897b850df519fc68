//! Numbers by which a pool's parts name what they share: tags, stream_lists, segments and blocks.

slotmap::new_key_type! {
    /// A segment of a pool.
    pub(super) struct SegmentKey;
    /// A tag of a pool. A tag of which nothing is left is forgotten, and its key never comes back: nobody keeps one while
    /// the state is unlocked without being the tag's access, having it exclusive, holding all tags or having a block of it.
    pub(super) struct TagKey;
}

/// A list of a pool, by number: the free mappings of one stream in one tag. A list is forgotten as soon
/// as no block has its number, which is given out again: so it is kept no longer than a block of the list.
pub(super) type ListKey = u16;

/// Where memory is mapped: its segment and address.
pub(super) type Location = (SegmentKey, u64);

/// A block of a pool. The key of a block that is gone may come back as that of another; whoever keeps keys
/// outside compares the block's serial too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct BlockKey(pub(super) u32);

impl BlockKey {
    pub(super) const NONE: Self = Self(u32::MAX);
    /// The smallest of all keys.
    pub(super) const FIRST: Self = Self(0);

    pub(super) const fn is_none(self) -> bool {
        self.0 == Self::NONE.0
    }

    pub(super) const fn is_some(self) -> bool {
        !self.is_none()
    }

    pub(super) fn some(self) -> Option<Self> {
        self.is_some().then_some(self)
    }
}
