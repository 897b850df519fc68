//! Wakes whose codes copy engines carry to device memory: over the library, and where its calls fail.

use std::sync::Arc;

use poorwill_core::backup::Compress;
use poorwill_core::codec::BLOCK_BYTES;
use poorwill_core::{Driver, Level, Pool, PoolConfig, SleepRequest, Tag, Verify, WakeRequest};
use poorwill_fake_libcuda::Census;
use poorwill_testkit::effort::Effort;
use poorwill_testkit::granules;
use poorwill_testkit::tenant::Tenant;

use super::fake::{Fake, alone, open};

/// Enough that scratch memory pays.
const GRANULES: u64 = 24;

/// One call in so many fails: a prime.
fn stride() -> usize {
    if Effort::of_this_run() == Effort::Quick { 131 } else { 67 }
}

fn pool(limit_granules: u64) -> Tenant {
    let device = open(0);
    let granule_bytes = device.info().granule_bytes;
    let mut config = PoolConfig::default().in_chunks_of(1).in_segments_of(GRANULES);
    config = config.compressing(Compress::Auto);
    config.limit_bytes = Some(limit_granules * granule_bytes);
    let mut tenant = Tenant::new(&Arc::new(Pool::new(Arc::new(device), config).unwrap()), 3);
    let nth = tenant.load(GRANULES * granule_bytes, &Tag::weights());
    let granule = granules::weights(1, usize::try_from(granule_bytes).unwrap() / BLOCK_BYTES);
    tenant.blocks[nth].bytes = granule.repeat(usize::try_from(GRANULES).unwrap());
    tenant.write(nth);
    let slept = tenant.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert!(slept.stored_bytes < slept.copied_bytes / 10 * 8, "{slept:?}");
    tenant
}

fn request() -> WakeRequest {
    WakeRequest::all().verifying(Verify::All)
}

fn end(tenant: Tenant) {
    tenant.verify();
    let pool = Arc::clone(&tenant.pool);
    drop(tenant);
    pool.close().unwrap();
}

#[test]
fn copy_engines_carry_codes_where_device_memory_is_left_over() {
    let _turn = alone();
    let fake = Fake::load();
    for (limit_granules, is_left_over) in [(GRANULES + 16, false), (10 * GRANULES, true)] {
        let tenant = pool(limit_granules);
        fake.arm(u64::MAX, 0);
        tenant.pool.wake(&request()).unwrap();
        let calls: Vec<String> = (0..fake.disarm()).map(|number| fake.called(number)).collect();
        let count = |name: &str| calls.iter().filter(|call| call.starts_with(name)).count() as u64;
        let copies = count("cuMemcpyHtoDAsync");
        assert_eq!(count("cuLaunchKernel"), GRANULES, "nothing arrived wrong, to be decoded once more");
        assert_eq!(copies > 0, is_left_over, "{copies} copies under a limit of {limit_granules} granules");
        assert_eq!(fake.census(0).held_bytes, tenant.touched_bytes(&Tag::weights()));
        end(tenant);
    }
}

#[test]
fn whatever_fails_codes_arrive_or_sleep_on() {
    let _turn = alone();
    let fake = Fake::load();
    let witness = open(0); // Keeps the context, which would take along all that was left in it.
    let before = fake.census(0);
    let (mut undone, mut woken) = (0, 0);
    for nth in (0..).step_by(stride()) {
        let tenant = pool(10 * GRANULES);
        fake.arm(nth, 1);
        let result = tenant.pool.wake(&request());
        let calls = fake.disarm();
        if result.is_ok() {
            woken += 1;
        } else {
            undone += 1;
            tenant.pool.wake(&request()).unwrap();
        }
        end(tenant);
        let left = fake.census(0);
        // What was dropped while its destruction failed is lost.
        let lost = Census { streams: before.streams, events: before.events, ..left };
        assert_eq!(Census { calls_that_wait: before.calls_that_wait, ..lost }, before, "call {nth}");
        if nth >= calls {
            break;
        }
    }
    assert!(undone > 0 && woken > 0, "{undone}, {woken}");
    drop(witness);
}
