//! Memory that moves under pressure, and past defects of that.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use poorwill_core::{
    AllocRequest, BackingId, Block, Level, Op, Pool, PoolConfig, PoolError, SleepRequest, StreamId, Tag,
    WakeRequest,
};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};

fn device(granules: u64) -> TestDevice {
    TestDevice::open(granules)
}

/// A pool over `device` whose calls pass through `script`, with a limit in granules.
fn scripted(
    device: &TestDevice,
    limit_granules: Option<u64>,
    chunk_granules: u64,
    script: impl Fn(Call) -> Verdict + Send + Sync + 'static,
) -> Pool {
    let limit_bytes = limit_granules.map(|granules| granules * device.info().granule_bytes);
    let config = PoolConfig::default().limited_to(limit_bytes).in_chunks_of(chunk_granules).in_segments_of(8);
    let driver = ScriptedDriver::new(device.driver(), script);
    Pool::new(Arc::new(driver), config).unwrap()
}

fn pool(device: &TestDevice, limit_granules: Option<u64>) -> Pool {
    scripted(device, limit_granules, 4, |_| Verdict::Pass)
}

fn granules(pool: &Pool, count: u64, tag: Tag) -> Block {
    pool.alloc(&AllocRequest::new(count * pool.driver().info().granule_bytes, tag)).unwrap()
}

/// Work on a block that does not pass before the latch is opened.
fn hold(pool: &Pool, block: &Block, stream: StreamId, latch: &Arc<Latch>) {
    let bytes = vec![7; usize::try_from(block.requested_bytes).unwrap()];
    drop(latch::write(pool, stream, block, latch, &bytes));
}

#[test]
fn small_holes_do_not_hide_new_addresses() {
    let device = device(1024);
    let pool = pool(&device, None);
    let blocks: Vec<Block> = (0..200).map(|_| granules(&pool, 1, Tag::kv_cache())).collect();
    blocks.iter().step_by(2).for_each(|block| pool.free(block.id).unwrap());
    pool.trim().unwrap();
    let segments = pool.stats().unwrap().segments;
    granules(&pool, 2, Tag::kv_cache());
    assert!(pool.stats().unwrap().segments <= segments + 1);
}

#[test]
fn idle_memory_that_a_failed_sleep_left_unmapped_is_not_handed_out() {
    let device = device(64);
    let unmaps = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&unmaps);
    // The first unmap works, the second does not, and nothing can be mapped again: armed by the count.
    let pool = scripted(&device, None, 4, move |call| {
        let now = counter.load(Ordering::Relaxed);
        match call.op {
            Op::Unmap if now > 0 => {
                counter.fetch_add(1, Ordering::Relaxed);
                if now > 1 { Verdict::device_failure(call) } else { Verdict::Pass }
            }
            Op::Map if now > 0 => Verdict::device_failure(call),
            _ => Verdict::Pass,
        }
    });
    let idle = granules(&pool, 4, Tag::kv_cache());
    granules(&pool, 4, Tag::weights());
    pool.free(idle.id).unwrap();
    unmaps.store(1, Ordering::Relaxed);
    pool.sleep(&SleepRequest::all(Level::One)).unwrap_err();
    unmaps.store(0, Ordering::Relaxed);
    let block = granules(&pool, 4, Tag::kv_cache());
    hold(&pool, &block, StreamId::DEFAULT, &open());
    pool.driver().synchronize().unwrap();
}

fn open() -> Arc<Latch> {
    let latch = Arc::new(Latch::default());
    latch.open();
    latch
}

/// A large block that had to be made of granules serves its own stream again at once, as any other.
#[test]
fn a_large_block_of_granules_is_used_again_where_it_is() {
    for chunk_granules in [1, 4] {
        let device = device(64);
        let maps = Arc::new(AtomicUsize::new(0));
        let (counter, latch) = (Arc::clone(&maps), Arc::new(Latch::default()));
        let opener = Arc::clone(&latch);
        let pool = scripted(&device, Some(8), chunk_granules, move |call| {
            counter.fetch_add(usize::from(call.op == Op::Map), Ordering::Relaxed);
            if call.op == Op::EventSynchronize {
                opener.open(); // Or a wait would hang instead of failing below.
            }
            Verdict::Pass
        });
        let small: Vec<Block> = (0..8).map(|_| granules(&pool, 1, Tag::kv_cache())).collect();
        small.iter().for_each(|block| pool.free(block.id).unwrap());
        let first = granules(&pool, 8, Tag::kv_cache());
        let mapped = maps.load(Ordering::Relaxed);
        hold(&pool, &first, StreamId::DEFAULT, &latch);
        pool.free(first.id).unwrap();
        let again = granules(&pool, 8, Tag::kv_cache());
        pool.free(again.id).unwrap();
        let smaller = granules(&pool, 7, Tag::kv_cache());
        latch.open();
        assert_eq!((again.range.addr, smaller.range.addr), (first.range.addr, first.range.addr));
        assert_eq!(maps.load(Ordering::Relaxed), mapped, "{chunk_granules}");
    }
}

#[test]
fn a_copy_on_another_stream_is_a_use_of_the_block() {
    let device = device(64);
    let pool = pool(&device, None);
    let (other, latch) = (device.stream_create().unwrap(), Arc::new(Latch::default()));
    let block = pool.alloc(&AllocRequest::new(4096, Tag::kv_cache())).unwrap();
    hold(&pool, &block, other, &latch);
    pool.free(block.id).unwrap();
    let next = pool.alloc(&AllocRequest::new(4096, Tag::kv_cache())).unwrap();
    latch.open();
    assert!(!next.range.overlaps(&block.range), "the copy is still writing there");
}

/// Freed memory whose event was under way when the sleep began is reclaimable once the device is idle.
#[test]
fn a_sleep_releases_what_was_waited_for_and_close_forgets_every_event() {
    let device = device(64);
    let latch = Arc::new(Latch::default());
    let events = Arc::new(AtomicI64::new(0));
    let (opener, counter) = (Arc::clone(&latch), Arc::clone(&events));
    let pool = scripted(&device, None, 4, move |call| {
        match call.op {
            Op::Synchronize => opener.open(),
            Op::EventRecord => drop(counter.fetch_add(1, Ordering::Relaxed)),
            Op::EventDestroy => drop(counter.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
        Verdict::Pass
    });
    let freed = granules(&pool, 8, Tag::kv_cache());
    hold(&pool, &freed, StreamId::DEFAULT, &latch);
    pool.free(freed.id).unwrap();
    granules(&pool, 5, Tag::weights()); // Looks for idle memory, and so records the event.
    assert!(events.load(Ordering::Relaxed) > 0);
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert_eq!(pool.stats().unwrap().mapped_bytes, 0);
    pool.close().unwrap();
    assert_eq!(events.load(Ordering::Relaxed), 0);
}

#[test]
fn dropping_a_pool_goes_on_after_a_refusal() {
    let device = device(64);
    let refusals = Arc::new(AtomicUsize::new(0));
    let left = Arc::clone(&refusals);
    let pool = scripted(&device, None, 4, move |call| {
        let refuses = call.op == Op::Release
            && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        if refuses { Verdict::device_failure(call) } else { Verdict::Pass }
    });
    for tag in [Tag::weights(), Tag::kv_cache(), Tag::runtime()] {
        granules(&pool, 8, tag);
    }
    refusals.store(1, Ordering::Relaxed);
    drop(pool);
    assert_eq!(device.memory_info().unwrap().free_bytes, device.info().total_bytes);
}

#[test]
fn an_allocation_that_failed_does_not_raise_what_may_be_held() {
    let device = device(64);
    let pool = pool(&device, None);
    let granule = device.info().granule_bytes;
    let others: Vec<BackingId> = (0..40).map(|_| device.create(granule).unwrap()).collect();
    let too_much = pool.alloc(&AllocRequest::new(48 * granule, Tag::weights()));
    assert!(matches!(too_much, Err(PoolError::DeviceFull { .. })));
    others.into_iter().for_each(|backing| device.release(backing).unwrap());
    // Not the default stream, which other tests on the same device may hold up.
    let stream = device.stream_create().unwrap();
    let of = |count, tag| pool.alloc(&AllocRequest::new(count * granule, tag).on(stream)).unwrap();
    let large = of(20, Tag::weights());
    pool.free(large.id).unwrap();
    for _ in 0..20 {
        of(1, Tag::kv_cache());
    }
    assert!(pool.stats().unwrap().peak_mapped_bytes <= 26 * granule);
}

#[test]
fn a_wake_takes_a_granule_that_two_streams_have_left() {
    let device = device(64);
    let pool = pool(&device, Some(8));
    let granule = device.info().granule_bytes;
    let other = device.stream_create().unwrap();
    granules(&pool, 8, Tag::weights());
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    let half = AllocRequest::new(granule / 2, Tag::kv_cache());
    let halves = [pool.alloc(&half).unwrap(), pool.alloc(&half.on(other)).unwrap()];
    halves.iter().for_each(|block| pool.free(block.id).unwrap());
    pool.wake(&WakeRequest::all()).unwrap();
}
