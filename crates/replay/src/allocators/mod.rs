//! Allocators that a trace is replayed through.

mod allocator;
mod caching;
mod first_fit;
mod lists;
mod memoryless;
mod node;
mod poorwill;
mod runs;
mod segment;
mod setup;

use ::poorwill::OpenError;

use crate::card::Card;
use crate::trace::Trace;

pub(crate) use self::allocator::Allocator;
pub use self::segment::{PartState, Segment, SegmentPart};
pub use self::setup::{AllocatorKind, ParseSetupError, Setup};

/// The allocator of a setup, on an empty card.
pub(crate) fn open(setup: &Setup, card: Card, trace: &Trace) -> Result<Box<dyn Allocator>, OpenError> {
    Ok(match setup.kind() {
        AllocatorKind::Poorwill => Box::new(poorwill::Pool::open(card, trace)?),
        AllocatorKind::PyTorch | AllocatorKind::Cumem | AllocatorKind::TorchMemorySaver => {
            Box::new(caching::CachingAllocator::new(setup, card, trace.blocks.len()))
        }
    })
}
