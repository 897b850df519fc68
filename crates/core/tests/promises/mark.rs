//! The mark above which cached memory is released in the background, changed while the pool lives.

use poorwill_core::{AllocRequest, Pool, PoolConfig, PoolError, Tag};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::watchdog::{eventually, watched};

#[test]
fn a_mark_that_is_lowered_lets_memory_leave_at_once_and_one_that_is_lifted_keeps_it() {
    watched(|| {
        let device = TestDevice::open(64);
        let config = PoolConfig::default().in_chunks_of(1).in_segments_of(8);
        let pool = Pool::new(device.driver(), config).unwrap();
        let granule = device.info().granule_bytes;
        let block = |granules| pool.alloc(&AllocRequest::new(granules * granule, Tag::weights())).unwrap();
        let live = block(4);
        let mapped = || pool.stats().unwrap().mapped_bytes;
        let held_bytes = {
            let cached = block(20);
            let held_bytes = mapped();
            pool.free(cached.id).unwrap();
            held_bytes
        };
        assert_eq!(mapped(), held_bytes, "without a mark it is kept");
        pool.set_cached_max_bytes(Some(u64::MAX)).unwrap();
        assert_eq!(mapped(), held_bytes, "it is below this one");
        pool.set_cached_max_bytes(Some(6 * granule)).unwrap();
        eventually("the cache is above its mark", || mapped() == 10 * granule);
        pool.set_cached_max_bytes(Some(0)).unwrap();
        eventually("the cache is above its mark", || mapped() == 4 * granule);
        let cached = block(3);
        pool.free(cached.id).unwrap();
        eventually("the mark stays", || mapped() == 4 * granule);
        pool.set_cached_max_bytes(None).unwrap();
        let cached = block(3);
        let held_bytes = mapped();
        pool.free(cached.id).unwrap();
        assert_eq!(mapped(), held_bytes, "it is kept again");
        pool.free(live.id).unwrap();
        pool.close().unwrap();
        assert!(matches!(pool.set_cached_max_bytes(Some(0)), Err(PoolError::Closed)));
    });
}
