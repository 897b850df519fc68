//! Freed parts of live blocks: what stays, what leaves, and what is refused. The properties (`property.rs`,
//! `streams.rs`) and the fault suite have the combinations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use poorwill_core::{
    AllocRequest, Block, BlockKind, DeviceRange, HostBuffer, Level, Op, Pool, PoolConfig, PoolError,
    SleepRequest, StreamId, Tag, Verify, WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::watchdog::eventually;

const SEED: u64 = 7;

fn open(chunk_granules: u64) -> (TestDevice, Pool, u64) {
    let device = TestDevice::open(64);
    let config =
        PoolConfig::default().in_chunks_of(chunk_granules).in_spans_of(chunk_granules).in_segments_of(8);
    let pool = Pool::new(device.driver(), config).unwrap();
    let granule = device.info().granule_bytes;
    (device, pool, granule)
}

fn loaded(pool: &Pool, bytes: u64) -> Block {
    let block = pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
    pattern::fill(pool, block.id, SEED, usize::try_from(bytes).unwrap()).unwrap();
    block
}

/// The part of a block from one byte to another.
fn part(block: &Block, from: u64, to: u64) -> DeviceRange {
    DeviceRange::new(block.range.addr + from, to - from)
}

/// What is left of `whole` reads as before.
fn assert_reads(pool: &Pool, whole: &Block, rest: &[Block]) {
    for block in rest {
        let len = usize::try_from(block.requested_bytes).unwrap();
        let offset = block.range.addr - whole.range.addr;
        assert!(pattern::read(pool, block.id, len).unwrap() == pattern::part(SEED, offset, len), "{block:?}");
    }
}

fn kinds(pool: &Pool) -> Vec<BlockKind> {
    let segments = pool.snapshot().unwrap().segments;
    segments.iter().flat_map(|segment| &segment.blocks).map(|block| block.kind).collect()
}

#[test]
fn the_rest_keeps_its_address_its_bytes_and_its_size() {
    let (_device, pool, granule) = open(4);
    let block = loaded(&pool, 6 * granule + 100);
    let rest = pool.free_part(block.id, part(&block, 512, 2 * granule)).unwrap();
    let expected = [part(&block, 0, 512), part(&block, 2 * granule, block.range.bytes)];
    assert_eq!(rest.iter().map(|rest| rest.range).collect::<Vec<_>>(), expected);
    assert_eq!(rest.iter().map(|rest| rest.requested_bytes).collect::<Vec<_>>(), [512, 4 * granule + 100]);
    assert!(rest.iter().all(|rest| pool.block(rest.id).unwrap() == *rest));
    assert!(matches!(pool.block(block.id), Err(PoolError::StaleBlock { .. })));
    assert_reads(&pool, &block, &rest);
    let stats = pool.stats().unwrap();
    assert_eq!((stats.live_blocks, stats.live_bytes), (2, 512 + 4 * granule + 512));
    assert_eq!(stats.peak_live_bytes, block.range.bytes, "what is left is not live twice");
    let behind = rest[1];
    let rest = pool.free_part(behind.id, part(&behind, 0, 512)).unwrap();
    assert_eq!((rest.len(), rest[0].requested_bytes), (1, 4 * granule + 100 - 512), "nothing before it");
    let rest = pool.free_part(rest[0].id, part(&rest[0], 512, rest[0].range.bytes)).unwrap();
    assert_eq!((rest.len(), rest[0].requested_bytes), (1, 512), "nothing behind it");
    assert!(pool.free_part(rest[0].id, rest[0].range).unwrap().is_empty(), "all of it");
    assert!(matches!(pool.free(rest[0].id), Err(PoolError::StaleBlock { .. })));
    assert_eq!(pool.stats().unwrap().live_bytes, 512);
    pool.close().unwrap();
}

#[test]
fn what_is_no_part_is_refused_and_changes_nothing() {
    let (_device, pool, granule) = open(4);
    let block = loaded(&pool, 2 * granule + 100);
    let before = pool.snapshot().unwrap();
    let DeviceRange { addr, bytes } = block.range;
    for (part, word) in [
        (DeviceRange::new(addr, 0), "no bytes"),
        (DeviceRange::new(addr, bytes + 512), "inside"),
        (DeviceRange::new(addr - 512, 512), "inside"),
        (DeviceRange::new(addr + bytes, 512), "inside"),
        (DeviceRange::new(addr + 512, u64::MAX), "inside"),
        (DeviceRange::new(addr + 1, 512), "512"),
        (DeviceRange::new(addr, 511), "512"),
        (DeviceRange::new(addr, 2 * granule + 100), "512"),
    ] {
        let error = pool.free_part(block.id, part).unwrap_err();
        assert!(matches!(error, PoolError::InvalidPart { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    assert_eq!(pool.snapshot().unwrap(), before);
    assert_reads(&pool, &block, &[block]);
    pool.free(block.id).unwrap();
    let late = pool.free_part(block.id, block.range).unwrap_err();
    assert!(matches!(late, PoolError::StaleBlock { .. }), "{late}");
    pool.close().unwrap();
    assert!(matches!(pool.free_part(block.id, block.range), Err(PoolError::Closed)));
}

#[test]
fn whole_granules_of_a_part_leave() {
    let (device, pool, granule) = open(1);
    let free_before = device.memory_info().unwrap().free_bytes;
    let block = loaded(&pool, 16 * granule);
    let rest = pool.free_part(block.id, part(&block, granule / 2, 11 * granule + 512)).unwrap();
    pool.trim().unwrap();
    let held = free_before - device.memory_info().unwrap().free_bytes;
    assert_eq!(held, 6 * granule, "those at the ends are touched by what is left");
    assert_reads(&pool, &block, &rest);
    let again = loaded(&pool, 10 * granule);
    assert!(
        part(&block, granule / 2, 11 * granule + 512).contains(&again.range),
        "the addresses serve again"
    );
    assert_reads(&pool, &block, &rest);
    pool.close().unwrap();
}

#[test]
fn a_chunk_leaves_when_nothing_of_it_is_live() {
    let (device, pool, granule) = open(4);
    let free_before = device.memory_info().unwrap().free_bytes;
    let held = || {
        pool.trim().unwrap();
        free_before - device.memory_info().unwrap().free_bytes
    };
    // Chunks of 4, 4, 4 and 2 granules.
    let block = loaded(&pool, 14 * granule);
    let rest = pool.free_part(block.id, part(&block, granule, 9 * granule)).unwrap();
    assert_eq!(held(), 10 * granule, "the one in the middle has left");
    let live = |kinds: Vec<BlockKind>| kinds.into_iter().filter(|kind| *kind == BlockKind::Live).count();
    assert_eq!(live(kinds(&pool)), 2);
    assert!(kinds(&pool).contains(&BlockKind::Pinned));
    assert_reads(&pool, &block, &rest);
    pool.free(rest[0].id).unwrap();
    assert_eq!(held(), 6 * granule, "nothing of the first is live any more");
    let small = loaded(&pool, 600);
    let third = part(&block, 8 * granule, 12 * granule);
    assert!(!third.overlaps(&small.range), "nothing is put into what is bound");
    pool.free(small.id).unwrap();
    let last = pool.free_part(rest[1].id, part(&rest[1], granule, 3 * granule)).unwrap();
    assert_eq!(held(), 6 * granule, "there is something live on one side");
    let end = pool.free_part(last[0].id, last[0].range).unwrap();
    assert!(end.is_empty());
    assert_reads(&pool, &block, &last[1..]);
    assert_eq!(held(), 2 * granule);
    pool.free(last[1].id).unwrap();
    assert_eq!(held(), 0);
    assert_eq!(pool.stats().unwrap().reserved_bytes, 0);
    pool.close().unwrap();
}

#[test]
fn beside_a_bound_of_cached_memory_a_freed_part_keeps_only_the_chunks_of_its_ends() {
    for bound_granules in [None, Some(0), Some(4)] {
        let device = TestDevice::open(64);
        let granule = device.info().granule_bytes;
        let config = PoolConfig::default().in_chunks_of(4).in_spans_of(64).in_segments_of(8);
        let bounded = config.caching_at_most(bound_granules.map(|granules| granules * granule));
        let pool = Pool::new(device.driver(), bounded).unwrap();
        let block = loaded(&pool, 16 * granule);
        let rest = pool.free_part(block.id, part(&block, 2 * granule, 14 * granule)).unwrap();
        let mapped_bytes = || pool.stats().unwrap().mapped_bytes;
        if bound_granules == Some(4) {
            eventually("two chunks are left", || mapped_bytes() == 2 * 4 * granule);
        } else {
            assert_eq!(mapped_bytes(), 16 * granule, "one mapping, whose ends are live");
        }
        assert_reads(&pool, &block, &rest);
        pool.close().unwrap();
    }
}

#[test]
fn a_part_that_is_freed_asleep_does_not_wake() {
    for (chunk_granules, stored_granules) in [(1, 4), (4, 8)] {
        let (device, pool, granule) = open(chunk_granules);
        let block = loaded(&pool, 14 * granule);
        let one = pool.free_part(block.id, part(&block, 0, 2 * granule)).unwrap()[0];
        pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        assert_eq!(device.resident_bytes(), 0);
        let rest = pool.free_part(one.id, part(&block, 3 * granule, 11 * granule)).unwrap();
        assert_eq!(pool.stats().unwrap().live_bytes, 4 * granule);
        let stored_bytes = pool.stats().unwrap().backup_bytes;
        let wake = pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
        // Granules 2, 11, 12 and 13 are live. Backups are dropped by extents, no longer than a chunk.
        let held_bytes = 4 * granule;
        assert_eq!(
            (wake.mapped_bytes, stored_bytes),
            (held_bytes, stored_granules * granule),
            "{chunk_granules}"
        );
        assert_reads(&pool, &block, &rest);
        let again = pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        assert_eq!(again.released_bytes, held_bytes);
        pool.wake(&WakeRequest::all()).unwrap();
        assert_reads(&pool, &block, &rest);
        rest.iter().for_each(|block| pool.free(block.id).unwrap());
        pool.trim().unwrap();
        let stats = pool.stats().unwrap();
        assert_eq!([stats.mapped_bytes, stats.reserved_bytes, stats.backup_bytes], [0; 3]);
        pool.close().unwrap();
    }
}

/// Work on another stream, recorded while the block was whole.
#[test]
fn a_recorded_use_is_one_of_the_part_and_of_the_rest() {
    let (device, pool, granule) = open(1);
    let other = device.stream_create().unwrap();
    let block = loaded(&pool, 4 * granule);
    let latch = Arc::new(Latch::default());
    let len = usize::try_from(block.requested_bytes).unwrap();
    let copy = latch::write(&pool, other, &block, &latch, &vec![1; len]);
    let rest = pool.free_part(block.id, part(&block, granule, 2 * granule)).unwrap();
    rest.iter().for_each(|block| pool.free(block.id).unwrap());
    let waiting = kinds(&pool).into_iter().filter(|kind| *kind == BlockKind::Waiting).count();
    assert_eq!(waiting, 3, "the work may still touch all of it");
    assert_eq!(pool.stats().unwrap().live_blocks, 0);
    latch.open();
    copy.wait().unwrap();
    pool.trim().unwrap();
    assert_eq!(pool.stats().unwrap().mapped_bytes, 0);
    pool.close().unwrap();
}

#[test]
fn the_rest_can_be_written_on_its_own() {
    let (_device, pool, granule) = open(4);
    let block = loaded(&pool, 5 * granule);
    let rest = pool.free_part(block.id, part(&block, granule, 3 * granule)).unwrap();
    let outside =
        pool.write(StreamId::DEFAULT, rest[0].id, granule, Arc::new(HostBuffer::from(vec![1])), 0, 1);
    assert!(matches!(outside, Err(PoolError::OutOfBlock { .. })), "the part is not its own any more");
    pattern::fill(&pool, rest[1].id, 9, usize::try_from(2 * granule).unwrap()).unwrap();
    assert_reads(&pool, &block, &rest[..1]);
    pool.close().unwrap();
}

/// A wake maps a block with one chunk; parts of the block are then freed on several streams. The order of the frees
/// does not tell when the work has passed. Any work in flight keeps the chunk from other requests.
#[test]
fn a_chunk_freed_in_parts_serves_no_request_while_work_touches_the_last() {
    if skipped_unless(
        DeviceKind::holds_streams_apart,
        "a wake needs functions of the host, behind one that holds",
    ) {
        return;
    }
    for limited in [false, true] {
        let (device, latch) = (TestDevice::open(64), Arc::new(Latch::default()));
        let (granule, opener) = (device.info().granule_bytes, Arc::clone(&latch));
        let is_held = Arc::new(AtomicBool::new(false));
        let armed = Arc::clone(&is_held);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            if call.op == Op::EventSynchronize && armed.load(Ordering::Relaxed) {
                opener.open();
            }
            Verdict::Pass
        });
        let config = PoolConfig::default().in_chunks_of(4).in_segments_of(8);
        let config = config.limited_to(limited.then_some(3 * granule));
        let pool = Pool::new(Arc::new(driver), config).unwrap();
        let streams = [0, 1, 2].map(|_| device.stream_create().unwrap());
        let [user, reader, other] = streams;
        let alloc = |bytes, stream| pool.alloc(&AllocRequest::new(bytes, Tag::weights()).on(stream)).unwrap();
        // Space for both, side by side.
        let spaces = [0, 1].map(|_| alloc(granule, StreamId::DEFAULT));
        spaces.iter().for_each(|block| pool.free(block.id).unwrap());
        // A sleep waits for the device, so what was freed has passed.
        let kv = pool.alloc(&AllocRequest::new(512, Tag::kv_cache())).unwrap();
        pool.sleep(&SleepRequest::of([Tag::kv_cache()], Level::One)).unwrap();
        pool.free(kv.id).unwrap();
        let beside = alloc(granule / 2, StreamId::DEFAULT);
        let block = alloc(3 * granule / 2, user);
        assert_eq!(beside.range.end(), block.range.addr);
        pool.record_use(beside.id, reader).unwrap();
        pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        let reads = Arc::new(Latch::default());
        latch::hold(&*device, reader, &reads);
        pool.free(beside.id).unwrap();
        assert!(kinds(&pool).contains(&BlockKind::Waiting), "for its reader");
        pool.wake(&WakeRequest::all()).unwrap();
        assert!(kinds(&pool).contains(&BlockKind::Waiting), "for its reader");
        reads.open();
        pool.trim().unwrap();
        let work = latch::write(&pool, user, &block, &latch, &[1; 512]);
        is_held.store(true, Ordering::Relaxed);
        pool.free(block.id).unwrap();
        let next = alloc(2 * granule, other);
        let has_waited = latch.is_open();
        latch.open();
        work.wait().unwrap();
        assert_eq!(has_waited, limited, "who finds no other memory waits for the work");
        assert!(limited || !next.range.overlaps(&block.range), "the work may still touch it");
        pool.free(next.id).unwrap();
        pool.trim().unwrap();
        assert_eq!(pool.stats().unwrap().mapped_bytes, 0, "all of it can be had again");
        pool.close().unwrap();
        streams.into_iter().for_each(|stream| device.stream_destroy(stream).unwrap());
    }
}
