//! Fault injection: driver calls fail at every position of three scenarios. These are load → sleep → wake →
//! free, memory that moves between segments, and prepared sleeps.
//!
//! [`some_calls`] runs each scenario many times, and each time another call fails. In further runs two, three
//! or five consecutive calls fail, so that undoing fails as well.
//!
//! After every failure, faults are switched off and the promises are checked. Operations are all or nothing,
//! every byte is in its position, and the pool's figures equal the device's. Then the step is repeated until
//! it succeeds. A scenario ends with an empty device.
//!
//! The failing call is one of the [`Driver`] trait, or, with an [`Injector`], one that the driver makes
//! itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use poorwill_core::{
    AllocRequest, Block, Changes, DeviceRange, Driver, Level, Op, Pending, Pool, PoolConfig, PoolError,
    Release, SleepReport, SleepRequest, StreamId, Tag, TagState, Verify, WakeRequest,
};

use crate::latch::{Latch, hold, source};
use crate::pattern;
use crate::scripted::{Call, ScriptedDriver, Verdict};
use crate::storing::Storing;

/// A device under test, and the check after its last use.
pub struct Subject {
    /// The device.
    pub driver: Arc<dyn Driver>,
    /// Called at the end of a scenario, after the pool's close.
    pub assert_clean: Box<dyn Fn()>,
    /// Makes calls below the driver fail, instead of the driver's own.
    pub injector: Option<Box<dyn Injector>>,
    /// How backups are stored.
    pub storing: Storing,
}

impl Subject {
    /// A device whose own calls fail.
    pub fn new(driver: Arc<dyn Driver>, assert_clean: impl Fn() + 'static) -> Self {
        Self { driver, assert_clean: Box::new(assert_clean), injector: None, storing: Storing::Raw }
    }
}

/// Counts the calls that a driver makes, and fails some of them.
pub trait Injector: Send + Sync {
    /// Starts counting at 0, and fails the calls `first .. first + count`.
    fn arm(&self, first: u64, count: u64);

    /// Stops, and returns the number of calls.
    fn disarm(&self) -> u64;

    /// The name of a call since [`Injector::arm`].
    fn called(&self, number: u64) -> String;
}

impl std::fmt::Debug for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subject").field("driver", &self.driver).finish_non_exhaustive()
    }
}

/// What the runs encountered, so that a caller can check that the hard cases were among it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Runs in which a call failed.
    pub runs: u64,
    /// Sleeps that left everything awake.
    pub sleeps_undone: u64,
    /// Sleeps that could not be undone.
    pub stranded: u64,
    /// Sleeps that could not release everything.
    pub shortfalls: u64,
    /// Wakes that left everything asleep.
    pub wakes_undone: u64,
    /// Preparations that changed nothing.
    pub prepares_undone: u64,
    /// Allocations that took nothing.
    pub allocs_undone: u64,
    /// Trims that could not release everything.
    pub trims_undone: u64,
    /// Calls of the driver that were to measure, write or read codes, and failed.
    pub codes_failed: u64,
}

#[derive(Debug, Clone, Copy)]
struct Scenario {
    steps: fn(&mut Fixture<'_>),
    limit_granules: Option<u64>,
    /// Whether anything is backed up.
    sleeps: bool,
    /// How many consecutive calls fail.
    bursts: &'static [u64],
}

const SCENARIOS: [Scenario; 3] = [
    Scenario {
        steps: |fixture| fixture.sleep_and_wake(),
        limit_granules: None,
        sleeps: true,
        bursts: &[1, 2, 3, 5],
    },
    Scenario {
        steps: |fixture| fixture.move_memory(),
        limit_granules: Some(24),
        sleeps: false,
        bursts: &[1, 3],
    },
    Scenario {
        steps: |fixture| fixture.prepare_and_change(),
        limit_granules: None,
        sleeps: true,
        bursts: &[1, 3],
    },
];

/// As [`some_calls`], without the scenario in which nothing sleeps.
///
/// # Panics
/// As there.
pub fn some_calls_of_sleeps(stride: usize, open: &dyn Fn() -> Subject) -> Tally {
    calls_of(|scenario| scenario.sleeps, stride, open)
}

/// Runs the scenarios with one call in `stride` failing first, and with bursts. The first call of each kind
/// in each step fails once, too. Some sleep of each scenario is stranded, whatever the stride.
///
/// # Panics
/// If a promise is broken; the message names the run and the step.
pub fn some_calls(stride: usize, open: &dyn Fn() -> Subject) -> Tally {
    calls_of(|_| true, stride, open)
}

fn calls_of(which: fn(&Scenario) -> bool, stride: usize, open: &dyn Fn() -> Subject) -> Tally {
    let mut tally = Tally::default();
    for scenario in SCENARIOS.into_iter().filter(which) {
        let stranded = tally.stranded;
        let (kinds, last_unmap) = kinds(open, scenario);
        assert!(kinds.len() > 20, "the scenario makes only these calls: {kinds:?}");
        for (nth, burst) in (0..).zip(scenario.bursts) {
            // Each burst size starts at another offset.
            let mut end = u64::MAX;
            for first in (nth % stride as u64..).step_by(stride) {
                if !run(open, scenario, first, *burst, &mut tally).reached {
                    end = first;
                    break;
                }
                tally.runs += 1;
            }
            let left = |first: &u64| *first < end && first % stride as u64 != nth % stride as u64;
            for first in kinds.values().copied().filter(left).filter(|_| nth == 0) {
                // Background threads may make fewer calls in another run.
                tally.runs += u64::from(run(open, scenario, first, *burst, &mut tally).reached);
            }
        }
        // A sample may miss the few calls between the last unmapping and its undo, and other threads move them by a
        // dozen. So try all positions that are near, the likeliest first.
        for attempt in 0..4 * NEAR {
            if tally.stranded > stranded || !scenario.sleeps {
                break;
            }
            let first = (last_unmap + (NEAR / 2 + attempt * 7) % NEAR).saturating_sub(NEAR / 2);
            tally.runs += u64::from(run(open, scenario, first, 3, &mut tally).reached);
        }
    }
    tally
}

/// How far the last unmapping is moved, both ways together. A prime, so that steps of 7 meet each position.
const NEAR: u64 = 41;

/// The first call of each step and name in a run without failures, and the last call of a sleep that unmaps.
fn kinds(open: &dyn Fn() -> Subject, scenario: Scenario) -> (BTreeMap<(&'static str, String), u64>, u64) {
    let (mut kinds, mut last_unmap) = (BTreeMap::new(), 0);
    let calls = run(open, scenario, u64::MAX - 9, 1, &mut Tally::default()).calls;
    for (number, call) in (0..).zip(calls) {
        if call.0 == "sleep" && call.1.to_lowercase().contains("unmap") {
            last_unmap = number;
        }
        kinds.entry(call).or_insert(number);
    }
    (kinds, last_unmap)
}

struct Trace {
    /// Whether the failing call was made.
    reached: bool,
    /// The step and the name of each call.
    calls: Vec<(&'static str, String)>,
}

/// One run in which the calls `first .. first + burst` fail.
fn run(open: &dyn Fn() -> Subject, scenario: Scenario, first: u64, burst: u64, tally: &mut Tally) -> Trace {
    let Subject { driver, assert_clean, injector, storing } = open();
    let (armed, calls, latches, codes_failed) = Default::default();
    let step = Mutex::new("");
    let faults = Arc::new(Faults { injector, armed, step, calls, first, burst, latches, codes_failed });
    let script = Arc::clone(&faults);
    let driver = ScriptedDriver::new(driver, move |call| {
        if script.fails(call) {
            return Verdict::device_failure(call);
        }
        if WAITS.contains(&call.op) {
            script.open_latches();
        }
        Verdict::Pass
    });
    let run = format!("calls {first}..{}", first + burst);
    Fixture::run(scenario, storing, Arc::new(driver), Arc::clone(&faults), run, tally);
    assert_clean();
    tally.codes_failed += faults.codes_failed.load(Ordering::Relaxed);
    let calls = std::mem::take(&mut *faults.calls.lock().unwrap());
    Trace { reached: calls.len() as u64 > first, calls }
}

/// Calls that return when work is complete.
const WAITS: [Op; 4] = [Op::EventSynchronize, Op::Synchronize, Op::StreamSynchronize, Op::StreamDestroy];

struct Faults {
    injector: Option<Box<dyn Injector>>,
    armed: AtomicBool,
    /// The current step, while armed.
    step: Mutex<&'static str>,
    /// The step and the name of each call made while armed.
    calls: Mutex<Vec<(&'static str, String)>>,
    first: u64,
    burst: u64,
    latches: Mutex<Vec<Arc<Latch>>>,
    codes_failed: AtomicU64,
}

impl Faults {
    fn open_latches(&self) {
        self.latches.lock().unwrap().drain(..).for_each(|latch| latch.open());
    }

    fn fails(&self, call: Call) -> bool {
        if !self.armed.load(Ordering::Relaxed) {
            return false;
        }
        let name = format!("{}{}", call.op, if call.waiting { ", waiting" } else { "" });
        let step = *self.step.lock().unwrap();
        let mut calls = self.calls.lock().unwrap();
        calls.push((step, name));
        let fails = (self.first..self.first + self.burst).contains(&(calls.len() as u64 - 1));
        let is_of_codes = matches!(call.op, Op::Encode | Op::Decode);
        self.codes_failed.fetch_add(u64::from(fails && is_of_codes), Ordering::Relaxed);
        fails
    }

    fn while_armed<T>(&self, step: &'static str, f: impl FnOnce() -> T) -> T {
        let Some(injector) = &self.injector else {
            *self.step.lock().unwrap() = step;
            self.armed.store(true, Ordering::Relaxed);
            let result = f();
            self.armed.store(false, Ordering::Relaxed);
            return result;
        };
        // The injector counts from 0 each time, so subtract the calls counted before.
        let calls = self.calls.lock().unwrap().len() as u64;
        let [first, end] = [self.first, self.first + self.burst].map(|call| call.saturating_sub(calls));
        injector.arm(first, end - first);
        let result = f();
        let called = (0..injector.disarm()).map(|number| (step, injector.called(number)));
        self.calls.lock().unwrap().extend(called);
        result
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Bytes {
    /// Stored, since it is compared many times.
    Pattern(Vec<u8>),
    Zeros,
    Unknown,
}

struct Fixture<'a> {
    tally: &'a mut Tally,
    run: String,
    storing: Storing,
    pool: Pool,
    driver: Arc<dyn Driver>,
    faults: Arc<Faults>,
    blocks: Vec<(Block, Tag, Bytes)>,
    states: BTreeMap<Tag, TagState>,
    seed: u64,
    /// How often work was held; runs that start with an odd call are one ahead.
    holds: u64,
    /// Held work to wait for at the end; every second one is dropped instead.
    held: Vec<Pending<()>>,
}

impl Drop for Fixture<'_> {
    fn drop(&mut self) {
        self.faults.open_latches(); // Also after a panic.
    }
}

impl<'a> Fixture<'a> {
    fn run(
        scenario: Scenario,
        storing: Storing,
        driver: Arc<dyn Driver>,
        faults: Arc<Faults>,
        run: String,
        tally: &'a mut Tally,
    ) {
        let granule = driver.info().granule_bytes;
        let limit_bytes = scenario.limit_granules.map(|granules| granules * granule);
        let config =
            PoolConfig::default().limited_to(limit_bytes).in_chunks_of(4).in_spans_of(8).in_segments_of(8);
        let config = storing.of(config);
        let pool = (0..9)
            .find_map(|_| faults.while_armed("open", || Pool::new(Arc::clone(&driver), config)).ok())
            .expect("a pool opens once the faults are over");
        let (blocks, states, held) = Default::default();
        let holds = faults.first % 2;
        let mut fixture =
            Self { tally, run, storing, pool, driver, faults, blocks, states, seed: 0, holds, held };
        (scenario.steps)(&mut fixture);
        fixture.close();
    }

    fn sleep_and_wake(&mut self) {
        let granule = self.driver.info().granule_bytes;
        for bytes in [3 * granule + 100, 10 * granule, 700, 600, 5 * granule] {
            self.load(bytes, &Tag::weights());
        }
        self.load(13 * granule, &Tag::kv_cache()); // A large chunk, a chunk and a granule.
        self.load(1000, &Tag::runtime());
        self.free(2);
        self.sleep(&SleepRequest::all(Level::One));
        self.free(2); // Asleep, and in the first segment.
        self.free_part(1, granule, 6 * granule); // Splits two chunks.
        self.wake(None);
        self.refill(1);
        self.free_part(2, 3 * granule, 4 * granule); // The last granule of a chunk.
        self.free_part(0, 512, 2 * granule + 512);
        self.sleep(&SleepRequest::of([Tag::weights()], Level::One));
        self.wake(Some(vec![Tag::weights()]));
        self.sleep(&SleepRequest::all(Level::Two));
        self.wake(None);
        self.sleep(&SleepRequest::of([Tag::weights()], Level::Two)); // Still undefined.
        self.wake(None);
        self.restore_weights();
        self.discard(&Tag::runtime());
        self.wake(Some(vec![Tag::runtime()]));
        while !self.blocks.is_empty() {
            self.free(0);
        }
    }

    /// Sizes that do not fit the freed memory, on two streams, up to the limit.
    fn move_memory(&mut self) {
        let granule = self.driver.info().granule_bytes;
        let streams = [0, 1].map(|_| self.driver.stream_create().unwrap());
        let (weights, kv) = (Tag::weights(), Tag::kv_cache());
        self.load_on(3 * granule + 100, &weights, streams[1]);
        self.load_on(12 * granule, &weights, streams[0]);
        self.free(1);
        self.load_on(6 * granule, &weights, streams[0]); // Its end splits a chunk.
        self.free(1);
        self.load_on(13 * granule, &kv, streams[1]); // The chunks move to addresses that hold all of it.
        self.hold(1, streams[1]);
        self.free(1);
        self.load_on(19 * granule, &weights, streams[0]); // Waits for held work.
        self.free(1);
        self.record_use(0, streams[0]);
        self.hold(0, streams[0]);
        self.free(0);
        self.load_on(2 * granule + 1, &weights, streams[1]);
        self.load_on(18 * granule, &kv, streams[0]);
        let last = self.blocks.len() - 1;
        self.free_part(last, 3 * granule, 17 * granule); // Splits one large chunk and frees the other.
        self.load_on(5 * granule, &weights, streams[1]); // In the freed part.
        self.trim();
        while !self.blocks.is_empty() {
            self.free(0);
        }
        self.trim();
        let stats = self.pool.stats().unwrap();
        assert_eq!([stats.mapped_bytes, stats.reserved_bytes], [0; 2], "{}: after a trim", self.run);
        self.load_on(granule, &weights, streams[1]);
        self.free(0);
        streams.into_iter().for_each(|stream| self.driver.stream_destroy(stream).unwrap());
    }

    /// Preparations, small changes, and tags with declared changes.
    fn prepare_and_change(&mut self) {
        let granule = self.driver.info().granule_bytes;
        let (weights, lora, runtime) = (Tag::weights(), Tag::new("lora").unwrap(), Tag::runtime());
        let level_1 = SleepRequest::all(Level::One);
        // After the first wake, the weights have a large chunk.
        for (bytes, tag) in [(9 * granule, &weights), (5 * granule, &lora), (700, &lora), (9, &runtime)] {
            self.load(bytes, tag);
        }
        self.retry("declare", |pool| pool.declare_changes(&lora, Changes::Immutable));
        self.retry("declare", |pool| pool.declare_changes(&runtime, Changes::Volatile));
        self.prepare(&level_1);
        self.refill(0);
        self.refill(3);
        self.prepare(&level_1);
        self.sleep(&level_1);
        self.wake_verifying(None, Verify::Sample);
        self.load(600, &lora);
        self.sleep(&level_1);
        self.free(1);
        self.wake_verifying(Some(vec![lora.clone(), weights]), Verify::Sample);
        self.prepare(&SleepRequest::of([lora], Level::One));
        self.wake(None);
        self.refill(0);
        self.prepare(&level_1);
        self.sleep(&level_1);
        self.wake(None);
        while !self.blocks.is_empty() {
            self.free(0);
        }
    }

    fn prepare(&mut self, request: &SleepRequest) {
        self.retry("prepare", |pool| pool.prepare_sleep(request)?.wait());
        self.check("prepare");
    }

    /// Repeats `f` until it succeeds, checking the promises after each failure.
    fn retry<T>(&mut self, step: &'static str, f: impl Fn(&Pool) -> Result<T, PoolError>) -> T {
        let mut last = None;
        for _ in 0..9 {
            match self.faults.while_armed(step, || f(&self.pool)) {
                Ok(value) => return value,
                Err(error) => self.check_failure(step, last.insert(error)),
            }
        }
        panic!("{}: {step} does not succeed once the faults are over: {last:?}", self.run);
    }

    fn check_failure(&mut self, step: &str, error: &PoolError) {
        match error {
            PoolError::SleepFailed { .. } => self.tally.sleeps_undone += 1,
            PoolError::Stranded { .. } => self.tally.stranded += 1,
            PoolError::WakeFailed { .. } => self.tally.wakes_undone += 1,
            PoolError::PrepareFailed { .. } => self.tally.prepares_undone += 1,
            _ if step == "alloc" => self.tally.allocs_undone += 1,
            _ if step == "trim" => self.tally.trims_undone += 1,
            _ => {}
        }
        let context = format!("{}: after {step} failed with `{error}`", self.run);
        if let PoolError::Stranded { .. } = error {
            self.pool.wake(&WakeRequest::all()).unwrap_or_else(|e| panic!("{context}: {e}"));
        }
        self.check(&context);
    }

    /// Checks all invariants, with the faults switched off.
    fn check(&self, context: &str) {
        let stats = self.pool.stats().unwrap();
        let used_bytes = self.driver.memory_info().unwrap().process.map(|process| process.used_bytes);
        assert_eq!(used_bytes.unwrap_or(stats.mapped_bytes), stats.mapped_bytes, "{context}: accounting");
        for (tag, state) in &self.states {
            assert_eq!(self.pool.tag_state(tag).unwrap(), *state, "{context}: state of {tag}");
        }
        let mut ranges: Vec<DeviceRange> = self.blocks.iter().map(|(block, ..)| block.range).collect();
        ranges.sort_unstable();
        assert!(ranges.is_sorted_by(|a, b| !a.overlaps(b)), "{context}: blocks overlap");
        for (block, tag, bytes) in &self.blocks {
            assert_eq!(self.pool.block(block.id).unwrap(), *block, "{context}: address");
            let state = self.states.get(tag).copied().unwrap_or(TagState::Awake);
            self.check_bytes(context, block, state, bytes);
        }
    }

    fn check_bytes(&self, context: &str, block: &Block, state: TagState, bytes: &Bytes) {
        let len = usize::try_from(block.requested_bytes).unwrap();
        let read = pattern::read(&self.pool, block.id, len);
        let zeros;
        let expected = match (state, bytes) {
            (TagState::Awake, Bytes::Pattern(pattern)) => pattern,
            (TagState::Awake, Bytes::Zeros) => {
                zeros = vec![0; len];
                &zeros
            }
            (TagState::Awake, Bytes::Unknown) => return drop(read.unwrap()),
            _ => return drop(read.expect_err("sleeping or undefined bytes cannot be read")),
        };
        assert!(
            read.unwrap_or_else(|e| panic!("{context}: {e}")) == *expected,
            "{context}: bytes at {}",
            block.range
        );
    }

    fn load(&mut self, bytes: u64, tag: &Tag) {
        self.load_on(bytes, tag, StreamId::DEFAULT);
    }

    fn load_on(&mut self, bytes: u64, tag: &Tag, stream: StreamId) {
        let request = AllocRequest::new(bytes, tag.clone()).on(stream);
        let block = self.retry("alloc", |pool| pool.alloc(&request));
        self.states.insert(tag.clone(), TagState::Awake);
        self.blocks.push((block, tag.clone(), Bytes::Unknown));
        self.refill(self.blocks.len() - 1);
    }

    fn refill(&mut self, index: usize) {
        self.seed += 1;
        let (id, len) =
            (self.blocks[index].0.id, usize::try_from(self.blocks[index].0.requested_bytes).unwrap());
        // A write is not all or nothing: until it succeeds, the block's bytes are unknown.
        self.blocks[index].2 = Bytes::Unknown;
        let bytes = self.storing.bytes(self.seed, len);
        let filled = (0..9).any(|_| {
            let filled = self.faults.while_armed("write", || pattern::write(&self.pool, id, bytes.clone()));
            self.check("a write");
            filled.is_ok()
        });
        assert!(filled, "{}: a write does not succeed once the faults are over", self.run);
        self.blocks[index].2 = Bytes::Pattern(bytes);
    }

    /// Holds work on a block until a call waits for work.
    fn hold(&mut self, index: usize, stream: StreamId) {
        let block = self.blocks[index].0;
        self.blocks[index].2 = Bytes::Unknown;
        let latch = Arc::new(Latch::default());
        let src = source(&*self.driver, &vec![0xAA; usize::try_from(block.requested_bytes).unwrap()]);
        self.faults.latches.lock().unwrap().push(Arc::clone(&latch));
        hold(&*self.driver, stream, &latch);
        let write = || self.pool.write(stream, block.id, 0, src, 0, block.requested_bytes);
        // A driver whose own call fails may have to wait for the stream, while the latch is closed.
        let below = self.faults.injector.is_some();
        let written = if below { write() } else { self.faults.while_armed("hold", write) };
        self.holds += 1;
        match written {
            Ok(copy) if self.holds.is_multiple_of(2) => drop(copy),
            Ok(copy) => self.held.push(copy),
            Err(_) => self.faults.open_latches(), // There is nothing to wait for.
        }
    }

    fn record_use(&mut self, index: usize, stream: StreamId) {
        let block = self.blocks[index].0;
        self.retry("record use", |pool| pool.record_use(block.id, stream));
    }

    fn trim(&mut self) {
        self.retry("trim", Pool::trim);
        self.check("trim");
    }

    fn free(&mut self, index: usize) {
        let (block, tag, _) = self.blocks.remove(index);
        self.retry("free", |pool| pool.free(block.id));
        assert!(matches!(self.pool.free(block.id), Err(PoolError::StaleBlock { .. })), "a second free");
        if self.states[&tag] == TagState::Undefined && !self.blocks.iter().any(|(_, other, _)| *other == tag)
        {
            self.states.insert(tag, TagState::Awake); // No block is left that could be undefined.
        }
        self.check("free");
    }

    /// Frees `from..to` of a block; the remaining blocks take its index.
    fn free_part(&mut self, index: usize, from: u64, to: u64) {
        let (block, tag, bytes) = self.blocks.remove(index);
        let part = DeviceRange::new(block.range.addr + from, to - from);
        let rest = self.retry("free a part", |pool| pool.free_part(block.id, part));
        assert!(!rest.is_empty(), "{}: {part} is not all of {block:?}", self.run);
        for left in rest.into_iter().rev() {
            let [start, len] = [left.range.addr - block.range.addr, left.requested_bytes]
                .map(|bytes| usize::try_from(bytes).unwrap());
            let bytes = match &bytes {
                Bytes::Pattern(pattern) => Bytes::Pattern(pattern[start..start + len].to_vec()),
                other => other.clone(),
            };
            self.blocks.insert(index, (left, tag.clone(), bytes));
        }
        self.check("free a part");
    }

    fn sleep(&mut self, request: &SleepRequest) {
        let asleep = |tag: &Tag| match (tag.as_str(), request.level) {
            ("weights", Level::Two) | ("kv_cache", _) => TagState::AsleepDropped,
            _ => TagState::AsleepBackedUp,
        };
        let after: BTreeMap<Tag, TagState> = self
            .states
            .iter()
            .map(|(tag, state)| {
                let named = request.tags.as_ref().is_none_or(|tags| tags.contains(tag));
                (tag.clone(), if named { asleep(tag) } else { *state })
            })
            .collect();
        self.fall_asleep("sleep", after, |pool| pool.sleep(request));
    }

    fn discard(&mut self, tag: &Tag) {
        let mut after = self.states.clone();
        after.insert(tag.clone(), TagState::AsleepDropped);
        self.fall_asleep("discard", after, |pool| pool.discard(std::slice::from_ref(tag)));
    }

    fn fall_asleep(
        &mut self,
        step: &'static str,
        after: BTreeMap<Tag, TagState>,
        sleep: impl Fn(&Pool) -> Result<SleepReport, PoolError>,
    ) {
        for _ in 0..9 {
            let before = self.driver.memory_info().unwrap().free_bytes;
            match self.faults.while_armed(step, || sleep(&self.pool)) {
                Ok(report) => {
                    let freed = self.driver.memory_info().unwrap().free_bytes - before;
                    assert_eq!(report.released_bytes, report.planned_release_bytes, "{}: {step}", self.run);
                    assert_eq!(freed, report.released_bytes, "{}: the device's own count", self.run);
                    self.fell_asleep(after);
                    return self.check(step);
                }
                Err(PoolError::Shortfall { report, .. }) => {
                    self.tally.shortfalls += 1;
                    assert_eq!(report.release, Release::Shortfall);
                    assert!(report.released_bytes < report.planned_release_bytes);
                    self.fell_asleep(after.clone());
                    self.check("a shortfall");
                }
                Err(error) => self.check_failure(step, &error),
            }
        }
        panic!("{}: {step} does not succeed once the faults are over", self.run);
    }

    fn fell_asleep(&mut self, after: BTreeMap<Tag, TagState>) {
        for (_, tag, bytes) in &mut self.blocks {
            if after[tag] == TagState::AsleepDropped {
                *bytes = if *tag == Tag::kv_cache() { Bytes::Zeros } else { Bytes::Unknown };
            }
        }
        self.states = after;
    }

    fn wake(&mut self, tags: Option<Vec<Tag>>) {
        self.wake_verifying(tags, Verify::All);
    }

    fn wake_verifying(&mut self, tags: Option<Vec<Tag>>, verify: Verify) {
        let request = WakeRequest::default().choosing(tags).verifying(verify);
        let report = self.retry("wake", |pool| pool.wake(&request));
        assert!(report.verified_bytes == report.copied_bytes || verify == Verify::Sample);
        assert!(report.verified_bytes > 0 || report.copied_bytes == 0, "no sample is empty");
        for (tag, state) in &mut self.states {
            if report.undefined_tags.contains(tag) {
                *state = TagState::Undefined;
            } else if report.tags.contains(tag) {
                *state = TagState::Awake;
            }
        }
        self.check("wake");
    }

    fn restore_weights(&mut self) {
        let weights = Tag::weights();
        for index in (0..self.blocks.len()).filter(|i| self.blocks[*i].1 == weights).collect::<Vec<_>>() {
            self.refill(index);
        }
        self.retry("mark restored", |pool| pool.mark_restored(&[Tag::weights()]));
        self.states.insert(weights, TagState::Awake);
        self.check("mark restored");
    }

    fn close(&mut self) {
        // A driver keeps the host memory of a copy until the copy is complete.
        self.faults.open_latches();
        self.held.drain(..).for_each(|copy| copy.wait().unwrap());
        let closed = (0..9).any(|_| self.faults.while_armed("close", || self.pool.close()).is_ok());
        assert!(closed, "{}: the pool does not close once the faults are over", self.run);
        assert!(matches!(self.pool.stats(), Err(PoolError::Closed)));
        let info = self.driver.memory_info().unwrap();
        assert_eq!(
            info.process.map_or(0, |process| process.used_bytes),
            0,
            "{}: everything given back",
            self.run
        );
    }
}
