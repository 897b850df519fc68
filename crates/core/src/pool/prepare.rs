//! Backing up before a sleep, in the background.
//!
//! A thread copies new or changed granules of live chunks on a low-priority stream. For volatile tags, and
//! where digests are slow, the sleep copies anyway: only backup buffers are prepared. Blocks stay usable; the
//! chunk being copied stays mapped. A call that needs a tag exclusively waits for the copies in flight, and
//! ends the preparation. The sleep finds later writes by comparing digests.
//!
//! A storage that measures needs the chunk held, too. Host memory is awaited with nothing held, since a sleep
//! would wait as well. So a chunk that needs a new buffer is held once to measure it, and once more to copy it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use serde::{Serialize, Serializer};

use super::backups::Suspect;
use super::backups::{Backup, Save, Stored, runs, tags_of};
use super::error::{PoolError, Result};
use super::heap::Landmark;
use super::keys::TagKey;
use super::shared::Shared;
use super::state::State;
use super::tag_lock::Monitor;
use crate::backup::{BackupBuffer, Footprint};
use crate::driver::{BackingId, DeviceRange, Driver, DriverError, DriverErrorKind, Op, Pending, StreamId};
use crate::tag::{Changes, Tag, TagState};

/// Host memory requested at a time: enough to occupy a few threads.
const AHEAD_BYTES: u64 = 256 << 20;

/// How a preparation ended.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, PrepareEnd, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let report = arena.prepare_sleep(&SleepRequest::all(Level::One))?.wait()?;
/// assert_eq!(report.end, PrepareEnd::Finished);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrepareEnd {
    /// Every chunk was visited.
    Finished,
    /// [`Preparation::cancel`] ended it.
    Cancelled,
    /// A sleep or discard of one of the tags came first, or its backups were dropped. Or a sleep of any pool
    /// in the process lacked host memory, or the pool was closed.
    Overtaken,
}

impl PrepareEnd {
    /// Name in JSON and Python.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Cancelled => "cancelled",
            Self::Overtaken => "overtaken",
        }
    }
}

impl Serialize for PrepareEnd {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// What a preparation did. Sizes in bytes, times in seconds.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let report = arena.prepare_sleep(&SleepRequest::all(Level::One))?.wait()?;
/// println!("{} bytes backed up in {:.3} s", report.copied_bytes, report.seconds);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PrepareReport {
    /// Tags that the sleep would back up.
    pub tags: Vec<Tag>,
    /// How it ended.
    pub end: PrepareEnd,
    /// Whole duration.
    pub seconds: f64,
    /// Copied to the backups.
    pub copied_bytes: u64,
    /// Written there for them: less where they are stored as codes.
    pub stored_bytes: u64,
    /// Not copied: the backup's digest matched, or the tag is immutable. What the sleep copies anyway is in
    /// neither figure.
    pub unchanged_bytes: u64,
}

/// The progress of a preparation.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let preparation = arena.prepare_sleep(&SleepRequest::all(Level::One))?;
/// let progress = preparation.progress();
/// println!("{} of {} bytes", progress.done_bytes, progress.total_bytes);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrepareProgress {
    /// Visited so far.
    pub done_bytes: u64,
    /// Live bytes to visit, counted at the start in whole granules.
    pub total_bytes: u64,
    /// Whether it has ended.
    pub is_ended: bool,
}

/// A sleep that is being prepared. Dropping it lets the preparation go on.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let preparation = arena.prepare_sleep(&SleepRequest::all(Level::One))?;
/// // Serve requests meanwhile.
/// preparation.wait()?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Preparation {
    job: Arc<Job>,
    driver: Arc<dyn Driver>,
}

#[derive(Debug)]
struct Job {
    cancelled: AtomicBool,
    done_bytes: AtomicU64,
    total_bytes: u64,
    /// Counts of backup drops at the start.
    forgets: BTreeMap<TagKey, u64>,
    /// [`Outcome::ended`], readable without a lock.
    ended: AtomicBool,
    outcome: Monitor<Outcome>,
}

#[derive(Debug, Default)]
struct Outcome {
    ended: bool,
    result: Option<Result<PrepareReport>>,
}

impl Preparation {
    /// Requests its end. Copies in flight are finished and kept.
    pub fn cancel(&self) {
        self.job.cancelled.store(true, Ordering::Relaxed);
    }

    /// How far the preparation is.
    #[must_use]
    pub fn progress(&self) -> PrepareProgress {
        let is_ended = self.job.ended.load(Ordering::Acquire);
        let done_bytes = self.job.done_bytes.load(Ordering::Relaxed);
        PrepareProgress { done_bytes, total_bytes: self.job.total_bytes, is_ended }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// `PrepareFailed` when host memory was lacking or the device failed; backups stored by then stay. `Lost`
    /// when backups that the last wake did not compare turn out to be spoiled. `Poisoned` when the thread has
    /// panicked. `WrongProcess` in a forked child, which has no such thread.
    pub fn wait(self) -> Result<PrepareReport> {
        self.driver.check_process().map_err(PoolError::WrongProcess)?;
        let mut outcome = self.job.outcome.lock_anyway();
        while !outcome.ended {
            outcome = self.job.outcome.wait(outcome).ok_or(PoolError::Poisoned)?;
        }
        outcome.result.take().unwrap_or(Err(PoolError::Poisoned))
    }
}

/// Signals the end, also of a thread that panics.
struct EndNotifier(Arc<Job>);

impl Drop for EndNotifier {
    fn drop(&mut self) {
        self.0.outcome.lock_anyway().ended = true;
        self.0.ended.store(true, Ordering::Release);
        self.0.outcome.notify();
    }
}

#[derive(Debug, Default)]
pub(super) struct Preparers(Vec<JoinHandle<()>>);

impl Preparers {
    pub(super) fn start(
        &mut self,
        shared: &Arc<Shared>,
        saves: Vec<Save>,
        tags: Vec<Tag>,
    ) -> Result<Preparation> {
        self.0.retain(|thread| !thread.is_finished());
        let granules: u64 = saves.iter().map(|save| save.granules.len() as u64).sum();
        let forgets = {
            let state = shared.lock_state();
            saves.iter().map(|save| (save.tag, state.backups().forgets(save.tag))).collect()
        };
        let job = Arc::new(Job {
            cancelled: AtomicBool::new(false),
            done_bytes: AtomicU64::new(0),
            total_bytes: granules * shared.shape().granule_bytes,
            forgets,
            ended: AtomicBool::new(false),
            outcome: Monitor::new(Outcome::default()),
        });
        let driver = Arc::clone(shared.shared_driver());
        let (shared, notifier) = (Arc::clone(shared), EndNotifier(Arc::clone(&job)));
        let work = move || {
            let result = shared.prepare(&notifier.0, &saves, tags);
            notifier.0.outcome.lock_anyway().result = Some(result);
            drop(notifier);
        };
        let thread = thread::Builder::new().name("poorwill-prepare".into()).spawn(work);
        self.0.push(thread.map_err(|error| PoolError::PrepareFailed { source: no_thread(&error) })?);
        Ok(Preparation { job, driver })
    }

    pub(super) fn join(&mut self) {
        for thread in self.0.drain(..) {
            // [`Preparation::wait`] reports a panic.
            let _ = thread.join();
        }
    }

    /// Drops threads that do not exist in this process.
    pub(super) fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.0));
    }
}

fn no_thread(error: &std::io::Error) -> DriverError {
    let kind = DriverErrorKind::Device {
        code: error.raw_os_error().unwrap_or(0).into(),
        name: "no thread".into(),
        text: error.to_string(),
    };
    DriverError::new(Op::Save, kind)
}

/// Keeps a chunk mapped and its tag awake.
struct HeldChunk<'a> {
    shared: &'a Shared,
    tag: TagKey,
    range: DeviceRange,
}

impl Drop for HeldChunk<'_> {
    fn drop(&mut self) {
        self.shared.settle_after_panic();
        let mut state = self.shared.lock_state();
        state.heap_mut().copied(self.range);
        state.tags_mut().get_mut(self.tag).leave();
        self.shared.had_again(state);
    }
}

struct Prepared<'a> {
    held: HeldChunk<'a>,
    save: Save,
    snapshot: ChunkState,
    /// Stays in the index too, where a free or a drop of backups finds it.
    stored: Option<Backup>,
    changes: Changes,
}

/// A buffer for the footprint that an extent took when it was planned.
struct Ahead {
    /// Number of its save.
    turn: usize,
    planned: Planned,
    buffer: Pending<BackupBuffer>,
}

/// The footprint for these granules.
struct Planned {
    granules: Vec<usize>,
    footprint: Footprint,
}

impl Planned {
    /// Footprints for codes have a place for each granule that was live then.
    fn is_for(&self, save: &Save) -> bool {
        !self.footprint.is_encoded() || self.granules == save.granules
    }
}

/// What came of a chunk that was held.
enum Visit {
    Done,
    /// It needs a new buffer.
    Lacks(Planned),
}

struct ChunkState {
    memory: Vec<BackingId>,
    invalidations: u64,
    landmark: Landmark,
}

enum NextStep<'a> {
    Chunk(Box<Prepared<'a>>),
    Gone,
    End(PrepareEnd),
}

#[derive(Default)]
struct Totals {
    copied_bytes: u64,
    stored_bytes: u64,
    unchanged_bytes: u64,
}

impl Shared {
    fn prepare(&self, job: &Job, saves: &[Save], tags: Vec<Tag>) -> Result<PrepareReport> {
        let started = Instant::now();
        // One at a time: the second finds what the first has stored.
        let guard = self.preparing();
        let mut done = Totals::default();
        let end = self.prepare_all(job, saves, &mut done);
        drop(guard);
        let seconds = started.elapsed().as_secs_f64();
        let Totals { copied_bytes, stored_bytes, unchanged_bytes } = done;
        Ok(PrepareReport { tags, end: end?, seconds, copied_bytes, stored_bytes, unchanged_bytes })
    }

    fn prepare_all(&self, job: &Job, saves: &[Save], done: &mut Totals) -> Result<PrepareEnd> {
        let (mut ahead, mut near) = (VecDeque::new(), None);
        for (turn, save) in saves.iter().enumerate() {
            if self.starving() > 0 {
                return Ok(PrepareEnd::Overtaken);
            }
            let lacks = self.lock_state().backups().get(save).is_none();
            if lacks && ahead.is_empty() {
                match self.look_ahead(job, saves, turn, near)? {
                    Ok(found) => ahead = found,
                    Err(end) => return Ok(end),
                }
            }
            // Buffers of chunks that need none any more are released.
            while ahead.front().is_some_and(|next: &Ahead| next.turn < turn) {
                ahead.pop_front();
            }
            let mut ready = match ahead.pop_front_if(|next| next.turn == turn) {
                Some(Ahead { planned, buffer, .. }) => Some(self.ready(planned, buffer)?),
                None => None,
            };
            loop {
                let was_ready = ready.is_some();
                let visit = match self.hold_chunk(job, save, near)? {
                    NextStep::End(end) => return Ok(end),
                    NextStep::Gone => Visit::Done,
                    NextStep::Chunk(found) => {
                        near = Some(found.snapshot.landmark);
                        self.bring_up_to_date(*found, ready.take(), saves, done)?
                    }
                };
                match visit {
                    // What changes again and again is left to the sleep.
                    Visit::Lacks(_) if was_ready => break,
                    Visit::Lacks(planned) => {
                        let buffer = self.new_buffer(&planned.footprint);
                        ready = Some(self.ready(planned, buffer)?);
                    }
                    Visit::Done => break,
                }
            }
            let visited_bytes = save.granules.len() as u64 * self.shape().granule_bytes;
            job.done_bytes.fetch_add(visited_bytes, Ordering::Relaxed);
        }
        Ok(PrepareEnd::Finished)
    }

    /// Waits for host memory, with nothing held.
    fn ready(&self, planned: Planned, buffer: Pending<BackupBuffer>) -> Result<(Planned, BackupBuffer)> {
        let again = || self.new_buffer(&planned.footprint).wait();
        let buffer = self.with_cached_host_memory(planned.footprint.bytes(), buffer.wait(), again);
        buffer.map(|buffer| (planned, buffer)).map_err(|source| PoolError::PrepareFailed { source })
    }

    /// Buffers for saves from `turn` on that have none. They are made during copies.
    fn look_ahead(
        &self,
        job: &Job,
        saves: &[Save],
        turn: usize,
        mut near: Option<Landmark>,
    ) -> Result<Result<VecDeque<Ahead>, PrepareEnd>> {
        let failed = |source| PoolError::PrepareFailed { source };
        let mut lacking: Vec<usize> = Vec::new();
        {
            let (state, mut ahead_bytes) = (self.lock_state(), 0_u64);
            for nth in (turn..saves.len()).filter(|nth| state.backups().get(&saves[*nth]).is_none()) {
                ahead_bytes = ahead_bytes.saturating_add(saves[nth].bytes);
                if ahead_bytes > AHEAD_BYTES && !lacking.is_empty() {
                    break;
                }
                lacking.push(nth);
            }
        }
        let mut planned: Vec<(usize, Planned)> = Vec::new();
        for nth in lacking {
            if !self.backups().measures() {
                let (granules, footprint) = (Vec::new(), self.plan_footprint(&saves[nth]).map_err(failed)?);
                planned.push((nth, Planned { granules, footprint }));
                continue;
            }
            match self.hold_chunk(job, &saves[nth], near)? {
                NextStep::End(end) => return Ok(Err(end)),
                NextStep::Gone => {}
                NextStep::Chunk(found) => {
                    near = Some(found.snapshot.landmark);
                    let footprint = self.plan_footprint(&found.save).map_err(failed)?;
                    planned.push((nth, Planned { granules: found.save.granules.clone(), footprint }));
                }
            }
        }
        if planned.is_empty() {
            return Ok(Ok(VecDeque::new()));
        }
        let footprints: Vec<Footprint> =
            planned.iter().map(|(_, planned)| planned.footprint.clone()).collect();
        let bytes = footprints.iter().map(Footprint::bytes).sum();
        let made = self.backups().buffers(&footprints);
        let made = self.with_cached_host_memory(bytes, made, || self.backups().buffers(&footprints));
        let ahead = planned.into_iter().zip(made.map_err(failed)?);
        Ok(Ok(ahead.map(|((turn, planned), buffer)| Ahead { turn, planned, buffer }).collect()))
    }

    fn plan_footprint(&self, save: &Save) -> Result<Footprint, DriverError> {
        let mut footprints = self.plan_footprints(self.streams().background(), std::iter::once(save))?;
        footprints.pop().ok_or_else(|| DriverError::invalid(Op::Save, "a store planned no footprint"))
    }

    /// Chunks are visited in order, so the last landmark is near.
    fn hold_chunk(&self, job: &Job, save: &Save, near: Option<Landmark>) -> Result<NextStep<'_>> {
        if job.cancelled.load(Ordering::Relaxed) {
            return Ok(NextStep::End(PrepareEnd::Cancelled));
        }
        let mut state = match self.open_state() {
            Err(PoolError::Closed) => return Ok(NextStep::End(PrepareEnd::Overtaken)),
            state => state?,
        };
        // The tag may be gone with the segment.
        let Some(tag) = state.heap().segments().tag_of(save.location.0) else { return Ok(NextStep::Gone) };
        let entry = state.tags().get(tag);
        // A call that dropped backups may have ended already.
        let dropped = job.forgets.get(&tag).is_some_and(|before| *before != state.backups().forgets(tag));
        if dropped || entry.wanted() > 0 || entry.is_taken() || entry.state() != TagState::Awake {
            return Ok(NextStep::End(PrepareEnd::Overtaken));
        }
        let (changes, invalidations) = (entry.changes(), state.backups().invalidations(tag));
        let Some((save, memory, landmark)) = state.current(save, near) else { return Ok(NextStep::Gone) };
        let stored = match state.backups().get(&save) {
            // Another call reads it, for which the sleep waits.
            Some(backup) if !backup.is_ours() && backup.has_unseen() => return Ok(NextStep::Gone),
            backup => backup.filter(|backup| backup.is_ours()).map(Backup::share),
        };
        let range = DeviceRange::new(save.location.1, save.bytes);
        state.tags_mut().get_mut(tag).enter();
        state.heap_mut().copying(range);
        drop(state);
        let held = HeldChunk { shared: self, tag, range };
        let snapshot = ChunkState { memory, invalidations, landmark };
        Ok(NextStep::Chunk(Box::new(Prepared { held, save, snapshot, stored, changes })))
    }

    /// `saves` are all that is prepared.
    fn bring_up_to_date(
        &self,
        found: Prepared<'_>,
        ready: Option<(Planned, BackupBuffer)>,
        saves: &[Save],
        done: &mut Totals,
    ) -> Result<Visit> {
        let failed = |source| PoolError::PrepareFailed { source };
        let Prepared { held, save, snapshot, mut stored, changes } = found;
        let stream = self.streams().background();
        if !self.replaces_nothing_spoiled(&save, stored.as_ref(), saves)? {
            return Ok(Visit::Done);
        }
        // The sleep copies these anyway.
        let only_buffer = changes == Changes::Volatile || !self.driver().info().fast_digests;
        let skips_verified = changes == Changes::Immutable;
        let same = match stored.as_mut() {
            _ if only_buffer => save.granules.clone(),
            None => Vec::new(),
            Some(stored) => {
                let same = self
                    .unchanged_granules(&save, &mut stored.granules, skips_verified, stream)
                    .map_err(failed)?;
                self.lock_state().backups_mut().note_looked_at(&save, stored);
                same
            }
        };
        let fresh = save.without(&same);
        let granule_bytes = self.shape().granule_bytes;
        let unchanged_bytes = if only_buffer { 0 } else { same.len() as u64 * granule_bytes };
        if stored.is_some() && fresh.is_empty() {
            done.unchanged_bytes += unchanged_bytes;
            return Ok(Visit::Done);
        }
        let empty = || vec![None; self.shape().granules(save.bytes)];
        let (footprint, buffer, granules, fresh) =
            match (ready.filter(|(planned, _)| planned.is_for(&save)), stored) {
                (Some((planned, buffer)), stored) => {
                    if let Some(stored) = stored
                        && self.take_to_write(&save, stored, saves)?.is_none()
                    {
                        return Ok(Visit::Done);
                    }
                    // A new buffer keeps none of the unchanged granules.
                    let fresh = if only_buffer { Vec::new() } else { save.granules.clone() };
                    (planned.footprint, buffer, empty(), fresh)
                }
                (None, stored) => {
                    let footprint = self.plan_footprint(&save).map_err(failed)?;
                    let Some(stored) = stored.filter(|stored| stored.buffer.fits(&footprint, &fresh)) else {
                        return Ok(Visit::Lacks(Planned { granules: save.granules, footprint }));
                    };
                    let Some(Backup { buffer, granules }) = self.take_to_write(&save, stored, saves)? else {
                        return Ok(Visit::Done);
                    };
                    let Some(buffer) = Arc::into_inner(buffer) else { return Ok(Visit::Done) };
                    done.unchanged_bytes += unchanged_bytes;
                    (footprint, buffer, granules, fresh)
                }
            };
        if fresh.is_empty() {
            self.put_back(&held, &save, &snapshot, Backup { buffer: Arc::new(buffer), granules });
            return Ok(Visit::Done);
        }
        let saving = self.start_copy(&save, &footprint, buffer, granules, fresh, stream).map_err(failed)?;
        // What no longer fits is left to the sleep.
        let copied = saving.complete(self, false).map_err(failed)?;
        done.copied_bytes += copied.copied_bytes;
        done.stored_bytes += copied.stored_bytes;
        self.put_back(&held, &save, &snapshot, copied.backup);
        Ok(Visit::Done)
    }

    /// Compares a backup's unseen granules, then takes it out of the index. `None` if it is gone or some had
    /// spoiled; what the device lacks too is lost.
    fn take_to_write(&self, save: &Save, mut stored: Backup, saves: &[Save]) -> Result<Option<Backup>> {
        let spoiled = stored.spoiled(save, self.shape().granule_bytes);
        let mut state = self.lock_state();
        state.backups_mut().note_looked_at(save, &stored);
        match spoiled {
            Ok(false) => Ok(state.backups_mut().take_back(save, stored)),
            Ok(true) => {
                drop(state);
                drop(stored);
                self.lose_prepared(saves).map(|()| None)
            }
            Err(source) => Err(PoolError::PrepareFailed { source }),
        }
    }

    /// Whether the other extents that this one would replace are unspoiled.
    fn replaces_nothing_spoiled(&self, save: &Save, stored: Option<&Backup>, saves: &[Save]) -> Result<bool> {
        let extent = DeviceRange::new(save.location.1, save.bytes);
        let is_other =
            |suspect: &Suspect| stored.is_none_or(|stored| !Arc::ptr_eq(&stored.buffer, &suspect.buffer));
        let suspects: Vec<Suspect> = {
            let state = self.lock_state();
            state.backups().unseen_in(save.tag, save.location.0, extent).filter(is_other).collect()
        };
        let granules: Vec<DeviceRange> = suspects.iter().map(|suspect| suspect.granule).collect();
        let spoiled = self.spoiled_of(suspects).map_err(|source| PoolError::PrepareFailed { source })?;
        if spoiled.is_empty() {
            self.lock_state().note_seen(granules);
            return Ok(true);
        }
        self.lose_prepared(saves)?;
        Ok(false)
    }

    /// Drops spoiled backups. Fails where the device lacks the bytes too.
    fn lose_prepared(&self, saves: &[Save]) -> Result<()> {
        let lost = self.lose_spoiled_of_awake(&tags_of(saves));
        let lost = lost.map_err(|source| PoolError::PrepareFailed { source })?;
        if lost.is_empty() { Ok(()) } else { Err(PoolError::Lost { op: "prepare a sleep", lost }) }
    }

    /// The live granules whose backup matches, or is skipped on the owner's promise, which the sleep checks.
    fn unchanged_granules(
        &self,
        save: &Save,
        stored: &mut [Option<Stored>],
        skips_verified: bool,
        stream: StreamId,
    ) -> Result<Vec<usize>, DriverError> {
        let is_there = |granule: &usize| stored.get(*granule).is_some_and(Option::is_some);
        let there = save.granules.iter().copied().filter(is_there);
        let is_verified =
            |granule: &usize| skips_verified && stored[*granule].is_some_and(|stored| stored.verified);
        let (mut same, queried): (Vec<usize>, Vec<usize>) = there.partition(is_verified);
        if queried.is_empty() {
            return Ok(same);
        }
        let range = |run: std::ops::Range<usize>| self.granule_range(save, run.start, run.len());
        let ranges: Vec<DeviceRange> = runs(&queried).into_iter().map(range).collect();
        let found = self.driver().digest(stream, &ranges)?.wait()?;
        for (granule, found) in queried.into_iter().zip(found) {
            if let Some(stored) = stored[granule].as_mut().filter(|stored| stored.digest == found) {
                stored.loaded_unseen = false;
                same.push(granule);
            }
        }
        same.sort_unstable();
        Ok(same)
    }

    /// Stores a backup if its chunk is unchanged since the snapshot.
    fn put_back(&self, held: &HeldChunk<'_>, save: &Save, snapshot: &ChunkState, mut backup: Backup) {
        debug_assert_eq!(held.range.addr, save.location.1, "the extent that is held");
        let mut state = self.lock_state();
        if state.backups().invalidations(held.tag) != snapshot.invalidations {
            backup.granules.iter_mut().flatten().for_each(|stored| stored.verified = false);
        }
        if state
            .current(save, Some(snapshot.landmark))
            .is_some_and(|(_, memory, _)| memory == snapshot.memory)
        {
            state.backups_mut().insert(save, backup);
        }
    }
}

impl State {
    /// The live granules, memory and a live block of an extent. `None` when it is unused or incomplete.
    fn current(&self, save: &Save, near: Option<Landmark>) -> Option<(Save, Vec<BackingId>, Landmark)> {
        let extent = DeviceRange::new(save.location.1, save.bytes);
        let (granules, memory, landmark) = self.heap().live_granules(save.location.0, extent, near)?;
        Some((Save { granules, ..*save }, memory, landmark))
    }
}
