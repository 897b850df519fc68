//! What was lost with a backup, as errors and reports name it: bytes of a live block.

use std::fmt;

use serde::{Serialize, Serializer};

use super::handle::BlockId;
use crate::bytes::ByteSize;
use crate::driver::DeviceRange;
use crate::tag::Tag;

/// How many ranges a message names.
const NAMED: usize = 3;

/// Bytes of a live block that were lost: their backup is not what was stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LostRange {
    /// The block's tag.
    pub tag: Tag,
    /// The block.
    #[serde(serialize_with = "as_text")]
    pub block: BlockId,
    /// Where in the block they begin, in bytes.
    pub offset_bytes: u64,
    /// Where on the device they are, and how many.
    #[serde(flatten)]
    pub range: DeviceRange,
}

fn as_text<S: Serializer>(block: &BlockId, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(block)
}

impl fmt::Display for LostRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tag, block, offset_bytes, range } = self;
        write!(f, "bytes {offset_bytes}..{} of {block} (`{tag}`)", offset_bytes + range.bytes)
    }
}

/// The first few of `lost`, and how many there are.
pub(super) fn listed(lost: &[LostRange]) -> String {
    let named: Vec<String> = lost.iter().take(NAMED).map(LostRange::to_string).collect();
    let named = named.join(", ");
    let bytes = ByteSize(lost.iter().map(|lost| lost.range.bytes).sum());
    match lost.len() {
        0 | 1 => named,
        count if count <= NAMED => format!("{named} ({bytes})"),
        count => format!("{named} and {} more ranges ({bytes} in {count} ranges)", count - NAMED),
    }
}
