//! Spans: the large chunks under blocks that a sleep drops, and under all blocks after a wake. The tests cover which
//! blocks get them, what becomes of backups, and which requests get their memory afterwards. A device without such
//! large ranges does not count as full.
//!
//! The properties (`property.rs`, `sizes.rs`, `streams.rs`) and the fault suite have the combinations.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use poorwill_core::{
    AllocRequest, Block, BlockKind, DeviceRange, DriverErrorKind, Dropped, HostBuffer, Level, Op, Pool,
    PoolConfig, PoolError, SleepRequest, StreamId, Tag, TagPolicy, TagState, Verify, WakeReport, WakeRequest,
};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};

const CHUNK: u64 = 4;
const SPAN: u64 = 16;

/// The test's commands to the driver, and the driver's counts.
#[derive(Debug, Default)]
struct Script {
    /// Sizes created since the last look, in granules.
    created: Mutex<Vec<u64>>,
    /// How many more chunks larger than the pool's chunk size are refused.
    refusals: AtomicU64,
    /// Whether host memory is refused.
    host_is_full: AtomicBool,
    /// Opened when a call waits for an event.
    latch: Arc<Latch>,
    /// Whether queries of events first wait for the default stream, so that frees have passed.
    is_settled: AtomicBool,
}

struct World {
    device: TestDevice,
    pool: Pool,
    script: Arc<Script>,
    granule: u64,
}

impl World {
    /// A device of `capacity_granules`, and a pool limited to `limit_granules`.
    fn open(capacity_granules: u64, limit_granules: Option<u64>) -> Self {
        let device = TestDevice::open(capacity_granules);
        let granule = device.info().granule_bytes;
        let script = Arc::new(Script::default());
        let (heard, chunk_bytes) = (Arc::clone(&script), CHUNK * granule);
        let inner = device.driver();
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            if matches!(call.op, Op::EventSynchronize | Op::Synchronize) {
                heard.latch.open();
            }
            if call.op == Op::EventQuery && heard.is_settled.load(Ordering::Relaxed) {
                inner.stream_synchronize(StreamId::DEFAULT).unwrap();
            }
            if call.op == Op::HostAlloc && heard.host_is_full.load(Ordering::Relaxed) {
                return Verdict::Fail(DriverErrorKind::OutOfHostMemory {
                    asked_bytes: call.bytes,
                    reason: "full".into(),
                });
            }
            if call.op != Op::Create {
                return Verdict::Pass;
            }
            let refuse = |left: u64| left.checked_sub(1);
            if call.bytes > chunk_bytes
                && heard.refusals.fetch_update(Ordering::Relaxed, Ordering::Relaxed, refuse).is_ok()
            {
                let kind = DriverErrorKind::OutOfMemory { asked_bytes: call.bytes, free_bytes: call.bytes };
                return Verdict::Fail(kind);
            }
            heard.created.lock().unwrap().push(call.bytes / granule);
            Verdict::Pass
        });
        let driver = driver.with_info(|info| info.fast_digests = true);
        let config = PoolConfig::default()
            .limited_to(limit_granules.map(|granules| granules * granule))
            .in_chunks_of(CHUNK)
            .in_spans_of(SPAN)
            .in_segments_of(8);
        Self { pool: Pool::new(Arc::new(driver), config).unwrap(), device, script, granule }
    }

    fn alloc(&self, granules: u64, tag: Tag) -> Result<Block, PoolError> {
        self.pool.alloc(&AllocRequest::new(granules * self.granule, tag))
    }

    fn kv(&self, granules: u64) -> Block {
        self.alloc(granules, Tag::kv_cache()).unwrap()
    }

    fn weights(&self, granules: u64) -> Block {
        self.alloc(granules, Tag::weights()).unwrap()
    }

    fn fill(&self, block: &Block, seed: u64) {
        pattern::fill(&self.pool, block.id, seed, usize::try_from(block.range.bytes).unwrap()).unwrap();
    }

    fn write(&self, block: &Block, offset: u64, bytes: &[u8]) {
        let (buffer, len) = (Arc::new(HostBuffer::from(bytes.to_vec())), bytes.len() as u64);
        self.pool.write(StreamId::DEFAULT, block.id, offset, buffer, 0, len).unwrap().wait().unwrap();
    }

    /// The block was filled, or is of one that was, from so many granules on.
    fn assert_filled(&self, block: &Block, first: u64, seed: u64) {
        let len = usize::try_from(block.range.bytes).unwrap();
        let read = pattern::read(&self.pool, block.id, len).unwrap();
        assert!(read == pattern::part(seed, first * self.granule, len), "bytes of {block:?}");
    }

    fn free(&self, block: Block) {
        self.pool.free(block.id).unwrap();
    }

    /// Frees granules of a block.
    fn free_part(&self, block: &Block, granules: std::ops::Range<u64>) -> Vec<Block> {
        let bytes = (granules.end - granules.start) * self.granule;
        let part = DeviceRange::new(block.range.addr + granules.start * self.granule, bytes);
        self.pool.free_part(block.id, part).unwrap()
    }

    /// What was created since the last call, in granules.
    fn created(&self) -> Vec<u64> {
        std::mem::take(&mut *self.script.created.lock().unwrap())
    }

    /// The same, the largest first.
    fn created_by_size(&self) -> Vec<u64> {
        let mut created = self.created();
        created.sort_unstable_by(|a, b| b.cmp(a));
        created
    }

    fn in_pieces(&self, in_pieces: bool) {
        self.refuse(if in_pieces { u64::MAX } else { 0 });
    }

    /// The next spans are refused.
    fn refuse(&self, spans: u64) {
        self.script.refusals.store(spans, Ordering::Relaxed);
    }

    /// Granules that the device and the pool say are held; they agree.
    fn held(&self) -> u64 {
        let stats = self.pool.stats().unwrap();
        assert_eq!(stats.mapped_bytes, self.device.memory_info().unwrap().process.unwrap().used_bytes);
        stats.mapped_bytes / self.granule
    }

    fn sleep(&self, granules: u64) {
        let report = self.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        assert_eq!((report.released_bytes, self.held()), (granules * self.granule, 0));
    }

    fn wake(&self) -> WakeReport {
        self.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap()
    }

    /// Granules of host memory for backups, in buffers of any size.
    fn backup(&self) -> u64 {
        self.pool.stats().unwrap().backup_bytes / self.granule
    }

    fn assert_zeros(&self, block: &Block) {
        let read = pattern::read(&self.pool, block.id, usize::try_from(block.range.bytes).unwrap()).unwrap();
        assert!(read.iter().all(|byte| *byte == 0), "zeros of {block:?}");
    }

    fn end(self) {
        self.pool.trim().unwrap();
        assert_eq!((self.held(), self.pool.stats().unwrap().reserved_bytes), (0, 0));
        self.pool.close().unwrap();
    }
}

#[test]
fn blocks_that_a_sleep_drops_are_as_few_spans_as_hold_them() {
    let world = World::open(256, None);
    let workspace = Tag::new("workspace").unwrap();
    world.pool.declare_tag(&workspace, TagPolicy::discardable(Dropped::Undefined)).unwrap();
    for (tag, granules, layout) in [
        (Tag::kv_cache(), 42, vec![16, 16, 10]),
        (workspace, 17, vec![15, 2]),
        (Tag::kv_cache(), 15, vec![15]),
        (Tag::weights(), 17, vec![4, 4, 4, 3, 2]),
        (Tag::runtime(), 16, vec![4, 4, 4, 4]),
    ] {
        let block = world.alloc(granules, tag.clone()).unwrap();
        // Granules ahead are created last.
        let created = world.created();
        assert_eq!(created[..layout.len()], layout, "{granules} of {tag}");
        assert!(created[layout.len()..].iter().all(|ahead| *ahead == 1));
        world.free(block);
        world.pool.trim().unwrap();
    }
    world.end();
}

#[test]
fn a_block_that_is_freed_in_parts_gives_each_granule_back() {
    let world = World::open(256, Some(64));
    let in_parts = |granules| {
        let request = AllocRequest::new(granules * world.granule, Tag::weights()).freed_in_parts();
        world.pool.alloc(&request).unwrap()
    };
    let block = in_parts(9);
    assert_eq!(world.created()[..9], [1; 9]);
    let [first, last] = world.free_part(&block, 2..8)[..] else { panic!("two parts are left") };
    world.pool.trim().unwrap();
    assert_eq!(world.held(), 3);
    world.fill(&first, 8);
    world.sleep(3);
    world.wake();
    world.assert_filled(&first, 0, 8);
    [first, last].into_iter().for_each(|block| world.free(block));
    world.end();
}

/// Chunks that freed parts keep are few, as new blocks get smaller ones then.
#[test]
fn what_freed_parts_keep_makes_chunks_smaller() {
    let world = World::open(1024, None);
    let whole = world.weights(256);
    let largest = |granules: u64| {
        world.pool.trim().unwrap();
        world.created();
        let block = world.weights(granules);
        let largest = world.created().into_iter().max();
        world.free(block);
        world.pool.trim().unwrap();
        largest
    };
    assert_eq!(largest(3), Some(3));
    let [block, other] = [world.weights(3), world.weights(4)];
    let [rest] = world.free_part(&block, 0..2)[..] else { panic!("one part is left") };
    assert_eq!(largest(3), Some(3));
    let [more] = world.free_part(&other, 0..3)[..] else { panic!("one part is left") };
    assert_eq!(largest(3), Some(1), "five granules of two chunks are much");
    world.free(rest);
    assert_eq!(largest(3), Some(3), "three are not");
    world.free(more);
    world.free(whole);
    world.end();
}

#[test]
fn a_sleep_releases_spans_and_a_wake_has_them_again() {
    let world = World::open(64, Some(42));
    let block = world.kv(42);
    pattern::fill(&world.pool, block.id, 3, usize::try_from(block.range.bytes).unwrap()).unwrap();
    world.created();
    for _ in 0..3 {
        world.sleep(42);
        let report = world.pool.wake(&WakeRequest::all()).unwrap();
        assert_eq!((report.mapped_bytes, report.zeroed_bytes), (42 * world.granule, 42 * world.granule));
        assert_eq!(world.created(), [16, 16, 10]);
        world.assert_zeros(&block);
        assert_eq!(world.pool.block(block.id).unwrap(), block);
    }
    world.free(block);
    world.end();
}

/// Work on the freed block is still queued: its own stream need not wait.
#[test]
fn the_same_size_again_is_the_same_memory_at_once() {
    for tag in [Tag::kv_cache(), Tag::weights()] {
        for granules in 2..=42 {
            let world = World::open(64, Some(42));
            let [block, other] =
                [granules, 42 - granules].map(|granules| world.alloc(granules, tag.clone()).ok());
            let block = block.unwrap();
            let latch = Arc::new(Latch::default());
            let copy = latch::write(&world.pool, StreamId::DEFAULT, &block, &latch, &[7; 512]);
            world.free(block);
            world.created();
            let again = world.alloc(granules, tag.clone()).unwrap();
            assert_eq!((again.range, world.created()), (block.range, vec![]), "{granules} of {tag}");
            latch.open();
            copy.wait().unwrap();
            [Some(again), other].into_iter().flatten().for_each(|block| world.free(block));
            world.end();
        }
    }
}

/// Of neighbours that were freed, each is had again, in any order.
#[test]
fn neighbours_that_were_freed_serve_the_same_sizes_in_any_order() {
    for in_parts in [false, true] {
        let world = World::open(64, Some(15));
        let alloc = |granules| {
            let mut request = AllocRequest::new(granules * world.granule, Tag::weights());
            request.is_freed_in_parts = in_parts;
            world.pool.alloc(&request).unwrap()
        };
        let blocks = [2, 3, 3, 2].map(alloc);
        let latch = Arc::new(Latch::default());
        let copies =
            blocks.map(|block| latch::write(&world.pool, StreamId::DEFAULT, &block, &latch, &[7; 512]));
        blocks.into_iter().for_each(|block| world.free(block));
        world.created();
        let again = [3, 2, 3].map(alloc);
        assert_eq!(world.created(), [0u64; 0], "freed in parts: {in_parts}");
        latch.open();
        copies.into_iter().for_each(|copy| copy.wait().unwrap());
        again.into_iter().for_each(|block| world.free(block));
        world.end();
    }
}

#[test]
fn what_a_freed_span_had_serves_every_size_and_tag_at_the_limit() {
    let world = World::open(64, Some(42));
    for granules in [42, 41, 38, 30, 17, 16, 15, 4, 1] {
        for (from, to) in [(Tag::kv_cache(), Tag::weights()), (Tag::weights(), Tag::kv_cache())] {
            let rest = world.alloc(42 - granules, from.clone()).ok();
            let freed = world.alloc(granules, from.clone()).unwrap();
            world.free(freed);
            assert!(world.held() <= 42);
            let small = world.alloc(1, to.clone()).unwrap();
            world.free(small);
            let other = world.alloc(granules, to).unwrap();
            world.free(other);
            let again = world.alloc(granules, from).unwrap();
            [Some(again), rest].into_iter().flatten().for_each(|block| world.free(block));
        }
    }
    world.end();
}

/// The smaller block cannot lie over parts of the spans, and waits for them.
#[test]
fn an_allocation_waits_for_pending_memory_that_it_needs() {
    for tag in [Tag::weights(), Tag::kv_cache()] {
        let world = World::open(64, Some(42));
        let block = world.kv(42);
        let bytes = vec![7; usize::try_from(block.range.bytes).unwrap()];
        let copy = latch::write(&world.pool, StreamId::DEFAULT, &block, &world.script.latch, &bytes);
        world.free(block);
        let other = world.alloc(37, tag).unwrap();
        copy.wait().unwrap();
        world.free(other);
        world.end();
    }
}

#[test]
fn a_span_leaves_when_nothing_of_it_is_live() {
    let world = World::open(64, None);
    let held = || {
        world.pool.trim().unwrap();
        world.held()
    };
    let block = world.kv(48);
    let rest = world.free_part(&block, 4..33);
    assert_eq!((rest.len(), held()), (2, 32), "the one in the middle");
    let bound = || {
        let segments = world.pool.snapshot().unwrap().segments;
        let blocks = segments.into_iter().flat_map(|segment| segment.blocks);
        let bound = blocks.filter(|block| block.kind == BlockKind::Pinned);
        bound.map(|block| DeviceRange::new(block.addr, block.bytes)).collect::<Vec<_>>()
    };
    assert_eq!(bound().len(), 2);
    for granules in [1, 12] {
        let other = world.kv(granules);
        assert!(
            bound().iter().all(|bound| !bound.overlaps(&other.range)),
            "nothing is put into what is bound"
        );
        world.free(other);
    }
    world.sleep(held());
    let report = world.pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(report.mapped_bytes, (4 + 15) * world.granule, "what lives, and nothing else");
    world.free(rest[0]);
    assert_eq!(held(), 15);
    world.sleep(15);
    world.free(rest[1]);
    world.pool.wake(&WakeRequest::all()).unwrap();
    assert!(bound().is_empty());
    assert_eq!(held(), 0);
    world.end();
}

#[test]
fn a_device_that_is_in_pieces_is_not_full() {
    let world = World::open(42, None);
    for partly in [false, true] {
        world.in_pieces(!partly);
        let first = partly.then(|| world.kv(16));
        world.in_pieces(true);
        world.created();
        let block = world.kv(if partly { 26 } else { 42 });
        assert!(world.created().iter().all(|size| *size <= CHUNK));
        assert_eq!(world.held(), 42);
        let full = world.alloc(1, Tag::weights()).unwrap_err();
        assert!(matches!(full, PoolError::DeviceFull { .. }), "{full}");
        first.into_iter().chain([block]).for_each(|block| world.free(block));
        world.pool.trim().unwrap();
    }
    // Free memory of every size is in its way.
    world.in_pieces(false);
    let (spans, chunks, granules) =
        (world.kv(16), world.alloc(20, Tag::weights()).unwrap(), world.alloc(3, Tag::weights()).unwrap());
    [spans, chunks, granules].into_iter().for_each(|block| world.free(block));
    world.in_pieces(true);
    let block = world.kv(42);
    assert_eq!(world.held(), 42);
    world.free(block);
    world.end();
}

#[test]
fn a_wake_where_the_device_is_in_pieces_succeeds() {
    let world = World::open(42, None);
    let block = world.kv(42);
    world.sleep(42);
    world.in_pieces(true);
    world.created();
    world.pool.wake(&WakeRequest::all()).unwrap();
    let created = world.created();
    assert!(created.iter().all(|size| *size <= CHUNK) && world.held() == 42, "{created:?}");
    world.assert_zeros(&block);
    // The next wake finds large chunks again.
    world.in_pieces(false);
    world.sleep(42);
    world.created();
    world.pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(world.created(), [16, 16, 10]);
    let rest = world.free_part(&block, 1..9);
    world.pool.trim().unwrap();
    assert_eq!(world.held(), 42, "a span leaves as a whole");
    world.sleep(42);
    world.created();
    world.pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(world.created(), [1, 16, 15, 2], "what lives comes back, and nothing else");
    rest.into_iter().for_each(|block| world.free(block));
    world.end();
}

/// Of a split span, only the chunks with live bytes come back.
#[test]
fn a_span_that_was_cut_wakes_in_chunks_where_it_must() {
    let world = World::open(42, None);
    let block = world.kv(34);
    let rest = world.free_part(&block, 6..33);
    world.pool.trim().unwrap();
    world.sleep(16 + 2); // The first span, and the last one.
    world.in_pieces(true);
    world.pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(world.held(), 6 + 1, "what lives, and nothing else");
    rest.iter().for_each(|block| world.assert_zeros(block));
    world.sleep(7);
    world.free(rest[0]);
    world.pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(world.held(), 1);
    world.free(rest[1]);
    world.end();
}

#[test]
fn a_device_that_is_full_does_not_cost_spans() {
    let world = World::open(42, None);
    let block = world.kv(40);
    world.sleep(40);
    let others = Pool::new(world.device.driver(), PoolConfig::default()).unwrap();
    let other = others.alloc(&AllocRequest::new(10 * world.granule, Tag::weights())).unwrap();
    let full = world.pool.wake(&WakeRequest::all()).unwrap_err();
    assert!(matches!(full, PoolError::DeviceFull { .. }), "{full}");
    assert_eq!(world.pool.tag_state(&Tag::kv_cache()).unwrap(), TagState::AsleepDropped);
    others.free(other.id).unwrap();
    others.close().unwrap();
    world.created();
    world.pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(world.created(), [16, 16, 8]);
    world.free(block);
    world.end();
}

/// Other processes may have released memory just after a refusal.
#[test]
fn one_refusal_does_not_cost_spans() {
    let world = World::open(42, None);
    world.refuse(1);
    let block = world.kv(40);
    let sizes = |created: &[u64]| created.ends_with(&[16, 16, 8]);
    assert!(sizes(&world.created()));
    world.sleep(40);
    world.refuse(1);
    world.pool.wake(&WakeRequest::all()).unwrap();
    assert!(sizes(&world.created()));
    world.free(block);
    world.end();
}

/// A wake needs a span, and free memory is in chunks and granules.
#[test]
fn reclaimable_chunks_are_released_for_a_wake() {
    for (capacity_granules, limit_granules) in [(42, None), (42, Some(42)), (84, None)] {
        let world = World::open(capacity_granules, limit_granules);
        // With space for more, they are released if their stream is seen to have passed.
        world.script.is_settled.store(true, Ordering::Relaxed);
        let block = world.kv(40);
        world.sleep(40);
        let (chunks, granules, live) = (world.weights(37), world.weights(3), world.weights(2));
        [chunks, granules].into_iter().for_each(|block| world.free(block));
        world.created();
        world.pool.wake(&WakeRequest::all()).unwrap();
        assert!(world.created().starts_with(&[16, 16]), "{limit_granules:?}");
        assert_eq!(world.held(), 42, "no more than was ever in use, of {capacity_granules}");
        world.assert_zeros(&block);
        [block, live].into_iter().for_each(|block| world.free(block));
        world.end();
    }
}

/// A policy may change while nothing of a tag is live; its free memory may still be spans.
#[test]
fn spans_may_lie_under_what_a_sleep_backs_up() {
    let world = World::open(64, Some(36));
    let tag = Tag::new("notes").unwrap();
    world.pool.declare_tag(&tag, TagPolicy::discardable(Dropped::Zeros)).unwrap();
    let block = world.alloc(32, tag.clone()).unwrap();
    world.free(block);
    let changed = world.pool.declare_tag(&tag, TagPolicy::PRESERVED).unwrap_err();
    assert!(matches!(changed, PoolError::PolicyConflict { .. }), "{changed}");
    let kv = world.kv(32);
    world.free(kv);
    world.pool.declare_tag(&Tag::kv_cache(), TagPolicy::PRESERVED).unwrap();
    world.created();
    let block = world.kv(32);
    assert_eq!((block.range, world.created()), (kv.range, vec![]), "what is there serves it");
    world.fill(&block, 5);
    world.sleep(world.held());
    world.in_pieces(true);
    world.wake();
    world.assert_filled(&block, 0, 5);
    world.free(block);
    let other = world.weights(36);
    world.free(other);
    world.end();
}

#[test]
fn what_is_backed_up_comes_back_in_spans_with_its_bytes() {
    let world = World::open(64, None);
    let (block, small) = (world.weights(42), world.weights(1));
    world.fill(&block, 3);
    world.fill(&small, 4);
    for cycle in 0..4u8 {
        let report = world.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        // However large the chunk, changed bytes are copied by granules, and only live granules have buffers.
        let copied_granules = report.copied_bytes / world.granule;
        let changed_granules = if cycle == 0 { 43 } else { 1 };
        assert_eq!((copied_granules, world.held(), world.backup()), (changed_granules, 0, 43), "{cycle}");
        world.created();
        assert_eq!(world.wake().copied_bytes, 43 * world.granule);
        assert_eq!(world.created_by_size(), [16, 16, 10, 1]);
        let mut expected = pattern::bytes(3, usize::try_from(block.range.bytes).unwrap());
        let at = 17 * usize::try_from(world.granule).unwrap() + 5;
        if cycle > 0 {
            expected[at] = cycle;
        }
        assert!(pattern::read(&world.pool, block.id, expected.len()).unwrap() == expected);
        world.assert_filled(&small, 0, 4);
        world.write(&block, at as u64, &[cycle + 1]);
    }
    [block, small].into_iter().for_each(|block| world.free(block));
    world.end();
}

/// A preparation, too, looks at parts of a span.
#[test]
fn spans_are_backed_up_in_the_background() {
    let world = World::open(64, None);
    let block = world.weights(40);
    world.fill(&block, 3);
    world.sleep(40);
    world.wake();
    world.fill(&block, 8);
    let prepared = world.pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap().wait().unwrap();
    assert_eq!((prepared.copied_bytes, prepared.unchanged_bytes), (40 * world.granule, 0));
    let report = world.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert_eq!((report.copied_bytes, report.unchanged_bytes), (0, 40 * world.granule));
    world.wake();
    world.assert_filled(&block, 0, 8);
    world.free(block);
    world.end();
}

#[test]
fn a_sleep_of_spans_without_host_memory_leaves_them_as_they_are() {
    let world = World::open(64, Some(40));
    let block = world.weights(40);
    world.sleep(40);
    world.wake();
    world.free(block);
    let block = world.weights(40);
    world.fill(&block, 6);
    assert_eq!(world.backup(), 0, "what was stored went with the block");
    world.script.host_is_full.store(true, Ordering::Relaxed);
    let failed = world.pool.sleep(&SleepRequest::all(Level::One)).unwrap_err();
    assert!(matches!(failed, PoolError::SleepFailed { .. }), "{failed}");
    assert_eq!(world.held(), 40);
    world.assert_filled(&block, 0, 6);
    world.script.host_is_full.store(false, Ordering::Relaxed);
    for _ in 0..2 {
        world.sleep(40);
        world.wake();
        world.assert_filled(&block, 0, 6);
    }
    world.free(block);
    world.end();
}

#[test]
fn a_wake_brings_back_backups_in_chunks_where_it_must() {
    let world = World::open(42, None);
    let block = world.weights(40);
    world.fill(&block, 3);
    for in_pieces in [false, true, false, true] {
        world.sleep(40);
        world.in_pieces(in_pieces);
        world.created();
        let report = world.wake();
        assert_eq!(report.copied_bytes, 40 * world.granule);
        let created = world.created();
        if in_pieces {
            assert!(created.iter().all(|size| *size <= CHUNK), "{created:?}");
        } else {
            assert_eq!(created, [16, 16, 8]);
        }
        world.assert_filled(&block, 0, 3);
        assert_eq!(world.backup(), 40);
    }
    world.free(block);
    world.end();
}

/// Each block is unmapped as a whole when it is freed, so no span lies under two.
#[test]
fn blocks_side_by_side_have_spans_of_their_own() {
    let world = World::open(64, Some(40));
    let whole = world.weights(40);
    world.free(whole);
    let blocks = [16, 8, 12, 4].map(|granules| world.weights(granules));
    let held = world.held();
    blocks.iter().zip(20..).for_each(|(block, seed)| world.fill(block, seed));
    world.sleep(held);
    world.created();
    world.wake();
    assert_eq!(world.created_by_size(), [16, 12, 8, 4]);
    blocks.iter().zip(20..).for_each(|(block, seed)| world.assert_filled(block, 0, seed));
    for block in blocks {
        let held = world.held();
        world.free(block);
        world.pool.trim().unwrap();
        assert_eq!(world.held(), held - block.range.bytes / world.granule);
    }
    world.end();
}

#[test]
fn of_a_span_that_is_freed_in_parts_what_lives_wakes() {
    let world = World::open(64, None);
    let block = world.weights(42);
    world.fill(&block, 3);
    world.sleep(42);
    world.wake();
    // Awake: the first span stays as a whole, but the backups of its free chunks go.
    let rest = world.free_part(&block, 2..13);
    world.pool.trim().unwrap();
    assert_eq!((world.held(), world.backup()), (42, 42 - 8));
    world.sleep(42);
    // Asleep: part of the next one.
    let behind = world.free_part(&rest[1], 11..16);
    let rest = [rest[0], behind[0], behind[1]];
    world.created();
    let report = world.wake();
    assert_eq!(report.mapped_bytes, (2 + 11 + 13) * world.granule, "{report:?}");
    for (part, first) in rest.iter().zip([0, 13, 29]) {
        world.assert_filled(part, first, 3);
    }
    rest.into_iter().for_each(|block| world.free(block));
    world.end();
}

/// Free spans after a wake are reclaimable like other memory: the same block gets them again at once, and under
/// pressure they go first.
#[test]
fn spans_of_what_is_backed_up_serve_others_when_they_are_free() {
    let world = World::open(64, Some(44));
    let block = world.weights(40);
    world.sleep(40);
    world.wake();
    world.created();
    world.free(block);
    let again = world.weights(40);
    assert_eq!((again.range, world.created()), (block.range, vec![]));
    world.free(again);
    let kv = world.kv(40);
    assert_eq!(world.created(), [0u64; 0], "spans for spans");
    world.free(kv);
    let (chunks, granules) = (world.weights(20), world.weights(3));
    assert_eq!(world.created().iter().filter(|size| **size > CHUNK).count(), 0);
    assert!(world.held() <= 44);
    [chunks, granules].into_iter().for_each(|block| world.free(block));
    world.end();
}

#[test]
fn a_pool_may_have_no_spans_and_refuses_impossible_ones() {
    for (chunk_granules, span_granules) in [(4, 0), (4, 4), (4, 7), (1, 64)] {
        let device = TestDevice::open(64);
        let config = PoolConfig::default().in_chunks_of(chunk_granules).in_spans_of(span_granules);
        let pool = Pool::new(device.driver(), config).unwrap();
        let block =
            pool.alloc(&AllocRequest::new(24 * device.info().granule_bytes, Tag::kv_cache())).unwrap();
        let part = DeviceRange::new(block.range.addr, 8 * device.info().granule_bytes);
        pool.free_part(block.id, part).unwrap();
        assert_eq!(pool.trim().unwrap() / device.info().granule_bytes, 8, "no span is in the way");
        pool.close().unwrap();
    }
    let device = TestDevice::open(64);
    let config = PoolConfig::default().in_spans_of(u64::MAX);
    let refused = Pool::new(device.driver(), config).unwrap_err();
    assert!(refused.to_string().contains("span"), "{refused}");
}

/// A block below a chunk of a tag that sleeps drop: freed and taken again needs no call of the driver.
#[test]
fn a_block_below_a_chunk_that_is_taken_again_needs_no_call() {
    let device = TestDevice::open(256);
    let maps = Arc::new(AtomicU64::new(0));
    let heard = Arc::clone(&maps);
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        if matches!(call.op, Op::Map | Op::Unmap) {
            heard.fetch_add(1, Ordering::Relaxed);
        }
        Verdict::Pass
    });
    let config = PoolConfig::default().in_chunks_of(CHUNK).in_spans_of(SPAN).in_segments_of(8);
    let pool = Pool::new(Arc::new(driver), config).unwrap();
    let granule = device.info().granule_bytes;
    let block = |bytes| pool.alloc(&AllocRequest::new(bytes, Tag::kv_cache())).unwrap();
    let first = block(2 * granule);
    pool.free(first.id).unwrap();
    let before = maps.load(Ordering::Relaxed);
    for _ in 0..10 {
        let again = block(2 * granule);
        pool.free(again.id).unwrap();
    }
    assert_eq!(
        maps.load(Ordering::Relaxed) - before,
        0,
        "maps and unmaps of ten allocations of what was just freed"
    );
}

/// What a block below a chunk leaves of its last granule serves small ones.
#[test]
fn what_a_block_below_a_chunk_leaves_of_its_last_granule_serves_small_ones() {
    let world = World::open(256, None);
    let g = world.granule;
    let alloc = |bytes| world.pool.alloc(&AllocRequest::new(bytes, Tag::kv_cache())).unwrap();
    let mut live = 0;
    for _ in 0..8 {
        let a = alloc(g + 512);
        live += a.range.bytes;
        let b = alloc(g - 512);
        live += b.range.bytes;
    }
    assert_eq!((world.held() * g, live / g), (live, 16), "held and live");
}

/// Blocks that fit into the limit are served, in a tag that sleeps drop, too.
#[test]
fn small_blocks_beside_those_below_a_chunk_fit_into_the_limit() {
    for tag in [Tag::weights(), Tag::kv_cache()] {
        let world = World::open(256, Some(16));
        let g = world.granule;
        let alloc = |bytes| world.pool.alloc(&AllocRequest::new(bytes, tag.clone()));
        let mut blocks = Vec::new();
        for _ in 0..5 {
            blocks.push(alloc(2 * g + 512).unwrap());
        }
        for nth in 0..5 {
            blocks.push(alloc(g - 512).unwrap_or_else(|error| panic!("{nth} of {tag}: {error}")));
        }
    }
}
