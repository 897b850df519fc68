//! Host memory comes back: backups that only save time are dropped on request, and nothing else is.

use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use poorwill_core::backup::Backups;
use poorwill_core::{
    Driver, Level, Op, Pool, PoolConfig, PoolError, PrepareEnd, SleepRequest, Tag, TagState, Verify,
    WakeRequest, chain,
};
use poorwill_driver::{HostConfig, HostDevice, HostMemoryConfig};
use poorwill_testkit::backups::{Coding, TestBackups};
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::latch::Latch;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::{eventually, watched};

fn config() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8)
}

fn tenant(device: &TestDevice) -> Tenant {
    let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass);
    let driver = Arc::new(driver.with_info(|info| info.fast_digests = true));
    Tenant::new(&Arc::new(Pool::new(driver, config()).unwrap()), 3)
}

/// Drops backups where there are none. On other devices than the host device, other tests use the same storage
/// meanwhile.
fn drop_nothing(tenant: &Tenant, tag: Option<&Tag>) {
    let dropped_bytes = tenant.pool.drop_backups(tag.map(std::slice::from_ref)).unwrap();
    assert!(dropped_bytes == 0 || DeviceKind::of_this_run() != DeviceKind::Host, "{dropped_bytes}");
}

fn only(tag: &Tag) -> SleepRequest {
    SleepRequest::of([tag.clone()], Level::One)
}

fn level_1() -> SleepRequest {
    SleepRequest::all(Level::One)
}

fn all() -> WakeRequest {
    WakeRequest::all().verifying(Verify::All)
}

#[test]
fn backups_of_awake_tags_are_dropped_on_request() {
    let device = TestDevice::open(64);
    let mut tenant = tenant(&device);
    let granule = tenant.granule();
    let (weights, runtime) = (Tag::weights(), Tag::runtime());
    tenant.load(10 * granule, &weights);
    tenant.load(3 * granule, &runtime);
    tenant.pool.sleep(&level_1()).unwrap();
    tenant.pool.wake(&all()).unwrap();
    assert_eq!(tenant.pool.stats().unwrap().backup_bytes, 13 * granule);
    tenant.pool.drop_backups(Some(std::slice::from_ref(&runtime))).unwrap();
    device.expect_host_bytes(10 * granule, "the other tag's are there");
    // A sleep knows the bytes that it has to copy.
    assert_eq!(tenant.pool.sleep(&level_1()).unwrap().copied_bytes, 3 * granule);
    tenant.pool.wake(&all()).unwrap();
    tenant.pool.drop_backups(None).unwrap();
    assert_eq!(tenant.pool.stats().unwrap().backup_bytes, 0);
    device.expect_no_host_bytes("nothing is kept");
    drop_nothing(&tenant, None);
    assert_eq!(tenant.pool.sleep(&level_1()).unwrap().copied_bytes, 13 * granule);
    tenant.pool.wake(&all()).unwrap();
    tenant.verify();
}

#[test]
fn what_sleeps_keeps_its_backups() {
    let device = TestDevice::open(64);
    let mut tenant = tenant(&device);
    let granule = tenant.granule();
    let (weights, runtime) = (Tag::weights(), Tag::runtime());
    tenant.load(10 * granule, &weights);
    tenant.load(3 * granule, &runtime);
    tenant.pool.sleep(&level_1()).unwrap();
    tenant.pool.wake(&WakeRequest::of([runtime.clone()])).unwrap();
    let refused = tenant.pool.drop_backups(Some(&[runtime.clone(), weights.clone()])).unwrap_err();
    assert!(matches!(&refused, PoolError::Asleep { tag, .. } if *tag == weights), "{refused}");
    assert!(refused.to_string().contains("wake it first"), "{refused}");
    device.expect_host_bytes(13 * granule, "the refusal has let go of nothing");
    let unknown = tenant.pool.drop_backups(Some(&[Tag::new("nobody").unwrap()]));
    assert!(matches!(unknown, Err(PoolError::UnknownTag { .. })), "{unknown:?}");
    tenant.pool.drop_backups(None).unwrap();
    device.expect_host_bytes(10 * granule, "what sleeps has nothing else");
    // A tag asleep without a backup has none to lose.
    tenant.pool.discard(std::slice::from_ref(&runtime)).unwrap();
    drop_nothing(&tenant, Some(&runtime));
    tenant.pool.wake(&WakeRequest::of([weights.clone()])).unwrap();
    assert_eq!(tenant.pool.tag_state(&weights).unwrap(), TagState::Awake);
    tenant.blocks.retain(|known| known.tag == weights);
    tenant.verify();
}

/// Only the figures of an exclusive device are exact.
#[test]
fn the_machine_gets_its_memory_back() {
    if skipped_unless(|kind| kind == DeviceKind::Host, "tests share what another device holds") {
        return;
    }
    let device = TestDevice::open(64);
    let mut tenant = tenant(&device);
    let granule = tenant.granule();
    tenant.load(10 * granule, &Tag::weights());
    tenant.pool.sleep(&level_1()).unwrap();
    tenant.pool.wake(&all()).unwrap();
    let held_bytes = device.driver().host_memory().held_bytes;
    assert!(held_bytes >= 10 * granule);
    assert_eq!(tenant.pool.drop_backups(None).unwrap(), held_bytes);
    assert_eq!(device.driver().host_memory().held_bytes, 0);
}

/// A preparation that goes on would recreate what is dropped.
#[test]
fn dropping_backups_ends_their_preparation() {
    watched(|| {
        let device = TestDevice::open(64);
        let (reached_sender, reached) = mpsc::channel();
        let (reached_sender, latch) = (Mutex::new(reached_sender), Arc::new(Latch::default()));
        let pass = Arc::clone(&latch);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            if thread::current().name() == Some("poorwill-prepare") && call.op == Op::Save && !call.waiting {
                let _ = reached_sender.lock().unwrap().send(());
                pass.pass();
            }
            Verdict::Pass
        });
        let driver = Arc::new(driver.with_info(|info| info.fast_digests = true));
        let mut tenant = Tenant::new(&Arc::new(Pool::new(driver, config()).unwrap()), 3);
        let granule = tenant.granule();
        tenant.load(12 * granule, &Tag::weights());
        let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
        reached.recv().unwrap();
        let pool = Arc::clone(&tenant.pool);
        let dropping = thread::spawn(move || pool.drop_backups(Some(&[Tag::weights()])).map(drop));
        eventually("it waits for the copy", || tenant.pool.waiting_calls().unwrap() == 1);
        latch.open();
        dropping.join().unwrap().unwrap();
        assert_eq!(preparation.wait().unwrap().end, PrepareEnd::Overtaken);
        assert_eq!(tenant.pool.stats().unwrap().backup_bytes, 0);
        tenant.verify();
    });
}

/// Two pools over one storage: the awake one gives up backups, the sleeping one does not.
#[test]
fn a_sleep_has_the_idle_backups_of_pools_over_the_same_store() {
    let device = TestDevice::open(64);
    let driver: Arc<dyn Driver> = device.driver();
    let granule = driver.info().granule_bytes;
    let store = TestBackups::new(&driver, Coding::Xored, 12 * granule);
    let open = |seed| {
        let store: Arc<dyn Backups> = Arc::new(store.clone());
        let pool = Pool::with_backups(Arc::clone(&driver), config(), store).unwrap();
        let mut tenant = Tenant::new(&Arc::new(pool), seed);
        tenant.load(8 * granule, &Tag::weights());
        tenant.load(2 * granule, &Tag::runtime());
        tenant
    };
    let [first, second] = [open(1), open(2)];
    for [sleeper, other] in [[&first, &second], [&second, &first], [&first, &second]] {
        sleeper.pool.sleep(&level_1()).unwrap();
        assert_eq!(store.used_bytes(), 10 * granule);
        assert_eq!(other.pool.stats().unwrap().backup_bytes, 0, "it was awake");
        sleeper.pool.wake(&all()).unwrap();
        sleeper.verify();
    }
    first.pool.sleep(&only(&Tag::weights())).unwrap();
    let refused = second.pool.sleep(&level_1()).unwrap_err();
    assert!(matches!(refused, PoolError::SleepFailed { .. }), "{refused}");
    assert_eq!(first.pool.stats().unwrap().backup_bytes, 8 * granule, "only what is awake has given");
    second.verify();
    first.pool.wake(&all()).unwrap();
    first.verify();
}

/// The same over one driver whose host memory is limited, as a user limits it.
#[test]
fn a_sleep_has_the_idle_backups_of_pools_over_the_same_driver() {
    if skipped_unless(|kind| kind == DeviceKind::Host, "the driver of another device is shared by all tests")
    {
        return;
    }
    let granule = HostConfig::of_pages(64).granule_bytes;
    let host_memory = HostMemoryConfig::default().limited_to(12 * granule);
    let config_of_device = HostConfig::of_pages(64).backing_up_in(host_memory);
    let driver: Arc<dyn Driver> = Arc::new(HostDevice::open(&config_of_device).unwrap());
    let open = |seed| {
        let mut tenant = Tenant::new(&Arc::new(Pool::new(Arc::clone(&driver), config()).unwrap()), seed);
        tenant.load(10 * granule, &Tag::weights());
        tenant
    };
    let [first, second] = [open(1), open(2)];
    for sleeper in [&first, &second, &first] {
        sleeper.pool.sleep(&level_1()).unwrap();
        sleeper.pool.wake(&all()).unwrap();
        sleeper.verify();
    }
    first.pool.sleep(&level_1()).unwrap();
    let refused = second.pool.sleep(&level_1()).unwrap_err();
    assert!(chain(&refused).contains("host memory"), "{refused}");
    first.pool.wake(&all()).unwrap();
    first.verify();
    second.verify();
}

/// A sleep that lacks memory waits for the preparation of another pool, which waits for none.
#[test]
fn a_preparation_ends_for_a_sleep_of_another_pool() {
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
        let open = |seed| {
            let store: Arc<dyn Backups> = Arc::new(store.clone());
            let pool = Pool::with_backups(Arc::clone(&driver), config(), store).unwrap();
            let mut tenant = Tenant::new(&Arc::new(pool), seed);
            tenant.load(12 * granule, &Tag::weights());
            tenant
        };
        let [first, second] = [open(1), open(2)];
        let preparation = first.pool.prepare_sleep(&level_1()).unwrap();
        reached.recv().unwrap();
        let pool = Arc::clone(&second.pool);
        let sleeper = thread::spawn(move || pool.sleep(&level_1()).map(drop));
        eventually("it lacks room", || first.pool.waiting_calls().unwrap() == 1);
        latch.open();
        sleeper.join().unwrap().unwrap();
        assert_eq!(preparation.wait().unwrap().end, PrepareEnd::Overtaken);
        first.verify();
        second.pool.wake(&all()).unwrap();
        second.verify();
    });
}
