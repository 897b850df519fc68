//! Work in flight: which calls wait for it, and what becomes of the pool when a caller's code panics in it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use poorwill_core::{
    AllocRequest, Block, Driver, Level, Op, Pool, PoolConfig, PoolError, SleepRequest, StreamId, Tag,
    WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::latch::{self, Latch, watched};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};

fn device() -> TestDevice {
    TestDevice::open(64)
}

fn config(limit_bytes: Option<u64>) -> PoolConfig {
    PoolConfig::default().limited_to(limit_bytes).in_chunks_of(4).in_segments_of(8)
}

/// A pool over a device that finishes its work only when waited for.
fn lazy_pool(granules: u64) -> (Arc<Latch>, Pool) {
    let latch = Arc::new(Latch::default());
    let opener = Arc::clone(&latch);
    let driver = ScriptedDriver::new(device().driver(), move |call| {
        if matches!(call.op, Op::Synchronize | Op::EventSynchronize) {
            opener.open();
        }
        Verdict::Pass
    });
    let limit_bytes = granules * driver.info().granule_bytes;
    (latch, Pool::new(Arc::new(driver), config(Some(limit_bytes))).unwrap())
}

fn write_in_flight(pool: &Pool, latch: &Arc<Latch>, block: &Block, seed: u64) {
    let bytes = pattern::bytes(seed, usize::try_from(block.requested_bytes).unwrap());
    drop(latch::write(pool, StreamId::DEFAULT, block, latch, &bytes));
}

#[test]
fn a_sleep_waits_for_work_in_flight() {
    let (latch, pool) = lazy_pool(32);
    let granule = pool.driver().info().granule_bytes;
    let block = pool.alloc(&AllocRequest::new(3 * granule, Tag::weights())).unwrap();
    write_in_flight(&pool, &latch, &block, 7);
    let sleep = pool.sleep(&SleepRequest::all(Level::One));
    latch.open(); // Or a sleep that did not wait would leave the test hanging instead of failing.
    sleep.unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    let len = usize::try_from(block.requested_bytes).unwrap();
    assert!(pattern::read(&pool, block.id, len).unwrap() == pattern::bytes(7, len));
}

#[test]
fn reclaiming_waits_for_work_in_flight() {
    let (latch, pool) = lazy_pool(8);
    let granule = pool.driver().info().granule_bytes;
    let block = pool.alloc(&AllocRequest::new(6 * granule, Tag::weights())).unwrap();
    write_in_flight(&pool, &latch, &block, 7);
    pool.free(block.id).unwrap();
    let next = pool.alloc(&AllocRequest::new(7 * granule, Tag::kv_cache()));
    latch.open();
    next.unwrap();
}

#[test]
fn a_panic_in_a_copy_fails_that_copy_and_no_other() {
    if skipped_unless(|kind| kind == DeviceKind::Host, "its copies run none of the caller's code") {
        return;
    }
    let device = device();
    let pool = Pool::new(device.driver(), config(None)).unwrap();
    let block = pool.alloc(&AllocRequest::new(100, Tag::weights())).unwrap();
    let src = watched(vec![1; 100], |look| assert!(look == 0, "a test's own panic"));
    let copy = pool.write(StreamId::DEFAULT, block.id, 0, src, 0, 100).unwrap();
    assert!(copy.wait().unwrap_err().to_string().contains("panicked"));
    pattern::fill(&pool, block.id, 5, 100).unwrap();
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(pattern::read(&pool, block.id, 100).unwrap(), pattern::bytes(5, 100));
}

#[test]
fn a_panic_while_a_copy_is_queued_fails_nothing_else() {
    let device = device();
    let pool = Pool::new(device.driver(), config(None)).unwrap();
    let block = pool.alloc(&AllocRequest::new(100, Tag::weights())).unwrap();
    let src = watched(vec![1; 100], |_| panic!("a test's own panic"));
    let write = || drop(pool.write(StreamId::DEFAULT, block.id, 0, src, 0, 100));
    assert!(catch_unwind(AssertUnwindSafe(write)).is_err());
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    pool.free(block.id).unwrap();
}

#[test]
fn a_poisoned_pool_refuses_everything_and_still_releases_everything() {
    let device = device();
    let driver = ScriptedDriver::new(device.driver(), |call| {
        assert!(call.op != Op::Unreserve, "a test's own panic");
        Verdict::Pass
    });
    let pool = Pool::new(Arc::new(driver), config(None)).unwrap();
    let block = pool.alloc(&AllocRequest::new(100, Tag::weights())).unwrap();
    let other = pool.alloc(&AllocRequest::new(100, Tag::runtime())).unwrap();
    pool.free(other.id).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(pool.trim()))).is_err());
    assert!(matches!(pool.stats(), Err(PoolError::Poisoned)));
    assert!(matches!(pool.free(block.id), Err(PoolError::Poisoned)));
    assert!(catch_unwind(AssertUnwindSafe(|| drop(pool))).is_err(), "the driver panics again");
    assert_eq!(device.resident_bytes(), 0);
    assert_eq!(device.memory_info().unwrap().free_bytes, device.info().total_bytes);
}

#[test]
fn dropping_a_pool_releases_awake_tags() {
    let device = device();
    let pool = Pool::new(device.driver(), config(None)).unwrap();
    let block = pool.alloc(&AllocRequest::new(100, Tag::weights())).unwrap();
    pattern::fill(&pool, block.id, 1, 100).unwrap();
    drop(pool);
    assert_eq!(device.memory_info().unwrap().free_bytes, device.info().total_bytes);
    assert_eq!(device.resident_bytes(), 0);
}
