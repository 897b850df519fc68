//! Keys by which a pool's parts name what they share: tags, lists, segments and blocks.

slotmap::new_key_type! {
    pub(super) struct SegmentKey;
    /// A tag of a pool. An empty tag is forgotten, and its key never reused. To keep a key while the state is
    /// unlocked, hold an access to the tag or a block of it, or pin all tags.
    pub(super) struct TagKey;
}

/// The number of a list: the free blocks of one stream in one tag. It is reused after the list's last block
/// is gone, so keep it no longer.
pub(super) type ListKey = u16;

pub(super) type Location = (SegmentKey, u64);

/// Keys are reused, so callers outside compare the block's serial too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct BlockKey(pub(super) u32);

impl BlockKey {
    pub(super) const NONE: Self = Self(u32::MAX);
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
