//! The two allocators behind one interface.

use std::ops::Range;
use std::sync::Arc;

use offset_allocator::{Allocation, Allocator as Offsets};
use poorwill_core::{AllocRequest, BlockId, Pool, PoolConfig, Tag};
use poorwill_driver::{HostConfig, HostDevice};

use crate::BenchResult;

/// Alignment of blocks: the pool's own unit, which the peer is given, too.
pub(crate) const UNIT_BYTES: u32 = 512;

/// Addresses of a process. Nothing is written to a block, so a device of this size takes no memory.
const CAPACITY_BYTES: u64 = 1 << 46;

/// What is measured. A handle frees its block.
pub(crate) trait Allocator {
    const NAME: &'static str;
    type Handle: Copy;

    fn alloc(&mut self, bytes: u32) -> BenchResult<Self::Handle>;
    fn free(&mut self, block: Self::Handle) -> BenchResult<()>;

    /// The addresses of a live block.
    fn range(&self, block: Self::Handle) -> BenchResult<Range<u64>>;

    /// Current size of its address space.
    fn extent(&self) -> BenchResult<Extent>;
}

/// An error names its allocator.
pub(crate) fn named<A: Allocator, T>(outcome: BenchResult<T>) -> BenchResult<T> {
    outcome.map_err(|error| format!("{}: {error}", A::NAME).into())
}

/// Address space of an allocator.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Extent {
    /// Reserved bytes.
    Reserved(u64),
    /// From zero to the end of the highest block so far.
    ToHighestBlock,
}

/// A pool on the host device.
pub(crate) struct Poorwill {
    pool: Pool,
    /// Only its size changes.
    request: AllocRequest,
}

impl Poorwill {
    pub(crate) fn open() -> BenchResult<Self> {
        let device = Arc::new(HostDevice::open(&HostConfig::with_capacity(CAPACITY_BYTES))?);
        let pool = Pool::new(device, PoolConfig::default())?;
        Ok(Self { pool, request: AllocRequest::new(1, Tag::weights()) })
    }
}

impl Allocator for Poorwill {
    const NAME: &'static str = "poorwill";
    type Handle = BlockId;

    fn alloc(&mut self, bytes: u32) -> BenchResult<BlockId> {
        self.request.bytes = u64::from(bytes);
        Ok(self.pool.alloc(&self.request)?.id)
    }

    fn free(&mut self, block: BlockId) -> BenchResult<()> {
        Ok(self.pool.free(block)?)
    }

    fn range(&self, block: BlockId) -> BenchResult<Range<u64>> {
        let range = self.pool.block(block)?.range;
        Ok(range.addr..range.end())
    }

    fn extent(&self) -> BenchResult<Extent> {
        Ok(Extent::Reserved(self.pool.stats()?.reserved_bytes))
    }
}

/// `offset-allocator` over the largest arena that it can have: 2 TiB of units.
pub(crate) struct Peer(Offsets);

impl Peer {
    /// With capacity for `live` blocks and as many gaps.
    pub(crate) fn new(live: u32) -> Self {
        Self(Offsets::with_max_allocs(u32::MAX, 2 * live + 16))
    }
}

impl Allocator for Peer {
    const NAME: &'static str = "offset-allocator";
    type Handle = Allocation;

    fn alloc(&mut self, bytes: u32) -> BenchResult<Allocation> {
        let block = self.0.allocate(bytes.div_ceil(UNIT_BYTES));
        block.ok_or_else(|| format!("its arena has no room for {bytes} bytes").into())
    }

    fn free(&mut self, block: Allocation) -> BenchResult<()> {
        self.0.free(block);
        Ok(())
    }

    fn range(&self, block: Allocation) -> BenchResult<Range<u64>> {
        let at = |units: u32| u64::from(units) * u64::from(UNIT_BYTES);
        let start = at(block.offset);
        Ok(start..start + at(self.0.allocation_size(block)))
    }

    fn extent(&self) -> BenchResult<Extent> {
        Ok(Extent::ToHighestBlock)
    }
}
