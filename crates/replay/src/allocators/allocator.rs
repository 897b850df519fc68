//! What a trace is replayed through.

use ::poorwill::PoolError;

use super::segment::Segment;
use crate::trace::{Block, BlockNumber};

/// What takes and gives device memory for blocks. Errors are those of Poorwill's pool, except for a lack of memory.
pub(crate) trait Allocator {
    /// Whether there is memory for a block, whose number did not come before.
    fn alloc(&mut self, number: BlockNumber, block: &Block) -> Result<bool, PoolError>;

    /// A block that is live.
    fn free(&mut self, number: BlockNumber) -> Result<(), PoolError>;

    /// As `torch.cuda.empty_cache` does.
    fn empty_cache(&mut self) -> Result<(), PoolError>;

    /// The weights are loaded: what has a pool of its own for that leaves it.
    fn load_ends(&mut self) -> Result<(), PoolError>;

    /// From now on it may map so much. Whether it has no more; nothing goes back for that.
    fn limit(&mut self, usable_bytes: u64) -> Result<bool, PoolError>;

    /// How often it gave all that is free back and tried again, as PyTorch counts that.
    fn retries(&self) -> Option<u64>;

    fn mapped_bytes(&self) -> Result<u64, PoolError>;

    /// By address.
    fn layout(&self) -> Result<Vec<Segment>, PoolError>;
}
