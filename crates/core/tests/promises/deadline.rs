//! Waking when others use the memory: the wake is refused with nothing held, can be repeated, or waits until a
//! deadline. It reports its progress.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::thread;
use std::time::Duration;

use poorwill_core::pool::Awaited;
use poorwill_core::{
    AllocRequest, Driver, Level, Op, Pool, PoolConfig, PoolError, SleepRequest, Tag, TagState, Verify,
    WakeProgress, WakeRequest,
};
use poorwill_testkit::clock::Clock;
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::watched;

/// Far beyond the waits of these tests.
const LONG: Duration = Duration::from_secs(3600);

fn config() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8)
}

fn tenant(driver: Arc<dyn Driver>, seed: u64) -> Tenant {
    Tenant::new(&Arc::new(Pool::new(driver, config()).unwrap()), seed)
}

/// Two tags asleep, 18 granules to wake.
fn asleep(driver: Arc<dyn Driver>) -> Tenant {
    let mut tenant = tenant(driver, 3);
    let granule = tenant.granule();
    tenant.load(13 * granule, &Tag::weights());
    tenant.load(5 * granule, &Tag::runtime());
    tenant.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    tenant
}

/// A driver that reports each query of free memory.
fn reporting_queries(device: &TestDevice) -> (Arc<dyn Driver>, mpsc::Receiver<()>) {
    let (sender, queries) = mpsc::channel();
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        if call.op == Op::MemoryInfo {
            // After the test's end there is no receiver.
            let _ = sender.send(());
        }
        Verdict::Pass
    });
    (Arc::new(driver), queries)
}

/// Another pool that holds `granules` of the device.
fn other(device: &TestDevice, granules: u64) -> Pool {
    let pool = Pool::new(device.driver(), config()).unwrap();
    let bytes = granules * device.info().granule_bytes;
    pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
    pool
}

fn all() -> WakeRequest {
    WakeRequest::all().verifying(Verify::All)
}

/// What the device and the host hold.
fn held(device: &TestDevice) -> (u64, u64) {
    (device.memory_info().unwrap().free_bytes, device.host_bytes())
}

#[test]
fn a_refused_wake_holds_nothing_and_can_be_repeated() {
    let device = TestDevice::open(32);
    let tenant = asleep(device.driver());
    let other = other(&device, 20);
    let before = held(&device);
    for stream_wait_max in [None, Some(Duration::ZERO), Some(Duration::from_millis(15)), None] {
        let request = stream_wait_max.map_or_else(all, |stream_wait_max| all().within(stream_wait_max));
        let refused = tenant.pool.wake(&request).unwrap_err();
        let PoolError::DeviceFull { shortage, .. } = &refused else { panic!("{refused}") };
        assert_eq!(shortage.needed_bytes, 18 * tenant.granule());
        assert_eq!(held(&device), before, "{refused}");
        for tag in [Tag::weights(), Tag::runtime()] {
            assert_eq!(tenant.pool.tag_state(&tag).unwrap(), TagState::AsleepBackedUp);
        }
        assert_eq!(tenant.pool.stats().unwrap().mapped_bytes, 0);
    }
    // What fits may wake.
    tenant.pool.wake(&WakeRequest::of([Tag::runtime()])).unwrap();
    other.close().unwrap();
    let wake = tenant.pool.wake(&all()).unwrap();
    assert_eq!((wake.tags, wake.already_awake_tags), (vec![Tag::weights()], vec![Tag::runtime()]));
    tenant.verify();
}

#[test]
fn a_wake_with_a_deadline_waits_for_memory_that_others_release() {
    watched(|| {
        let device = TestDevice::open(32);
        let (driver, queries) = reporting_queries(&device);
        let tenant = asleep(driver);
        let other = other(&device, 20);
        queries.try_iter().for_each(drop);
        let leaver = thread::spawn(move || {
            // The wake has found no memory, and polls again and again.
            queries.iter().take(9).for_each(drop);
            other.sleep(&SleepRequest::all(Level::Two)).unwrap();
            other
        });
        let wake = tenant.pool.wake(&all().within(LONG)).unwrap();
        tenant.verify();
        assert!(wake.phases.wait_s > 0.0 && wake.phases.wait_s <= wake.seconds);
        assert_eq!(wake.verified_bytes, 18 * tenant.granule());
        leaver.join().unwrap().close().unwrap();
    });
}

/// A tag that was awake when a wake of all tags began, and falls asleep before there is memory, stays asleep. The
/// wake needs no memory for it.
#[test]
fn a_wake_that_waits_leaves_asleep_what_falls_asleep_meanwhile() {
    watched(|| {
        let device = TestDevice::open(32);
        let (driver, queries) = reporting_queries(&device);
        let tenant = asleep(driver);
        let (pool, granule) = (Arc::clone(&tenant.pool), tenant.granule());
        // Too large to be awake beside the others.
        let kv = pool.alloc(&AllocRequest::new(20 * granule, Tag::kv_cache())).unwrap();
        queries.try_iter().for_each(drop);
        let waker = thread::spawn({
            let pool = Arc::clone(&pool);
            move || pool.wake(&all().within(LONG))
        });
        // The wake was undone, and polls again and again.
        queries.iter().take(9).for_each(drop);
        pool.sleep(&SleepRequest::of([Tag::kv_cache()], Level::One)).unwrap();
        let wake = waker.join().unwrap().unwrap();
        assert_eq!(wake.tags, [Tag::runtime(), Tag::weights()]);
        assert!(wake.already_awake_tags.is_empty(), "{:?}", wake.already_awake_tags);
        assert_eq!(wake.mapped_bytes, 18 * granule);
        assert_eq!(pool.tag_state(&Tag::kv_cache()).unwrap(), TagState::AsleepDropped);
        tenant.verify();
        pool.free(kv.id).unwrap();
    });
}

#[test]
fn a_waiting_wake_ends_with_its_pool() {
    watched(|| {
        let device = TestDevice::open(32);
        let (driver, queries) = reporting_queries(&device);
        let tenant = asleep(driver);
        let other = other(&device, 20);
        queries.try_iter().for_each(drop);
        let pool = Arc::clone(&tenant.pool);
        let waker = thread::spawn(move || pool.wake(&all().within(LONG)));
        // It has found no memory, and polls again and again.
        queries.iter().take(9).for_each(drop);
        tenant.pool.close().unwrap();
        let ended = waker.join().unwrap();
        assert!(matches!(ended, Err(PoolError::Closed)), "{ended:?}");
        assert_eq!(device.host_bytes(), 0);
        other.close().unwrap();
    });
}

/// Each has more than half of the device, so only one can be awake.
#[test]
fn pools_that_wait_for_each_other_take_turns() {
    watched(|| {
        let device = TestDevice::open(32);
        let tenants = [1, 2, 3].map(|seed| {
            let mut tenant = tenant(device.driver(), seed);
            let granule = tenant.granule();
            tenant.load(13 * granule, &Tag::weights());
            tenant.load(5 * granule, &Tag::runtime());
            tenant.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
            tenant
        });
        let turns = DeviceKind::of_this_run().cases(30);
        thread::scope(|scope| {
            for tenant in &tenants {
                scope.spawn(move || {
                    for _ in 0..turns {
                        tenant.pool.wake(&all().within(LONG)).unwrap();
                        tenant.verify();
                        tenant.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
                    }
                });
            }
        });
        assert_eq!(device.resident_bytes(), 0);
    });
}

/// Records a wake's progress.
fn record_progress(request: WakeRequest) -> (WakeRequest, Arc<Mutex<Vec<WakeProgress>>>) {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let note = Arc::clone(&reports);
    (request.telling(move |progress| note.lock().unwrap().push(progress)), reports)
}

fn assert_monotone(reports: &[WakeProgress], total_bytes: u64) {
    assert!(
        reports.iter().all(|at| at.total_bytes == total_bytes && at.filled_bytes <= total_bytes),
        "{reports:?}"
    );
    assert!(reports.is_sorted_by(|a, b| a.filled_bytes < b.filled_bytes), "{reports:?}");
}

#[test]
fn progress_grows_until_everything_is_filled() {
    let device = TestDevice::open(64);
    let mut tenant = tenant(device.driver(), 3);
    let granule = tenant.granule();
    tenant.load(13 * granule, &Tag::weights());
    let kv = tenant.pool.alloc(&AllocRequest::new(6 * granule, Tag::kv_cache())).unwrap();
    tenant.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    let (request, reports) = record_progress(all());
    tenant.pool.wake(&request).unwrap();
    let reports = reports.lock().unwrap();
    assert_monotone(&reports, 19 * granule);
    assert!(reports.len() > 1 && reports.last().unwrap().filled_bytes == 19 * granule, "{reports:?}");
    tenant.verify();
    tenant.pool.free(kv.id).unwrap();
}

#[test]
fn no_progress_is_reported_after_an_error() {
    let device = TestDevice::open(32);
    let (armed, fails) = (Arc::new(AtomicU64::new(u64::MAX)), Arc::new(AtomicBool::new(false)));
    let (left, failed) = (Arc::clone(&armed), Arc::clone(&fails));
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        let fills = matches!(call.op, Op::CopyToDevice | Op::Create | Op::Map);
        if fills && left.fetch_sub(1, Ordering::Relaxed) == 0 {
            failed.store(true, Ordering::Relaxed);
            return Verdict::device_failure(call);
        }
        Verdict::Pass
    });
    let tenant = asleep(Arc::new(driver));
    let granule = tenant.granule();
    let before = held(&device);
    for nth in 0.. {
        armed.store(nth, Ordering::Relaxed);
        let reports = Arc::new(Mutex::new(Vec::new()));
        let (note, over) = (Arc::clone(&reports), Arc::clone(&fails));
        let request = all().telling(move |progress| {
            assert!(!over.load(Ordering::Relaxed), "progress after an error");
            note.lock().unwrap().push(progress);
        });
        let woken = tenant.pool.wake(&request);
        armed.store(u64::MAX, Ordering::Relaxed);
        assert_monotone(&reports.lock().unwrap(), 18 * granule);
        if !fails.swap(false, Ordering::Relaxed) {
            woken.unwrap();
            break;
        }
        assert!(matches!(woken, Err(PoolError::WakeFailed { .. })), "{woken:?}");
        assert_eq!(held(&device), before, "call {nth}");
    }
    tenant.verify();
}

#[test]
fn a_panic_in_the_progress_callback_undoes_the_wake() {
    let device = TestDevice::open(32);
    let tenant = asleep(device.driver());
    let before = held(&device);
    let request = all().telling(|_| panic!("a test's own panic"));
    assert!(catch_unwind(AssertUnwindSafe(|| drop(tenant.pool.wake(&request)))).is_err());
    assert_eq!(held(&device), before);
    assert_eq!(tenant.pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
    tenant.pool.wake(&all()).unwrap();
    tenant.verify();
}

/// A deadline is for memory, not for other failures.
#[test]
fn what_is_no_lack_of_memory_is_not_waited_for() {
    watched(|| {
        let device = TestDevice::open(32);
        let (sender, fails) = mpsc::channel();
        let fails = Mutex::new(fails);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            let fails = call.op == Op::Map && fails.lock().unwrap().try_recv().is_ok();
            if fails { Verdict::device_failure(call) } else { Verdict::Pass }
        });
        let tenant = asleep(Arc::new(driver));
        sender.send(()).unwrap();
        let failed = tenant.pool.wake(&all().within(LONG));
        assert!(matches!(failed, Err(PoolError::WakeFailed { .. })), "{failed:?}");
        tenant.pool.wake(&all()).unwrap();
        tenant.verify();
    });
}

/// Its time begins with the call, not with the request, by the driver's clock.
#[test]
fn a_deadline_goes_by_the_drivers_clock() {
    watched(|| {
        let (device, clock) = (TestDevice::open(32), Arc::new(Clock::default()));
        let ticking = Arc::clone(&clock);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            if call.op == Op::MemoryInfo {
                ticking.advance(Duration::from_secs(1));
            }
            Verdict::Pass
        });
        let tenant = asleep(Arc::new(driver.by(&clock)));
        let other = other(&device, 20);
        let most = Duration::from_secs(10);
        let request = all().within(most);
        clock.advance(LONG);
        for _ in 0..2 {
            let began = clock.now();
            let refused = tenant.pool.wake(&request);
            assert!(matches!(refused, Err(PoolError::DeviceFull { .. })), "{refused:?}");
            assert!(clock.now() - began >= most);
        }
        other.close().unwrap();
        tenant.pool.wake(&request).unwrap();
        tenant.verify();
    });
}

/// The tags for whose other calls a call was refused at once.
fn refused_for_calls<T: std::fmt::Debug>(result: Result<T, PoolError>) -> Vec<Tag> {
    match result {
        Err(PoolError::TimedOut { awaited: Awaited::Calls(tags), .. }) => tags,
        other => panic!("{other:?}"),
    }
}

/// A pool, and what is done once, at the next call of this kind after it is armed.
struct Once {
    pool: Arc<Pool>,
    armed: Arc<AtomicBool>,
    did: Arc<AtomicBool>,
}

fn once(limit_granules: Option<u64>, op: Op, act: impl Fn(&Pool) + Send + Sync + 'static) -> Once {
    let device = TestDevice::open(64);
    let [armed, did] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (is_armed, has_done) = (Arc::clone(&armed), Arc::clone(&did));
    let pool: Arc<OnceLock<Weak<Pool>>> = Arc::default();
    let known = Arc::clone(&pool);
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        if call.op == op && is_armed.swap(false, Ordering::Relaxed) {
            act(&known.get().and_then(Weak::upgrade).unwrap());
            has_done.store(true, Ordering::Relaxed);
        }
        Verdict::Pass
    });
    let limit_bytes = limit_granules.map(|granules| granules * device.info().granule_bytes);
    let made = Arc::new(Pool::new(Arc::new(driver), config().limited_to(limit_bytes)).unwrap());
    pool.set(Arc::downgrade(&made)).unwrap();
    Once { pool: made, armed, did }
}

#[test]
fn a_call_waits_for_a_busy_tag_until_the_deadline() {
    watched(|| {
        let tag = Tag::kv_cache;
        let Once { pool, armed, did } = once(None, Op::Map, move |pool| {
            let alloc = AllocRequest::new(1, tag()).within(Duration::ZERO);
            assert_eq!(refused_for_calls(pool.alloc(&alloc)), [tag()]);
            let sleep = SleepRequest::all(Level::One).within(Duration::ZERO);
            assert_eq!(refused_for_calls(pool.sleep(&sleep)), [tag()]);
            let wake = WakeRequest::all().within(Duration::ZERO);
            assert_eq!(refused_for_calls(pool.wake(&wake)), [tag()]);
            let other = AllocRequest::new(1, Tag::runtime()).within(Duration::ZERO);
            pool.free(pool.alloc(&other).unwrap().id).unwrap();
        });
        let granule = pool.driver().info().granule_bytes;
        pool.alloc(&AllocRequest::new(granule, Tag::runtime())).unwrap();
        pool.alloc(&AllocRequest::new(700, Tag::runtime())).unwrap();
        pool.alloc(&AllocRequest::new(9 * granule, tag())).unwrap();
        pool.sleep(&SleepRequest::of([tag()], Level::One)).unwrap();
        armed.store(true, Ordering::Relaxed);
        pool.wake(&WakeRequest::all()).unwrap();
        assert!(did.load(Ordering::Relaxed));
        pool.close().unwrap();
    });
}

/// A sleep under way may release memory: at the limit, it is waited for as long as the request allows.
#[test]
fn a_sleep_that_may_release_memory_is_waited_for_until_the_deadline() {
    watched(|| {
        let Once { pool, armed, did } = once(Some(12), Op::MemoryInfo, |pool| {
            let bytes = 5 * pool.driver().info().granule_bytes;
            let request = AllocRequest::new(bytes, Tag::runtime()).within(Duration::ZERO);
            assert_eq!(refused_for_calls(pool.alloc(&request)), [Tag::kv_cache()]);
        });
        let granule = pool.driver().info().granule_bytes;
        pool.alloc(&AllocRequest::new(8 * granule, Tag::kv_cache())).unwrap();
        armed.store(true, Ordering::Relaxed);
        pool.sleep(&SleepRequest::of([Tag::kv_cache()], Level::One)).unwrap();
        assert!(did.load(Ordering::Relaxed));
        pool.alloc(&AllocRequest::new(5 * granule, Tag::runtime()).within(Duration::ZERO)).unwrap();
        pool.close().unwrap();
    });
}
