//! A process with many pools has few threads and descriptors: as many as there is work, not as there are pools.
//!
//! A program of its own, so that threads and descriptors can be counted.
#![allow(clippy::unwrap_used)]

use poorwill_core::{AllocRequest, Level, Pool, PoolConfig, SleepRequest, StreamId, Tag, WakeRequest};
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::watchdog::eventually;

/// More than any number of pools needs that do nothing.
const FEW: usize = 24;

/// Threads and descriptors of this process.
fn count() -> [usize; 2] {
    ["task", "fd"].map(|folder| std::fs::read_dir(format!("/proc/self/{folder}")).unwrap().count())
}

/// A pool that has needed all its threads once, and nothing any more.
fn pool() -> (TestDevice, Pool) {
    let device = TestDevice::open(8);
    let pool = Pool::new(device.driver(), PoolConfig::default()).unwrap();
    let bytes = device.info().granule_bytes;
    let [kept, freed] = [0; 2].map(|_| pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap());
    let stream = device.stream_create().unwrap();
    let source = std::sync::Arc::new(vec![7; 100].into());
    pool.write(stream, freed.id, 0, source, 0, 100).unwrap().wait().unwrap();
    pool.record_use(freed.id, StreamId::DEFAULT).unwrap();
    pool.free(freed.id).unwrap(); // For the reaper.
    pool.set_cached_max_bytes(Some(0)).unwrap();
    let all = SleepRequest::all(Level::One);
    pool.prepare_sleep(&all).unwrap().wait().unwrap();
    pool.sleep(&all).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    pool.block(kept.id).unwrap();
    (device, pool)
}

#[test]
fn many_pools_have_few_threads() {
    if skipped_unless(|kind| !matches!(kind, DeviceKind::Cuda(_)), "a GPU's driver has threads of its own") {
        return;
    }
    let before = count();
    let many = usize::try_from(DeviceKind::of_this_run().cases(400)).unwrap().min(1000);
    let pools: Vec<_> = (0..many).map(|_| pool()).collect();
    let few = || count().iter().zip(before).all(|(now, before)| *now <= before + FEW);
    eventually(&format!("few threads and descriptors: {before:?} before, {:?} now", count()), few);
    for (_, pool) in &pools {
        pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    }
    eventually("few again", few);
    drop(pools);
    if DeviceKind::of_this_run() == DeviceKind::Host {
        // The kernel may count a joined thread for a moment.
        eventually("all have ended with the last pool", || count() == before);
    }
}
