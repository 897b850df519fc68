//! A device whose memory is the computer's: what backups take is not given back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use poorwill_core::{ByteSize, Driver, Level, Op, Pool, PoolConfig, SleepRequest, Tag, WakeRequest};
use poorwill_testkit::backups::{Coding, TestBackups};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;

const WEIGHTS: u64 = 10;
const CACHE: u64 = 5;

struct World {
    tenant: Tenant,
    store: TestBackups,
    granule: u64,
    /// The next release.
    refuses: Arc<AtomicBool>,
    _device: TestDevice,
}

impl World {
    fn new(shares: bool, config: PoolConfig) -> Self {
        let device = TestDevice::open(64);
        let refuses = Arc::new(AtomicBool::new(false));
        let refuse = Arc::clone(&refuses);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            let is_refused = call.op == Op::Release && refuse.swap(false, Ordering::Relaxed);
            if is_refused { Verdict::device_failure(call) } else { Verdict::Pass }
        });
        let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| {
            info.fast_digests = true;
            info.shares_host_memory = shares;
        }));
        let store = TestBackups::new(&driver, Coding::Xored, u64::MAX);
        let config = config.in_chunks_of(4).in_segments_of(8);
        let pool = Pool::with_backups(driver, config, Arc::new(store.clone())).unwrap();
        let mut tenant = Tenant::new(&Arc::new(pool), 5);
        let granule = tenant.granule();
        tenant.load(WEIGHTS * granule, &Tag::weights());
        tenant.load(CACHE * granule, &Tag::kv_cache());
        Self { tenant, store, granule, refuses, _device: device }
    }

    /// A sleep and a wake. Returns what backups took of the same memory, in granules, which is not released.
    fn cycle(&self, level: Level) -> u64 {
        let sleep = self.tenant.pool.sleep(&SleepRequest::all(level)).unwrap();
        assert!(sleep.planned_release_bytes >= (WEIGHTS + CACHE) * self.granule, "{sleep:?}");
        let not_released_bytes = sleep.planned_release_bytes - sleep.released_bytes;
        assert_eq!(not_released_bytes, sleep.shared_backup_bytes, "{sleep:?}");
        self.tenant.pool.wake(&WakeRequest::all()).unwrap();
        sleep.shared_backup_bytes / self.granule
    }
}

#[test]
fn what_backups_take_is_not_released() {
    let world = World::new(true, PoolConfig::default());
    // Backups are not kept by default, so each sleep is as the first one.
    for _ in 0..2 {
        assert_eq!(world.cycle(Level::One), WEIGHTS);
        assert_eq!((world.tenant.pool.stats().unwrap().backup_bytes, world.store.used_bytes()), (0, 0));
    }
    assert_eq!(world.cycle(Level::Two), 0);
}

#[test]
fn a_shortfall_is_what_was_refused_and_not_what_backups_took() {
    let world = World::new(true, PoolConfig::default());
    world.refuses.store(true, Ordering::Relaxed);
    let error = world.tenant.pool.sleep(&SleepRequest::all(Level::One)).unwrap_err();
    let refused_bytes = world.tenant.pool.stats().unwrap().deferred_release_bytes;
    assert!(refused_bytes > 0, "nothing was refused");
    let expected = format!("asleep, but {} of ", ByteSize(refused_bytes));
    assert!(error.to_string().starts_with(&expected), "{error}, where {expected}");
}

#[test]
fn what_kept_backups_hold_already_is_taken_once() {
    let world = World::new(true, PoolConfig::default().keeping_backups(true));
    assert_eq!(world.cycle(Level::One), WEIGHTS);
    assert_eq!(world.store.used_bytes(), WEIGHTS * world.granule);
    assert_eq!(world.cycle(Level::One), 0);
}

#[test]
fn memory_of_its_own_is_released_whole() {
    let world = World::new(false, PoolConfig::default());
    for _ in 0..2 {
        assert_eq!(world.cycle(Level::One), 0);
        assert_eq!(world.store.used_bytes(), WEIGHTS * world.granule, "backups stay by default");
    }
}
