//! What is known about changes between sleeps: only changed bytes are copied. Bytes promised not to change are
//! skipped, and checked in turns, never beyond the promise.
//!
//! Digests count as fast, as on a GPU, unless a test says otherwise.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use poorwill_core::{
    Changes, Level, Op, Pool, PoolConfig, PoolError, SleepReport, SleepRequest, Tag, TagState, Verify,
    WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::latch::Latch;
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::watched;

/// A tenant, and the bytes of device memory that were digested.
fn tenant_with(
    fast_digests: bool,
    script: impl Fn(&Call) + Send + Sync + 'static,
) -> (TestDevice, Tenant, Arc<AtomicU64>) {
    let device = TestDevice::open(256);
    let digested = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&digested);
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        if call.op == Op::Digest && !call.waiting {
            count.fetch_add(call.bytes, Ordering::Relaxed);
        }
        script(&call);
        Verdict::Pass
    });
    let driver = driver.with_info(|info| info.fast_digests = fast_digests);
    let config = PoolConfig::default().in_chunks_of(4).in_segments_of(8);
    let pool = Arc::new(Pool::new(Arc::new(driver), config).unwrap());
    (device, Tenant::new(&pool, 7), digested)
}

fn tenant() -> (TestDevice, Tenant, Arc<AtomicU64>) {
    tenant_with(true, |_| ())
}

fn of(tags: &[Tag]) -> SleepRequest {
    SleepRequest::of(tags, Level::One)
}

fn sleep(tenant: &Tenant) -> SleepReport {
    tenant.pool.sleep(&SleepRequest::all(Level::One)).unwrap()
}

fn wake(tenant: &Tenant) {
    tenant.pool.wake(&WakeRequest::all()).unwrap();
}

/// All of a sleep's bytes, in granules: copied, unchanged, and of these unchecked.
fn moved(tenant: &Tenant, report: &SleepReport) -> [u64; 3] {
    [report.copied_bytes, report.unchanged_bytes, report.unchecked_bytes]
        .map(|bytes| bytes / tenant.granule())
}

/// A tag of a block that was backed up, declared immutable, and compared once since.
fn verified_tag(granules: u64, fast_digests: bool) -> (TestDevice, Tenant, Arc<AtomicU64>) {
    let (device, mut tenant, digested) = tenant_with(fast_digests, |_| ());
    let bytes = granules * tenant.granule();
    tenant.load(bytes, &Tag::weights());
    sleep(&tenant);
    wake(&tenant);
    tenant.pool.declare_changes(&Tag::weights(), Changes::Immutable).unwrap();
    let first = sleep(&tenant);
    let copied = if fast_digests { 0 } else { granules };
    assert_eq!(
        moved(&tenant, &first),
        [copied, granules - copied, 0],
        "before the promise it may have changed"
    );
    wake(&tenant);
    (device, tenant, digested)
}

#[test]
fn each_immutable_granule_is_compared_once_in_64_sleeps() {
    for fast_digests in [true, false] {
        let granules = 64 + 7;
        let (_device, tenant, digested) = verified_tag(granules, fast_digests);
        let mut compared = Vec::new();
        for _ in 0..64 {
            let before = digested.load(Ordering::Relaxed);
            let report = sleep(&tenant);
            let asked = (digested.load(Ordering::Relaxed) - before) / tenant.granule();
            assert_eq!(moved(&tenant, &report), [0, granules, granules - asked]);
            compared.push(asked);
            wake(&tenant);
        }
        assert!(compared.iter().all(|asked| [1, 2].contains(asked)), "{compared:?}");
        assert_eq!(compared.iter().sum::<u64>(), granules);
        tenant.verify();
    }
}

#[test]
fn a_broken_promise_is_found_in_its_turn_and_ends_the_skipping() {
    for (fast_digests, touched) in [(true, 0), (true, 37), (false, 70)] {
        let granules = 71;
        let (_device, mut tenant, _) = verified_tag(granules, fast_digests);
        tenant.touch_granule(0, touched);
        let mut sleeps = 0;
        let broken = loop {
            match tenant.pool.sleep(&SleepRequest::all(Level::One)) {
                Err(error) => break error,
                Ok(_) => sleeps += 1,
            }
            assert!(sleeps < 64, "granule {touched} was not looked at");
            wake(&tenant);
            tenant.write(0); // The wake has brought the bytes that were promised.
        };
        let PoolError::ImmutableChanged { tag, range, expected, found } = broken else { panic!("{broken}") };
        assert_eq!((tag, range.bytes), (Tag::weights(), tenant.granule()));
        assert_eq!(range.addr, tenant.blocks[0].block.range.addr + touched * tenant.granule());
        assert_ne!(expected, found);
        assert_eq!(tenant.pool.tag_state(&Tag::weights()).unwrap(), TagState::Awake);
        tenant.verify();
        let copied = if fast_digests { 1 } else { granules };
        assert_eq!(moved(&tenant, &sleep(&tenant)), [copied, granules - copied, 0]);
        tenant.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
        tenant.verify();
    }
}

/// With one count of turns for all tags, a tag that sleeps every second time would see only every second granule.
#[test]
fn a_tag_has_its_own_turns_beside_other_tags() {
    let (weights, runtime) = (Tag::weights(), Tag::runtime());
    for touched in [32, 33] {
        let (_device, mut tenant, _) = verified_tag(64, true);
        let granule = tenant.granule();
        let block = tenant.load(64 * granule, &runtime);
        tenant.pool.declare_changes(&runtime, Changes::Immutable).unwrap();
        sleep(&tenant);
        wake(&tenant);
        tenant.touch_granule(block, touched);
        let found = (0..64).any(|_| {
            let together = tenant.pool.sleep(&of(&[weights.clone(), runtime.clone()]));
            if let Err(error) = together {
                assert!(matches!(error, PoolError::ImmutableChanged { .. }), "{error}");
                return true;
            }
            wake(&tenant);
            tenant.write(block);
            tenant.pool.sleep(&of(std::slice::from_ref(&weights))).unwrap();
            wake(&tenant);
            false
        });
        assert!(found, "granule {touched} was not looked at");
        tenant.verify();
    }
}

#[test]
fn new_bytes_in_an_immutable_tag_are_copied_and_never_skipped() {
    let (_device, mut tenant, _) = tenant();
    let weights = Tag::weights();
    let granule = tenant.granule();
    tenant.pool.declare_changes(&weights, Changes::Immutable).unwrap();
    tenant.load(8 * granule, &weights);
    tenant.load(700, &weights);
    sleep(&tenant);
    wake(&tenant);
    assert!(moved(&tenant, &sleep(&tenant))[2] > 0);
    wake(&tenant);
    // In the same granule as the small one; in a granule of its own; in the place of another block.
    let small = tenant.load(600, &weights);
    tenant.load(granule, &weights);
    let report = sleep(&tenant);
    assert_eq!(moved(&tenant, &report)[..2], [2, 8]);
    wake(&tenant);
    tenant.verify();
    tenant.free(small);
    tenant.load(600, &weights);
    assert_eq!(moved(&tenant, &sleep(&tenant))[..2], [1, 9]);
    wake(&tenant);
    tenant.free(0);
    let again = tenant.load(8 * granule, &weights);
    let report = sleep(&tenant);
    assert_eq!(moved(&tenant, &report)[0], 8, "{:?}", tenant.blocks[again].block);
    wake(&tenant);
    tenant.verify();
}

#[test]
fn a_new_declaration_begins_anew() {
    let (_device, mut tenant, _) = verified_tag(12, true);
    tenant.pool.declare_changes(&Tag::weights(), Changes::Compared).unwrap();
    tenant.touch_granule(0, 5);
    tenant.pool.declare_changes(&Tag::weights(), Changes::Immutable).unwrap();
    assert_eq!(moved(&tenant, &sleep(&tenant)), [1, 11, 0]);
    wake(&tenant);
    tenant.verify();
    assert_eq!(moved(&tenant, &sleep(&tenant)), [0, 12, 11]);
    wake(&tenant);
    tenant.pool.declare_changes(&Tag::weights(), Changes::Volatile).unwrap();
    assert_eq!(moved(&tenant, &sleep(&tenant)), [12, 0, 0]);
    wake(&tenant);
    assert_eq!(tenant.pool.stats().unwrap().backup_bytes, 0, "a backup of what changes anyway saves nothing");
    tenant.verify();
    tenant.pool.declare_changes(&Tag::weights(), Changes::Immutable).unwrap();
    assert_eq!(moved(&tenant, &sleep(&tenant)), [12, 0, 0]);
    wake(&tenant);
    assert_eq!(moved(&tenant, &sleep(&tenant)), [0, 12, 11]);
}

/// A promise is made while the preparation updates the backup.
#[test]
fn a_promise_covers_nothing_that_changed_before_it() {
    watched(|| {
        let (reached_sender, reached) = mpsc::channel();
        let (reached_sender, latch) = (Mutex::new(reached_sender), Arc::new(Latch::default()));
        let pass = Arc::clone(&latch);
        let (_device, mut tenant, _) = tenant_with(true, move |call| {
            let preparing = thread::current().name() == Some("poorwill-prepare");
            if preparing && call.op == Op::Save && call.waiting {
                let _ = reached_sender.lock().unwrap().send(());
                pass.pass();
            }
        });
        let granule = tenant.granule();
        tenant.load(4 * granule, &Tag::weights());
        sleep(&tenant);
        wake(&tenant);
        tenant.touch_granule(0, 1);
        let preparation = tenant.pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap();
        reached.recv().unwrap();
        tenant.touch_granule(0, 1); // Torn: the copy has completed.
        tenant.touch_granule(0, 2); // Was the same when the preparation looked.
        tenant.pool.declare_changes(&Tag::weights(), Changes::Immutable).unwrap();
        latch.open();
        assert_eq!(preparation.wait().unwrap().copied_bytes, granule);
        assert_eq!(moved(&tenant, &sleep(&tenant)), [2, 2, 0]);
        wake(&tenant);
        tenant.verify();
        assert_eq!(moved(&tenant, &sleep(&tenant)), [0, 4, 3]);
    });
}

#[test]
fn a_preparation_leaves_it_to_the_sleep_whether_a_promise_was_kept() {
    let (_device, mut tenant, digested) = verified_tag(8, true);
    let before = digested.load(Ordering::Relaxed);
    tenant.touch_granule(0, 3);
    let report = tenant.pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap().wait().unwrap();
    assert_eq!((report.copied_bytes, digested.load(Ordering::Relaxed)), (0, before));
    let found = (0..8).any(|_| {
        let slept = tenant.pool.sleep(&SleepRequest::all(Level::One));
        if slept.is_ok() {
            wake(&tenant);
            tenant.write(0);
        }
        matches!(slept, Err(PoolError::ImmutableChanged { .. }))
    });
    assert!(found);
}

#[test]
fn without_fast_digests_everything_is_copied_and_still_verified() {
    let (_device, mut tenant, digested) = tenant_with(false, |_| ());
    let granule = tenant.granule();
    tenant.load(9 * granule, &Tag::weights());
    for _ in 0..3 {
        let before = digested.load(Ordering::Relaxed);
        let report = sleep(&tenant);
        assert!(!report.fast_digests);
        assert_eq!(moved(&tenant, &report), [9, 0, 0]);
        assert_eq!(digested.load(Ordering::Relaxed), before, "nothing is compared");
        let wake = tenant.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
        assert_eq!(wake.verified_bytes, 9 * granule);
        tenant.verify();
        // A preparation has nothing to copy either, but allocates buffers.
        let report = tenant.pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap().wait().unwrap();
        assert_eq!(report.copied_bytes, 0);
    }
}

#[test]
fn what_was_freed_asleep_does_not_come_back() {
    let (_device, mut tenant, _) = tenant();
    let granule = tenant.granule();
    tenant.load(4 * granule, &Tag::weights());
    let gone = tenant.load(3 * granule, &Tag::weights());
    tenant.load(700, &Tag::weights());
    sleep(&tenant);
    tenant.free(gone);
    let wake = tenant.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
    assert_eq!((wake.copied_bytes, wake.verified_bytes), (5 * granule, 5 * granule));
    tenant.verify();
}

/// Random writes between cycles: exactly the touched granules move, and every byte is right.
#[test]
fn only_touched_granules_move() {
    let rounds = DeviceKind::of_this_run().cases(60);
    for seed in 0..4 {
        let (_device, mut tenant, _) = tenant();
        let granule = tenant.granule();
        let tags = [Tag::weights(), Tag::runtime(), Tag::new("lora").unwrap()];
        tenant.random(seed + 1);
        for tag in &tags {
            for _ in 0..3 {
                let bytes = granule * (1 + tenant.random(12));
                tenant.load(bytes, tag);
            }
        }
        let total: u64 = tags.iter().map(|tag| tenant.touched_bytes(tag)).sum();
        for round in 0..rounds {
            let mut touched = BTreeSet::new();
            for _ in 0..tenant.random(12) {
                let nth = usize::try_from(tenant.random(tenant.blocks.len() as u64)).unwrap();
                let granules = tenant.blocks[nth].bytes.len() as u64 / granule;
                let which = tenant.random(granules);
                // A second change of the same byte would undo the first.
                if touched.insert((nth, which)) {
                    tenant.touch_granule(nth, which);
                }
            }
            let expected = if round == 0 { total } else { touched.len() as u64 * granule };
            let prepared = if tenant.random(3) == 0 {
                let preparation = tenant.pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap();
                preparation.wait().unwrap().copied_bytes
            } else {
                0
            };
            let report = sleep(&tenant);
            assert_eq!(prepared + report.copied_bytes, expected, "round {round}: {touched:?}");
            assert!(prepared == 0 || report.copied_bytes == 0);
            assert_eq!(report.unchanged_bytes, total - report.copied_bytes);
            let verify = if round % 2 == 0 { Verify::All } else { Verify::Sample };
            tenant.pool.wake(&WakeRequest::all().verifying(verify)).unwrap();
            tenant.verify();
        }
    }
}
