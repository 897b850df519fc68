//! Allocators that a trace is replayed through.

mod caching;
mod lists;
mod memoryless;
mod poorwill;
mod setup;

use ::poorwill::{OpenError, PoolError};

use crate::card::Card;
use crate::trace::{Block, BlockNumber, Trace};

pub use self::setup::{Kind, ParseSetupError, Setup};

/// A range of device addresses with memory of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins.
    pub addr: u64,
    /// The private pool that it belongs to.
    pub pool: u32,
    /// From its beginning on, without gaps.
    pub parts: Vec<Part>,
}

impl Segment {
    /// Without addresses at its end that have no memory; `None` if nothing is left.
    fn trimmed(mut self) -> Option<Self> {
        let is_mapped = |part: &Part| part.state != State::Unmapped;
        self.parts.truncate(self.parts.iter().rposition(is_mapped).map_or(0, |at| at + 1));
        (!self.parts.is_empty()).then_some(self)
    }
}

/// A part of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// How long it is.
    pub bytes: u64,
    /// What it is.
    pub state: State,
}

/// What a part of a segment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// A block has it.
    Live(BlockNumber),
    /// Nothing has it, and memory is there.
    Cached,
    /// Addresses only.
    Unmapped,
}

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

    fn mapped_bytes(&self) -> Result<u64, PoolError>;

    /// By address.
    fn layout(&self) -> Result<Vec<Segment>, PoolError>;
}

/// The allocator of a setup, on an empty card.
pub(crate) fn open(setup: &Setup, card: Card, trace: &Trace) -> Result<Box<dyn Allocator>, OpenError> {
    Ok(match setup.kind() {
        Kind::Poorwill => Box::new(poorwill::Pool::open(card, trace)?),
        Kind::PyTorch | Kind::Cumem | Kind::TorchMemorySaver => {
            Box::new(caching::CachingAllocator::new(setup, card, trace.blocks.len()))
        }
    })
}
