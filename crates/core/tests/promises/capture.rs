//! Promise 6 while a stream is being captured into a graph. Nothing touches an event. What would wait for the device
//! is refused before anything has happened. What was freed meanwhile is freed later.
//!
//! The test declares the capture; captures of real graphs are tested with the drivers.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use poorwill_core::{
    AllocRequest, Block, BlockKind, Level, Op, Pool, PoolConfig, PoolError, SleepRequest, StreamId, Tag,
    TagState, Verify, WakeRequest,
};
use poorwill_testkit::capture::Capture;
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use poorwill_testkit::watchdog::{eventually, watched};

struct World {
    device: TestDevice,
    pool: Pool,
    capture: Arc<Capture>,
    granule: u64,
    /// The captured stream, and another.
    streams: [StreamId; 2],
}

fn world(limit_granules: Option<u64>, script: impl Fn(Call) -> Verdict + Send + Sync + 'static) -> World {
    let device = TestDevice::open(64);
    let granule = device.info().granule_bytes;
    let driver = ScriptedDriver::new(device.driver(), script);
    let capture = driver.capture();
    let config = PoolConfig::default()
        .limited_to(limit_granules.map(|granules| granules * granule))
        .in_chunks_of(4)
        .in_segments_of(8);
    let pool = Pool::new(Arc::new(driver), config).unwrap();
    let streams = [0, 1].map(|_| device.stream_create().unwrap());
    World { device, pool, capture, granule, streams }
}

fn open(limit_granules: Option<u64>) -> World {
    world(limit_granules, |_| Verdict::Pass)
}

impl World {
    fn alloc(&self, granules: u64, stream: StreamId) -> Result<Block, PoolError> {
        self.pool.alloc(&AllocRequest::new(granules * self.granule, Tag::weights()).on(stream))
    }

    fn loaded(&self, granules: u64, seed: u64) -> Block {
        let block = self.alloc(granules, StreamId::DEFAULT).unwrap();
        let len = usize::try_from(block.requested_bytes).unwrap();
        pattern::fill(&self.pool, block.id, seed, len).unwrap();
        block
    }

    fn assert_reads(&self, block: &Block, seed: u64) {
        let len = usize::try_from(block.requested_bytes).unwrap();
        assert!(pattern::read(&self.pool, block.id, len).unwrap() == pattern::bytes(seed, len));
    }

    fn mapped_granules(&self) -> u64 {
        self.pool.stats().unwrap().mapped_bytes / self.granule
    }

    fn has_waiting(&self) -> bool {
        let segments = self.pool.snapshot().unwrap().segments;
        let mut blocks = segments.iter().flat_map(|segment| &segment.blocks);
        blocks.any(|block| block.kind == BlockKind::Waiting)
    }
}

#[test]
fn what_is_freed_during_a_capture_touches_no_event_and_is_caught_up_with() {
    watched(|| {
        let world = open(None);
        let [captured, other] = world.streams;
        let before = world.alloc(4, captured).unwrap();
        world.pool.free(before.id).unwrap();
        world.capture.begin(captured);
        let block = world.alloc(4, captured).unwrap();
        assert_eq!(block.range, before.range, "its own stream has it back at once");
        let second = world.alloc(6, captured).unwrap();
        world.pool.free(second.id).unwrap();
        let rest = world.pool.free_part(block.id, block.range).unwrap();
        assert!(rest.is_empty());
        let elsewhere = world.alloc(4, other).unwrap();
        assert!(!elsewhere.range.overlaps(&before.range), "nobody knows whether its work has passed");
        drop((world.pool.stats().unwrap(), world.pool.snapshot().unwrap()));
        assert_eq!(world.pool.trim().unwrap(), 0, "nothing is known to be quiet");
        world.capture.end();
        assert_eq!(world.pool.trim().unwrap(), 10 * world.granule);
        world.pool.close().unwrap();
    });
}

#[test]
fn sleep_discard_and_close_are_refused_before_anything_has_happened() {
    watched(|| {
        let world = open(None);
        let block = world.loaded(5, 1);
        let (level_1, weights) = (SleepRequest::all(Level::One), [Tag::weights()]);
        world.capture.begin(world.streams[0]);
        let stats = world.pool.stats().unwrap();
        for refused in
            [world.pool.sleep(&level_1).map(drop), world.pool.discard(&weights).map(drop), world.pool.close()]
        {
            let error = refused.unwrap_err();
            let named = matches!(error, PoolError::Capturing { stream, .. } if stream == world.streams[0]);
            assert!(named && error.to_string().contains("end it first"), "{error}");
        }
        assert_eq!(world.pool.stats().unwrap(), stats);
        assert_eq!(world.pool.tag_state(&Tag::weights()).unwrap(), TagState::Awake);
        world.capture.end();
        world.assert_reads(&block, 1);
        world.pool.sleep(&level_1).unwrap();
        world.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
        world.assert_reads(&block, 1);
        world.pool.close().unwrap();
    });
}

#[test]
fn the_reaper_catches_up_after_the_capture_without_a_call() {
    watched(|| {
        let world = open(None);
        let [captured, other] = world.streams;
        let used = world.alloc(4, captured).unwrap();
        let cached = world.alloc(8, captured).unwrap();
        world.pool.record_use(used.id, other).unwrap();
        world.pool.set_cached_max_bytes(Some(0)).unwrap();
        world.capture.begin(captured);
        world.pool.free(used.id).unwrap();
        world.pool.free(cached.id).unwrap();
        assert!(world.has_waiting());
        // Work of the pool that has nothing to do with it goes on.
        (0..20).for_each(|_| drop(world.alloc(1, other).map(|block| world.pool.free(block.id).unwrap())));
        assert!(world.has_waiting());
        world.capture.end();
        eventually("all is given back", || world.mapped_granules() == 0);
        assert!(!world.has_waiting());
        world.pool.close().unwrap();
    });
}

/// The capture ends between two queries of the reaper: it records nothing after the first, and would wait after the
/// second.
#[test]
fn the_reaper_catches_up_when_the_capture_ends_between_its_queries() {
    watched(|| {
        let ending: Arc<OnceLock<Arc<Capture>>> = Arc::default();
        let (capture, asked) = (Arc::clone(&ending), AtomicU64::new(0));
        let world = world(None, move |call| {
            let is_second = || asked.fetch_add(1, Ordering::Relaxed) == 1;
            if call.op == Op::Capturing
                && let Some(capture) = capture.get()
                && is_second()
            {
                capture.end();
            }
            Verdict::Pass
        });
        let [captured, other] = world.streams;
        let used = world.alloc(4, captured).unwrap();
        world.pool.record_use(used.id, other).unwrap();
        world.capture.begin(captured);
        ending.set(Arc::clone(&world.capture)).unwrap();
        world.pool.free(used.id).unwrap();
        eventually("the block is free", || !world.has_waiting());
        assert_eq!(world.capture.stream(), None);
        world.pool.close().unwrap();
    });
}

#[test]
fn a_pool_that_closes_after_a_capture_ends_a_reaper_that_was_waiting_for_it() {
    watched(|| {
        let world = open(None);
        let [captured, other] = world.streams;
        let used = world.alloc(4, captured).unwrap();
        world.pool.record_use(used.id, other).unwrap();
        world.capture.begin(captured);
        world.pool.free(used.id).unwrap();
        world.capture.end();
        world.pool.close().unwrap();
    });
}

#[test]
fn memory_that_a_capture_keeps_is_named_by_the_refusal() {
    // Of the pool's limit, and of the device.
    for limit_granules in [Some(16), None] {
        watched(move || {
            let world = open(limit_granules);
            let all = limit_granules.unwrap_or(64);
            let [captured, other] = world.streams;
            let freed = world.alloc(all - 4, captured).unwrap();
            world.capture.begin(captured);
            let never = world.alloc(all, other).unwrap_err();
            assert!(!matches!(never, PoolError::HeldByCapture { .. }), "nothing was freed: {never}");
            world.pool.free(freed.id).unwrap();
            let held = world.alloc(all - 4, other).unwrap_err();
            assert!(matches!(held, PoolError::HeldByCapture { .. }), "{held}");
            assert!(held.to_string().contains("memory that was freed"), "{held}");
            let small = world.alloc(4, other).unwrap();
            world.pool.free(small.id).unwrap();
            world.capture.end();
            world.alloc(all - 4, other).unwrap();
            world.pool.close().unwrap();
        });
    }
}

#[test]
fn tags_wake_and_sleeps_are_prepared_during_a_capture() {
    watched(|| {
        let fails = Arc::new(AtomicBool::new(false));
        let failing = Arc::clone(&fails);
        let world = world(None, move |call| {
            let wanted = call.op == Op::CopyToDevice && failing.load(Ordering::Relaxed);
            if wanted { Verdict::device_failure(call) } else { Verdict::Pass }
        });
        let block = world.loaded(40, 1);
        world.capture.begin(world.streams[0]);
        let prepared = world.pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap().wait();
        prepared.unwrap();
        world.capture.end();
        world.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        world.capture.begin(world.streams[0]);
        fails.store(true, Ordering::Relaxed);
        let failed = world.pool.wake(&WakeRequest::all()).unwrap_err();
        assert!(matches!(failed, PoolError::WakeFailed { .. }), "{failed}");
        assert_eq!(world.mapped_granules(), 0, "it was undone");
        fails.store(false, Ordering::Relaxed);
        world.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
        world.capture.end();
        world.assert_reads(&block, 1);
        world.pool.close().unwrap();
    });
}

#[test]
fn a_pool_that_holds_nothing_closes_without_waiting_for_the_device() {
    watched(|| {
        let waits = Arc::new(AtomicU64::new(0));
        let counting = Arc::clone(&waits);
        let world = world(None, move |call| {
            counting.fetch_add(u64::from(call.op == Op::Synchronize), Ordering::Relaxed);
            Verdict::Pass
        });
        let before = world.device.memory_info().unwrap();
        let [captured, other] = world.streams;
        let live = world.loaded(5, 1);
        world.pool.record_use(live.id, other).unwrap();
        world.pool.discard(&[Tag::weights()]).unwrap();
        world.pool.free(live.id).unwrap();
        world.pool.trim().unwrap();
        assert_eq!(world.mapped_granules(), 0);
        let awaited = waits.load(Ordering::Relaxed);
        world.capture.begin(captured);
        world.pool.close().unwrap();
        world.capture.end();
        assert_eq!(waits.load(Ordering::Relaxed), awaited);
        assert_eq!(world.device.memory_info().unwrap().free_bytes, before.free_bytes);
    });
}

/// The work was queued before the capture began, and passes while it is under way.
#[test]
fn a_trim_waits_for_nothing_during_a_capture() {
    watched(|| {
        let world = open(None);
        let [captured, other] = world.streams;
        let block = world.alloc(4, other).unwrap();
        let latch = Arc::new(Latch::default());
        let len = usize::try_from(block.requested_bytes).unwrap();
        let copy = latch::write(&world.pool, other, &block, &latch, &vec![1; len]);
        world.pool.free(block.id).unwrap();
        world.alloc(1, captured).unwrap(); // Records the event behind the work.
        world.capture.begin(captured);
        assert_eq!(world.pool.trim().unwrap() / world.granule, 0);
        latch.open();
        copy.wait().unwrap();
        world.capture.end();
        assert!(world.pool.trim().unwrap() >= 4 * world.granule);
        world.pool.close().unwrap();
    });
}

#[test]
fn a_pool_that_is_dropped_during_a_capture_leaves_it_alone() {
    if skipped_unless(|kind| kind == DeviceKind::Host, "what it leaves would stay with the process") {
        return;
    }
    watched(|| {
        let World { device, pool, capture, streams, .. } = open(None);
        let block = pool.alloc(&AllocRequest::new(1 << 16, Tag::weights())).unwrap();
        pool.record_use(block.id, streams[0]).unwrap();
        capture.begin(streams[0]);
        pool.free(block.id).unwrap();
        drop(pool);
        capture.end();
        assert!(device.memory_info().unwrap().process.unwrap().used_bytes > 0);
    });
}
