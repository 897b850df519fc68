//! Keys by which a pool's parts name what they share: tags, lists, segments and blocks.

slotmap::new_key_type! {
    pub(in crate::pool) struct SegmentKey;
    /// A tag of a pool. An empty tag is forgotten, and its key never reused. To keep a key while the state is
    /// unlocked, hold an access to the tag or a block of it, or pin all tags.
    pub(in crate::pool) struct TagKey;
}

/// The number of a list: the free blocks of one stream in one tag. It is reused after the list's last block
/// is gone, so keep it no longer.
pub(in crate::pool) type ListKey = u16;

pub(in crate::pool) type Location = (SegmentKey, u64);

/// Keys are reused, so callers outside compare the block's serial too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::pool) struct BlockKey(pub(in crate::pool) u32);

impl BlockKey {
    pub(in crate::pool) const NONE: Self = Self(u32::MAX);
    pub(in crate::pool) const FIRST: Self = Self(0);

    pub(in crate::pool) const fn is_none(self) -> bool {
        self.0 == Self::NONE.0
    }

    pub(in crate::pool) const fn is_some(self) -> bool {
        !self.is_none()
    }

    pub(in crate::pool) fn some(self) -> Option<Self> {
        self.is_some().then_some(self)
    }
}
