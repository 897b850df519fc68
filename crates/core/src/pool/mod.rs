//! A pool: blocks of one device's memory that can be put to sleep and woken.
//!
//! ```text
//! segment (one reservation, one tag)
//! ├── slot ── backing ── mapped, held, or absent; backup in host memory
//! ├── slot …                                        blocks: [live][ free ][live][live][   free   ]
//! └── slot …
//! ```
//!
//! A segment is a range of addresses that belongs to one tag, cut into slots. Each slot has its own backing
//! or none, and addresses stay reserved while anything lives in the segment; so memory can come and go
//! under blocks that stay where they are. All of allocating, reclaiming, sleeping and waking is bringing
//! slots in and taking them out (`segment`), planned without touching anything (`plan`) and undone step
//! by step when the driver fails.
//!
//! What is promised: addresses, bytes, all or nothing, the truth in reports, no leak, never over the limit,
//! errors in forked children. One lock is held for the whole of each call.

mod blocks;
mod error;
mod ledger;
mod plan;
mod report;
mod segment;
mod sleep;
mod state;
mod stats;
mod wake;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use error::{Corruption, Phase, PoolError, Shortage, Usage};
pub use report::{
    Level, Release, SleepPhases, SleepReport, SleepRequest, WakePhases, WakeReport, WakeRequest,
};
pub use stats::{BlockSnapshot, PoolStats, SegmentSnapshot, Snapshot, TagStats};

use self::blocks::{BlockKey, Blocks};
use self::ledger::Ledger;
use self::segment::Segments;
use self::state::{State, TagEntry};
use crate::bytes::ByteSize;
use crate::driver::{CopyPart, DeviceRange, Driver, HostBuffer, Pending, StreamId};
use crate::tag::{Tag, TagPolicy, TagState};

/// Result of a pool call.
pub type Result<T, E = PoolError> = std::result::Result<T, E>;

/// How a pool behaves. The default suits a whole device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// Most bytes of backing the pool may hold, at least one granule. `None`: what the device has.
    pub limit_bytes: Option<u64>,
    /// Granules of a slot in segments of large blocks (at least this large themselves).
    pub chunk_granules: u64,
    /// Granules of address space of a segment for smaller blocks, whose slots are one granule.
    pub segment_granules: u64,
    /// Whether backups stay in host memory after a wake, to save the next copy of what has not changed.
    pub keep_backups: bool,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { limit_bytes: None, chunk_granules: 16, segment_granules: 32, keep_backups: true }
    }
}

/// What to allocate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocRequest {
    /// Size in bytes; at least 1. Blocks are rounded up to 512.
    pub bytes: u64,
    /// Alignment in bytes: a power of two up to the granule. At least 512 is always kept.
    pub align: u64,
    /// What the block is.
    pub tag: Tag,
    /// The stream whose work uses the block; work on others is announced by `record_use`.
    pub stream: StreamId,
}

impl AllocRequest {
    /// `bytes` for `tag` on the default stream, aligned as every block is.
    #[must_use]
    pub fn new(bytes: u64, tag: Tag) -> Self {
        Self { bytes, align: state::ALIGN_BYTES, tag, stream: StreamId::DEFAULT }
    }

    /// The same for work on `stream`.
    #[must_use]
    pub fn on(mut self, stream: StreamId) -> Self {
        self.stream = stream;
        self
    }
}

impl fmt::Display for AllocRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "allocate {} for `{}`", ByteSize(self.bytes), self.tag)
    }
}

/// Handle of a live block. Generational: after the block is freed the handle is an error for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId {
    pool: u32,
    key: BlockKey,
    /// Counts the pool's allocations; the key's own generation would come round after 2³¹ of them.
    serial: u64,
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}.{}", self.pool, self.serial)
    }
}

/// A live block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Its handle.
    pub id: BlockId,
    /// Where it is; stays there until it is freed, asleep or awake. The size is rounded to 512 bytes.
    pub range: DeviceRange,
    /// Bytes asked for.
    pub requested_bytes: u64,
}

/// Blocks of one device's memory. See the module's documentation.
pub struct Pool {
    driver: Arc<dyn Driver>,
    state: Mutex<State>,
}

static NEXT_POOL: AtomicU32 = AtomicU32::new(1);

impl Pool {
    /// A pool over `driver`. Takes nothing from the device but streams.
    ///
    /// # Errors
    /// `InvalidConfig`; what the driver says when it has no streams.
    pub fn new(driver: Arc<dyn Driver>, config: PoolConfig) -> Result<Self> {
        let info = driver.info().clone();
        let invalid = |reason: String| Err(PoolError::InvalidConfig { reason });
        if config.chunk_granules == 0 || config.segment_granules == 0 {
            return invalid("a slot and a segment have at least one granule".into());
        }
        if config.chunk_granules.max(config.segment_granules).checked_mul(info.granule_bytes).is_none() {
            return invalid("a slot or segment of that many granules leaves the address space".into());
        }
        if let Some(limit) = config.limit_bytes.filter(|limit| *limit < info.granule_bytes).map(ByteSize) {
            let granule = ByteSize(info.granule_bytes);
            return invalid(format!("a limit of {limit} is below one granule of {granule}; raise it"));
        }
        let streams = (0..info.copy_streams.max(1)).map(|_| driver.stream_create()).collect::<Vec<_>>();
        let ready: Vec<StreamId> =
            streams.iter().filter_map(|stream| stream.as_ref().ok().copied()).collect();
        if let Some(source) = streams.into_iter().find_map(Result::err) {
            for stream in ready {
                // Already failing; a stream that cannot be destroyed is idle and ends with the driver.
                let _ = driver.stream_destroy(stream);
            }
            return Err(PoolError::Driver { op: "open the pool", source });
        }
        let built_in = [Tag::weights(), Tag::kv_cache(), Tag::runtime(), Tag::cudagraph()];
        let entry = |tag: Tag| (tag.clone(), TagEntry::new(TagPolicy::built_in(&tag)));
        let state = State {
            pool: NEXT_POOL.fetch_add(1, Ordering::Relaxed),
            driver: Arc::clone(&driver),
            config,
            granule_bytes: info.granule_bytes,
            total_bytes: info.total_bytes,
            streams: ready,
            tags: built_in.map(entry).into_iter().collect::<BTreeMap<_, _>>(),
            segments: Segments::default(),
            blocks: Blocks::default(),
            ledger: Ledger::new(Arc::clone(&driver)),
            live_bytes: 0,
            peak_live_bytes: 0,
            next_serial: 1,
            closed: false,
        };
        Ok(Self { driver, state: Mutex::new(state) })
    }

    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Gives `tag` a policy other than the built-in one. Declaring the same policy again does nothing.
    ///
    /// # Errors
    /// `PolicyConflict` when the tag has blocks, or another policy was declared, under a different one.
    pub fn declare_tag(&self, tag: &Tag, policy: TagPolicy) -> Result<()> {
        let mut state = self.open_state()?;
        let entry = state.tag_entry(tag);
        if entry.policy != policy && (entry.live_blocks > 0 || entry.declared) {
            return Err(PoolError::PolicyConflict { tag: tag.clone() });
        }
        entry.policy = policy;
        entry.declared = true;
        Ok(())
    }

    /// Takes a block. Its bytes are unspecified.
    ///
    /// # Errors
    /// `InvalidRequest`; `Asleep` when the tag sleeps; `OverLimit` or `DeviceFull` with the figures; what the
    /// driver says.
    pub fn alloc(&self, request: &AllocRequest) -> Result<Block> {
        self.open_state()?.alloc(request)
    }

    /// Gives a block back, asleep or awake. Its memory stays cached until it is reused, reclaimed or trimmed.
    ///
    /// # Errors
    /// `StaleBlock` for a second free.
    pub fn free(&self, block: BlockId) -> Result<()> {
        self.open_state()?.free(block)
    }

    /// Where a live block is.
    ///
    /// # Errors
    /// `StaleBlock`.
    pub fn block(&self, block: BlockId) -> Result<Block> {
        let state = self.open_state()?;
        let (_, entry) = state.live_block("look up", block)?;
        let base = state.segments.get(entry.segment).map_or(0, |segment| segment.range.addr);
        let range = DeviceRange::new(base + entry.offset, entry.bytes);
        Ok(Block { id: block, range, requested_bytes: entry.requested_bytes.unwrap_or(0) })
    }

    /// Queues a copy of `bytes` of `src` (from `src_offset` on) into a block at `offset`.
    ///
    /// # Errors
    /// `StaleBlock`, `OutOfBlock`, `Asleep`; what the driver says.
    pub fn write(
        &self,
        stream: StreamId,
        block: BlockId,
        offset: u64,
        src: Arc<HostBuffer>,
        src_offset: u64,
        bytes: u64,
    ) -> Result<Pending<()>> {
        let state = self.open_state()?;
        let device = state.reachable("write", block, offset, bytes, true)?;
        let parts = [CopyPart { device, host_offset: src_offset }];
        let copy = state.driver.copy_to_device(stream, src, &parts);
        copy.map_err(|source| PoolError::Driver { op: "write", source })
    }

    /// Queues a copy of `bytes` of a block, from `offset` on, into `dst` at `dst_offset`.
    ///
    /// # Errors
    /// `StaleBlock`, `OutOfBlock`, `Asleep`; `Undefined` when the bytes were dropped and not restored; what the
    /// driver says.
    pub fn read(
        &self,
        stream: StreamId,
        block: BlockId,
        offset: u64,
        dst: HostBuffer,
        dst_offset: u64,
        bytes: u64,
    ) -> Result<Pending<HostBuffer>> {
        let state = self.open_state()?;
        let device = state.reachable("read", block, offset, bytes, false)?;
        let parts = [CopyPart { device, host_offset: dst_offset }];
        let copy = state.driver.copy_to_host(stream, dst, &parts);
        copy.map_err(|source| PoolError::Driver { op: "read", source })
    }

    /// Puts tags to sleep: their memory goes back to the device, their addresses stay.
    ///
    /// All or nothing up to the point of no return. Tags that sleep already are reported and left alone.
    ///
    /// # Errors
    /// `UnknownTag`, `SleepConflict`, `Undefined`, `Asleep` (stranded) before anything has happened; `SleepFailed` with everything
    /// awake as before; `Stranded` when that could not be restored; `Shortfall` when the tags sleep but not
    /// everything was given back.
    pub fn sleep(&self, request: &SleepRequest) -> Result<SleepReport> {
        let mut state = self.open_state()?;
        let plan = state.plan_sleep(request)?;
        state.apply_sleep(&plan)
    }

    /// Drops the bytes of `tags` whatever their policy says, awake or asleep; backups go too. The tags sleep
    /// until woken, and then hold what their policy says of dropped memory.
    ///
    /// # Errors
    /// As for [`Pool::sleep`].
    pub fn discard(&self, tags: &[Tag]) -> Result<SleepReport> {
        let mut state = self.open_state()?;
        let plan = state.plan_discard(tags)?;
        state.apply_sleep(&plan)
    }

    /// Wakes tags: memory under every live block again, at the same addresses, with the same bytes or what the
    /// policy says. All or nothing.
    ///
    /// # Errors
    /// `UnknownTag`; `OverLimit`, `DeviceFull`, `WakeFailed`, `Corrupt` with everything asleep as before.
    pub fn wake(&self, request: &WakeRequest) -> Result<WakeReport> {
        self.open_state()?.wake(request)
    }

    /// Says that the owner has written the bytes of `tags` again after a level-2 wake. Returns the tags that
    /// were undefined until now.
    ///
    /// # Errors
    /// `UnknownTag`; `Asleep`.
    pub fn mark_restored(&self, tags: &[Tag]) -> Result<Vec<Tag>> {
        let mut state = self.open_state()?;
        let tags = state.selected("mark as restored", Some(tags))?;
        if let Some(tag) = tags.iter().find(|tag| state.tags.get(tag).is_some_and(|e| e.state.is_asleep())) {
            let asleep = state.tag_entry(tag).state;
            return Err(PoolError::Asleep { op: "mark as restored", tag: tag.clone(), state: asleep });
        }
        let undefined = |tag: &Tag| state.tags.get(tag).is_some_and(|e| e.state == TagState::Undefined);
        let restored: Vec<Tag> = tags.into_iter().filter(undefined).collect();
        restored.iter().for_each(|tag| state.tag_entry(tag).state = TagState::Awake);
        Ok(restored)
    }

    /// Gives back all memory and addresses that serve no byte. Returns the bytes given back.
    ///
    /// # Errors
    /// What the driver said first; the rest was still done.
    pub fn trim(&self) -> Result<u64> {
        self.open_state()?.trim()
    }

    /// Where the bytes of a tag are.
    ///
    /// # Errors
    /// `UnknownTag`.
    pub fn tag_state(&self, tag: &Tag) -> Result<TagState> {
        let state = self.open_state()?;
        state.selected("look up", Some(std::slice::from_ref(tag)))?;
        Ok(state.tags.get(tag).map_or(TagState::Awake, |entry| entry.state))
    }

    /// Figures.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn stats(&self) -> Result<PoolStats> {
        Ok(self.open_state()?.stats())
    }

    /// Every segment and block.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn snapshot(&self) -> Result<Snapshot> {
        Ok(self.open_state()?.snapshot())
    }

    /// Gives everything back, live blocks included, and ends the pool. Dropping a pool does the same, but
    /// cannot tell what failed.
    ///
    /// # Errors
    /// What the driver said first. The pool is closed all the same; closing again goes on with what is left.
    pub fn close(&self) -> Result<()> {
        self.driver.check_process().map_err(PoolError::WrongProcess)?;
        self.state.lock().unwrap_or_else(PoisonError::into_inner).close()
    }

    fn open_state(&self) -> Result<MutexGuard<'_, State>> {
        // Before the lock: in a forked child it may be held by a thread that does not exist there.
        self.driver.check_process().map_err(PoolError::WrongProcess)?;
        let state = self.state.lock().map_err(|_| PoolError::Poisoned)?;
        if state.closed { Err(PoolError::Closed) } else { Ok(state) }
    }
}

impl State {
    /// The device range of a part of a block whose bytes are there.
    fn reachable(
        &self,
        op: &'static str,
        id: BlockId,
        offset: u64,
        bytes: u64,
        writing: bool,
    ) -> Result<DeviceRange> {
        let (_, entry) = self.live_block(op, id)?;
        let Some(segment) = self.segments.get(entry.segment) else {
            return Err(PoolError::StaleBlock { op, block: id });
        };
        let tag = &segment.tag;
        let state = self.tags.get(tag).map_or(TagState::Awake, |tag| tag.state);
        if state.is_asleep() {
            return Err(PoolError::Asleep { op, tag: tag.clone(), state });
        }
        if state == TagState::Undefined && !writing {
            return Err(PoolError::Undefined { op, tag: tag.clone() });
        }
        let block = DeviceRange::new(segment.range.addr + entry.offset, entry.requested_bytes.unwrap_or(0));
        let outside = PoolError::OutOfBlock { op, offset, bytes, block: id, block_bytes: block.bytes };
        block.slice(offset, bytes).ok_or(outside)
    }

    /// The copy stream for the `turn`-th piece of work.
    pub(in crate::pool) fn stream(&self, turn: usize) -> StreamId {
        self.streams.get(turn % self.streams.len().max(1)).copied().unwrap_or(StreamId::DEFAULT)
    }

    fn close(&mut self) -> Result<()> {
        self.closed = true;
        let op = "close the pool";
        self.driver.synchronize().map_err(|source| PoolError::Driver { op, source })?;
        self.sweep().map_err(|source| PoolError::Driver { op, source })?;
        while let Some(stream) = self.streams.last() {
            self.driver.stream_destroy(*stream).map_err(|source| PoolError::Driver { op, source })?;
            self.streams.pop();
        }
        Ok(())
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("device", &self.driver.info().id).finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.driver.check_process().is_err() {
            return; // A forked child: everything belongs to the parent.
        }
        // Also after a panic: closing trusts no count of what is live.
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Nobody is left to tell; whoever wants to know calls `close`.
        let _ = state.close();
    }
}
