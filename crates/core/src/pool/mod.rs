//! A pool: blocks of one device's memory that can be put to sleep and woken.
//!
//! ```text
//! segment (one reservation, one tag)
//! chunks: [       32 MiB       ][       32 MiB       ][2][2][2]  -  -  -
//! blocks: [ live                                        ][small][   unmapped   ]
//! ```
//!
//! A segment is a range of addresses that belongs to one tag. Chunks of memory are mapped into it where they are
//! needed: large ones inside large blocks, single granules at their ends and under small blocks. Under blocks that
//! a sleep drops or that are freed as a whole, and in all that a wake brings back (`heap/layout`), they are *exact*: as long
//! as what one block has to itself, so that there is little to give back one by one. Chunks that nothing lives in are
//! *idle*: whoever needs memory takes them to wherever it is needed, and only when there are none is memory created. So
//! what is mapped follows what is live, however the sizes change.
//!
//! How a call travels:
//! - `alloc` finds a free mapping that is ready and cuts it (`heap`); if there is none, it finds the location that lacks the
//!   least (`heap/placement`), takes idle memory (`supply`) and maps it (`alloc`, `physical`).
//! - `free` joins the block with its free neighbours and stamps it with its stream's clock (`heap`, `clocks`). Nothing is
//!   unmapped, and no other stream gets it, before what was queued until then has passed (`events`).
//!   `free_part` cuts a part out of a live block first (`heap/parts`).
//!   While a stream is captured into a graph, none of this touches an event (`capture`).
//! - Streams are looked up before they are used (`streams`). Tags (`tags`) and their streams (`heap/stream_lists`) are found in
//!   constant time; those that are over are forgotten (`state`, `heap/sweep`).
//! - `sleep` and `wake` are planned without touching anything (`sleep/plan`, `wake/plan`), carried out with copies of what
//!   the pool knows, and undone when the driver fails. What is kept meanwhile sits in buffers of a store
//!   ([`crate::backup`]), by extents that know nothing of chunks (`backups/index`); `save` compares and copies what
//!   differs, `prepare` does so before, in the background, and `wake/fill` brings it back while more is mapped, by
//!   the faster of the device's two ways (`wake/ways`), and `wake/verify` compares it. A backup that has spoiled is never
//!   taken for a change (`spoiled`): what was lost is undefined (`losses`, `undefined`).
//!
//! What is promised: addresses, bytes, all or nothing, the truth in reports, no leak, stream order, live fits
//! means success, never over the limit, errors in forked children.
//!
//! Three things are locked. The state (`tag_lock::Monitor`) for bookkeeping only: no driver call that moves memory,
//! no copy and no wait happens under it. Physical memory (`physical`) by whoever moves memory, for as long as the driver
//! takes to map and unmap; a sleep and a wake hand it over in between to those who wait for it (`handover`). A tag
//! (`tag_lock`) by whoever sleeps or wakes it; others wait in front of it with nothing held.

mod access;
mod alloc;
mod backups;
mod capture;
mod clocks;
mod close;
mod commands;
mod config;
mod deadline;
mod error;
mod events;
mod handle;
mod handover;
mod heap;
mod hold;
mod holds;
mod host_reclaim;
mod keys;
mod losses;
mod lost;
mod mapping;
mod memory;
mod per_process;
mod physical;
mod prepare;
mod pressure;
mod reaper;
mod report;
mod save;
mod shape;
mod shared;
mod sleep;
mod spoiled;
mod state;
mod stats;
mod streams;
mod supply;
mod tag_lock;
mod tags;
mod undefined;
mod units;
mod wake;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use config::PoolConfig;
pub use error::{Awaited, Corruption, Phase, PoolError, Result, Shortage, Usage};
pub use handle::{AllocRequest, Block, BlockId};
pub use hold::{HeldTag, Hold};
pub use lost::LostRange;
pub use prepare::{Preparation, PrepareEnd, PrepareProgress, PrepareReport};
pub use report::{
    Level, OnProgress, Release, SleepPhases, SleepReport, SleepRequest, Verify, WakePhases, WakeProgress,
    WakeReport, WakeRequest,
};
#[doc(hidden)]
pub use stats::Remembered;
pub use stats::{BlockKind, BlockSnapshot, PoolStats, SegmentSnapshot, Snapshot, TagStats};

use self::access::Access;
use self::deadline::Wait;
use self::prepare::Preparers;
use self::reaper::Reaper;
use self::shared::{Shared, StateGuard};
use crate::backup::{Backups, HostBackups};
use crate::driver::{CopyPart, DeviceRange, Driver, HostBuffer, Pending, StreamId};
use crate::tag::{Changes, Tag, TagPolicy, TagState};

/// Blocks of one device's memory. See the module's documentation.
pub struct Pool {
    shared: Arc<Shared>,
    reaper: Mutex<Reaper>,
    preparers: Mutex<Preparers>,
}

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
        let shared = Arc::new(Shared::open(driver, &config, backups)?);
        shared.lend_host_memory();
        let (reaper, preparers) = Default::default();
        Ok(Self { shared, reaper, preparers })
    }

    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.shared.shared_driver()
    }

    /// Gives `tag` a policy other than the built-in one. Declaring the same policy again does nothing.
    ///
    /// # Errors
    /// `PolicyConflict` when the tag has blocks, or another policy was declared, under a different one.
    pub fn declare_tag(&self, tag: &Tag, policy: TagPolicy) -> Result<()> {
        self.shared.open_state()?.declare(tag, policy)
    }

    /// Takes a block. Its bytes are unspecified. Waits for work of the device when the limit or the device leaves
    /// no other way; and for no longer than the request's [stream_wait_max](AllocRequest::stream_wait_max) where that may save
    /// creating memory. A request may say for how long it waits at all ([`AllocRequest::within`]). While a stream is being
    /// captured it waits for no work.
    ///
    /// # Errors
    /// `InvalidRequest`; `UnknownStream`; `Asleep` when the tag sleeps; `OverLimit` or `DeviceFull` with the figures;
    /// `TimedOut` with what it waited for in vain;
    /// `HeldByCapture` where memory that was freed might do, and a capture keeps it; what the driver says.
    pub fn alloc(&self, request: &AllocRequest) -> Result<Block> {
        self.shared.alloc(request)
    }

    /// Says that work on `stream` uses a block too. After it is freed, the block waits for what is queued there
    /// by then, as it does for its own stream.
    ///
    /// # Errors
    /// `StaleBlock`; `UnknownStream`.
    pub fn record_use(&self, block: BlockId, stream: StreamId) -> Result<()> {
        self.shared.check_stream("record a use of a block", stream)?;
        let mut state = self.shared.open_state()?;
        state.record_use("record a use of", block, stream, |other| self.shared.may_exist(other))
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

    /// Gives `part` of a block back, asleep or awake, in every way like a block of that extent: in the order of the
    /// block's stream, and after what is queued by now on streams that [`Pool::record_use`] named. `part` lies inside
    /// the block and begins and ends on multiples of 512 bytes. Returns what stays live, in address order: none, one
    /// or two blocks, where they were, with the bytes and recorded uses that they had. Their handles are new, and the
    /// old one is stale. Never waits.
    ///
    /// Memory leaves by whole chunks ([`PoolConfig::chunk_granules`](PoolConfig::chunk_granules)) and spans
    /// ([`PoolConfig::span_granules`](PoolConfig::span_granules)): one of which something is still live stays
    /// where it is as a whole, a span until its tag sleeps. Where parts of large blocks are to be given back, chunks of
    /// one granule serve best.
    ///
    /// # Errors
    /// `StaleBlock`; `InvalidPart`.
    pub fn free_part(&self, block: BlockId, part: DeviceRange) -> Result<Vec<Block>> {
        let mut state = self.shared.open_state()?;
        let (waits, rest) = state.free_part(block, part)?;
        self.freed(state, waits);
        Ok(rest)
    }

    /// After something was freed, or the mark was lowered: gets the reaper to work if the block `waits` for other
    /// streams, or the cache is above its mark.
    fn freed(&self, state: StateGuard<'_>, waits: bool) {
        let above_mark = state.above_mark_bytes(self.shared.counters()) > 0;
        drop(state);
        if waits || above_mark {
            self.rouse_reaper();
        }
    }

    fn rouse_reaper(&self) {
        self.reaper.lock().unwrap_or_else(PoisonError::into_inner).start(&self.shared);
        self.shared.wake_reaper();
    }

    /// Changes the mark above which cached memory is given back in the background, from now on: what is above a
    /// lower one begins to leave at once. See [`PoolConfig::cached_max_bytes`]. Waits for nothing.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn set_cached_max_bytes(&self, cached_max_bytes: Option<u64>) -> Result<()> {
        let mut state = self.shared.open_state()?;
        state.set_cached_max_bytes(cached_max_bytes);
        self.freed(state, false);
        Ok(())
    }

    /// Where a live block is.
    ///
    /// # Errors
    /// `StaleBlock`.
    pub fn block(&self, block: BlockId) -> Result<Block> {
        let entry = self.shared.open_state()?.heap().live_block("look up", block)?;
        let requested_bytes = entry.requested_bytes();
        Ok(Block { id: block, range: DeviceRange::new(entry.addr, entry.bytes()), requested_bytes })
    }

    /// Queues a copy of `bytes` of `src` (from `src_offset` on) into a block at `offset`. It is a use of the block
    /// on `stream`, as [`Pool::record_use`] says.
    ///
    /// # Errors
    /// `StaleBlock`, `OutOfBlock`, `Asleep`, `UnknownStream`; what the driver says.
    pub fn write(
        &self,
        stream: StreamId,
        block: BlockId,
        offset: u64,
        src: Arc<HostBuffer>,
        src_offset: u64,
        bytes: u64,
    ) -> Result<Pending<()>> {
        let access = Access { op: "write", stream, block, offset, bytes, writing: true };
        let (device, _access) = self.shared.reach(&access)?;
        let parts = [CopyPart { device, host_offset: src_offset }];
        let copy = self.shared.driver().copy_to_device(stream, src, &parts);
        copy.map_err(|source| PoolError::Driver { op: "write", source })
    }

    /// Queues a copy of `bytes` of a block, from `offset` on, into `dst` at `dst_offset`. It is a use of the block on
    /// `stream`, as [`Pool::record_use`] says.
    ///
    /// # Errors
    /// `StaleBlock`, `OutOfBlock`, `Asleep`, `UnknownStream`; `Undefined` when the bytes were dropped and not restored,
    /// `Lost` when some were lost with their backup; what the driver says.
    pub fn read(
        &self,
        stream: StreamId,
        block: BlockId,
        offset: u64,
        dst: HostBuffer,
        dst_offset: u64,
        bytes: u64,
    ) -> Result<Pending<HostBuffer>> {
        let access = Access { op: "read", stream, block, offset, bytes, writing: false };
        let (device, _access) = self.shared.reach(&access)?;
        let parts = [CopyPart { device, host_offset: dst_offset }];
        let copy = self.shared.driver().copy_to_host(stream, dst, &parts);
        copy.map_err(|source| PoolError::Driver { op: "read", source })
    }

    /// What is known about changes to the bytes of a tag between sleeps, from now on. May be said at any time: also
    /// that a tag is immutable once it has been loaded.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn declare_changes(&self, tag: &Tag, changes: Changes) -> Result<()> {
        let begin = || Wait::for_ever(self.shared.driver(), &"declare changes");
        let (mut state, key) = self.shared.open_tag(self.shared.open_state()?, tag, begin)?;
        state.tags_mut().get_mut(key).set_changes(changes);
        // What was the same before this was promised may have changed by then.
        state.backups_mut().invalidate_all(key);
        Ok(())
    }

    /// Starts to back up, in the background, what a sleep would: so that even the first sleep copies nothing but
    /// what changes from then on. Of what a sleep copies whatever is stored (a volatile tag's bytes, or everything
    /// where [`fast_digests`](crate::DeviceInfo::fast_digests) is false) only the buffer is made ready. The owner goes on
    /// working. A sleep or a discard of one of the tags ends the preparation; a capture of a stream does not, as it waits
    /// for its own copies only.
    ///
    /// # Errors
    /// As for [`Pool::sleep`] before anything has happened; `PrepareFailed` when there is no thread to be had.
    /// What fails later, [`Preparation::wait`] tells.
    pub fn prepare_sleep(&self, request: &SleepRequest) -> Result<Preparation> {
        // Before the lock: in a forked child it may be held by a thread that does not exist there.
        self.shared.driver().check_process().map_err(PoolError::WrongProcess)?;
        // One at a time: threads are not counted twice.
        let mut preparers = self.preparers.lock().unwrap_or_else(PoisonError::into_inner);
        let (saves, tags) = self.shared.plan_preparation(request)?;
        preparers.start(&self.shared, saves, tags)
    }

    /// Puts tags to sleep: their memory goes back to the device, their addresses stay.
    ///
    /// All or nothing up to the point of no return. Tags that sleep already are reported and left exclusive.
    ///
    /// # Errors
    /// `UnknownTag`, `SleepConflict`, `Undefined`, `Lost`, `Asleep` (stranded), `Held`, and `Capturing` while a stream is
    /// being captured, before anything has happened, and `TimedOut` where the request says how long it waits;
    /// `SleepFailed` with everything awake as before; `Lost` also where backups that the last wake did not compare turn
    /// out to have spoiled; `Stranded` when that could not be restored; `Shortfall` when the tags sleep but not everything
    /// was given back.
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
    /// `UnknownTag`; `OverLimit`, `DeviceFull`, `HeldByCapture`, `TimedOut`, `WakeFailed`, `Corrupt` with everything
    /// asleep as before. `Corrupt` names all that has spoiled; [accepting losses](WakeRequest::accepting_losses), the rest
    /// wakes.
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
        let tags = state.tags().selected("mark as restored", Some(tags))?;
        tags.iter().try_for_each(|tag| state.tags().check_awake("mark as restored", *tag))?;
        let restored: Vec<_> =
            tags.into_iter().filter(|tag| state.tags_mut().get_mut(*tag).restore()).collect();
        Ok(state.tags().names(&restored))
    }

    /// Gives back all memory and addresses that serve no byte, waiting for work that may still touch what was
    /// freed before; while a stream is being captured, only what no work may touch. What a [hold](Pool::hold) keeps stays,
    /// and [`Pool::held`] says how much that is. Host memory is [`Pool::drop_backups`]' business. Returns the bytes given
    /// back.
    ///
    /// # Errors
    /// What the driver said first; the rest was still done.
    pub fn trim(&self) -> Result<u64> {
        self.shared.trim(None)
    }

    /// The same, waiting for work for `wait_max` at most.
    ///
    /// # Errors
    /// As for [`Pool::trim`]; `TimedOut`, which names the streams, when work keeps some of it. The rest was given back.
    pub fn trim_within(&self, wait_max: Duration) -> Result<u64> {
        self.shared.trim(Some(wait_max))
    }

    /// Where the bytes of a tag are.
    ///
    /// # Errors
    /// `UnknownTag`.
    pub fn tag_state(&self, tag: &Tag) -> Result<TagState> {
        let state = self.shared.open_state()?;
        let keys = state.tags().selected("look up", Some(std::slice::from_ref(tag)))?;
        Ok(keys.first().map_or(TagState::Awake, |key| state.tags().get(*key).state()))
    }

    /// Figures.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn stats(&self) -> Result<PoolStats> {
        Ok(self.shared.open_state()?.stats(self.shared.counters()))
    }

    /// How many calls wait for the lock of who moves memory. For tests, who can be there when one has begun to wait.
    #[doc(hidden)]
    #[must_use]
    pub fn waiting_for_turn(&self) -> usize {
        self.shared.waiting_for_memory()
    }

    /// How many calls wait until others make way: for whoever works on their tags, or prepares a sleep where host memory
    /// is lacking. For tests, who can be there when one has begun to wait.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    #[doc(hidden)]
    pub fn waiting_calls(&self) -> Result<u32> {
        let of_tags: u32 = self.shared.open_state()?.tags().iter().map(|(_, entry)| entry.wanted()).sum();
        Ok(of_tags + self.shared.starving())
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
    /// `Capturing` while a stream is being captured and something is held, and `Held` while somebody has a
    /// [hold](Pool::hold), with nothing done: the pool is open. Otherwise what the driver said first, or `Capturing` for a
    /// capture that began under way; the pool is closed all the same, and closing again goes on with what is left.
    pub fn close(&self) -> Result<()> {
        self.shared.driver().check_process().map_err(PoolError::WrongProcess)?;
        self.shared.check_closable()?;
        self.shared.close_unheld()?;
        self.end_work();
        self.shared.close()
    }

    /// Refuses new work, and ends the pool's own threads.
    fn end_work(&self) {
        self.shared.close_gates();
        self.preparers.lock().unwrap_or_else(PoisonError::into_inner).join();
        self.shared.commands().lock_anyway().stop();
        self.shared.commands().notify();
        self.reaper.lock().unwrap_or_else(PoisonError::into_inner).join();
    }
}

impl Pool {
    /// How much the pool remembers of tags and streams. For tests of what it forgets.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    #[doc(hidden)]
    pub fn remembered(&self) -> Result<Remembered> {
        Ok(self.shared.open_state()?.remembered())
    }
}

/// What was lost with its backup.
impl Pool {
    /// Every range of a block that was lost with its backup, and neither written again nor freed since, by address. What
    /// a sleep has dropped is not among them: there, the whole tag is undefined.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn lost_ranges(&self) -> Result<Vec<LostRange>> {
        let state = self.shared.open_state()?;
        Ok(state.lost_of(state.tags().iter().map(|(tag, _)| tag)))
    }

    /// Says that the owner has written again what was lost of a block. Returns that. Its tag is awake as before when
    /// nothing else of it is lost.
    ///
    /// # Errors
    /// `StaleBlock`; `Asleep`; `Undefined` when a sleep has dropped the whole tag: [`Pool::mark_restored`] is for that.
    pub fn mark_block_restored(&self, block: BlockId) -> Result<Vec<LostRange>> {
        self.shared.open_state()?.restore_block(block)
    }
}

/// Host memory that only saves time, and memory that others have registered.
impl Pool {
    /// Lets go of the backups of tags that are awake, of all or of those named, and gives host memory back that nothing
    /// uses. Returns how much less the store holds then, in bytes: what shares a slab with a backup that stays comes back
    /// with that one, and where others use the store, too, what they take or give meanwhile counts as well. What sleeps
    /// keeps its backups. The next sleep copies what is let go of. Waits for whoever puts the tags to sleep or wakes them,
    /// and ends a preparation of theirs; may wait for work on the device.
    ///
    /// # Errors
    /// `UnknownTag`, and `Asleep` for a tag that is named and sleeps with a backup, before anything has happened. `Lost`
    /// names what the device has not either of backups that turn out to have spoiled: all of them are gone all the same.
    /// `Driver` with what the driver says when they cannot be looked at, and all stay, or what the store says when it is to
    /// give memory back, and they are gone.
    pub fn drop_backups(&self, tags: Option<&[Tag]>) -> Result<u64> {
        self.shared.drop_backups(tags)
    }

    /// Says that somebody else has the physical memory of a tag registered, `holder` by name, until the guard is
    /// dropped. Take it before registering, drop it after deregistering. Meanwhile a sleep or a discard that means the
    /// tag, also one that means all, and [`Pool::close`] are refused, naming the holder; memory that is freed in the tag
    /// stays where it is, for blocks of the tag. Holds add up: of one holder as well. Waits for whoever puts the tag to
    /// sleep or wakes it.
    ///
    /// # Errors
    /// `UnknownTag`; `Asleep` for a tag that has no memory now.
    pub fn hold(&self, tag: &Tag, holder: impl Into<String>) -> Result<Hold> {
        self.shared.hold(tag, holder.into().into())
    }

    /// The tags that are held, and by whom; none where nobody holds any.
    ///
    /// # Errors
    /// `Closed`, `WrongProcess`.
    pub fn held(&self) -> Result<Vec<HeldTag>> {
        Ok(self.shared.open_state()?.held())
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("device", &self.shared.driver().info().id).finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.shared.driver().check_process().is_err() {
            // A forked child: everything belongs to the parent.
            self.reaper.get_mut().unwrap_or_else(PoisonError::into_inner).forget();
            self.preparers.get_mut().unwrap_or_else(PoisonError::into_inner).forget();
            return;
        }
        // Nobody is left to tell; whoever wants to know calls `close`. Also after a panic: closing trusts no
        // count of what is live.
        match self.close() {
            Err(PoolError::Capturing { .. }) => self.end_work(),
            Err(PoolError::Held { .. }) => {
                self.end_work();
                self.shared.orphan();
            }
            _ => {}
        }
    }
}
