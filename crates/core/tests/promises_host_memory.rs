//! Pools of different drivers share the machine's memory: a pool that lacks memory gets what only saves time
//! elsewhere.
//!
//! A program of its own, one test at a time: a sleep that lacks memory takes backups from every pool of the process.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use poorwill_core::backup::Backups;
use poorwill_core::{
    Driver, Level, Pool, PoolConfig, PoolError, SleepRequest, Tag, Verify, WakeRequest, chain,
};
use poorwill_testkit::backups::{Coding, SharedMachine, TestBackups};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::watched;

static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pool over a driver of its own, with so many granules of weights.
struct Model {
    tenant: Tenant,
    store: Arc<dyn Backups>,
    device: TestDevice,
}

fn driver_of(device: &TestDevice) -> Arc<dyn Driver> {
    let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass);
    Arc::new(driver.with_info(|info| info.fast_digests = true))
}

impl Model {
    fn open(granules: u64, store: impl FnOnce(&Arc<dyn Driver>) -> TestBackups) -> Self {
        let device = TestDevice::open(64);
        let driver = driver_of(&device);
        let store = store(&driver);
        Self::over(&device, driver, granules, store)
    }

    fn over(device: &TestDevice, driver: Arc<dyn Driver>, granules: u64, store: TestBackups) -> Self {
        let (device, store): (_, Arc<dyn Backups>) = (device.clone(), Arc::new(store));
        let config = PoolConfig::default().in_chunks_of(4).in_segments_of(8);
        let pool = Pool::with_backups(driver, config, Arc::clone(&store)).unwrap();
        let mut tenant = Tenant::new(&Arc::new(pool), granules);
        let granule = tenant.granule();
        tenant.load(granules * granule, &Tag::weights());
        Self { tenant, store, device }
    }

    fn sleep(&self) -> Result<u64, PoolError> {
        self.tenant.pool.sleep(&SleepRequest::all(Level::One)).map(|report| report.copied_bytes)
    }

    fn wake(&self) {
        self.tenant.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
        self.tenant.verify();
    }

    fn backup_bytes(&self) -> u64 {
        self.tenant.pool.stats().unwrap().backup_bytes
    }
}

fn granule() -> u64 {
    TestDevice::open(1).info().granule_bytes
}

#[test]
fn a_sleep_has_the_idle_backups_of_pools_over_other_drivers() {
    let _alone = alone();
    let machine = SharedMachine::new(12 * granule());
    let [first, second] =
        [8, 9].map(|granules| Model::open(granules, |driver| TestBackups::on_machine(driver, &machine)));
    for [sleeper, other] in [[&first, &second], [&second, &first], [&first, &second]] {
        sleeper.sleep().unwrap();
        assert_eq!(
            (other.backup_bytes(), other.store.held_bytes()),
            (0, 0),
            "it was awake, and keeps nothing"
        );
        assert_eq!(machine.held_bytes(), sleeper.backup_bytes());
        sleeper.wake();
    }
    // Sleeping tags keep their backups, and the pool that lacks memory is unchanged.
    first.sleep().unwrap();
    let refused = second.sleep().unwrap_err();
    assert!(matches!(refused, PoolError::SleepFailed { .. }), "{refused}");
    assert!(chain(&refused).contains("the machine has"), "{refused}");
    second.tenant.verify();
    first.wake();
}

#[test]
fn a_limit_of_its_own_takes_nothing_from_others() {
    let _alone = alone();
    let other = Model::open(8, |driver| TestBackups::new(driver, Coding::Xored, u64::MAX));
    other.sleep().unwrap();
    other.wake();
    let limited = Model::open(9, |driver| TestBackups::new(driver, Coding::Xored, 8 * granule()));
    assert!(matches!(limited.sleep(), Err(PoolError::SleepFailed { .. })));
    assert_eq!(other.backup_bytes(), 8 * granule());
    assert_eq!(other.sleep().unwrap(), 0);
    other.wake();
}

/// A preparation only saves time, as other pools' backups do: it gets the buffers that they do not use, and no more.
#[test]
fn a_preparation_takes_no_backups() {
    let _alone = alone();
    let machine = SharedMachine::new(12 * granule());
    let [first, second] =
        [8, 9].map(|granules| Model::open(granules, |driver| TestBackups::on_machine(driver, &machine)));
    first.sleep().unwrap();
    first.wake();
    let prepare = || second.tenant.pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap().wait();
    let failed = prepare();
    assert!(matches!(failed, Err(PoolError::PrepareFailed { .. })), "{failed:?}");
    assert_eq!(first.backup_bytes(), 8 * granule());
    // Now its storage keeps as much for later.
    second.tenant.pool.drop_backups(None).unwrap();
    let block = first.tenant.blocks[0].block.id;
    first.tenant.pool.free(block).unwrap();
    assert_eq!((first.backup_bytes(), first.store.held_bytes()), (0, 8 * granule()));
    assert_eq!(prepare().unwrap().copied_bytes, 9 * granule());
    assert_eq!(second.sleep().unwrap(), 0);
    second.wake();
}

/// Closed pools hold nothing, and do not limit others.
#[test]
fn pools_come_and_go() {
    let _alone = alone();
    let machine = SharedMachine::new(12 * granule());
    let open = || Model::open(9, |driver| TestBackups::on_machine(driver, &machine));
    let sleeper = open();
    for closes in [false, true, false] {
        let other = open();
        other.sleep().unwrap();
        other.wake();
        if closes {
            other.tenant.pool.close().unwrap();
        } else {
            drop(other.tenant);
        }
        sleeper.sleep().unwrap();
        sleeper.wake();
        drop(other.device);
    }
}

/// Each pool needs what the other has; neither may wait forever.
#[test]
fn pools_that_starve_at_once_come_to_an_end() {
    let _alone = alone();
    for are_near in [true, false] {
        let machine = SharedMachine::new(12 * granule());
        let device = TestDevice::open(64);
        let driver = driver_of(&device);
        let shared = TestBackups::new(&driver, Coding::Xored, 12 * granule());
        let open = |granules| match are_near {
            true => Model::over(&device, Arc::clone(&driver), granules, shared.clone()),
            false => Model::open(granules, |driver| TestBackups::on_machine(driver, &machine)),
        };
        let sleepers = [open(8), open(9)];
        watched(move || {
            let sleepers = sleepers.map(|model| {
                thread::spawn(move || {
                    for _ in 0..20 {
                        let all = SleepRequest::all(Level::One);
                        drop(model.tenant.pool.prepare_sleep(&all).unwrap());
                        match model.sleep() {
                            Ok(_) => model.wake(),
                            // The other one is falling asleep.
                            Err(error) => assert!(chain(&error).contains("host memory"), "{error}"),
                        }
                        model.tenant.verify();
                    }
                })
            });
            sleepers.into_iter().for_each(|sleeper| sleeper.join().unwrap());
        });
    }
}
