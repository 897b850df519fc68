//! Ranges of live blocks that were lost with their backups, for errors and reports.

use std::fmt;

use serde::{Serialize, Serializer};

use super::handle::BlockId;
use crate::bytes::ByteSize;
use crate::driver::DeviceRange;
use crate::tag::Tag;

/// Ranges that a message names.
const NAMED: usize = 3;

/// Bytes of a live block whose backup has changed.
///
/// ```
/// use poorwill::{Arena, Config};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// for lost in arena.lost_ranges()? {
///     println!("write {} bytes of {} again, from {} on", lost.range.bytes, lost.block, lost.offset_bytes);
///     arena.mark_block_restored(lost.block)?; // Once they are written.
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LostRange {
    /// Of the block.
    pub tag: Tag,
    /// The block.
    #[serde(serialize_with = "as_text")]
    pub block: BlockId,
    /// From the block's start.
    pub offset_bytes: u64,
    /// On the device.
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

/// The first few ranges, and the count.
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
