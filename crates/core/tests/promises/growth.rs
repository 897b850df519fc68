//! A long-lived pool: streams and tags come and go, and are forgotten. Counted, not timed.

use std::sync::Arc;

use poorwill_core::{
    AllocRequest, Block, Dropped, Level, Pool, PoolConfig, PoolError, SleepRequest, StreamId, Tag, TagPolicy,
    WakeRequest,
};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::latch::{Latch, hold};
use poorwill_testkit::pattern;

const GRANULES: u64 = 64;

/// More of anything is remembered only while as much is in use.
const FEW: usize = 150;

fn open() -> (TestDevice, Pool) {
    let device = TestDevice::open(GRANULES);
    let limit_bytes = Some(GRANULES * device.info().granule_bytes);
    let config = PoolConfig::default().limited_to(limit_bytes).in_chunks_of(4).in_segments_of(8);
    let pool = Pool::new(device.driver(), config).unwrap();
    (device, pool)
}

fn nth(n: u32) -> Tag {
    Tag::new(&format!("lora-{n}")).unwrap()
}

fn small(pool: &Pool, tag: &Tag, stream: StreamId) -> Block {
    pool.alloc(&AllocRequest::new(512, tag.clone()).on(stream)).unwrap()
}

/// All that the pool may hold can be allocated: no block was lost.
fn assert_nothing_is_lost(device: &TestDevice, pool: &Pool) {
    let bytes = GRANULES * device.info().granule_bytes;
    for tag in [Tag::weights(), Tag::runtime()] {
        let all = pool.alloc(&AllocRequest::new(bytes, tag)).unwrap();
        pool.free(all.id).unwrap();
    }
    pool.trim().unwrap();
    let stats = pool.stats().unwrap();
    assert_eq!((stats.live_bytes, stats.mapped_bytes, stats.segments), (0, 0, 0));
}

/// A stream that exists for one copy, in two tags.
fn come_and_go(device: &TestDevice, pool: &Pool, shared: &Block) {
    let stream = device.stream_create().unwrap();
    for tag in [Tag::runtime(), Tag::weights()] {
        let block = small(pool, &tag, stream);
        pool.record_use(shared.id, stream).unwrap();
        pool.free(block.id).unwrap();
    }
    device.stream_destroy(stream).unwrap();
}

#[test]
fn streams_that_are_gone_are_forgotten() {
    let (device, pool) = open();
    // A long run has more streams than lists have numbers.
    for round in 0..device.kind().cases(4_000) {
        let shared = small(&pool, &Tag::weights(), StreamId::DEFAULT);
        come_and_go(&device, &pool, &shared);
        pool.free(shared.id).unwrap();
        let remembered = pool.remembered().unwrap();
        assert!(remembered.stream_lists < FEW && remembered.clocks < FEW, "round {round}: {remembered:?}");
    }
    assert_nothing_is_lost(&device, &pool);
}

/// Completes the work also when a test fails: a dropped pool waits for it.
struct Opened(Arc<Latch>);

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Freed blocks stay where they are as long as their streams have work in flight.
#[test]
fn a_stream_at_work_is_not_forgotten() {
    let (device, pool) = open();
    let granule = device.info().granule_bytes;
    let busy = device.stream_create().unwrap();
    let own = pool.alloc(&AllocRequest::new(3 * granule, Tag::runtime()).on(busy)).unwrap();
    let used = pool.alloc(&AllocRequest::new(2 * granule, Tag::runtime())).unwrap();
    pool.record_use(used.id, busy).unwrap();
    let latch = Arc::new(Latch::default());
    let opened = Opened(Arc::clone(&latch));
    hold(&*device.driver(), busy, &latch);
    pool.free(own.id).unwrap();
    pool.free(used.id).unwrap();
    let shared = small(&pool, &Tag::weights(), StreamId::DEFAULT);
    for _ in 0..300 {
        come_and_go(&device, &pool, &shared);
        let stream = device.stream_create().unwrap();
        for bytes in [512, granule, 2 * granule] {
            let block = pool.alloc(&AllocRequest::new(bytes, Tag::runtime()).on(stream)).unwrap();
            for held in [&own, &used] {
                assert!(!block.range.overlaps(&held.range), "{} is still in use", held.range);
            }
            pool.free(block.id).unwrap();
        }
        device.stream_destroy(stream).unwrap();
    }
    assert!(pool.remembered().unwrap().stream_lists < FEW);
    // Its own stream has it back at once.
    let again = pool.alloc(&AllocRequest::new(3 * granule, Tag::runtime()).on(busy)).unwrap();
    assert_eq!(again.range.addr, own.range.addr);
    drop(opened);
    pool.free(again.id).unwrap();
    pool.free(shared.id).unwrap();
    device.stream_destroy(busy).unwrap();
    assert_nothing_is_lost(&device, &pool);
}

#[test]
fn streams_with_live_blocks_are_remembered_and_forgotten_with_them() {
    const STREAMS: usize = 200;
    let (device, pool) = open();
    let streams: Vec<StreamId> = (0..STREAMS).map(|_| device.stream_create().unwrap()).collect();
    let blocks: Vec<Block> = streams.iter().map(|stream| small(&pool, &Tag::runtime(), *stream)).collect();
    for (n, block) in (0..).zip(&blocks) {
        pattern::fill(&pool, block.id, n, 512).unwrap();
    }
    let remembered = pool.remembered().unwrap();
    assert!(remembered.stream_lists >= STREAMS && remembered.clocks >= STREAMS, "{remembered:?}");
    for stream in &streams {
        device.stream_destroy(*stream).unwrap();
    }
    for (n, block) in (0..).zip(&blocks) {
        assert!(pattern::read(&pool, block.id, 512).unwrap() == pattern::bytes(n, 512));
        pool.free(block.id).unwrap();
    }
    let shared = small(&pool, &Tag::weights(), StreamId::DEFAULT);
    (0..STREAMS + FEW).for_each(|_| come_and_go(&device, &pool, &shared));
    let remembered = pool.remembered().unwrap();
    assert!(remembered.uses < FEW, "of a block that lives long: {remembered:?}");
    pool.free(shared.id).unwrap();
    pool.trim().unwrap();
    let remembered = pool.remembered().unwrap();
    assert!(remembered.stream_lists < FEW && remembered.clocks < FEW, "{remembered:?}");
    assert_nothing_is_lost(&device, &pool);
}

#[test]
fn tags_of_which_nothing_is_left_are_forgotten() {
    let (device, pool) = open();
    let granule = device.info().granule_bytes;
    let [declared, asleep, live] = ["declared", "asleep", "live"].map(|name| Tag::new(name).unwrap());
    pool.declare_tag(&declared, TagPolicy::discardable(Dropped::Zeros)).unwrap();
    let of_live = small(&pool, &live, StreamId::DEFAULT);
    let of_asleep = pool.alloc(&AllocRequest::new(granule, asleep.clone())).unwrap();
    let len = usize::try_from(granule).unwrap();
    pattern::fill(&pool, of_asleep.id, 7, len).unwrap();
    pool.sleep(&SleepRequest::of([asleep.clone()], Level::One)).unwrap();
    for n in 0..device.kind().cases(4_000) {
        let block = small(&pool, &nth(n), StreamId::DEFAULT);
        pool.free(block.id).unwrap();
        let remembered = pool.remembered().unwrap();
        assert!(remembered.tags < 2 * FEW && remembered.stream_lists < 2 * FEW, "after {n}: {remembered:?}");
    }
    // The declaration of a tag and its content stay.
    let conflict = pool.declare_tag(&declared, TagPolicy::PRESERVED).unwrap_err();
    assert!(matches!(conflict, PoolError::PolicyConflict { .. }), "{conflict}");
    pool.wake(&WakeRequest::of([asleep])).unwrap();
    assert!(pattern::read(&pool, of_asleep.id, len).unwrap() == pattern::bytes(7, len));
    pool.free(of_asleep.id).unwrap();
    pool.free(of_live.id).unwrap();
    assert_nothing_is_lost(&device, &pool);
    // A forgotten tag is as good as new.
    let block = small(&pool, &nth(0), StreamId::DEFAULT);
    pool.free(block.id).unwrap();
    for tag in [Tag::weights(), Tag::kv_cache(), Tag::runtime(), Tag::cudagraph()] {
        pool.tag_state(&tag).unwrap();
    }
}

#[test]
fn a_tag_may_be_forgotten_while_others_wake() {
    let (device, pool) = open();
    std::thread::scope(|scope| {
        let cycles = scope.spawn(|| {
            let block =
                pool.alloc(&AllocRequest::new(8 * device.info().granule_bytes, Tag::weights())).unwrap();
            for _ in 0..device.kind().cases(100) {
                pool.sleep(&SleepRequest::all(Level::One)).unwrap();
                pool.wake(&WakeRequest::all()).unwrap();
            }
            pool.free(block.id).unwrap();
        });
        for n in 0.. {
            match pool.alloc(&AllocRequest::new(512, nth(n))) {
                Ok(block) => pool.free(block.id).unwrap(),
                // A sleep of all tags has found it live.
                Err(error) => assert!(matches!(error, PoolError::Asleep { .. }), "{error}"),
            }
            if cycles.is_finished() {
                break;
            }
        }
        cycles.join().unwrap();
    });
    pool.wake(&WakeRequest::all()).unwrap();
    assert_nothing_is_lost(&device, &pool);
}
