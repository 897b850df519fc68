//! What allocations and wakes try, and in which order, when memory is short.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use poorwill_core::{
    AllocRequest, Block, DeviceRange, DriverErrorKind, Level, Op, Pool, PoolConfig, SleepRequest, StreamId,
    Tag, WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use poorwill_testkit::watchdog::watched;

const CHUNK: u64 = 4;
const SPAN: u64 = 16;

/// With more queries than this in one call, the call waits.
const LOOKS: u64 = 100;
/// Far beyond the waits of these tests.
const LONG: Duration = Duration::from_secs(24 * 3600);

/// Why a test that holds one stream and lets another pass cannot run.
const HELD_TOGETHER: &str = "one held stream may hold up the other";

/// The test's commands to the driver, and the driver's counts.
#[derive(Default)]
struct Script {
    /// Larger chunks are refused.
    largest_bytes: AtomicU64,
    /// Whether large chunks are refused.
    is_in_pieces: AtomicBool,
    /// Events recorded and not destroyed.
    events: AtomicI64,
    /// Queries of events left before a call counts as waiting; see [`Script::arm`].
    looks_left: AtomicU64,
    /// How often the driver had to wait for an event.
    waits: AtomicU64,
    /// Latches of work that is held back: with each wait, the oldest opens.
    latches: Mutex<VecDeque<Arc<Latch>>>,
    /// Done at the next wait, first.
    on_wait: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Script {
    fn judge(&self, call: Call) -> Verdict {
        match call.op {
            Op::EventRecord => drop(self.events.fetch_add(1, Ordering::Relaxed)),
            Op::EventDestroy => drop(self.events.fetch_sub(1, Ordering::Relaxed)),
            Op::EventSynchronize => {
                self.waits.fetch_add(1, Ordering::Relaxed);
                self.let_pass();
            }
            Op::EventQuery => {
                let less = |left: u64| left.checked_sub(1);
                if self.looks_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) == Ok(1) {
                    self.let_pass();
                }
            }
            Op::Create
                if self.is_in_pieces.load(Ordering::Relaxed)
                    && call.bytes > self.largest_bytes.load(Ordering::Relaxed) =>
            {
                let (asked_bytes, free_bytes) = (call.bytes, call.bytes);
                return Verdict::Fail(DriverErrorKind::OutOfMemory { asked_bytes, free_bytes });
            }
            _ => {}
        }
        Verdict::Pass
    }

    /// The next call may have to wait.
    fn arm(&self) {
        self.looks_left.store(LOOKS, Ordering::Relaxed);
    }

    fn let_pass(&self) {
        if let Some(act) = self.on_wait.lock().unwrap().take() {
            act();
        }
        if let Some(latch) = self.latches.lock().unwrap().pop_front() {
            latch.open();
        }
    }
}

struct World {
    device: TestDevice,
    pool: Arc<Pool>,
    script: Arc<Script>,
    granule: u64,
}

impl Drop for World {
    fn drop(&mut self) {
        // Also after a failure: a dropped pool waits for work.
        self.script.latches.lock().unwrap().drain(..).for_each(|latch| latch.open());
    }
}

/// The call that lacks memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Requester {
    Allocates,
    Wakes,
}

const BOTH: [Requester; 2] = [Requester::Allocates, Requester::Wakes];

impl World {
    /// A device of `capacity_granules`, and a pool limited to `limit_granules`.
    fn open(capacity_granules: u64, limit_granules: Option<u64>) -> Self {
        let device = TestDevice::open(capacity_granules);
        let (granule, script) = (device.info().granule_bytes, Arc::new(Script::default()));
        script.largest_bytes.store(CHUNK * granule, Ordering::Relaxed);
        let heard = Arc::clone(&script);
        let driver = ScriptedDriver::new(device.driver(), move |call| heard.judge(call));
        let config = PoolConfig::default()
            .limited_to(limit_granules.map(|granules| granules * granule))
            .in_chunks_of(CHUNK)
            .in_spans_of(SPAN)
            .in_segments_of(8);
        Self { pool: Arc::new(Pool::new(Arc::new(driver), config).unwrap()), device, script, granule }
    }

    fn streams<const N: usize>(&self) -> [StreamId; N] {
        [0; N].map(|_| self.device.stream_create().unwrap())
    }

    /// A request that waits for nothing that it does not need.
    fn request(&self, bytes: u64, tag: Tag, stream: StreamId) -> AllocRequest {
        AllocRequest::new(bytes, tag).on(stream).waiting_for_streams(Duration::ZERO)
    }

    fn alloc(&self, granules: u64, tag: Tag, stream: StreamId) -> Block {
        self.pool.alloc(&self.request(granules * self.granule, tag, stream)).unwrap()
    }

    fn free(&self, block: Block) {
        self.pool.free(block.id).unwrap();
    }

    /// Frees blocks under work of their stream that is held.
    fn free_under_work<const N: usize>(&self, blocks: [Block; N], stream: StreamId) {
        let latch = Arc::new(Latch::default());
        let bytes = vec![7; usize::try_from(blocks[0].requested_bytes).unwrap()];
        drop(latch::write(&self.pool, stream, &blocks[0], &latch, &bytes));
        self.script.latches.lock().unwrap().push_back(latch);
        blocks.into_iter().for_each(|block| self.free(block));
    }

    /// Prepares that `requester` needs granules of a tag that sleeps drop: see [`World::get`].
    fn prepare(&self, requester: Requester, granules: u64) {
        if requester == Requester::Wakes {
            self.alloc(granules, Tag::kv_cache(), StreamId::DEFAULT);
            self.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        }
    }

    /// `requester` gets so many granules, without a deadline. Returns how often the driver had to wait for it.
    fn get(&self, requester: Requester, granules: u64) -> u64 {
        self.script.arm();
        let before = self.waits();
        match requester {
            Requester::Allocates => drop(self.alloc(granules, Tag::kv_cache(), StreamId::DEFAULT)),
            Requester::Wakes => {
                let woken = self.pool.wake(&WakeRequest::all()).unwrap();
                assert_eq!(woken.mapped_bytes, granules * self.granule);
            }
        }
        self.waits() - before
    }

    /// Two halves of one granule, freed on two streams whose work has passed: reclaimable, but not by one stream.
    fn halves(&self) -> DeviceRange {
        let half = |stream| self.pool.alloc(&self.request(self.granule / 2, Tag::runtime(), stream)).unwrap();
        let halves = self.streams::<2>().map(half);
        let [first, second] = halves.map(|half| half.range.addr / self.granule);
        assert_eq!(first, second);
        halves.into_iter().for_each(|half| self.free(half));
        self.device.synchronize().unwrap();
        DeviceRange::new(first * self.granule, self.granule)
    }

    /// The number of blocks that the pool has at these addresses.
    fn block_count(pool: &Pool, range: DeviceRange) -> usize {
        let segments = pool.snapshot().unwrap().segments;
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| DeviceRange::new(block.addr, block.bytes).overlaps(&range)).count()
    }

    /// The pool has needed so much once: free memory of other sizes may stay up to that.
    fn note_used(&self, granules: u64) {
        let block = self.alloc(granules, Tag::weights(), StreamId::DEFAULT);
        self.free(block);
        self.pool.trim().unwrap();
        assert_eq!(self.pool.stats().unwrap().mapped_bytes, 0);
    }

    /// Others take all of the device but so many granules.
    fn leave(&self, granules: u64) {
        let free = self.device.memory_info().unwrap().free_bytes / self.granule;
        for _ in granules..free {
            self.device.create(self.granule).unwrap();
        }
    }

    fn waits(&self) -> u64 {
        self.script.waits.load(Ordering::Relaxed)
    }

    fn held_granules(&self) -> u64 {
        self.pool.stats().unwrap().mapped_bytes / self.granule
    }
}

/// Work of others may never end, and the device has enough memory, in small chunks.
#[test]
fn memory_in_small_chunks_is_taken_before_work_is_waited_for() {
    if skipped_unless(DeviceKind::holds_streams_apart, HELD_TOGETHER) {
        return;
    }
    for requester in BOTH {
        watched(move || {
            let world = World::open(64, None);
            let [stuck] = world.streams();
            world.prepare(requester, 20);
            let block = world.alloc(8, Tag::weights(), stuck);
            world.free_under_work([block], stuck);
            world.script.is_in_pieces.store(true, Ordering::Relaxed);
            let waits = world.get(requester, 20);
            let passed = world.script.latches.lock().unwrap().is_empty();
            assert_eq!((passed, waits, world.held_granules()), (false, 0, 28), "{requester:?}");
        });
    }
}

/// Each wait of the pool costs an event, which is destroyed when it has passed.
#[test]
fn events_go_when_they_have_passed() {
    watched(|| {
        let world = World::open(64, Some(8));
        let streams: [StreamId; 2] = world.streams();
        let rounds = u64::from(world.device.kind().cases(60)).max(20);
        for nth in 0..rounds {
            let stream = streams[usize::from(nth % 2 == 1)];
            let mut request = world.request(6 * world.granule, Tag::weights(), stream);
            if nth % 3 == 0 {
                request = request.within(LONG);
            }
            world.script.arm();
            let block = world.pool.alloc(&request).unwrap();
            assert!(world.script.latches.lock().unwrap().is_empty(), "round {nth} had to wait");
            if nth % 4 == 0 {
                world.pool.sleep(&SleepRequest::all(Level::One).within(LONG)).unwrap();
                world.pool.wake(&WakeRequest::all()).unwrap();
            }
            world.free_under_work([block], stream);
            let events = world.script.events.load(Ordering::Relaxed);
            assert!((0..=2).contains(&events), "{events} after round {nth}");
        }
        assert!(world.waits() >= rounds / 2, "of {rounds} rounds {} had the driver wait", world.waits());
        world.script.latches.lock().unwrap().drain(..).for_each(|latch| latch.open());
        world.pool.close().unwrap();
        assert_eq!(world.script.events.load(Ordering::Relaxed), 0);
    });
}

/// Free blocks of several streams stay apart as long as there is any other way, and no longer.
#[test]
fn free_blocks_of_streams_are_joined_when_waiting_was_in_vain() {
    for requester in BOTH {
        watched(move || {
            let world = World::open(64, Some(8));
            let [busy] = world.streams();
            world.prepare(requester, 7);
            let halves = world.halves();
            let block = world.alloc(7, Tag::weights(), busy);
            world.free_under_work([block], busy);
            let (pool, block_count) = (Arc::clone(&world.pool), Arc::new(AtomicU64::new(0)));
            let found = Arc::clone(&block_count);
            *world.script.on_wait.lock().unwrap() = Some(Box::new(move || {
                found.store(World::block_count(&pool, halves) as u64, Ordering::Relaxed);
            }));
            world.get(requester, 7);
            assert_eq!(
                block_count.load(Ordering::Relaxed),
                2,
                "{requester:?}: while there was work to wait for"
            );
            assert_eq!(
                World::block_count(&world.pool, halves),
                2,
                "{requester:?}: it was served by what had passed"
            );
            world.alloc(1, Tag::weights(), StreamId::DEFAULT);
            assert_eq!(world.held_granules(), 8);
        });
    }
}

/// Memory that passes during a wait has the wrong size. It is released for the request before other work is waited
/// for, which may never end.
#[test]
fn memory_that_passed_meanwhile_is_released_before_the_next_wait() {
    if skipped_unless(DeviceKind::holds_streams_apart, HELD_TOGETHER) {
        return;
    }
    for requester in BOTH {
        watched(move || {
            let world = World::open(32, None);
            world.note_used(32);
            let streams: [StreamId; 2] = world.streams();
            world.prepare(requester, CHUNK);
            for stream in streams {
                let blocks = [0; 4].map(|_| world.alloc(1, Tag::weights(), stream));
                world.free_under_work(blocks, stream);
            }
            assert_eq!(world.held_granules(), 2 * 4);
            world.leave(0);
            assert_eq!(world.get(requester, CHUNK), 0, "{requester:?}");
        });
    }
}

/// The same holds for joined memory.
#[test]
fn joined_memory_is_released_for_what_is_needed() {
    for requester in BOTH {
        watched(move || {
            let world = World::open(32, None);
            world.note_used(32);
            world.prepare(requester, CHUNK);
            world.halves();
            assert_eq!(world.held_granules(), 1);
            world.leave(CHUNK - 1);
            world.get(requester, CHUNK);
            assert_eq!(world.held_granules(), CHUNK, "{requester:?}");
        });
    }
}
