//! Promise 5: cycles end with the addresses, handles, host bytes and device bytes of the first.
//!
//! A program of its own, so that descriptors and mappings can be counted exactly.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use poorwill_core::{Level, Pool, PoolConfig, SleepRequest, Tag, Verify, WakeRequest};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::storing::Storing;
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::eventually;

/// Mappings of device memory, open descriptors, and threads of this process. On the host device, since a GPU's driver
/// has some of its own and keeps what it likes.
fn system() -> [usize; 3] {
    count(|_| true)
}

/// The same without the threads that all pools share. How many of them stay depends on how much work was under way at
/// a time.
fn system_of_cycles() -> [usize; 3] {
    count(|thread| !["poorwill-host", "poorwill-reaper"].contains(&thread))
}

fn count(is_counted: impl Fn(&str) -> bool) -> [usize; 3] {
    if DeviceKind::of_this_run() != DeviceKind::Host {
        return [0; 3];
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let entries = |folder| std::fs::read_dir(folder).unwrap().filter_map(Result::ok);
    // One listing, so that no thread is missing in a second one.
    let threads = entries("/proc/self/task");
    let names = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    let threads = names.filter(|name| is_counted(name.trim())).count();
    [maps.matches("poorwill-host-device").count(), entries("/proc/self/fd").count(), threads]
}

#[test]
fn cycles_leave_nothing_behind() {
    let baseline = system();
    for storing in Storing::ALL {
        cycles(storing);
        eventually("mappings, descriptors and threads are as before", || system() == baseline);
    }
}

fn cycles(storing: Storing) {
    let device = TestDevice::open(64);
    let config = storing.of(PoolConfig::default().in_chunks_of(4).in_spans_of(8).in_segments_of(8));
    let pool = Arc::new(Pool::new(device.driver(), config).unwrap());
    // With this seed, no block is noise.
    let mut tenant = Tenant::new(&pool, 3).storing(storing);
    let granule = device.info().granule_bytes;
    let weights = tenant.load(10 * granule, &Tag::weights());
    let runtime = tenant.load(3 * granule, &Tag::runtime());
    let kv = tenant.load(21 * granule, &Tag::kv_cache()); // Two spans, a chunk and a granule.
    // Its bytes are zeros after each wake.
    tenant.blocks[kv].bytes.fill(0);
    let (mut first, mut fewest) = (None, None::<[usize; 3]>);
    for cycle in 0..DeviceKind::of_this_run().cases(500).max(40) {
        // Level 2 comes second to last of each round, so that every round ends with a level 1.
        let level = if cycle % 4 == 2 { Level::Two } else { Level::One };
        for _ in 0..tenant.random(3) {
            let touched = tenant.random(10);
            tenant.touch_granule(weights, touched);
            tenant.touch_granule(runtime, touched % 3);
        }
        // The first round shows how many threads there are without those that prepare.
        if cycle > 3 && cycle % 5 < 2 {
            let preparation = pool.prepare_sleep(&SleepRequest::all(level)).unwrap();
            match cycle % 3 {
                0 => drop(preparation.wait().unwrap()),
                1 => preparation.cancel(),
                _ => drop(preparation),
            }
        }
        pool.sleep(&SleepRequest::all(level)).unwrap();
        assert_eq!(device.resident_bytes(), 0, "cycle {cycle}");
        let wake = WakeRequest::all().verifying(if cycle % 2 == 0 { Verify::All } else { Verify::Sample });
        if !pool.wake(&wake).unwrap().undefined_tags.is_empty() {
            tenant.write(weights);
            pool.mark_restored(&[Tag::weights()]).unwrap();
        }
        tenant.verify();
        if cycle % 4 == 3 {
            let here = || {
                let mut stats = pool.stats().unwrap();
                stats.created_bytes = 0;
                if storing == Storing::Codes {
                    // Codes are as long as their bytes make them.
                    stats.backup_bytes = 0;
                }
                let info = device.memory_info().unwrap();
                (pool.snapshot().unwrap(), stats, info)
            };
            // A joined thread may still be counted, also among the first.
            let most = *fewest.get_or_insert_with(system_of_cycles);
            let is_as_before = || system_of_cycles().iter().zip(most).all(|(now, most)| *now <= most);
            eventually("no thread, descriptor or mapping is left", is_as_before);
            let now = system_of_cycles();
            fewest = Some(std::array::from_fn(|nth| most[nth].min(now[nth])));
            // So preparations that no call waits for have ended, and their buffers are released.
            match storing {
                Storing::Raw => device.expect_host_bytes(13 * granule, "one backup of each preserved byte"),
                Storing::Codes => {
                    let backup_bytes = pool.stats().unwrap().backup_bytes;
                    assert!(backup_bytes < 12 * granule, "{backup_bytes} bytes of 13 granules of weights");
                    device.expect_host_bytes(backup_bytes, "one code of each preserved granule");
                }
            }
            let first = first.get_or_insert_with(here);
            assert_eq!(*first, here(), "cycle {cycle}");
        }
    }
    tenant.verify();
    drop(tenant);
    pool.close().unwrap();
    drop(pool);
}
