//! Promise 5: a thousand cycles end with the addresses, handles, host bytes and device bytes of the first.
//!
//! Alone in its file, hence in its process, so that descriptors and mappings can be counted exactly.
#![allow(clippy::unwrap_used)]

use poorwill_core::{
    AllocRequest, Block, Level, Pool, PoolConfig, PoolStats, SleepRequest, Tag, WakeRequest,
};
use poorwill_testkit::device::{Kind, TestDevice};
use poorwill_testkit::pattern;

fn loaded(pool: &Pool, granules: u64, tag: &Tag, seed: u64) -> Block {
    let bytes = granules * pool.driver().info().granule_bytes;
    let block = pool.alloc(&AllocRequest::new(bytes, tag.clone())).unwrap();
    fill(pool, &block, seed);
    block
}

fn fill(pool: &Pool, block: &Block, seed: u64) {
    pattern::fill(pool, block.id, seed, usize::try_from(block.requested_bytes).unwrap()).unwrap();
}

/// Mappings of device memory, open descriptors, and threads of this process; on the host device, since a GPU's
/// driver has some of its own and keeps what it likes.
fn system() -> [usize; 3] {
    if Kind::of_this_run() != Kind::Host {
        return [0; 3];
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let entries = |folder| std::fs::read_dir(folder).unwrap().count();
    [maps.matches("poorwill-host-device").count(), entries("/proc/self/fd"), entries("/proc/self/task")]
}

#[test]
fn a_thousand_cycles_leave_nothing_behind() {
    let bare = system();
    let device = TestDevice::open(64);
    let config = PoolConfig { chunk_granules: 4, segment_granules: 8, ..PoolConfig::default() };
    let pool = Pool::new(device.driver(), config).unwrap();
    let weights = loaded(&pool, 10, &Tag::weights(), 1);
    let runtime = loaded(&pool, 3, &Tag::runtime(), 2);
    loaded(&pool, 6, &Tag::kv_cache(), 3);
    let mut first = None;
    for cycle in 0..1000 {
        // Level 2 comes second to last of each round, so that every round ends with a level 1.
        let level = if cycle % 4 == 2 { Level::Two } else { Level::One };
        pool.sleep(&SleepRequest::all(level)).unwrap();
        assert_eq!(device.resident_bytes(), 0, "cycle {cycle}");
        if !pool.wake(&WakeRequest::all()).unwrap().undefined_tags.is_empty() {
            fill(&pool, &weights, 1);
            pool.mark_restored(&[Tag::weights()]).unwrap();
        }
        if cycle % 4 == 3 {
            let stats = PoolStats { created_bytes: 0, ..pool.stats().unwrap() };
            let info = device.memory_info().unwrap();
            let here = (pool.snapshot().unwrap(), stats, info, device.host_bytes(), system());
            assert_eq!(*first.get_or_insert_with(|| here.clone()), here, "cycle {cycle}");
        }
    }
    assert_eq!(device.host_bytes(), 13 * device.info().granule_bytes, "one backup of each preserved byte");
    for (block, seed) in [(weights, 1), (runtime, 2)] {
        let len = usize::try_from(block.requested_bytes).unwrap();
        assert!(pattern::read(&pool, block.id, len).unwrap() == pattern::bytes(seed, len));
    }
    pool.close().unwrap();
    drop(pool);
    drop(device);
    assert_eq!(system(), bare, "mappings, descriptors and threads after the last drop");
}
