//! Several streams: freed memory is neither reused nor unmapped before the work that may touch it has passed.
//!
//! Work is queued on held streams, so the test decides when it passes. A [`Ledger`] tracks what each stream may still
//! touch. It knows nothing of clocks and events.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use poorwill_core::{
    AllocRequest, Block, BlockKind, DeviceRange, Level, Op, Pending, Pool, PoolConfig, PoolError,
    SleepRequest, StreamId, Tag, WakeRequest,
};
use poorwill_testkit::broken::{BrokenDriver, Defect};
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

const STREAMS: usize = 3;
const CAPACITY_GRANULES: u64 = 48;
/// More than the blocks of a whole run would take if each had memory of its own.
const ENOUGH_GRANULES: u64 = 1 << 13;

/// The n-th unit of work on a stream.
type Nth = (StreamId, usize);

/// Addresses of a freed block, and the last held work on each stream that used it.
#[derive(Debug)]
struct Freed {
    range: DeviceRange,
    until: Vec<Nth>,
}

/// Which work may still touch which addresses.
#[derive(Debug, Default)]
struct Ledger {
    /// The latches of each stream's work, in order, and how many of them are open.
    queued: BTreeMap<StreamId, (Vec<Arc<Latch>>, usize)>,
    /// The ranges that work reads or writes.
    touches: Vec<(Nth, DeviceRange)>,
    freed: Vec<Freed>,
    live: Vec<DeviceRange>,
    /// Whether a sleep or wake is under way, which moves live blocks.
    moving: bool,
    /// Whether a block is being allocated or freed.
    serving: bool,
    /// How often the test's own thread has had to wait.
    waits: u64,
    /// Event queries of the current call.
    queries: usize,
    violations: Vec<String>,
}

/// A call with more queries than this waits, for whichever stream comes first.
const QUERIES: usize = 200;

impl Ledger {
    fn holds(&self, (stream, nth): Nth) -> bool {
        self.queued.get(&stream).is_some_and(|(_, open)| nth >= *open)
    }

    /// The last work on a stream, if it is held back.
    fn last_held(&self, stream: StreamId) -> Option<Nth> {
        let (latches, open) = self.queued.get(&stream)?;
        (latches.len() > *open).then(|| (stream, latches.len() - 1))
    }

    /// Work held back on another stream than `user` that keeps it from `range`.
    fn hazard(&self, range: &DeviceRange, user: Option<StreamId>) -> Option<Nth> {
        let hit = |nth: &Nth| Some(nth.0) != user && self.holds(*nth);
        let touches = self.touches.iter().filter(|(_, other)| other.overlaps(range)).map(|(nth, _)| *nth);
        let freed = self.freed.iter().filter(|freed| freed.range.overlaps(range));
        touches.chain(freed.flat_map(|freed| freed.until.iter().copied())).find(hit)
    }

    fn open(&mut self, stream: StreamId, count: usize) {
        let Some((latches, open)) = self.queued.get_mut(&stream) else { return };
        let upto = latches.len().min(open.saturating_add(count));
        latches[*open..upto].iter().for_each(|latch| latch.open());
        *open = upto;
    }

    fn open_all(&mut self) {
        let streams: Vec<StreamId> = self.queued.keys().copied().collect();
        streams.into_iter().for_each(|stream| self.open(stream, usize::MAX));
    }

    /// Checks the call that the driver is about to get.
    fn watch(&mut self, call: Call, by_test: bool) {
        if let Some(range) = call.unmaps {
            if let Some((stream, nth)) = self.hazard(&range, None) {
                self.violations.push(format!("{range} is unmapped, and work {nth} of {stream} is held"));
            }
            if !self.moving && self.live.iter().any(|live| live.overlaps(&range)) {
                self.violations.push(format!("{range} is unmapped, and a block lives there"));
            }
        }
        let all = matches!(call.op, Op::Synchronize | Op::StreamSynchronize);
        if all && self.serving {
            self.violations.push(format!("allocating or freeing: {}", call.op));
        }
        if by_test && call.op == Op::EventQuery {
            self.queries += 1;
        }
        let waits = all || call.op == Op::EventSynchronize || self.queries > QUERIES;
        if by_test && waits {
            // The call waits for the test itself: now the work has to pass.
            self.waits += 1;
            self.queries = 0;
            self.open_all();
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Alloc {
        stream: usize,
        tag: usize,
        eighths: u64,
        odd: u64,
    },
    /// The n-th live block, modulo their number.
    Free(usize),
    /// From one eighth of the n-th live block to another.
    FreePart(usize, u64, u64),
    /// Such a block, and another of the same size for a stream.
    Swap(usize, usize),
    Use(usize, usize),
    /// Work on a block, held back: on its own stream, or on one of the others that use it.
    Work(usize, usize),
    /// The next units of work on a stream pass.
    Pass(usize, usize),
    Trim,
    Sleep(usize),
    Wake,
}

fn step() -> impl Strategy<Value = Step> {
    let any = any::<usize>;
    let alloc = (0..STREAMS, 0..2usize, 0..7u32, 1..3u64, 0..600u64)
        .prop_map(|(stream, tag, log, factor, odd)| Step::Alloc { stream, tag, eighths: factor << log, odd });
    prop_oneof![
        10 => alloc,
        6 => any().prop_map(Step::Free),
        4 => (any(), 0..8u64, 1..=8u64).prop_map(|(n, from, to)| Step::FreePart(n, from, to)),
        4 => (any(), 0..STREAMS).prop_map(|(n, stream)| Step::Swap(n, stream)),
        4 => (any(), 0..STREAMS).prop_map(|(n, stream)| Step::Use(n, stream)),
        8 => (any(), any()).prop_map(|(n, user)| Step::Work(n, user)),
        5 => (0..STREAMS, 1..4usize).prop_map(|(stream, count)| Step::Pass(stream, count)),
        1 => Just(Step::Trim),
        1 => (0..3usize).prop_map(Step::Sleep),
        2 => Just(Step::Wake),
    ]
}

/// The pool's configuration.
#[derive(Debug, Clone, Copy)]
struct PoolKind {
    limited: bool,
    /// The cache's mark, in granules.
    mark: Option<u64>,
    chunk_granules: u64,
    span_granules: u64,
    defect: Option<Defect>,
}

fn kind() -> impl Strategy<Value = PoolKind> {
    let mark = prop_oneof![2 => Just(None), 1 => (0..8u64).prop_map(Some)];
    let sizes = prop_oneof![1 => Just((4, 4)), 1 => Just((4, 8)), 1 => Just((2, 6)), 1 => Just((1, 8))];
    (any::<bool>(), mark, sizes).prop_map(|(limited, mark, (chunk_granules, span_granules))| PoolKind {
        limited,
        mark,
        chunk_granules,
        span_granules,
        defect: None,
    })
}

#[derive(Debug)]
struct Live {
    block: Block,
    tag: usize,
    stream: StreamId,
    others: Vec<StreamId>,
    /// Seed and start of the pattern that it must read as in the end, if only its own stream has written.
    seed: Option<(u64, u64)>,
}

struct Run {
    kind: PoolKind,
    ledger: Arc<Mutex<Ledger>>,
    copies: BTreeMap<StreamId, Vec<Pending<()>>>,
    pool: Pool,
    device: TestDevice,
    streams: [StreamId; STREAMS],
    tags: [Tag; 2],
    asleep: BTreeSet<usize>,
    live: Vec<Live>,
    next: u64,
}

impl Drop for Run {
    fn drop(&mut self) {
        // Also after a failed check, when no caller is left to let the work pass.
        self.ledger().open_all();
    }
}

/// The ledger, also after a failed check.
fn locked(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Run {
    fn new(kind: PoolKind) -> Self {
        let capacity = if kind.limited { CAPACITY_GRANULES * 3 / 2 } else { ENOUGH_GRANULES };
        let device = TestDevice::open(capacity);
        let streams = [StreamId::DEFAULT, device.stream_create().unwrap(), device.stream_create().unwrap()];
        let ledger = Arc::new(Mutex::new(Ledger::default()));
        let (watcher, this) = (Arc::clone(&ledger), thread::current().id());
        let broken = Arc::new(BrokenDriver::new(device.driver(), kind.defect));
        let driver = ScriptedDriver::new(broken, move |call| {
            locked(&watcher).watch(call, thread::current().id() == this);
            Verdict::Pass
        });
        let granule = device.info().granule_bytes;
        let config = PoolConfig::default()
            .limited_to(kind.limited.then_some(CAPACITY_GRANULES * granule))
            .in_chunks_of(kind.chunk_granules)
            .in_spans_of(kind.span_granules)
            .in_segments_of(8)
            .caching_at_most(kind.mark.map(|granules| granules * granule));
        let pool = Pool::new(Arc::new(driver), config).unwrap();
        let tags = [Tag::weights(), Tag::kv_cache()];
        let (copies, asleep, live) = Default::default();
        Self { kind, ledger, copies, pool, device, streams, tags, asleep, live, next: 0 }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        locked(&self.ledger)
    }

    fn granule(&self) -> u64 {
        self.device.info().granule_bytes
    }

    fn nth(&self, n: usize) -> Option<usize> {
        (!self.live.is_empty()).then(|| n % self.live.len())
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Alloc { stream, tag, eighths, odd } => {
                let bytes = (eighths * self.granule() / 8 + odd).max(1);
                self.alloc(*tag, bytes, self.streams[*stream]);
            }
            Step::Free(n) => {
                self.nth(*n).map(|n| self.free(n));
            }
            Step::FreePart(n, from, to) => {
                self.nth(*n).into_iter().for_each(|n| self.free_part(n, *from, *to));
            }
            Step::Swap(n, stream) => {
                let Some(n) = self.nth(*n) else { return };
                let (tag, block) = self.free(n);
                self.alloc(tag, block.requested_bytes, self.streams[*stream]);
            }
            Step::Use(n, stream) => {
                let Some(n) = self.nth(*n) else { return };
                let (stream, live) = (self.streams[*stream], &mut self.live[n]);
                self.pool.record_use(live.block.id, stream).unwrap();
                if stream != live.stream && !live.others.contains(&stream) {
                    live.others.push(stream);
                }
            }
            Step::Work(n, user) => {
                self.nth(*n).into_iter().for_each(|n| self.work(n, *user));
            }
            Step::Pass(stream, count) => self.pass(self.streams[*stream], *count),
            Step::Trim => drop(self.pool.trim().unwrap()),
            Step::Sleep(which) => self.sleep(*which),
            Step::Wake => self.wake(),
        }
    }

    /// Bytes under the limit that live blocks of awake tags leave, pinned granules included.
    fn headroom_bytes(&self) -> u64 {
        let granule = self.granule();
        let awake = self.live.iter().filter(|live| !self.asleep.contains(&live.tag));
        let bound: Vec<DeviceRange> = {
            let segments = self.pool.snapshot().unwrap().segments.into_iter();
            let sleeps = |tag: &Tag| self.asleep.iter().any(|asleep| self.tags[*asleep] == *tag);
            let blocks = segments.filter(|segment| !sleeps(&segment.tag)).flat_map(|segment| segment.blocks);
            let bound = blocks.filter(|block| block.kind == BlockKind::Pinned);
            bound.map(|block| DeviceRange::new(block.addr, block.bytes)).collect()
        };
        let granules = awake.map(|live| live.block.range).chain(bound);
        let granules = granules.flat_map(|range| range.addr / granule..range.end().div_ceil(granule));
        let touched = granules.collect::<BTreeSet<u64>>().len() as u64 * granule;
        (CAPACITY_GRANULES * granule).saturating_sub(touched)
    }

    fn alloc(&mut self, tag: usize, bytes: u64, stream: StreamId) {
        let mapped_before = self.pool.stats().unwrap().mapped_bytes;
        let whole_bytes = bytes.next_multiple_of(self.granule());
        let is_freed_in_parts = (bytes / 512).is_multiple_of(2);
        let mut request = AllocRequest::new(bytes, self.tags[tag].clone()).on(stream);
        request.is_freed_in_parts = is_freed_in_parts;
        let waits_before = self.ledger().waits;
        self.ledger().serving = true;
        self.ledger().queries = 0;
        let result = self.pool.alloc(&request);
        let mut ledger = self.ledger();
        ledger.serving = false;
        let unused_bytes = (CAPACITY_GRANULES * self.granule()).saturating_sub(mapped_before);
        if !self.kind.limited || unused_bytes >= whole_bytes {
            assert_eq!(ledger.waits, waits_before, "{request} waited, and nothing was short");
        }
        match result {
            Ok(block) => {
                assert!(!self.asleep.contains(&tag), "{request}: the tag sleeps");
                let apart = |live: &Live| !live.block.range.overlaps(&block.range);
                assert!(self.live.iter().all(apart), "{block:?} overlaps another block");
                if let Some((other, nth)) = ledger.hazard(&block.range, Some(stream)) {
                    panic!("{block:?} was given to {stream}, and work {nth} of {other} is held");
                }
                ledger.live.push(block.range);
                drop(ledger);
                self.live.push(Live { block, tag, stream, others: Vec::new(), seed: None });
            }
            Err(PoolError::Asleep { .. }) => assert!(self.asleep.contains(&tag)),
            Err(PoolError::OverLimit { .. }) if self.kind.limited && self.headroom_bytes() < whole_bytes => {}
            Err(error) => panic!("with room for {}: {error}", self.headroom_bytes()),
        }
    }

    fn free(&mut self, n: usize) -> (usize, Block) {
        let Live { block, tag, stream, others, .. } = self.live.swap_remove(n);
        let mut ledger = self.ledger();
        let users = others.iter().copied().chain([stream]);
        // No work touches sleeping memory: the sleep has waited for it, and new work is refused.
        let users = users.filter(|_| !self.asleep.contains(&tag));
        let until = users.filter_map(|user| ledger.last_held(user)).collect();
        ledger.freed.push(Freed { range: block.range, until });
        ledger.live.retain(|range| *range != block.range);
        ledger.serving = true;
        drop(ledger);
        self.pool.free(block.id).unwrap();
        self.ledger().serving = false;
        assert!(matches!(self.pool.free(block.id), Err(PoolError::StaleBlock { .. })), "a second free");
        let late = self.pool.record_use(block.id, self.streams[1]);
        assert!(matches!(late, Err(PoolError::StaleBlock { .. })), "a use of a freed block");
        (tag, block)
    }

    fn free_part(&mut self, n: usize, from: u64, to: u64) {
        let range = self.live[n].block.range;
        let eighth = |nth: u64| range.bytes * nth / 8 / 512 * 512;
        let (from, to) = (eighth(from.min(to)), eighth(to.max(from)));
        if from == to {
            return;
        }
        let part = DeviceRange::new(range.addr + from, to - from);
        let Live { block, tag, stream, others, seed } = self.live.swap_remove(n);
        let mut ledger = self.ledger();
        let users = others.iter().copied().chain([stream]).filter(|_| !self.asleep.contains(&tag));
        let until = users.filter_map(|user| ledger.last_held(user)).collect();
        ledger.freed.push(Freed { range: part, until });
        ledger.live.retain(|live| *live != range);
        let kept = [DeviceRange::new(range.addr, from), DeviceRange::new(part.end(), range.bytes - to)];
        ledger.live.extend(kept.into_iter().filter(|kept| kept.bytes > 0));
        ledger.serving = true;
        drop(ledger);
        let rest = self.pool.free_part(block.id, part).unwrap();
        self.ledger().serving = false;
        assert!(matches!(self.pool.free(block.id), Err(PoolError::StaleBlock { .. })), "the old handle");
        for block in rest {
            let seed = seed.map(|(seed, offset)| (seed, offset + block.range.addr - range.addr));
            self.live.push(Live { block, tag, stream, others: others.clone(), seed });
        }
    }

    fn work(&mut self, n: usize, user: usize) {
        let live = &mut self.live[n];
        if self.asleep.contains(&live.tag) {
            return;
        }
        let user = user % (live.others.len() + 1);
        let stream = live.others.get(user).copied().unwrap_or(live.stream);
        self.next += 1;
        live.seed = (stream == live.stream && live.others.is_empty()).then_some((self.next, 0));
        let block = live.block;
        let latch = Arc::new(Latch::default());
        let bytes = pattern::bytes(self.next, usize::try_from(block.requested_bytes).unwrap());
        let mut ledger = self.ledger();
        let (latches, _) = ledger.queued.entry(stream).or_default();
        latches.push(Arc::clone(&latch));
        let nth = (stream, latches.len() - 1);
        ledger.touches.push((nth, DeviceRange::new(block.range.addr, block.requested_bytes)));
        drop(ledger);
        let copy = latch::write(&self.pool, stream, &block, &latch, &bytes);
        self.copies.entry(stream).or_default().push(copy);
    }

    /// The next units of work on a stream pass, and have passed on return, unless the machine lets work held
    /// elsewhere hold them up.
    fn pass(&mut self, stream: StreamId, count: usize) {
        let mut ledger = self.ledger();
        ledger.open(stream, count);
        let waiting = ledger.queued.get(&stream).map_or(0, |(latches, open)| latches.len() - open);
        let held = ledger.queued.values().any(|(latches, open)| latches.len() > *open);
        drop(ledger);
        if held && !self.device.kind().holds_streams_apart() {
            return;
        }
        let copies = self.copies.entry(stream).or_default();
        let passed = copies.len().saturating_sub(waiting);
        copies.drain(..passed).for_each(|copy| copy.wait().unwrap());
    }

    fn sleep(&mut self, which: usize) {
        let falling: Vec<usize> = (0..2).filter(|tag| which == 2 || which == *tag).collect();
        let tags: Vec<Tag> = falling.iter().map(|tag| self.tags[*tag].clone()).collect();
        self.ledger().moving = true;
        self.pool.sleep(&SleepRequest::of(tags, Level::One)).unwrap();
        self.ledger().moving = false;
        let used = |tag: &usize| self.live.iter().any(|live| live.tag == *tag);
        let falling: Vec<usize> = falling.into_iter().filter(used).collect();
        let dropped = |live: &Live| self.tags[live.tag] == Tag::kv_cache() && falling.contains(&live.tag);
        self.live.iter_mut().filter(|live| dropped(live)).for_each(|live| live.seed = None);
        self.asleep.extend(falling);
    }

    fn wake(&mut self) {
        if !self.device.kind().holds_streams_apart() {
            self.ledger().open_all(); // A wake needs functions of the host, behind those that hold.
        }
        self.ledger().moving = true;
        match self.pool.wake(&WakeRequest::all()) {
            Ok(_) => self.asleep.clear(),
            Err(PoolError::OverLimit { .. }) if self.kind.limited => {}
            Err(error) => panic!("{error}"),
        }
        self.ledger().moving = false;
    }

    fn check(&self) {
        let ledger = self.ledger();
        assert!(ledger.violations.is_empty(), "{:?}", ledger.violations);
        drop(ledger);
        let stats = self.pool.stats().unwrap();
        assert_eq!(stats.live_blocks, self.live.len());
        assert_eq!(stats.live_bytes, self.live.iter().map(|live| live.block.range.bytes).sum::<u64>());
        if self.kind.mark.is_none() {
            let used_bytes = self.device.memory_info().unwrap().process.unwrap().used_bytes;
            assert_eq!(stats.mapped_bytes, used_bytes, "our accounting and the device's");
        }
        if self.kind.limited {
            assert!(stats.peak_mapped_bytes <= CAPACITY_GRANULES * self.granule(), "over the limit");
        }
        let mut found: Vec<DeviceRange> = Vec::new();
        for segment in self.pool.snapshot().unwrap().segments {
            let mut at = segment.addr;
            for block in &segment.blocks {
                assert_eq!(block.addr, at);
                at += block.bytes;
                assert_ne!(block.kind, BlockKind::UnmapFailed, "the device has refused an unmap");
                if block.kind == BlockKind::Live {
                    found.push(DeviceRange::new(block.addr, block.bytes));
                }
            }
            assert_eq!(at, segment.addr + segment.bytes);
        }
        let mut expected: Vec<DeviceRange> = self.live.iter().map(|live| live.block.range).collect();
        expected.sort_unstable();
        assert_eq!(found, expected);
    }

    fn end(mut self) {
        self.ledger().open_all();
        for stream in self.streams {
            self.pass(stream, usize::MAX);
        }
        self.free_until_awake();
        for live in &self.live {
            let Some((seed, offset)) = live.seed else { continue };
            let len = usize::try_from(live.block.requested_bytes).unwrap();
            let read = pattern::read(&self.pool, live.block.id, len).unwrap();
            assert!(read == pattern::part(seed, offset, len), "bytes of {:?}", live.block);
        }
        while !self.live.is_empty() {
            self.free(0);
        }
        self.pool.trim().unwrap();
        let stats = self.pool.stats().unwrap();
        assert_eq!([stats.live_bytes, stats.mapped_bytes, stats.reserved_bytes], [0; 3]);
        self.check();
        self.pool.close().unwrap();
        let info = self.device.memory_info().unwrap();
        assert_eq!(info.free_bytes, info.total_bytes);
    }

    /// Wakes everything. If memory is short, some blocks are freed.
    fn free_until_awake(&mut self) {
        self.wake();
        while !self.asleep.is_empty() {
            self.free(0);
            self.wake();
        }
    }
}

fn run(kind: PoolKind, steps: &[Step]) {
    let mut run = Run::new(kind);
    for step in steps {
        run.step(step);
        run.check();
    }
    run.end();
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(step(), 1..300)
}

fn config() -> ProptestConfig {
    let cases = DeviceKind::of_this_run().cases(100);
    // Failures are printed in full; CI would leave a file of seeds in the tree.
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 8000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn streams_never_meet_in_memory(kind in kind(), steps in steps()) {
        run(kind, &steps);
    }
}

/// A broken driver: when events pass before the work does, the property must not hold.
#[test]
fn the_property_notices_events_that_pass_too_early() {
    if skipped_unless(
        |kind| !matches!(kind, DeviceKind::Cuda(_)),
        "unmapping under work would break its context",
    ) {
        return;
    }
    let mut runner = TestRunner::deterministic();
    let noticed = (0..12).filter(|case| {
        let steps = steps().new_tree(&mut runner).unwrap().current();
        let kind = PoolKind {
            limited: case % 2 == 0,
            mark: None,
            chunk_granules: 4,
            span_granules: 8,
            defect: Some(Defect::EventsPassAtOnce),
        };
        catch_unwind(AssertUnwindSafe(|| run(kind, &steps))).is_err()
    });
    assert!(noticed.count() >= 10);
}
