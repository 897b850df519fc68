//! The pool's promises over several backup storages: with too little space, with failures, and with bytes that go
//! bad.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use poorwill_core::backup::{Backups, HostBackups};
use poorwill_core::pool::Corruption;
use poorwill_core::{
    BlockId, Changes, Driver, DriverErrorKind, Level, Op, Pool, PoolConfig, PoolError, PrepareEnd,
    SleepRequest, Tag, TagState, Verify, WakeRequest,
};
use poorwill_testkit::backups::{BackupCall, Coding, TestBackups};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::latch::Latch;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::{eventually, watched};

fn config() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8)
}

fn quick(device: &TestDevice) -> Arc<dyn Driver> {
    let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass);
    Arc::new(driver.with_info(|info| info.fast_digests = true))
}

fn tenant(driver: &Arc<dyn Driver>, config: PoolConfig, store: &Arc<dyn Backups>) -> Tenant {
    let pool = Pool::with_backups(Arc::clone(driver), config, Arc::clone(store)).unwrap();
    Tenant::new(&Arc::new(pool), 5)
}

fn level_1() -> SleepRequest {
    SleepRequest::all(Level::One)
}

fn only(tag: &Tag) -> SleepRequest {
    SleepRequest::of([tag.clone()], Level::One)
}

fn all() -> WakeRequest {
    WakeRequest::all().verifying(Verify::All)
}

fn over_each_store(test: impl Fn(&TestDevice, &Arc<dyn Driver>, &Arc<dyn Backups>)) {
    let device = TestDevice::open(64);
    let driver = quick(&device);
    let host: Arc<dyn Backups> = Arc::new(HostBackups::new(Arc::clone(&driver)));
    test(&device, &driver, &host);
    for coding in [Coding::Xored, Coding::WithoutZeros] {
        let store = TestBackups::new(&driver, coding, u64::MAX);
        let backups: Arc<dyn Backups> = Arc::new(store.clone());
        test(&device, &driver, &backups);
        assert_eq!((store.used_bytes(), store.stored_bytes()), (0, 0), "{coding:?}: rooms are given back");
    }
    assert_eq!((device.host_bytes(), device.resident_bytes()), (0, 0));
}

#[test]
fn the_promises_hold_over_every_store() {
    over_each_store(|_, driver, store| {
        let mut tenant = tenant(driver, config(), store);
        let granule = tenant.granule();
        let weights = tenant.load(10 * granule, &Tag::weights());
        tenant.load(700, &Tag::weights());
        let zeros = tenant.load(4 * granule, &Tag::runtime());
        tenant.blocks[zeros].bytes.fill(0);
        tenant.write(zeros);
        let report = tenant.pool.prepare_sleep(&level_1()).unwrap().wait().unwrap();
        assert_eq!(report.copied_bytes, 15 * granule);
        tenant.touch_granule(weights, 2);
        for expected in [1, 2, 3] {
            assert_eq!(tenant.pool.sleep(&level_1()).unwrap().copied_bytes, expected * granule);
            let wake = tenant.pool.wake(&all()).unwrap();
            assert_eq!((wake.copied_bytes, wake.verified_bytes), (15 * granule, 15 * granule));
            tenant.verify();
            (0..=expected).for_each(|touched| tenant.touch_granule(weights, 3 * touched));
        }
        tenant.pool.declare_changes(&Tag::runtime(), Changes::Volatile).unwrap();
        tenant.pool.declare_changes(&Tag::weights(), Changes::Immutable).unwrap();
        for unchecked in [0, 10] {
            let report = tenant.pool.sleep(&level_1()).unwrap();
            assert_eq!(
                (report.copied_bytes >= 4 * granule, report.unchecked_bytes),
                (true, unchecked * granule)
            );
            tenant.pool.wake(&WakeRequest::all()).unwrap();
            tenant.verify();
        }
        tenant.pool.sleep(&level_1()).unwrap();
        tenant.pool.discard(&[Tag::weights(), Tag::runtime()]).unwrap();
        assert_eq!(tenant.pool.stats().unwrap().backup_bytes, 0);
        tenant.pool.close().unwrap();
    });
}

#[test]
fn backups_that_are_not_kept_go_with_the_wake() {
    over_each_store(|_, driver, store| {
        let mut tenant = tenant(driver, config().keeping_backups(false), store);
        let granule = tenant.granule();
        tenant.load(10 * granule, &Tag::weights());
        for _ in 0..2 {
            assert_eq!(tenant.pool.sleep(&level_1()).unwrap().copied_bytes, 10 * granule);
            tenant.pool.wake(&all()).unwrap();
            tenant.verify();
            assert_eq!(tenant.pool.stats().unwrap().backup_bytes, 0);
        }
    });
}

#[test]
fn a_store_may_keep_less_than_it_is_given() {
    let device = TestDevice::open(64);
    let driver = quick(&device);
    let store = TestBackups::new(&driver, Coding::WithoutZeros, u64::MAX);
    let mut tenant = tenant(&driver, config(), &(Arc::new(store.clone()) as Arc<dyn Backups>));
    let granule = tenant.granule();
    let zeros = tenant.load(8 * granule, &Tag::runtime());
    tenant.blocks[zeros].bytes.fill(0);
    tenant.write(zeros);
    tenant.load(2 * granule, &Tag::runtime());
    tenant.pool.sleep(&level_1()).unwrap();
    assert_eq!((store.used_bytes(), store.stored_bytes()), (10 * granule, 2 * granule));
    tenant.pool.wake(&all()).unwrap();
    tenant.verify();
}

/// Every call of the storage fails in turn: everything or nothing has happened, and the next attempt succeeds.
#[test]
fn a_store_that_fails_loses_nothing() {
    for nth in 0.. {
        let device = TestDevice::open(64);
        let driver = quick(&device);
        let (left, failures) = (AtomicU64::new(nth), Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&failures);
        let store = TestBackups::failing(&driver, Coding::Xored, u64::MAX, move |_: BackupCall| {
            let fails = left.fetch_sub(1, Ordering::Relaxed) == 0;
            count.fetch_add(u64::from(fails), Ordering::Relaxed);
            fails
        });
        let mut tenant = tenant(&driver, config(), &(Arc::new(store.clone()) as Arc<dyn Backups>));
        let granule = tenant.granule();
        let weights = tenant.load(10 * granule, &Tag::weights());
        tenant.load(5 * granule, &Tag::runtime());
        let weights_only = only(&Tag::weights());
        match tenant.pool.prepare_sleep(&weights_only).unwrap().wait() {
            Err(PoolError::PrepareFailed { .. }) => tenant.verify(),
            prepared => drop(prepared.unwrap()),
        }
        for round in 0..2 {
            let slept = tenant.pool.sleep(&level_1());
            if let Err(error) = &slept {
                assert!(matches!(error, PoolError::SleepFailed { .. }), "{error}");
                tenant.verify();
                tenant.pool.sleep(&level_1()).unwrap();
            }
            let before = (device.memory_info().unwrap().free_bytes, store.used_bytes());
            if let Err(error) = tenant.pool.wake(&all()) {
                assert!(matches!(error, PoolError::WakeFailed { .. }), "{error}");
                assert_eq!((device.memory_info().unwrap().free_bytes, store.used_bytes()), before);
                assert_eq!(tenant.pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
                tenant.pool.wake(&all()).unwrap();
            }
            tenant.verify();
            tenant.touch_granule(weights, round + 4);
        }
        tenant.pool.close().unwrap();
        assert_eq!((store.used_bytes(), device.resident_bytes()), (0, 0));
        device.expect_no_host_bytes("no host memory is left behind");
        if failures.load(Ordering::Relaxed) == 0 {
            assert!(nth > 30, "only {nth} calls were made");
            return;
        }
    }
}

fn lacks_host_memory(error: &PoolError) -> bool {
    let PoolError::SleepFailed { source, .. } = error else { return false };
    matches!(source.kind, DriverErrorKind::OutOfHostMemory { .. })
}

#[test]
fn a_full_storage_drops_only_backups_that_save_time() {
    let device = TestDevice::open(64);
    let driver = quick(&device);
    let (weights, runtime) = (Tag::weights(), Tag::runtime());
    let granule = driver.info().granule_bytes;
    let store = TestBackups::new(&driver, Coding::Xored, 9 * granule);
    let mut tenant = tenant(&driver, config(), &(Arc::new(store.clone()) as Arc<dyn Backups>));
    tenant.load(8 * granule, &weights);
    tenant.load(6 * granule, &runtime);
    let refused = tenant.pool.sleep(&level_1()).unwrap_err();
    assert!(lacks_host_memory(&refused), "{refused}");
    assert_eq!(store.used_bytes(), 0, "what was copied in vain stands in nobody's way");
    tenant.verify();
    for tag in [&weights, &runtime, &weights] {
        // The other tag's backup exists, and it is awake.
        tenant.pool.sleep(&only(tag)).unwrap();
        tenant.pool.wake(&all()).unwrap();
        tenant.verify();
    }
    assert_eq!(store.used_bytes(), 8 * granule);
    tenant.pool.sleep(&only(&weights)).unwrap();
    let refused = tenant.pool.sleep(&only(&runtime)).unwrap_err();
    assert!(lacks_host_memory(&refused), "{refused}");
    assert_eq!(tenant.pool.tag_state(&runtime).unwrap(), TagState::Awake);
    assert_eq!(store.used_bytes(), 8 * granule, "the sleeper's backup stays");
    tenant.pool.wake(&all()).unwrap();
    tenant.pool.sleep(&only(&runtime)).unwrap();
    tenant.pool.wake(&all()).unwrap();
    tenant.verify();
}

/// A preparation has allocated all buffers there are; the sleep of another tag needs them.
#[test]
fn a_preparation_ends_for_a_sleep_that_lacks_host_memory() {
    watched(|| {
        let device = TestDevice::open(64);
        let (reached_sender, reached) = mpsc::channel();
        let (reached_sender, latch) = (Mutex::new(reached_sender), Arc::new(Latch::default()));
        let pass = Arc::clone(&latch);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            let preparing = thread::current().name() == Some("poorwill-prepare");
            if preparing && call.op == Op::CopyToHost && !call.waiting {
                let _ = reached_sender.lock().unwrap().send(());
                pass.pass();
            }
            Verdict::Pass
        });
        let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| info.fast_digests = true));
        let granule = driver.info().granule_bytes;
        let store = TestBackups::new(&driver, Coding::Xored, 12 * granule);
        let mut tenant = tenant(&driver, config(), &(Arc::new(store) as Arc<dyn Backups>));
        tenant.load(12 * granule, &Tag::weights());
        tenant.load(12 * granule, &Tag::runtime());
        let preparation = tenant.pool.prepare_sleep(&only(&Tag::weights())).unwrap();
        reached.recv().unwrap();
        let pool = Arc::clone(&tenant.pool);
        let sleeper = thread::spawn(move || pool.sleep(&only(&Tag::runtime())));
        eventually("it lacks room", || tenant.pool.waiting_calls().unwrap() == 1);
        latch.open();
        sleeper.join().unwrap().unwrap();
        assert_eq!(preparation.wait().unwrap().end, PrepareEnd::Overtaken);
        tenant.pool.wake(&all()).unwrap();
        tenant.verify();
    });
}

#[test]
fn a_spoiled_backup_is_always_found_when_everything_is_compared() {
    let device = TestDevice::open(64);
    let driver = quick(&device);
    let store = TestBackups::new(&driver, Coding::Xored, u64::MAX);
    let mut tenant = tenant(&driver, config(), &(Arc::new(store.clone()) as Arc<dyn Backups>));
    let granule = tenant.granule();
    tenant.load(11 * granule, &Tag::weights());
    tenant.load(2 * granule, &Tag::runtime());
    tenant.pool.sleep(&level_1()).unwrap();
    let before = device.memory_info().unwrap().free_bytes;
    for nth in 0..13 {
        store.spoil(nth);
        for _ in 0..2 {
            let refused = tenant.pool.wake(&all()).unwrap_err();
            let PoolError::Corrupt { location, lost } = refused else { panic!("{refused}") };
            assert_eq!((location, lost.len(), lost[0].range.bytes), (Corruption::Backup, 1, granule));
            assert_eq!(device.memory_info().unwrap().free_bytes, before, "everything sleeps");
        }
        store.spoil(nth); // The same bit again.
    }
    tenant.pool.wake(&all()).unwrap();
    tenant.verify();
}

/// Each check samples one granule in 64, different ones each time, also when another tag wakes every second time.
#[test]
fn a_spoiled_backup_is_found_by_samples_in_64_wakes() {
    let granules = 66;
    let stride = DeviceKind::of_this_run().stride() * 7;
    for nth in (0..granules).step_by(stride) {
        let device = TestDevice::open(128);
        let driver = quick(&device);
        let store = TestBackups::new(&driver, Coding::Xored, u64::MAX);
        let mut tenant = tenant(&driver, config(), &(Arc::new(store.clone()) as Arc<dyn Backups>));
        let granule = tenant.granule();
        let block = tenant.load(granules as u64 * granule, &Tag::weights());
        tenant.load(3 * granule, &Tag::runtime());
        tenant.pool.sleep(&level_1()).unwrap();
        // The weights' buffers come first or last, whichever segments the storage has seen first.
        let is_weights = |nth: usize| {
            store.spoil(nth);
            let found = tenant.pool.wake(&all()).unwrap_err();
            store.spoil(nth);
            matches!(found, PoolError::Corrupt { lost, .. } if lost[0].tag == Tag::weights())
        };
        let spoiled = if is_weights(nth) { nth } else { nth + 3 };
        store.spoil(spoiled);
        let mut wakes = 0;
        loop {
            match tenant.pool.wake(&WakeRequest::of([Tag::weights()])) {
                Err(PoolError::Corrupt { location: Corruption::Backup, .. }) => break,
                woken => drop(woken.unwrap()),
            }
            wakes += 1;
            assert!(wakes < 64, "granule {nth} was not looked at");
            tenant.pool.wake(&WakeRequest::of([Tag::runtime()])).unwrap();
            // What was stored is on the device again, so the sleep copies nothing, and the spoiled granule stays.
            tenant.write(block);
            tenant.pool.sleep(&level_1()).unwrap();
        }
        store.spoil(spoiled);
        tenant.pool.wake(&all()).unwrap();
        tenant.verify();
    }
}

/// Buffers allocated for one chunk must not serve a chunk of another size, whatever is freed meanwhile.
#[test]
fn a_block_freed_while_a_sleep_allocates_buffers_takes_none_of_another_size() {
    let device = TestDevice::open(64);
    let driver = quick(&device);
    let granule = driver.info().granule_bytes;
    for sizes in [[4 * granule, granule], [granule, 4 * granule]] {
        let leaves = Arc::new(Mutex::new(None::<(Arc<Pool>, BlockId)>));
        let leaving = Arc::clone(&leaves);
        let store = TestBackups::failing(&driver, Coding::Xored, u64::MAX, move |call| {
            let gone = leaving.lock().unwrap().take_if(|_| call == BackupCall::Allocate);
            gone.into_iter().for_each(|(pool, block)| pool.free(block).unwrap());
            false
        });
        let mut tenant = tenant(&driver, config(), &(Arc::new(store.clone()) as Arc<dyn Backups>));
        let gone = tenant.load(sizes[0], &Tag::weights());
        tenant.pool.sleep(&level_1()).unwrap();
        tenant.pool.wake(&all()).unwrap();
        // Now it has a buffer and needs a copy; the other has none.
        tenant.touch_granule(gone, 0);
        tenant.load(sizes[1], &Tag::weights());
        let gone = tenant.blocks.swap_remove(gone);
        *leaves.lock().unwrap() = Some((Arc::clone(&tenant.pool), gone.block.id));
        tenant.pool.sleep(&level_1()).unwrap();
        assert!(leaves.lock().unwrap().is_none(), "it was freed while room was asked for");
        assert_eq!(store.used_bytes(), sizes[1], "room for what is left, and no more");
        tenant.pool.wake(&all()).unwrap();
        tenant.verify();
    }
}

/// Memory that a copy reads must not be unmapped, also when a storage panics between two copies.
#[test]
fn a_wake_is_undone_when_a_store_panics() {
    // So few mappings are filled by this thread, and so many by another.
    for tensors in [2, 20] {
        watched(move || {
            let device = TestDevice::open(64);
            let driver: Arc<dyn Driver> = device.driver();
            let left = AtomicU64::new(1);
            let store = TestBackups::failing(&driver, Coding::Xored, u64::MAX, move |call| {
                let panics = call == BackupCall::Load && left.fetch_sub(1, Ordering::Relaxed) == 0;
                assert!(!panics, "a test's own panic");
                false
            });
            let mut tenant = tenant(&driver, config(), &(Arc::new(store) as Arc<dyn Backups>));
            let granule = tenant.granule();
            (0..tensors).for_each(|_| {
                tenant.load(granule, &Tag::weights());
            });
            tenant.pool.sleep(&level_1()).unwrap();
            let free_bytes = driver.memory_info().unwrap().free_bytes;
            assert!(catch_unwind(AssertUnwindSafe(|| drop(tenant.pool.wake(&all())))).is_err());
            assert_eq!(driver.memory_info().unwrap().free_bytes, free_bytes, "{tensors} tensors");
            tenant.pool.wake(&all()).unwrap();
            tenant.verify();
        });
    }
}

#[test]
fn a_store_that_panics_leaves_nothing_in_flight() {
    for prepares in [false, true] {
        watched(move || {
            let device = TestDevice::open(64);
            let ops: Arc<Mutex<Vec<Op>>> = Arc::default();
            let made = Arc::clone(&ops);
            let driver = ScriptedDriver::new(device.driver(), move |call| {
                made.lock().unwrap().push(call.op);
                Verdict::Pass
            });
            let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| info.fast_digests = true));
            let left = AtomicU64::new(2);
            let store = TestBackups::failing(&driver, Coding::Xored, u64::MAX, move |call| {
                let panics = call == BackupCall::Save && left.fetch_sub(1, Ordering::Relaxed) == 0;
                assert!(!panics, "a test's own panic");
                false
            });
            let mut tenant = tenant(&driver, config(), &(Arc::new(store) as Arc<dyn Backups>));
            let granule = tenant.granule();
            tenant.load(12 * granule, &Tag::weights());
            if prepares {
                let ended = tenant.pool.prepare_sleep(&level_1()).unwrap().wait();
                assert!(matches!(ended, Err(PoolError::Poisoned)), "{ended:?}");
            } else {
                assert!(catch_unwind(AssertUnwindSafe(|| drop(tenant.pool.sleep(&level_1())))).is_err());
            }
            let last = ops.lock().unwrap().last().copied();
            assert_eq!(last, Some(Op::Synchronize), "prepares: {prepares}");
            tenant.pool.sleep(&level_1()).unwrap();
            tenant.pool.wake(&all()).unwrap();
            tenant.verify();
        });
    }
}

/// What is copied is unmapped while the rest is copied. If that fails, or panics, it is mapped again.
#[test]
fn a_sleep_that_fails_behind_what_it_has_unmapped_maps_it_again() {
    for (fails_at, panics) in
        [(BackupCall::Save, false), (BackupCall::Saved, false), (BackupCall::Save, true)]
    {
        watched(move || {
            let device = TestDevice::open(64);
            let unmaps = Arc::new(AtomicU64::new(0));
            let count = Arc::clone(&unmaps);
            let driver = ScriptedDriver::new(device.driver(), move |call| {
                count.fetch_add(u64::from(call.op == Op::Unmap), Ordering::Relaxed);
                Verdict::Pass
            });
            let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| info.fast_digests = true));
            let left = AtomicU64::new(30);
            let store = TestBackups::failing(&driver, Coding::Xored, u64::MAX, move |call| {
                let fails = call == fails_at && left.fetch_sub(1, Ordering::Relaxed) == 0;
                assert!(!(fails && panics), "a test's own panic");
                fails
            });
            let mut tenant = tenant(&driver, config(), &(Arc::new(store) as Arc<dyn Backups>));
            (0..40).for_each(|_| {
                tenant.load(tenant.granule(), &Tag::weights());
            });
            let free_bytes = driver.memory_info().unwrap().free_bytes;
            let slept = catch_unwind(AssertUnwindSafe(|| tenant.pool.sleep(&level_1()).map(drop)));
            assert!(!slept.is_ok_and(|slept| slept.is_ok()), "{fails_at:?}");
            assert!(unmaps.load(Ordering::Relaxed) > 0, "{fails_at:?} came before anything was unmapped");
            assert_eq!(driver.memory_info().unwrap().free_bytes, free_bytes);
            assert_eq!(tenant.pool.tag_state(&Tag::weights()).unwrap(), TagState::Awake);
            tenant.verify();
            tenant.pool.sleep(&level_1()).unwrap();
            tenant.pool.wake(&all()).unwrap();
            tenant.verify();
        });
    }
}
