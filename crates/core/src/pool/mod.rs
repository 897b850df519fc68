//! A pool: blocks of one device's memory that can be put to sleep and woken.
//!
//! ```text
//! segment (one reservation, one tag)
//! chunks: [       32 MiB       ][       32 MiB       ][2][2][2]  -  -  -
//! blocks: [ live                                        ][fine][   bare   ]
//! ```
//!
//! A segment is a range of addresses that belongs to one tag. Chunks of memory are mapped into it where they are
//! needed: large ones inside large blocks, single granules at their ends and under small blocks. Inside blocks that
//! a sleep drops or that are freed as a whole, and in all that a wake brings back (`layout`), they are larger still:
//! *spans*, so that there is little to give back one by one. Chunks that nothing lives in are *idle*: whoever needs
//! memory takes them to wherever it is needed, and only when there are none is memory created. So what is mapped follows
//! what is live, however the sizes change.
//!
//! How a call travels:
//! - `alloc` finds a free piece that is ready (`bins`, `place`) and cuts it (`state`); if there is none, it finds
//!   the place that lacks the least (`place`), takes idle memory (`supply`) and maps it (`alloc`, `vm`).
//! - `free` joins the block with its free neighbours and stamps it with its stream's clock (`clocks`). Nothing is
//!   unmapped, and no other stream gets it, before what was queued until then has passed (`quiet`).
//!   `free_part` cuts a part out of a live block first (`part`).
//!   While a stream is captured into a graph, none of this touches an event (`capture`).
//! - `sleep` and `wake` are planned without touching anything (`plan`), carried out with copies of what the pool
//!   knows, and undone when the driver fails. What is kept meanwhile sits in rooms of a store
//!   ([`crate::backup`], `backed`); `save` compares and copies what differs, `prepare` does so before, in the background,
//!   and `fill` brings it back while more is mapped, by the faster of the device's two ways (`ways`), and `verify` compares it.
//!   A backup that has spoiled is never taken for a change (`spoiled`): what was lost is undefined (`lost`, `undefined`).
//!
//! What is promised: addresses, bytes, all or nothing, the truth in reports, no leak, stream order, live fits
//! means success, never over the limit, errors in forked children.
//!
//! Three things are locked. The state (`gate::Monitor`) for bookkeeping only: no driver call that moves memory,
//! no copy and no wait happens under it. The machine (`vm`) by whoever moves memory, for as long as the driver
//! takes to map and unmap. A tag (`gate`) by whoever sleeps or wakes it; others wait in front of it with nothing
//! held.

mod access;
mod alloc;
mod backed;
mod bins;
mod blocks;
mod capture;
mod clocks;
mod error;
mod fill;
mod gate;
mod handle;
mod layout;
mod lost;
mod orders;
mod part;
mod place;
mod plan;
mod prepare;
mod quiet;
mod reaper;
mod reclaim;
mod report;
mod sample;
mod save;
mod segment;
mod sleep;
mod spoiled;
mod state;
mod stats;
mod supply;
mod trust;
mod undefined;
mod verify;
mod vm;
mod wake;
mod ways;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use error::{Corruption, Phase, PoolError, Shortage, Usage};
pub use handle::{AllocRequest, Block, BlockId};
pub use lost::LostRange;
pub use prepare::{Preparation, PrepareEnd, PrepareProgress, PrepareReport};
pub use report::{
    Level, OnProgress, Release, SleepPhases, SleepReport, SleepRequest, Verify, WakePhases, WakeProgress,
    WakeReport, WakeRequest,
};
pub use stats::{BlockKind, BlockSnapshot, PoolStats, SegmentSnapshot, Snapshot, TagStats};

use self::access::Guest;
use self::blocks::Blocks;
use self::clocks::Clocks;
use self::gate::Monitor;
use self::orders::Orders;
use self::prepare::Preparers;
use self::reaper::Reaper;
use self::segment::Segments;
use self::state::{State, TagEntry, TagKey};
use self::undefined::Undefined;
use self::vm::{Counters, Vm};
use crate::backup::{Backups, HostBackups};
use crate::bytes::ByteSize;
use crate::driver::{DeviceRange, Driver, StreamId};
use crate::tag::{Changes, Tag, TagPolicy, TagState};

/// Result of a pool call.
pub type Result<T, E = PoolError> = std::result::Result<T, E>;

/// How a pool behaves. The default suits a whole device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Most bytes of backing the pool may hold, at least one granule. `None`: what the device has.
    pub limit_bytes: Option<u64>,
    /// Granules of a chunk, the piece in which blocks of at least this size get their memory. Their ends, and
    /// smaller blocks, get single granules.
    pub chunk_granules: u64,
    /// Granules of the largest span, rounded down to whole chunks. Spans are pieces of this size, or of a smaller power of
    /// two chunks: a sleep and a wake take calls of the driver for each piece. Blocks of tags that a sleep drops at
    /// whichever level ([`TagPolicy::is_discardable`]) are as many spans as fit, then chunks, then granules, from the
    /// beginning: they are few, huge and live long. So are blocks that are freed as a whole
    /// ([`AllocRequest::freed_whole`]), and whatever a wake brings back: what lives by then outlives its load. A span that
    /// is freed in parts leaves as a whole, as a chunk does, or with the next sleep: the wake after it brings back what
    /// lives. There are none where it would be no larger than a chunk, or a chunk is one granule.
    pub span_granules: u64,
    /// Granules of address space that the pool grows by for smaller blocks.
    pub segment_granules: u64,
    /// Cached bytes above which memory that nothing uses is given back soon, in the background. `None`: it is
    /// kept until somebody needs it or trims. [`Pool::set_cached_max_bytes`] changes it.
    pub cached_max_bytes: Option<u64>,
    /// Whether backups stay in host memory after a wake, to save the next copy of what has not changed.
    pub keep_backups: bool,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            limit_bytes: None,
            chunk_granules: 16,
            span_granules: 256,
            segment_granules: 32,
            cached_max_bytes: None,
            keep_backups: true,
        }
    }
}

impl PoolConfig {
    fn chunks_of_span(&self) -> u64 {
        let has_chunks = self.chunk_granules > 1;
        if has_chunks { (self.span_granules / self.chunk_granules).max(1) } else { 1 }
    }
}

/// Blocks of one device's memory. See the module's documentation.
pub struct Pool {
    shared: Arc<Shared>,
    reaper: Mutex<Reaper>,
    preparers: Mutex<Preparers>,
}

/// What the callers of a pool and its reaper share.
#[derive(Debug)]
struct Shared {
    driver: Arc<dyn Driver>,
    backups: Arc<dyn Backups>,
    shape: Shape,
    streams: Vec<StreamId>,
    /// Where copies to the device are made by a kernel, if that pays.
    kernel_stream: Option<StreamId>,
    /// Its work gives way to that of others.
    background_stream: StreamId,
    /// Held by who prepares a sleep.
    preparing: Mutex<()>,
    /// How many sleeps lack host memory: who prepares one makes way.
    starving: AtomicU32,
    /// Freed memory that a request has waited for in vain.
    stuck_bytes: AtomicU64,
    state: Monitor<State>,
    vm: Mutex<Vm>,
    counters: Arc<Counters>,
    orders: Monitor<Orders>,
}

type StateGuard<'a> = MutexGuard<'a, State>;
type VmGuard<'a> = MutexGuard<'a, Vm>;

/// The sizes of a pool. Never change.
#[derive(Debug, Clone, Copy)]
struct Shape {
    granule_bytes: u64,
    chunk_bytes: u64,
    /// Of the largest; as a chunk where there are no spans.
    span_bytes: u64,
    segment_bytes: u64,
    total_bytes: u64,
    limit_bytes: Option<u64>,
    keep_backups: bool,
}

impl Shape {
    fn limit_bytes(&self) -> u64 {
        self.limit_bytes.unwrap_or(self.total_bytes)
    }
}

const CLOSE: &str = "close the pool";

static NEXT_POOL: AtomicU32 = AtomicU32::new(1);

impl Pool {
    /// A pool over `driver`. Takes nothing from the device but streams.
    ///
    /// # Errors
    /// `InvalidConfig`; what the driver says when it has no streams.
    pub fn new(driver: Arc<dyn Driver>, config: PoolConfig) -> Result<Self> {
        let backups = Arc::new(HostBackups::new(Arc::clone(&driver)));
        Self::with_backups(driver, config, backups)
    }

    /// A pool over `driver` that keeps its backups in `backups`, which may serve other pools, too.
    ///
    /// # Errors
    /// As for [`Pool::new`].
    pub fn with_backups(
        driver: Arc<dyn Driver>,
        config: PoolConfig,
        backups: Arc<dyn Backups>,
    ) -> Result<Self> {
        let info = driver.info().clone();
        let invalid = |reason: String| Err(PoolError::InvalidConfig { reason });
        if config.chunk_granules == 0 || config.segment_granules == 0 {
            return invalid("a chunk and a segment have at least one granule".into());
        }
        let largest = config.chunk_granules.max(config.span_granules).max(config.segment_granules);
        if largest.checked_mul(info.granule_bytes).is_none_or(|bytes| bytes > blocks::BYTES_MAX) {
            return invalid(format!("a chunk, span or segment has at most {} bytes", blocks::BYTES_MAX));
        }
        if let Some(limit) = config.limit_bytes.filter(|limit| *limit < info.granule_bytes).map(ByteSize) {
            let granule = ByteSize(info.granule_bytes);
            return invalid(format!("a limit of {limit} is below one granule of {granule}; raise it"));
        }
        let streams = (0..info.copy_streams.max(info.save_streams).max(1)).map(|_| driver.stream_create());
        let kernel = (0..usize::from(info.kernel_copies)).map(|_| driver.stream_create_kernel_copies());
        let background = std::iter::once_with(|| driver.stream_create_background());
        let streams = streams.chain(kernel).chain(background).collect::<Vec<_>>();
        let mut ready: Vec<StreamId> =
            streams.iter().filter_map(|stream| stream.as_ref().ok().copied()).collect();
        if let Some(source) = streams.into_iter().find_map(Result::err) {
            for stream in ready {
                // Already failing; a stream that cannot be destroyed is idle and ends with the driver.
                let _ = driver.stream_destroy(stream);
            }
            return Err(PoolError::Driver { op: "open the pool", source });
        }
        let built_in = [Tag::weights(), Tag::kv_cache(), Tag::runtime(), Tag::cudagraph()];
        let shape = Shape {
            granule_bytes: info.granule_bytes,
            chunk_bytes: info.granule_bytes * config.chunk_granules,
            span_bytes: info.granule_bytes * config.chunk_granules * config.chunks_of_span(),
            segment_bytes: info.granule_bytes * config.segment_granules,
            total_bytes: match info.total_bytes {
                // Not known; it is the device then that refuses.
                0 => config.limit_bytes.unwrap_or(u64::MAX),
                bytes => bytes,
            },
            limit_bytes: config.limit_bytes,
            keep_backups: config.keep_backups,
        };
        let state = State {
            pool: NEXT_POOL.fetch_add(1, Ordering::Relaxed),
            shape,
            tags: built_in.map(TagEntry::new).into(),
            lanes: Vec::new(),
            clocks: Clocks::default(),
            segments: Segments::default(),
            bases: BTreeMap::new(),
            blocks: Blocks::default(),
            uses: HashMap::new(),
            waiting: Vec::new(),
            stuck: Vec::new(),
            copying: Vec::new(),
            undefined: Undefined::default(),
            emptied: Vec::new(),
            live_bytes: 0,
            peak_live_bytes: 0,
            peak_used_bytes: 0,
            fine_demand_bytes: 0,
            next_serial: 1,
            cached_max_bytes: config.cached_max_bytes,
            closed: false,
        };
        let counters = Arc::new(Counters::default());
        let vm = Mutex::new(Vm::new(Arc::clone(&driver), Arc::clone(&counters)));
        let (state, orders) = (Monitor::new(state), Monitor::new(Orders::default()));
        let background_stream = ready.pop().unwrap_or(StreamId::DEFAULT); // It was created last.
        let kernel_stream = if info.kernel_copies { ready.pop() } else { None };
        let (preparing, starving) = Default::default();
        let stuck_bytes = AtomicU64::new(0);
        let shared = Shared {
            driver,
            backups,
            shape,
            streams: ready,
            kernel_stream,
            background_stream,
            preparing,
            starving,
            stuck_bytes,
            state,
            vm,
            counters,
            orders,
        };
        let (reaper, preparers) = Default::default();
        Ok(Self { shared: Arc::new(shared), reaper, preparers })
    }

    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// Gives `tag` a policy other than the built-in one. Declaring the same policy again does nothing.
    ///
    /// # Errors
    /// `PolicyConflict` when the tag has blocks, or another policy was declared, under a different one.
    pub fn declare_tag(&self, tag: &Tag, policy: TagPolicy) -> Result<()> {
        let mut state = self.shared.open_state()?;
        let key = state.tag_key(tag);
        let entry = state.tag_mut(key);
        if entry.policy != policy && (entry.live_blocks > 0 || entry.declared) {
            return Err(PoolError::PolicyConflict { tag: tag.clone() });
        }
        entry.policy = policy;
        entry.declared = true;
        Ok(())
    }

    /// Takes a block. Its bytes are unspecified. Waits for work of the device when the limit or the device leaves
    /// no other way; and for no longer than the request's [patience](AllocRequest::patience) where that may save
    /// creating memory. While a stream is being captured it waits for no work.
    ///
    /// # Errors
    /// `InvalidRequest`; `Asleep` when the tag sleeps; `OverLimit` or `DeviceFull` with the figures;
    /// `HeldByCapture` where memory that was freed might do, and a capture keeps it; what the driver says.
    pub fn alloc(&self, request: &AllocRequest) -> Result<Block> {
        self.shared.alloc(request)
    }

    /// Says that work on `stream` uses a block too. After it is freed, the block waits for what is queued there
    /// by then, as it does for its own stream.
    ///
    /// # Errors
    /// `StaleBlock`.
    pub fn record_use(&self, block: BlockId, stream: StreamId) -> Result<()> {
        let mut state = self.shared.open_state()?;
        let entry = state.live_block("record a use of", block)?;
        state.record_use(block, entry.lane, stream);
        Ok(())
    }

    /// Gives a block back, asleep or awake. Its own stream can use it at once, others when the work queued until
    /// now has passed. Its memory stays cached until it is reused, reclaimed or trimmed. Never waits, and touches no
    /// event: while a stream is being captured, what is freed queues up.
    ///
    /// # Errors
    /// `StaleBlock` for a second free.
    pub fn free(&self, block: BlockId) -> Result<()> {
        let mut state = self.shared.open_state()?;
        let waits = state.free("free", block)?;
        self.freed(state, waits);
        Ok(())
    }

    /// After something was freed, or the mark was lowered: gets the reaper to work if the block `waits` for other
    /// streams, or the cache is above its mark.
    fn freed(&self, state: StateGuard<'_>, waits: bool) {
        let above_mark = state.is_above_mark(&self.shared.counters);
        drop(state);
        if waits || above_mark {
            self.rouse_reaper();
        }
    }

    fn rouse_reaper(&self) {
        self.reaper.lock().unwrap_or_else(PoisonError::into_inner).start(&self.shared);
        self.shared.orders.lock_anyway().give();
        self.shared.orders.ring();
    }

    /// Changes the mark above which cached memory is given back in the background, from now on: what is above a
    /// lower one begins to leave at once. See [`PoolConfig::cached_max_bytes`]. Waits for nothing.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn set_cached_max_bytes(&self, cached_max_bytes: Option<u64>) -> Result<()> {
        let mut state = self.shared.open_state()?;
        state.cached_max_bytes = cached_max_bytes;
        self.freed(state, false);
        Ok(())
    }

    /// Where a live block is.
    ///
    /// # Errors
    /// `StaleBlock`.
    pub fn block(&self, block: BlockId) -> Result<Block> {
        let entry = self.shared.open_state()?.live_block("look up", block)?;
        let requested_bytes = entry.requested_bytes();
        Ok(Block { id: block, range: DeviceRange::new(entry.addr, entry.bytes()), requested_bytes })
    }

    /// What is known about changes to the bytes of a tag between sleeps, from now on. May be said at any time: also
    /// that a tag is immutable once it has been loaded.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn declare_changes(&self, tag: &Tag, changes: Changes) -> Result<()> {
        let mut state = self.shared.open_state()?;
        let key = state.tag_key(tag);
        while state.tag(key).gate.is_closed() {
            state = self.shared.wait(state)?;
        }
        state.tag_mut(key).changes = changes;
        // What was the same before this was promised may have changed by then.
        state.doubt_all(key);
        Ok(())
    }

    /// Starts to back up, in the background, what a sleep would: so that even the first sleep copies nothing but
    /// what changes from then on. Of what a sleep copies whatever is stored (a volatile tag's bytes, or everything
    /// where [`fast_digests`](crate::DeviceInfo::fast_digests) is false) only the room is made ready. The owner goes on
    /// working. A sleep or a discard of one of the tags ends the preparation; a capture of a stream does not, as it waits
    /// for its own copies only.
    ///
    /// # Errors
    /// As for [`Pool::sleep`] before anything has happened; `PrepareFailed` when there is no thread to be had.
    /// What fails later, [`Preparation::wait`] tells.
    pub fn prepare_sleep(&self, request: &SleepRequest) -> Result<Preparation> {
        // Before the lock: in a forked child it may be held by a thread that does not exist there.
        self.shared.driver.check_process().map_err(PoolError::WrongProcess)?;
        self.preparers.lock().unwrap_or_else(PoisonError::into_inner).start(&self.shared, request)
    }

    /// Puts tags to sleep: their memory goes back to the device, their addresses stay.
    ///
    /// All or nothing up to the point of no return. Tags that sleep already are reported and left alone.
    ///
    /// # Errors
    /// `UnknownTag`, `SleepConflict`, `Undefined`, `Lost`, `Asleep` (stranded), and `Capturing` while a stream is being
    /// captured, before anything has happened; `SleepFailed` with everything
    /// awake as before; `Lost` also where backups that the last wake did not compare turn out to have spoiled; `Stranded` when that could not be restored; `Shortfall` when the tags sleep but not
    /// everything was given back.
    pub fn sleep(&self, request: &SleepRequest) -> Result<SleepReport> {
        self.shared.sleep(request)
    }

    /// Drops the bytes of `tags` whatever their policy says, awake or asleep; backups go too. The tags sleep
    /// until woken, and then hold what their policy says of dropped memory.
    ///
    /// # Errors
    /// As for [`Pool::sleep`].
    pub fn discard(&self, tags: &[Tag]) -> Result<SleepReport> {
        self.shared.discard(tags)
    }

    /// Wakes tags: memory under every live block again, at the same addresses, with the same bytes or what the
    /// policy says. All or nothing. It may be done while a stream is being captured: it waits for its own copies only.
    ///
    /// # Errors
    /// `UnknownTag`; `OverLimit`, `DeviceFull`, `HeldByCapture`, `WakeFailed`, `Corrupt` with everything asleep as
    /// before. `Corrupt` names all that has spoiled; [accepting losses](WakeRequest::accepting_losses), the rest wakes.
    pub fn wake(&self, request: &WakeRequest) -> Result<WakeReport> {
        self.shared.wake(request)
    }

    /// Says that the owner has written the bytes of `tags` again after a level-2 wake, or what was lost of them
    /// ([`Pool::lost_ranges`]). Returns the tags that were undefined until now.
    ///
    /// # Errors
    /// `UnknownTag`; `Asleep`.
    pub fn mark_restored(&self, tags: &[Tag]) -> Result<Vec<Tag>> {
        let mut state = self.shared.open_state()?;
        let tags = state.selected("mark as restored", Some(tags))?;
        tags.iter().try_for_each(|tag| state.check_awake("mark as restored", *tag))?;
        let undefined = |tag: &TagKey| state.tag(*tag).state == TagState::Undefined;
        let restored: Vec<TagKey> = tags.into_iter().filter(undefined).collect();
        restored.iter().for_each(|tag| state.define_all(*tag));
        Ok(state.names(&restored))
    }

    /// Gives back all memory and addresses that serve no byte, waiting for work that may still touch what was
    /// freed before; while a stream is being captured, only what no work may touch. Returns the bytes given back.
    ///
    /// # Errors
    /// What the driver said first; the rest was still done.
    pub fn trim(&self) -> Result<u64> {
        drop(self.shared.open_state()?);
        self.shared.trim()
    }

    /// Where the bytes of a tag are.
    ///
    /// # Errors
    /// `UnknownTag`.
    pub fn tag_state(&self, tag: &Tag) -> Result<TagState> {
        let state = self.shared.open_state()?;
        let keys = state.selected("look up", Some(std::slice::from_ref(tag)))?;
        Ok(keys.first().map_or(TagState::Awake, |key| state.tag(*key).state))
    }

    /// Figures.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn stats(&self) -> Result<PoolStats> {
        Ok(self.shared.open_state()?.stats(&self.shared.counters))
    }

    /// How many calls wait until others make way: for whoever works on their tags, or prepares a sleep where host memory
    /// is lacking. For tests, who can be there when one has begun to wait.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    #[doc(hidden)]
    pub fn waiting_calls(&self) -> Result<u32> {
        let of_tags: u32 = self.shared.open_state()?.tags.iter().map(|entry| entry.wanted).sum();
        Ok(of_tags + self.shared.starving.load(Ordering::Relaxed))
    }

    /// Every segment and block.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn snapshot(&self) -> Result<Snapshot> {
        Ok(self.shared.open_state()?.snapshot())
    }

    /// Gives everything back, live blocks included, and ends the pool. Dropping a pool does the same, but
    /// cannot tell what failed; while a stream is being captured, it leaves what it holds to the driver, which gives
    /// it back when it ends. Waits for the device unless nothing is held.
    ///
    /// # Errors
    /// `Capturing` while a stream is being captured and something is held, with nothing done: the pool is open.
    /// Otherwise what the driver said first, or `Capturing` for a capture that began under way; the pool is closed all
    /// the same, and closing again goes on with what is left.
    pub fn close(&self) -> Result<()> {
        self.shared.driver.check_process().map_err(PoolError::WrongProcess)?;
        self.shared.check_closable()?;
        self.end_work();
        self.shared.close()
    }

    /// Refuses new work, and ends the pool's own threads.
    fn end_work(&self) {
        self.shared.close_gates();
        self.preparers.lock().unwrap_or_else(PoisonError::into_inner).join();
        self.shared.orders.lock_anyway().stop();
        self.shared.orders.ring();
        self.reaper.lock().unwrap_or_else(PoisonError::into_inner).join();
    }
}

impl Shared {
    fn open_state(&self) -> Result<StateGuard<'_>> {
        // Before the lock: in a forked child it may be held by a thread that does not exist there.
        self.driver.check_process().map_err(PoolError::WrongProcess)?;
        let state = self.state.lock().filter(|_| !self.vm.is_poisoned()).ok_or(PoolError::Poisoned)?;
        if state.closed { Err(PoolError::Closed) } else { Ok(state) }
    }

    fn lock_vm(&self) -> Result<VmGuard<'_>> {
        self.vm.lock().map_err(|_| PoolError::Poisoned)
    }

    /// All that were made for the pool.
    fn own_streams(&self) -> impl Iterator<Item = StreamId> {
        self.streams.iter().copied().chain(self.kernel_stream).chain([self.background_stream])
    }

    /// The stream for the `turn`-th copy to the device by its copy engines.
    fn copy_stream(&self, turn: usize) -> StreamId {
        self.stream(turn, self.driver.info().copy_streams)
    }

    /// The stream for the `turn`-th save or digest.
    fn save_stream(&self, turn: usize) -> StreamId {
        self.stream(turn, self.driver.info().save_streams)
    }

    fn stream(&self, turn: usize, of: usize) -> StreamId {
        self.streams.get(turn % of.clamp(1, self.streams.len().max(1))).copied().unwrap_or(StreamId::DEFAULT)
    }

    /// Refuses new work, and waits until what is under way has ended.
    fn close_gates(&self) {
        let mut state = self.state.lock_anyway();
        state.closed = true;
        self.state.ring();
        while !state.tags.iter().all(|entry| entry.gate.is_empty()) {
            match self.state.wait(state) {
                Some(woken) => state = woken,
                None => return, // Poisoned: whoever was inside is gone.
            }
        }
    }

    /// Refuses to wait for the device during a capture. Where nothing is held no work can touch anything, and nothing is
    /// waited for.
    fn check_closable(&self) -> Result<()> {
        if self.counters.held_bytes() == 0 { Ok(()) } else { self.check_no_capture(CLOSE) }
    }

    fn close(&self) -> Result<()> {
        let failed = |source| PoolError::Driver { op: CLOSE, source };
        self.check_closable()?;
        if self.counters.held_bytes() > 0 {
            self.quiesce().map_err(failed)?;
        } else {
            self.forget_clocks();
        }
        let mut vm = self.vm.lock().unwrap_or_else(PoisonError::into_inner);
        let swept = self.sweep(&mut vm);
        let streams: Vec<StreamId> = self.own_streams().collect();
        let ended = swept.and(vm.destroy_streams(&streams)).map_err(failed);
        drop(vm);
        // The backups went with it. What is kept of their memory may as well be kept.
        let _ = self.backups.trim();
        ended
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("device", &self.shared.driver.info().id).finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.shared.driver.check_process().is_err() {
            // A forked child: everything belongs to the parent.
            self.reaper.get_mut().unwrap_or_else(PoisonError::into_inner).forget();
            self.preparers.get_mut().unwrap_or_else(PoisonError::into_inner).forget();
            return;
        }
        // Nobody is left to tell; whoever wants to know calls `close`. Also after a panic: closing trusts no
        // count of what is live.
        if let Err(PoolError::Capturing { .. }) = self.close() {
            self.end_work();
        }
    }
}
