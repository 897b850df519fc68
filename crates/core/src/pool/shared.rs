//! What the callers of a pool and its own threads share, and the order of its locks.
//!
//! A call waits for locks in this order only. A tag ([`crate::pool::tools::tag_lock`]) is locked by a sleep or wake;
//! others wait for it without holding anything. Physical memory is locked while the driver maps and unmaps; a
//! sleep or wake hands it over in between ([`crate::pool::tools::handover`]). Under the lock of the state ([`Monitor`]) no
//! driver call moves memory, and no copy or wait happens.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use super::state::PoolState;
use crate::backup::Backups;
use crate::driver::{Driver, StreamId};
use crate::lend::Broker;
use crate::peer::Peer;
use crate::pool::parts::links::Links;
use crate::pool::parts::newly_taken::NewlyTaken;
use crate::pool::parts::open_copies::Opened;
use crate::pool::parts::physical::{Counters, PhysicalMemory};
use crate::pool::parts::scratch::ScratchMemory;
use crate::pool::parts::tags::Chosen;
use crate::pool::tools::cancel;
use crate::pool::tools::commands::Commands;
use crate::pool::tools::config::PoolConfig;
use crate::pool::tools::deadline::{Deadline, Wait};
use crate::pool::tools::error::{Awaited, PoolError, Result};
use crate::pool::tools::free_memory::FreeMemory;
use crate::pool::tools::handover::HandoverLock;
use crate::pool::tools::keys::TagKey;
use crate::pool::tools::reaper_thread::ReaperThread;
use crate::pool::tools::shape::Shape;
use crate::pool::tools::tag_lock::Monitor;
use crate::tag::{Tag, TagState};

/// Between two checks for what sends no notification.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

static NEXT_POOL: AtomicU32 = AtomicU32::new(1);

#[derive(Debug)]
pub(super) struct Shared {
    driver: Arc<dyn Driver>,
    backups: Arc<dyn Backups>,
    broker: OnceLock<Arc<dyn Broker>>,
    free_memory: FreeMemory,
    newly_taken: NewlyTaken,
    links: Links,
    peers: OnceLock<Vec<Peer>>,
    opened: Opened,
    shape: Shape,
    streams: Streams,
    preparing: Mutex<()>,
    /// Sleeps, of any pool, that lack host memory: preparations here give way.
    starving: AtomicU32,
    /// Freed memory that a request has awaited without success.
    stalled_bytes: AtomicU64,
    state: Monitor<PoolState>,
    memory: HandoverLock<PhysicalMemory>,
    scratch: ScratchMemory,
    counters: Arc<Counters>,
    commands: Monitor<Commands>,
    reaper_thread: ReaperThread,
    this: Weak<Self>,
}

pub(super) type StateGuard<'a> = MutexGuard<'a, PoolState>;
pub(super) type MemoryGuard<'a> = MutexGuard<'a, PhysicalMemory>;

#[derive(Debug)]
pub(super) struct Streams {
    copies: Vec<StreamId>,
    copy_streams: usize,
    save_streams: usize,
    /// Copies to the device by a kernel, if that pays.
    kernel: Option<StreamId>,
    /// Of low priority.
    background: StreamId,
}

impl Streams {
    fn open(driver: &dyn Driver) -> Result<Self> {
        let info = driver.info();
        let (copy_streams, save_streams) = (info.copy_streams, info.save_streams);
        let streams = (0..copy_streams.max(save_streams).max(1)).map(|_| driver.stream_create());
        let kernel = (0..usize::from(info.kernel_copies)).map(|_| driver.stream_create_kernel_copies());
        let background = std::iter::once_with(|| driver.stream_create_background());
        let streams = streams.chain(kernel).chain(background).collect::<Vec<_>>();
        let mut copies: Vec<StreamId> =
            streams.iter().filter_map(|stream| stream.as_ref().ok().copied()).collect();
        if let Some(source) = streams.into_iter().find_map(std::result::Result::err) {
            for stream in copies {
                // A stream that cannot be destroyed is idle and ends with the driver.
                let _ = driver.stream_destroy(stream);
            }
            return Err(PoolError::Driver { op: "open the pool", source });
        }
        let background = copies.pop().unwrap_or(StreamId::DEFAULT); // It was created last.
        let kernel = if info.kernel_copies { copies.pop() } else { None };
        Ok(Self { copies, copy_streams, save_streams, kernel, background })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = StreamId> {
        self.copies.iter().copied().chain(self.kernel).chain([self.background])
    }

    /// For copies to the device by a copy engine.
    pub(super) fn copy(&self, turn: usize) -> StreamId {
        self.nth(turn, self.copy_streams)
    }

    pub(super) fn save(&self, turn: usize) -> StreamId {
        self.nth(turn, self.save_streams)
    }

    /// How many saves or digests run at a time.
    pub(super) fn saves(&self) -> usize {
        self.save_streams.max(1)
    }

    pub(super) fn kernel(&self) -> Option<StreamId> {
        self.kernel
    }

    pub(super) fn background(&self) -> StreamId {
        self.background
    }

    fn nth(&self, turn: usize, of: usize) -> StreamId {
        self.copies.get(turn % of.clamp(1, self.copies.len().max(1))).copied().unwrap_or(StreamId::DEFAULT)
    }
}

impl Shared {
    pub(super) fn open(
        driver: Arc<dyn Driver>,
        config: &PoolConfig,
        backups: Arc<dyn Backups>,
    ) -> Result<Arc<Self>> {
        config.check(driver.info())?;
        let shape = Shape::new(config, driver.info());
        let streams = Streams::open(&*driver)?;
        let pool = NEXT_POOL.fetch_add(1, Ordering::Relaxed);
        let counters = Arc::new(Counters::default());
        Ok(Arc::new_cyclic(|this| Self {
            memory: HandoverLock::new(PhysicalMemory::new(Arc::clone(&driver), Arc::clone(&counters))),
            scratch: ScratchMemory::default(),
            driver,
            backups,
            broker: OnceLock::new(),
            free_memory: FreeMemory::default(),
            newly_taken: NewlyTaken::default(),
            links: Links::default(),
            peers: OnceLock::new(),
            opened: Opened::default(),
            shape,
            streams,
            preparing: Mutex::default(),
            starving: AtomicU32::default(),
            stalled_bytes: AtomicU64::default(),
            state: Monitor::new(PoolState::new(shape, pool, config.cached_max_bytes)),
            counters,
            commands: Monitor::new(Commands::default()),
            reaper_thread: ReaperThread::new(),
            this: Weak::clone(this),
        }))
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    pub(super) fn shared_driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    pub(super) fn backups(&self) -> &Arc<dyn Backups> {
        &self.backups
    }

    pub(super) fn free_memory(&self) -> &FreeMemory {
        &self.free_memory
    }

    pub(super) fn newly_taken(&self) -> &NewlyTaken {
        &self.newly_taken
    }

    pub(super) fn links(&self) -> &Links {
        &self.links
    }

    /// Other devices that may have copies of what sleeps.
    pub(super) fn peers(&self) -> &[Peer] {
        self.peers.get().map_or(&[], Vec::as_slice)
    }

    pub(super) fn copy_to(&self, peers: Vec<Peer>) -> Result<()> {
        drop(self.open_state()?);
        self.can_share_memory("copy to other devices")?;
        let again = || PoolError::InvalidConfig { reason: "the pool copies to other devices already".into() };
        self.peers.set(peers).map_err(|_| again())
    }

    /// Copies that a sleep or a wake has at hand.
    pub(super) fn opened(&self) -> &Opened {
        &self.opened
    }

    fn can_share_memory(&self, what: &str) -> Result<()> {
        if self.driver.info().memory_name.is_some() {
            return Ok(());
        }
        let reason = format!(
            "{} cannot {what}: it has no descriptors of memory that other processes could hold",
            self.driver.info().id
        );
        Err(PoolError::InvalidConfig { reason })
    }

    /// Where sleeps may lend memory.
    pub(super) fn broker(&self) -> Option<&Arc<dyn Broker>> {
        self.broker.get()
    }

    pub(super) fn lend_through(&self, broker: Arc<dyn Broker>) -> Result<&Arc<dyn Broker>> {
        drop(self.open_state()?);
        self.can_share_memory("lend memory")?;
        let mut memory = self.lock_memory()?;
        if self.broker.get().is_some() {
            return Err(PoolError::InvalidConfig {
                reason: "the pool lends through another broker already".into(),
            });
        }
        memory.share_from(self.shape.large_bytes());
        Ok(self.broker.get_or_init(|| broker))
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(super) fn streams(&self) -> &Streams {
        &self.streams
    }

    pub(super) fn scratch(&self) -> &ScratchMemory {
        &self.scratch
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(super) fn commands(&self) -> &Monitor<Commands> {
        &self.commands
    }

    pub(super) fn reaper_thread(&self) -> &ReaperThread {
        &self.reaper_thread
    }

    /// Another owner of this; `None` as it is dropped.
    pub(super) fn counted(&self) -> Option<Arc<Self>> {
        self.this.upgrade()
    }

    pub(super) fn preparing(&self) -> MutexGuard<'_, ()> {
        self.preparing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn starving(&self) -> u32 {
        self.starving.load(Ordering::Relaxed)
    }

    /// A sleep lacks host memory while the guard lives.
    pub(super) fn starve(&self) -> Starving<'_> {
        self.starving.fetch_add(1, Ordering::Relaxed);
        Starving(&self.starving)
    }

    /// After a request's whole `stream_wait_max`: later requests do not wait for the same memory.
    pub(super) fn note_stalled(&self) {
        let pending_bytes = self.lock_state().reclaimable().pending_bytes;
        self.stalled_bytes.store(pending_bytes, Ordering::Relaxed);
    }

    /// The pending bytes worth waiting for. Completed memory no longer counts as awaited in vain.
    pub(super) fn promising_bytes(&self, pending_bytes: u64) -> u64 {
        let stalled_bytes = self.stalled_bytes.fetch_min(pending_bytes, Ordering::Relaxed).min(pending_bytes);
        pending_bytes - stalled_bytes
    }

    /// Ignores poisoning.
    pub(super) fn lock_state(&self) -> StateGuard<'_> {
        self.state.lock_anyway()
    }

    pub(super) fn notify(&self) {
        self.state.notify();
    }

    pub(super) fn open_state(&self) -> Result<StateGuard<'_>> {
        // Before the lock: in a forked child a thread that does not exist there may hold it.
        self.driver.check_process().map_err(PoolError::WrongProcess)?;
        still_open(self.state.lock().filter(|_| !self.memory.is_poisoned()).ok_or(PoolError::Poisoned)?)
    }

    pub(super) fn lock_memory(&self) -> Result<MemoryGuard<'_>> {
        self.memory.lock().ok_or(PoolError::Poisoned)
    }

    pub(super) fn lock_memory_anyway(&self) -> MemoryGuard<'_> {
        self.memory.lock_anyway()
    }

    pub(super) fn waiting_for_memory(&self) -> usize {
        self.memory.waiting()
    }

    pub(super) fn hand_over_memory<'a>(&'a self, memory: MemoryGuard<'a>) -> MemoryGuard<'a> {
        self.memory.yield_to_waiters(memory)
    }

    /// Waits for a change of the state, also in a closed pool.
    pub(super) fn wait_anyway<'a>(
        &'a self,
        state: StateGuard<'a>,
        most: Option<Duration>,
    ) -> Result<StateGuard<'a>> {
        let woken = match most {
            Some(most) => self.state.wait_for(state, most),
            None => self.state.wait(state),
        };
        woken.ok_or(PoolError::Poisoned)
    }

    pub(super) fn wait<'a>(&'a self, state: StateGuard<'a>) -> Result<StateGuard<'a>> {
        self.wait_anyway(state, None).and_then(still_open)
    }

    pub(super) fn wait_briefly<'a>(&'a self, state: StateGuard<'a>) -> Result<StateGuard<'a>> {
        self.wait_anyway(state, Some(CHECK_INTERVAL)).and_then(still_open)
    }

    /// Unless it may block it returns now and then, so that the caller can check its deadline.
    pub(super) fn wait_by<'a>(&'a self, state: StateGuard<'a>, deadline: Deadline) -> Result<StateGuard<'a>> {
        if deadline.may_block() { self.wait(state) } else { self.wait_briefly(state) }
    }

    /// The tag of this name, created if need be, after any exclusive access has ended. `begin` is called to
    /// wait.
    #[inline]
    pub(super) fn open_tag<'a, 'w>(
        &'a self,
        mut state: StateGuard<'a>,
        tag: &Tag,
        begin: impl FnOnce() -> Wait<'w>,
    ) -> Result<(StateGuard<'a>, TagKey)> {
        let key = state.tag_key(tag);
        if state.tags().get(key).is_taken() {
            self.wait_for_tag(state, tag, begin())
        } else {
            Ok((state, key))
        }
    }

    fn wait_for_tag<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        tag: &Tag,
        wait: Wait<'_>,
    ) -> Result<(StateGuard<'a>, TagKey)> {
        loop {
            // The tag may be forgotten during a wait.
            let key = state.tag_key(tag);
            if !state.tags().get(key).is_taken() {
                return Ok((state, key));
            }
            if wait.deadline.has_passed(&*self.driver) {
                drop(state);
                return Err(self.timed_out(wait, Awaited::Calls(vec![tag.clone()])));
            }
            state = self.wait_by(state, wait.deadline)?;
        }
    }

    /// The error of a call that has waited enough.
    pub(super) fn timed_out(&self, wait: Wait<'_>, awaited: Awaited) -> PoolError {
        let Wait { deadline, op, needed_bytes } = wait;
        if let Err(cancelled) = cancel::check(op) {
            return cancelled;
        }
        let waited = deadline.elapsed(&*self.driver);
        PoolError::TimedOut { op: op.to_string(), needed_bytes, waited, awaited, usage: self.usage() }
    }

    /// Memory freed during an access or a copy can be reused now. Notifies requests that wait for it, and the
    /// reaper, which may have found nothing above the mark.
    pub(super) fn had_again(&self, mut state: StateGuard<'_>) {
        state.heap_mut().clocks_mut().note_change();
        let above_mark = state.above_mark_bytes(&self.counters) > 0;
        drop(state);
        self.state.notify();
        if above_mark {
            self.wake_reaper();
        }
    }

    /// Keeps awake tags that satisfy `wanted` from falling asleep, except those under exclusive access.
    pub(super) fn shared_accesses(
        &self,
        wanted: impl Fn(&PoolState, TagKey) -> bool,
    ) -> Vec<SharedAccess<'_>> {
        // Dropping an access locks the state, so the guard below is dropped first.
        let mut shared_accesses = Vec::new();
        let mut state = self.lock_state();
        if state.is_closed() {
            return Vec::new();
        }
        let awake = state.tags().iter().filter(|(_, entry)| entry.state().is_held() && !entry.is_taken());
        let tags: Vec<TagKey> = awake.map(|(tag, _)| tag).filter(|tag| wanted(&state, *tag)).collect();
        shared_accesses.extend(tags.into_iter().map(|tag| SharedAccess::enter(self, &mut state, tag)));
        shared_accesses
    }

    /// Takes those of `tags` (or of all) that satisfy `wanted`, after other calls have left them. Returns all
    /// selected tags too.
    pub(super) fn exclusive<'a>(
        &self,
        op: &'static str,
        tags: impl Into<Chosen<'a>>,
        wanted: impl Fn(TagState) -> bool,
        falls_asleep: bool,
        deadline: Deadline,
    ) -> Result<(Vec<TagKey>, ExclusiveAccess<'_>)> {
        let mut state = self.open_state()?;
        let tags = tags.into();
        loop {
            let visited = state.tags().selected(op, tags)?;
            if falls_asleep {
                state.check_unheld(op, &visited)?;
            }
            let is_wanted = |tag: &TagKey| wanted(state.tags().get(*tag).state());
            let held: Vec<TagKey> = visited.iter().copied().filter(is_wanted).collect();
            let busy = visited.iter().any(|tag| state.tags().get(*tag).is_taken());
            if !busy && held.iter().all(|tag| state.tags().get(*tag).is_free()) {
                held.iter().for_each(|tag| state.tags_mut().get_mut(*tag).take(falls_asleep));
                state.tags_mut().pin(); // Also those that are only visited.
                return Ok((visited, ExclusiveAccess { shared: self, tags: held }));
            }
            if deadline.has_passed(&*self.driver) {
                let in_use = |tag: &TagKey| !state.tags().get(*tag).is_free();
                let busy: Vec<TagKey> = visited.into_iter().filter(in_use).collect();
                let awaited = Awaited::Calls(state.tags().names(&busy));
                drop(state);
                return Err(self.timed_out(Wait { deadline, op: &op, needed_bytes: 0 }, awaited));
            }
            // Background preparations give way.
            held.iter().for_each(|tag| state.tags_mut().get_mut(*tag).want());
            state = self.wait_anyway(state, (!deadline.may_block()).then_some(CHECK_INTERVAL))?;
            held.iter().for_each(|tag| state.tags_mut().get_mut(*tag).unwant());
            state = still_open(state)?;
        }
    }
}

fn still_open(state: StateGuard<'_>) -> Result<StateGuard<'_>> {
    if state.is_closed() { Err(PoolError::Closed) } else { Ok(state) }
}

#[derive(Debug)]
pub(super) struct Starving<'a>(&'a AtomicU32);

impl Drop for Starving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// While it lives, no tag is forgotten.
#[derive(Debug)]
pub(super) struct ExclusiveAccess<'a> {
    shared: &'a Shared,
    tags: Vec<TagKey>,
}

impl ExclusiveAccess<'_> {
    pub(super) fn tags(&self) -> &[TagKey] {
        &self.tags
    }
}

impl Drop for ExclusiveAccess<'_> {
    fn drop(&mut self) {
        self.shared.settle_after_panic();
        let mut state = self.shared.lock_state();
        for tag in &self.tags {
            state.tags_mut().get_mut(*tag).release();
            state.tidy_absent(*tag);
        }
        state.tags_mut().unpin();
        self.shared.had_again(state);
    }
}

/// Keeps a tag from falling asleep.
#[derive(Debug)]
pub(super) struct SharedAccess<'a> {
    shared: &'a Shared,
    tag: TagKey,
}

impl<'a> SharedAccess<'a> {
    /// No call may have exclusive access to the tag.
    pub(super) fn enter(shared: &'a Shared, state: &mut PoolState, tag: TagKey) -> Self {
        state.tags_mut().get_mut(tag).enter();
        Self { shared, tag }
    }

    pub(super) fn tag(&self) -> TagKey {
        self.tag
    }
}

impl Drop for SharedAccess<'_> {
    fn drop(&mut self) {
        self.shared.lock_state().tags_mut().get_mut(self.tag).leave();
        self.shared.notify();
    }
}
