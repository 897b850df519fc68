//! Preparing a sleep in the background: what it saves the sleep, what may happen meanwhile, and how it ends.
//!
//! The thread that prepares is stopped where a test needs it, so that things really happen meanwhile. Digests count
//! as fast, as on a GPU.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use poorwill_core::{
    AllocRequest, BlockKind, BlockSnapshot, Changes, DeviceRange, Driver, DriverErrorKind, Level, Op, Pool,
    PoolConfig, PoolError, PrepareEnd, SleepRequest, Tag, TagState, Verify, WakeRequest,
};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::{eventually, watched};

const GRANULES: u64 = 64;

/// Stops the thread that prepares, once, at a call.
struct Stop {
    reached: mpsc::Receiver<()>,
    latch: Arc<Latch>,
    /// Ranges unmapped before the stop ended.
    unmapped: Arc<Mutex<Vec<DeviceRange>>>,
    /// Whether a thread other than the reaper, which waits for the end of the stop, has waited for an event meanwhile.
    awaited: Arc<AtomicBool>,
}

impl Stop {
    fn wait(&self) {
        self.reached.recv().unwrap();
    }

    fn end(&self) {
        self.latch.open();
    }

    fn unmapped_meanwhile(&self, range: DeviceRange) -> bool {
        self.unmapped.lock().unwrap().iter().any(|unmapped| unmapped.overlaps(&range))
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.latch.open();
    }
}

fn is_preparing() -> bool {
    thread::current().name() == Some("poorwill-prepare")
}

/// A pool whose first preparation stops before the `nth` call that `stops` describes.
fn stopped(
    config: PoolConfig,
    nth: u64,
    stops: impl Fn(&Call) -> bool + Send + Sync + 'static,
) -> (TestDevice, Tenant, Stop) {
    let device = TestDevice::open(GRANULES);
    let (reached_sender, reached) = mpsc::channel();
    let (latch, unmapped) = (Arc::new(Latch::default()), Arc::new(Mutex::new(Vec::new())));
    let awaited = Arc::new(AtomicBool::new(false));
    let awaits = Arc::clone(&awaited);
    let (reached_sender, seen, is_stopped) =
        (Mutex::new(reached_sender), AtomicU64::new(0), AtomicBool::new(false));
    let (pass, noted) = (Arc::clone(&latch), Arc::clone(&unmapped));
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        if is_preparing() && stops(&call) && seen.fetch_add(1, Ordering::Relaxed) == nth {
            is_stopped.store(true, Ordering::Relaxed);
            reached_sender.lock().unwrap().send(()).unwrap();
            pass.pass();
            is_stopped.store(false, Ordering::Relaxed);
        }
        if is_stopped.load(Ordering::Relaxed) {
            noted.lock().unwrap().extend(call.unmaps);
            match call.op {
                // Without this, the reaper would see passed events before a test's own threads do. It holds nothing.
                Op::EventSynchronize if thread::current().name() == Some("poorwill-reaper") => pass.pass(),
                Op::EventSynchronize => awaits.store(true, Ordering::Relaxed),
                _ => {}
            }
        }
        Verdict::Pass
    });
    let tenant = tenant(Arc::new(driver.with_info(|info| info.fast_digests = true)), config);
    (device, tenant, Stop { reached, latch, unmapped, awaited })
}

fn config() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8)
}

fn tenant(driver: Arc<dyn Driver>, config: PoolConfig) -> Tenant {
    Tenant::new(&Arc::new(Pool::new(driver, config).unwrap()), 1)
}

fn quick(device: &TestDevice) -> Tenant {
    let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass);
    tenant(Arc::new(driver.with_info(|info| info.fast_digests = true)), config())
}

fn is_save(call: &Call) -> bool {
    call.op == Op::Save && !call.waiting
}

fn level_1() -> SleepRequest {
    SleepRequest::all(Level::One)
}

fn only(tag: &Tag) -> SleepRequest {
    SleepRequest::of([tag.clone()], Level::One)
}

/// Wakes everything, compares every granule, and reads every byte.
fn wake_and_verify(tenant: &Tenant) {
    tenant.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
    tenant.verify();
}

#[test]
fn the_first_sleep_after_a_preparation_copies_nothing() {
    let device = TestDevice::open(GRANULES);
    let mut tenant = quick(&device);
    let granule = tenant.granule();
    for (bytes, tag) in [
        (10 * granule, Tag::weights()),
        (3 * granule + 100, Tag::weights()),
        (700, Tag::weights()),
        (granule, Tag::runtime()),
    ] {
        tenant.load(bytes, &tag);
    }
    let kv = tenant.pool.alloc(&AllocRequest::new(4 * granule, Tag::kv_cache())).unwrap();
    let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
    let total_bytes = preparation.progress().total_bytes;
    eventually("it ends by itself", || preparation.progress().is_ended);
    assert_eq!(preparation.progress().done_bytes, total_bytes);
    let report = preparation.wait().unwrap();
    let bytes = [Tag::weights(), Tag::runtime()].iter().map(|tag| tenant.touched_bytes(tag)).sum();
    assert_eq!((report.copied_bytes, report.unchanged_bytes, total_bytes), (bytes, 0, bytes));
    assert_eq!((report.end, report.tags), (PrepareEnd::Finished, vec![Tag::runtime(), Tag::weights()]));
    let again = tenant.pool.prepare_sleep(&level_1()).unwrap().wait().unwrap();
    assert_eq!((again.copied_bytes, again.unchanged_bytes), (0, bytes));
    tenant.verify();
    let host_bytes = device.host_bytes();
    let sleep = tenant.pool.sleep(&level_1()).unwrap();
    assert_eq!((sleep.copied_bytes, sleep.unchanged_bytes, sleep.unchecked_bytes), (0, bytes, 0));
    assert_eq!((device.host_bytes(), device.resident_bytes()), (host_bytes, 0));
    wake_and_verify(&tenant);
    tenant.pool.free(kv.id).unwrap();
}

#[test]
fn changes_after_a_copy_are_found_by_the_sleep() {
    watched(|| {
        // Stopped when the copy of the second chunk has completed, and is not stored yet.
        let (_device, mut tenant, stop) = stopped(config(), 1, |call| call.op == Op::Save && call.waiting);
        let granule = tenant.granule();
        let block = tenant.load(12 * granule, &Tag::weights());
        let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
        stop.wait();
        for touched in [0, 4, 7, 11] {
            tenant.touch_granule(block, touched);
        }
        stop.end();
        assert_eq!(preparation.wait().unwrap().copied_bytes, 12 * granule);
        let sleep = tenant.pool.sleep(&level_1()).unwrap();
        // The last chunk was copied after the change.
        assert_eq!((sleep.copied_bytes, sleep.unchanged_bytes), (3 * granule, 9 * granule));
        wake_and_verify(&tenant);
    });
}

#[test]
fn a_writer_that_never_rests_loses_nothing() {
    watched(|| {
        let device = TestDevice::open(GRANULES);
        let mut tenant = quick(&device);
        let granule = tenant.granule();
        let unwritten = tenant.load(8 * granule, &Tag::weights());
        let busy = tenant.load(8 * granule, &Tag::weights());
        for round in 0..8 {
            let ended = Arc::new(AtomicBool::new(false));
            let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
            let is_over = Arc::clone(&ended);
            let waiter = thread::spawn(move || {
                let report = preparation.wait();
                is_over.store(true, Ordering::Relaxed);
                report.unwrap()
            });
            while !ended.load(Ordering::Relaxed) {
                let touched = tenant.random(8);
                tenant.touch_granule(busy, touched);
            }
            assert_eq!(waiter.join().unwrap().end, PrepareEnd::Finished);
            let sleep = tenant.pool.sleep(&level_1()).unwrap();
            assert!(sleep.unchanged_bytes >= 8 * granule, "round {round}: {sleep:?}");
            wake_and_verify(&tenant);
        }
        assert_eq!(tenant.blocks[unwritten].bytes.len() as u64, 8 * granule);
    });
}

#[test]
fn memory_freed_under_a_copy_stays_mapped_and_serves_waiting_requests() {
    watched(|| {
        let limited = config().limited_to(8 * granule_bytes());
        let (_device, mut tenant, stop) = stopped(limited, 0, is_save);
        let granule = tenant.granule();
        let block = tenant.load(4 * granule, &Tag::weights());
        let range = tenant.blocks[block].block.range;
        tenant.load(2 * granule, &Tag::weights());
        let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
        stop.wait();
        tenant.free(block);
        // Fits when the freed chunk leaves, which is being copied.
        let pool = Arc::clone(&tenant.pool);
        let other = thread::spawn(move || pool.alloc(&AllocRequest::new(5 * granule, Tag::kv_cache())));
        let pool = Arc::clone(&tenant.pool);
        let trim = thread::spawn(move || pool.trim());
        thread::sleep(Duration::from_millis(30));
        assert!(!stop.unmapped_meanwhile(range), "memory was unmapped under a copy");
        stop.end();
        other.join().unwrap().unwrap();
        trim.join().unwrap().unwrap();
        assert_eq!(preparation.wait().unwrap().end, PrepareEnd::Finished);
        tenant.pool.sleep(&level_1()).unwrap();
        wake_and_verify(&tenant);
    });
}

#[test]
fn a_request_that_cannot_fit_is_refused_while_a_sleep_is_prepared() {
    watched(|| {
        let limited = config().limited_to(8 * granule_bytes());
        let (_device, mut tenant, stop) = stopped(limited, 0, is_save);
        let granule = tenant.granule();
        tenant.load(6 * granule, &Tag::weights());
        let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
        stop.wait();
        let refused = tenant.pool.alloc(&AllocRequest::new(3 * granule, Tag::weights()));
        assert!(matches!(refused, Err(PoolError::OverLimit { .. })), "{refused:?}");
        stop.end();
        preparation.wait().unwrap();
    });
}

#[test]
fn trimming_releases_memory_freed_under_a_copy() {
    watched(|| {
        let (_device, mut tenant, stop) = stopped(config(), 0, is_save);
        let granule = tenant.granule();
        let block = tenant.load(4 * granule, &Tag::weights());
        tenant.load(4 * granule, &Tag::weights());
        let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
        stop.wait();
        tenant.free(block);
        let pool = Arc::clone(&tenant.pool);
        let trim = thread::spawn(move || pool.trim().unwrap());
        thread::sleep(Duration::from_millis(20));
        stop.end();
        assert_eq!(trim.join().unwrap(), 4 * granule);
        preparation.wait().unwrap();
        tenant.verify();
    });
}

/// A block used on other streams is free after they have passed. Only then is it known to be under a copy.
#[test]
fn trimming_waits_for_the_copy_of_what_several_streams_have_used() {
    watched(|| {
        let (device, mut tenant, stop) = stopped(config(), 0, is_save);
        let granule = tenant.granule();
        let block = tenant.load(4 * granule, &Tag::weights());
        let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
        stop.wait();
        let (user, work) = (device.stream_create().unwrap(), Arc::new(Latch::default()));
        tenant.pool.record_use(tenant.blocks[block].block.id, user).unwrap();
        latch::hold(&*device, user, &work);
        tenant.free(block);
        let pool = Arc::clone(&tenant.pool);
        let trim = thread::spawn(move || pool.trim().unwrap());
        eventually("it waits for the work", || stop.awaited.load(Ordering::Relaxed));
        work.open();
        let is_waiting = |block: &BlockSnapshot| block.kind == BlockKind::Waiting;
        let blocks =
            || tenant.pool.snapshot().unwrap().segments.into_iter().flat_map(|segment| segment.blocks);
        eventually("it has seen the work pass", || !blocks().any(|block| is_waiting(&block)));
        thread::sleep(Duration::from_millis(20)); // It waits for the copy.
        stop.end();
        assert_eq!(trim.join().unwrap(), 4 * granule);
        preparation.wait().unwrap();
        tenant.pool.close().unwrap();
        device.stream_destroy(user).unwrap();
    });
}

/// The freed block begins in a granule that another block lives in, and that is being copied.
#[test]
fn granules_freed_beside_a_copy_serve_waiting_requests() {
    for trims in [false, true] {
        watched(move || {
            let limited = config().limited_to(8 * granule_bytes());
            let (_device, mut tenant, stop) = stopped(limited, 0, is_save);
            let granule = tenant.granule();
            tenant.load(700, &Tag::weights());
            let block = tenant.load(2 * granule, &Tag::weights());
            assert_eq!(tenant.touched_bytes(&Tag::weights()), 3 * granule, "they share one");
            let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
            stop.wait();
            tenant.free(block);
            let pool = Arc::clone(&tenant.pool);
            let other = thread::spawn(move || {
                let trimmed = if trims { pool.trim() } else { Ok(2 * granule) };
                (trimmed, pool.alloc(&AllocRequest::new(7 * granule, Tag::kv_cache())))
            });
            thread::sleep(Duration::from_millis(30));
            stop.end();
            let (trimmed, allocated) = other.join().unwrap();
            assert!(trimmed.unwrap() >= 2 * granule);
            allocated.unwrap();
            preparation.wait().unwrap();
            tenant.verify();
        });
    }
}

/// Blocks freed on several streams serve like those of one.
#[test]
fn a_granule_freed_by_several_streams_under_a_copy_serves_waiting_requests() {
    for trims in [false, true] {
        watched(move || {
            let limited = config().limited_to(8 * granule_bytes());
            let (device, mut tenant, stop) = stopped(limited, 0, is_save);
            let (granule, driver) = (tenant.granule(), device.driver());
            let streams = [0, 1].map(|_| driver.stream_create().unwrap());
            for stream in streams {
                tenant.load_on(700, &Tag::weights(), stream);
            }
            assert_eq!(tenant.touched_bytes(&Tag::weights()), granule, "they share one");
            let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
            stop.wait();
            tenant.free(1);
            tenant.free(0);
            let pool = Arc::clone(&tenant.pool);
            let other = thread::spawn(move || {
                let trimmed = if trims { pool.trim() } else { Ok(granule_bytes()) };
                (trimmed, pool.alloc(&AllocRequest::new(8 * granule_bytes(), Tag::kv_cache())))
            });
            thread::sleep(Duration::from_millis(30));
            stop.end();
            let (trimmed, allocated) = other.join().unwrap();
            assert_eq!(trimmed.unwrap(), granule);
            allocated.unwrap();
            preparation.wait().unwrap();
            tenant.pool.close().unwrap();
            streams.into_iter().for_each(|stream| driver.stream_destroy(stream).unwrap());
        });
    }
}

#[test]
fn a_cache_above_its_mark_shrinks_when_the_copy_has_ended() {
    watched(|| {
        let kept = config().caching_at_most(0);
        let (_device, mut tenant, stop) = stopped(kept, 0, is_save);
        let granule = tenant.granule();
        let block = tenant.load(4 * granule, &Tag::weights());
        tenant.load(4 * granule, &Tag::weights());
        let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
        stop.wait();
        tenant.free(block);
        thread::sleep(Duration::from_millis(20)); // The reaper looks, and finds it in use.
        stop.end();
        preparation.wait().unwrap();
        eventually("above its mark", || tenant.pool.stats().unwrap().mapped_bytes == 4 * granule);
        tenant.verify();
    });
}

#[test]
fn a_cancelled_preparation_keeps_what_it_has_and_the_sleep_makes_the_rest() {
    watched(|| {
        let (_device, mut tenant, stop) = stopped(config(), 1, is_save);
        let granule = tenant.granule();
        tenant.load(12 * granule, &Tag::weights());
        let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
        stop.wait();
        let progress = preparation.progress();
        assert_eq!((progress.done_bytes, progress.total_bytes), (4 * granule, 12 * granule));
        assert!(!progress.is_ended);
        preparation.cancel();
        stop.end();
        let report = preparation.wait().unwrap();
        assert_eq!((report.end, report.copied_bytes), (PrepareEnd::Cancelled, 8 * granule));
        let sleep = tenant.pool.sleep(&level_1()).unwrap();
        assert_eq!((sleep.copied_bytes, sleep.unchanged_bytes), (4 * granule, 8 * granule));
        wake_and_verify(&tenant);
    });
}

/// A call that needs the tag exclusively gets it after the copy in flight.
#[test]
fn a_sleep_or_discard_overtakes_a_preparation() {
    for discards in [false, true] {
        watched(move || {
            let (_device, mut tenant, stop) = stopped(config(), 0, is_save);
            let granule = tenant.granule();
            let (weights, runtime) = (Tag::weights(), Tag::runtime());
            tenant.load(40 * granule, &weights);
            tenant.load(8 * granule, &runtime);
            let preparation = tenant.pool.prepare_sleep(&only(&weights)).unwrap();
            stop.wait();
            // Calls on other tags do not wait.
            tenant.pool.sleep(&only(&runtime)).unwrap();
            tenant.pool.wake(&WakeRequest::of([runtime.clone()])).unwrap();
            let pool = Arc::clone(&tenant.pool);
            let other = thread::spawn(move || {
                if discards { pool.discard(&[Tag::weights()]) } else { pool.sleep(&only(&Tag::weights())) }
            });
            eventually("it waits", || tenant.pool.waiting_calls().unwrap() == 1);
            stop.end();
            let slept = other.join().unwrap().unwrap();
            let report = preparation.wait().unwrap();
            assert_eq!((report.end, report.copied_bytes), (PrepareEnd::Overtaken, 4 * granule));
            if discards {
                assert_eq!(tenant.pool.tag_state(&weights).unwrap(), TagState::AsleepDropped);
                tenant.pool.wake(&WakeRequest::all()).unwrap();
                (0..tenant.blocks.len()).for_each(|nth| tenant.write(nth));
                tenant.pool.mark_restored(&[weights]).unwrap();
                tenant.pool.sleep(&level_1()).unwrap();
            } else {
                assert_eq!((slept.copied_bytes, slept.unchanged_bytes), (36 * granule, 4 * granule));
            }
            wake_and_verify(&tenant);
        });
    }
}

#[test]
fn a_pool_that_closes_ends_its_preparation() {
    watched(|| {
        let (device, mut tenant, stop) = stopped(config(), 0, is_save);
        let granule = tenant.granule();
        tenant.load(12 * granule, &Tag::weights());
        let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
        stop.wait();
        let pool = Arc::clone(&tenant.pool);
        let closer = thread::spawn(move || pool.close().unwrap());
        eventually("nothing new is begun", || matches!(tenant.pool.stats(), Err(PoolError::Closed)));
        stop.end();
        closer.join().unwrap();
        let report = preparation.wait().unwrap();
        assert_eq!((report.end, report.copied_bytes), (PrepareEnd::Overtaken, 4 * granule));
        assert_eq!((device.resident_bytes(), device.host_bytes()), (0, 0));
    });
}

/// A dropped pool has no handle left, so when it begins to refuse new work cannot be seen. A preparation may end
/// before; nothing else depends on it.
#[test]
fn a_pool_that_is_dropped_waits_for_its_preparation() {
    watched(|| {
        let (device, mut tenant, stop) = stopped(config(), 0, is_save);
        let granule = tenant.granule();
        tenant.load(12 * granule, &Tag::weights());
        let preparation = tenant.pool.prepare_sleep(&level_1()).unwrap();
        stop.wait();
        let dropper = thread::spawn(move || drop(tenant));
        stop.end();
        dropper.join().unwrap();
        assert!(preparation.progress().is_ended);
        assert_eq!((device.resident_bytes(), device.host_bytes()), (0, 0));
        let report = preparation.wait().unwrap();
        assert!(report.copied_bytes >= 4 * granule && report.end != PrepareEnd::Cancelled, "{report:?}");
    });
}

#[test]
fn of_two_preparations_the_second_finds_what_the_first_has_stored() {
    watched(|| {
        let (_device, mut tenant, stop) = stopped(config(), 0, is_save);
        let granule = tenant.granule();
        tenant.load(12 * granule, &Tag::weights());
        let first = tenant.pool.prepare_sleep(&level_1()).unwrap();
        stop.wait();
        let second = tenant.pool.prepare_sleep(&level_1()).unwrap();
        drop(tenant.pool.prepare_sleep(&level_1()).unwrap()); // Goes on, and nobody hears of it.
        stop.end();
        let reports = [first.wait().unwrap(), second.wait().unwrap()];
        assert_eq!(reports.map(|report| report.copied_bytes), [12 * granule, 0]);
        assert_eq!(tenant.pool.sleep(&level_1()).unwrap().copied_bytes, 0);
        wake_and_verify(&tenant);
    });
}

#[test]
fn where_there_is_nothing_to_prepare() {
    let device = TestDevice::open(GRANULES);
    let mut tenant = quick(&device);
    let granule = tenant.granule();
    let nothing = tenant.pool.prepare_sleep(&level_1()).unwrap().wait().unwrap();
    assert_eq!((nothing.tags.len(), nothing.copied_bytes, nothing.end), (0, 0, PrepareEnd::Finished));
    let unknown = tenant.pool.prepare_sleep(&only(&Tag::new("nobody").unwrap()));
    assert!(matches!(unknown, Err(PoolError::UnknownTag { .. })), "{unknown:?}");
    tenant.load(3 * granule, &Tag::weights());
    tenant.load(2 * granule, &Tag::runtime());
    // Level 2 drops the weights: they need no backup.
    let level_2 = tenant.pool.prepare_sleep(&SleepRequest::all(Level::Two)).unwrap().wait().unwrap();
    assert_eq!((level_2.tags, level_2.copied_bytes), (vec![Tag::runtime()], 2 * granule));
    tenant.pool.sleep(&SleepRequest::all(Level::Two)).unwrap();
    let asleep = tenant.pool.prepare_sleep(&SleepRequest::all(Level::Two)).unwrap().wait().unwrap();
    assert_eq!((asleep.tags.len(), asleep.copied_bytes), (0, 0));
    let conflict = tenant.pool.prepare_sleep(&level_1());
    assert!(matches!(conflict, Err(PoolError::SleepConflict { .. })), "{conflict:?}");
    tenant.pool.wake(&WakeRequest::all()).unwrap();
    let undefined = tenant.pool.prepare_sleep(&level_1());
    assert!(matches!(undefined, Err(PoolError::Undefined { .. })), "{undefined:?}");
    tenant.pool.close().unwrap();
    assert!(matches!(tenant.pool.prepare_sleep(&level_1()), Err(PoolError::Closed)));
}

#[test]
fn what_keeps_a_preparation_from_its_end_keeps_no_sleep_from_its_own() {
    // Host memory is missing at once, or when waited for; copies fail.
    let places = [(Op::HostAlloc, false), (Op::HostAlloc, true), (Op::Save, false), (Op::Save, true)];
    for (op, waiting) in places {
        watched(move || {
            let device = TestDevice::open(GRANULES);
            let script = move |call: Call| {
                if !is_preparing() || (call.op, call.waiting) != (op, waiting) {
                    return Verdict::Pass;
                }
                let reason = "the test has taken it all".into();
                Verdict::Fail(DriverErrorKind::OutOfHostMemory { asked_bytes: call.bytes, reason })
            };
            let driver =
                ScriptedDriver::new(device.driver(), script).with_info(|info| info.fast_digests = true);
            let mut tenant = tenant(Arc::new(driver), config());
            let granule = tenant.granule();
            tenant.load(10 * granule, &Tag::weights());
            let failed = tenant.pool.prepare_sleep(&level_1()).unwrap().wait();
            assert!(matches!(failed, Err(PoolError::PrepareFailed { .. })), "{op} {waiting}: {failed:?}");
            tenant.verify();
            assert_eq!(tenant.pool.sleep(&level_1()).unwrap().copied_bytes, 10 * granule);
            wake_and_verify(&tenant);
        });
    }
}

#[test]
fn preparing_again_looks_at_what_has_changed_only() {
    let device = TestDevice::open(GRANULES);
    let mut tenant = quick(&device);
    let granule = tenant.granule();
    let block = tenant.load(16 * granule, &Tag::weights());
    tenant.pool.prepare_sleep(&level_1()).unwrap().wait().unwrap();
    for touched in [3, 4, 15] {
        tenant.touch_granule(block, touched);
    }
    let other = tenant.load(2 * granule, &Tag::weights());
    let again = tenant.pool.prepare_sleep(&level_1()).unwrap().wait().unwrap();
    assert_eq!((again.copied_bytes, again.unchanged_bytes), (5 * granule, 13 * granule));
    tenant.free(other);
    let sleep = tenant.pool.sleep(&level_1()).unwrap();
    assert_eq!((sleep.copied_bytes, sleep.unchanged_bytes), (0, 16 * granule));
    wake_and_verify(&tenant);
}

#[test]
fn for_volatile_tags_only_buffers_are_prepared() {
    let device = TestDevice::open(GRANULES);
    let mut tenant = quick(&device);
    let granule = tenant.granule();
    tenant.load(6 * granule, &Tag::runtime());
    tenant.pool.declare_changes(&Tag::runtime(), Changes::Volatile).unwrap();
    let report = tenant.pool.prepare_sleep(&level_1()).unwrap().wait().unwrap();
    assert_eq!((report.copied_bytes, report.unchanged_bytes), (0, 0));
    let host_bytes = device.host_bytes();
    assert_eq!(host_bytes, 6 * granule);
    assert_eq!(tenant.pool.sleep(&level_1()).unwrap().copied_bytes, 6 * granule);
    assert_eq!(device.host_bytes(), host_bytes, "no room beyond what was prepared");
    wake_and_verify(&tenant);
    assert_eq!(device.host_bytes(), 0, "what changes anyway need not be kept");
}

fn granule_bytes() -> u64 {
    TestDevice::open(1).info().granule_bytes
}
