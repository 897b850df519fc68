//! Lent memory: it comes back with its bytes, and what did not is brought back as ever. Whatever becomes of a broker, no
//! byte is lost and no memory leaks.

mod resident;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use poorwill_core::lend::Broker;
use poorwill_core::{
    AllocRequest, Block, DriverErrorKind, Level, Op, Pool, PoolConfig, PoolError, SleepReport, SleepRequest,
    Tag, WakeReport, WakeRequest,
};
use poorwill_testkit::broker::HeldMemory;
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::watchdog::TEST_TIMEOUT;

const CHUNK: u64 = 4;
const DEVICE: u64 = 96;

struct World {
    device: TestDevice,
    broker: Arc<HeldMemory>,
    pool: Pool,
    granule: u64,
    /// The number of the driver's call that fails next; 0: none.
    failing: Arc<AtomicU64>,
}

impl World {
    fn open() -> Self {
        Self::on(TestDevice::open(DEVICE), Arc::default())
    }

    fn on(device: TestDevice, broker: Arc<HeldMemory>) -> Self {
        let granule = device.info().granule_bytes;
        let failing = Arc::new(AtomicU64::new(0));
        let countdown = Arc::clone(&failing);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            let left =
                countdown.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            if left != Ok(1) || matches!(call.op, Op::Release | Op::EventQuery | Op::EventDestroy) {
                return Verdict::Pass;
            }
            Verdict::Fail(DriverErrorKind::Device {
                code: 1,
                name: "ON_PURPOSE".into(),
                text: "a test".into(),
            })
        });
        let driver = driver.with_info(|info| info.fast_digests = true);
        let config = PoolConfig::default().in_chunks_of(CHUNK).in_spans_of(4 * CHUNK).in_segments_of(8);
        let pool = Pool::new(Arc::new(driver), config.keeping_backups(true)).unwrap();
        pool.lend_through(Arc::clone(&broker) as Arc<dyn Broker>).unwrap();
        Self { device, broker, pool, granule, failing }
    }

    fn loaded(&self, granules: u64, seed: u64) -> Block {
        let bytes = granules * self.granule;
        let block = self.pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
        pattern::fill(&self.pool, block.id, seed, usize::try_from(bytes).unwrap()).unwrap();
        block
    }

    fn assert_reads(&self, block: &Block, seed: u64) {
        let len = usize::try_from(block.requested_bytes).unwrap();
        assert!(pattern::read(&self.pool, block.id, len).unwrap() == pattern::bytes(seed, len), "{block:?}");
    }

    fn lend(&self) -> SleepReport {
        self.pool.sleep(&SleepRequest::all(Level::One).lending()).unwrap()
    }

    fn wake(&self) -> WakeReport {
        self.pool.wake(&WakeRequest::all()).unwrap()
    }

    fn granules(&self, bytes: u64) -> u64 {
        assert_eq!(bytes % self.granule, 0);
        bytes / self.granule
    }
}

/// Runs a program once for each call of the driver that fails in it. It gets the call's number, and says whether that
/// failed.
fn for_each_failing_call(program: impl Fn(u64) -> bool) {
    let mut calls = (1..).step_by(DeviceKind::of_this_run().stride());
    while calls.next().is_some_and(&program) {}
}

fn has_descriptors() -> bool {
    let device = TestDevice::open(1);
    let shares_memory = device.info().memory_name.is_some();
    !skipped_unless(|_| shares_memory, "the device has no descriptors of its memory")
}

#[test]
fn what_nothing_else_needed_comes_back_without_a_copy() {
    if !has_descriptors() {
        return;
    }
    let world = World::open();
    let blocks: Vec<Block> = (0..3).map(|seed| world.loaded(5 + 4 * seed, seed)).collect();
    for round in 0..4 {
        let slept = world.lend();
        let copied = if round == 0 { 5 + 9 + 13 } else { 0 };
        assert_eq!(world.granules(slept.copied_bytes), copied, "backups are made as ever");
        assert_eq!(world.granules(slept.lent_bytes), 5 + 9 + 13, "round {round}: {slept:?}");
        assert_eq!((slept.released_bytes, slept.lend_refused), (0, None));
        let stats = world.pool.stats().unwrap();
        assert_eq!((stats.mapped_bytes, stats.lent_bytes), (0, slept.lent_bytes));
        let woken = world.wake();
        assert_eq!((woken.returned_bytes, woken.copied_bytes), (slept.lent_bytes, 0), "round {round}");
        assert_eq!(woken.verified_bytes, slept.lent_bytes);
        for (seed, block) in (0..).zip(&blocks) {
            world.assert_reads(block, seed);
        }
        assert_eq!((world.broker.held_bytes(), world.pool.stats().unwrap().lent_bytes), (0, 0));
    }
    world.pool.close().unwrap();
}

#[test]
fn what_others_took_is_copied_back() {
    if !has_descriptors() {
        return;
    }
    let world = World::open();
    let blocks: Vec<Block> = (0..6).map(|seed| world.loaded(CHUNK * (1 + seed % 3), seed)).collect();
    let all: u64 = (0..6).map(|seed| CHUNK * (1 + seed % 3)).sum();
    for taken in [1, 9, 17, 10_000] {
        assert_eq!(world.granules(world.lend().lent_bytes), all);
        let gone = world.granules(world.broker.give_up(taken * world.granule));
        assert!(gone >= taken.min(all), "{gone} of {taken}");
        let woken = world.wake();
        assert_eq!(world.granules(woken.copied_bytes), gone);
        assert_eq!(world.granules(woken.returned_bytes), all - gone);
        for (seed, block) in (0..).zip(&blocks) {
            world.assert_reads(block, seed);
        }
    }
    world.pool.close().unwrap();
}

#[test]
fn a_broker_that_fails_costs_time_and_no_byte() {
    if !has_descriptors() {
        return;
    }
    let world = World::open();
    let block = world.loaded(11, 3);
    world.broker.fail(true);
    let slept = world.lend();
    assert_eq!((slept.lent_bytes, world.granules(slept.released_bytes)), (0, 11));
    assert!(slept.lend_refused.is_some_and(|reason| reason.contains("start another")));
    assert_eq!(world.granules(world.wake().copied_bytes), 11);
    world.broker.fail(false);
    assert_eq!(world.granules(world.lend().lent_bytes), 11);
    world.broker.fail(true);
    assert_eq!(world.granules(world.wake().copied_bytes), 11, "what it held is gone");
    world.assert_reads(&block, 3);
    world.pool.close().unwrap();
}

#[test]
fn bytes_that_changed_meanwhile_are_copied_back() {
    if !has_descriptors() {
        return;
    }
    let world = World::open();
    let block = world.loaded(2 * CHUNK, 3);
    world.lend();
    let taken = world.broker.take().unwrap();
    let range = world.device.reserve(taken.bytes).unwrap();
    let backing = world.device.import(std::os::fd::AsFd::as_fd(&taken.descriptor), taken.bytes).unwrap();
    world.device.map(range, backing).unwrap();
    world.device.set_access(range).unwrap();
    let half = range.slice(world.granule, world.granule).unwrap();
    world.device.zero(poorwill_core::StreamId::DEFAULT, half).unwrap().wait().unwrap();
    world.device.unmap(range).unwrap();
    world.device.release(backing).unwrap();
    world.device.unreserve(range).unwrap();
    world.broker.lend(vec![taken]).unwrap();
    world.wake();
    world.assert_reads(&block, 3);
    world.pool.close().unwrap();
}

#[test]
fn dropped_bytes_come_back_as_their_policy_says() {
    if !has_descriptors() {
        return;
    }
    let world = World::open();
    let weights = world.loaded(CHUNK, 1);
    let kv = world.pool.alloc(&AllocRequest::new(2 * CHUNK * world.granule, Tag::kv_cache())).unwrap();
    let len = usize::try_from(kv.range.bytes).unwrap();
    pattern::fill(&world.pool, kv.id, 2, len).unwrap();
    assert_eq!(world.granules(world.lend().lent_bytes), 3 * CHUNK);
    assert_eq!(world.granules(world.broker.dropped_bytes()), 2 * CHUNK, "the broker knows what goes first");
    let woken = world.wake();
    assert_eq!(world.granules(woken.zeroed_bytes), 2 * CHUNK);
    assert!(
        pattern::read(&world.pool, kv.id, len).unwrap().iter().all(|byte| *byte == 0),
        "zeros, never old pages"
    );
    world.assert_reads(&weights, 1);
    world.pool.close().unwrap();
}

#[test]
fn a_sleep_that_releases_has_what_is_lent_given_up() {
    if !has_descriptors() {
        return;
    }
    let world = World::open();
    let block = world.loaded(3 * CHUNK, 5);
    world.lend();
    let released = world.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert_eq!(world.granules(released.released_bytes), 3 * CHUNK);
    assert_eq!((world.broker.held_bytes(), world.pool.stats().unwrap().lent_bytes), (0, 0));
    assert_eq!(world.granules(world.wake().copied_bytes), 3 * CHUNK);
    world.assert_reads(&block, 5);
    world.lend();
    world.pool.discard(&[Tag::weights()]).unwrap();
    assert_eq!(world.broker.held_bytes(), 0, "a discard is one, too");
    world.pool.close().unwrap();
}

#[test]
fn what_is_freed_or_closed_asleep_does_not_stay_lent() {
    if !has_descriptors() {
        return;
    }
    let world = World::open();
    let (first, second) = (world.loaded(2 * CHUNK, 1), world.loaded(CHUNK, 2));
    world.lend();
    world.pool.free(first.id).unwrap();
    let woken = world.wake();
    assert_eq!(world.granules(woken.returned_bytes), CHUNK);
    world.assert_reads(&second, 2);
    assert_eq!(
        (world.broker.held_bytes(), world.granules(world.pool.stats().unwrap().mapped_bytes)),
        (0, CHUNK)
    );
    world.lend();
    world.pool.free(second.id).unwrap();
    world.pool.trim().unwrap();
    world.wake();
    // Its addresses may be had again, and lent.
    let third = world.loaded(2 * CHUNK, 3);
    assert_eq!(world.granules(world.lend().lent_bytes), 2 * CHUNK);
    assert_eq!(world.granules(world.broker.held_bytes()), 2 * CHUNK);
    world.wake();
    world.assert_reads(&third, 3);
    world.pool.close().unwrap();
}

#[test]
fn what_is_closed_or_trimmed_leaves_the_broker() {
    if !has_descriptors() {
        return;
    }
    let world = World::open();
    let block = world.loaded(2 * CHUNK, 1);
    world.loaded(CHUNK, 2);
    world.lend();
    world.pool.free(block.id).unwrap();
    world.pool.trim().unwrap();
    world.pool.close().unwrap();
    assert_eq!(world.broker.held_bytes(), 0);
}

#[test]
fn only_what_can_come_back_is_lent() {
    if !has_descriptors() {
        return;
    }
    let world = World::open();
    let (cached, live) = (world.loaded(3 * CHUNK, 1), world.loaded(2 * CHUNK, 2));
    world.pool.free(cached.id).unwrap();
    let slept = world.lend();
    assert_eq!(
        (world.granules(slept.lent_bytes), world.granules(slept.released_bytes)),
        (2 * CHUNK, 3 * CHUNK)
    );
    world.wake();
    world.assert_reads(&live, 2);
    world.pool.close().unwrap();
}

#[test]
fn a_wake_that_waits_sees_what_is_lent_meanwhile() {
    // A share of a device does not count what others hold of it.
    if skipped_unless(|kind| kind == DeviceKind::Host, "the device of this test is a share of one") {
        return;
    }
    let device = TestDevice::open(DEVICE);
    let first = World::on(device.clone(), Arc::default());
    let block = first.loaded(60, 1);
    first.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    let second = World::on(device.clone(), Arc::clone(&first.broker));
    second.loaded(60, 2);
    let request = WakeRequest::all().within(TEST_TIMEOUT);
    std::thread::scope(|scope| {
        let waking = scope.spawn(|| first.pool.wake(&request).unwrap());
        second.lend();
        waking.join().unwrap();
    });
    first.assert_reads(&block, 1);
    first.pool.close().unwrap();
    second.pool.close().unwrap();
}

#[test]
fn a_full_device_asks_for_what_others_lend() {
    // A share of a device does not count what others hold of it.
    if skipped_unless(|kind| kind == DeviceKind::Host, "the device of this test is a share of one") {
        return;
    }
    let device = TestDevice::open(DEVICE);
    let sleeper = World::on(device.clone(), Arc::default());
    let block = sleeper.loaded(64, 1);
    sleeper.lend();
    let free = || device.memory_info().unwrap().free_bytes / sleeper.granule;
    assert_eq!(free(), DEVICE - 64, "lent memory is in use");
    // One broker for both, as they would have.
    let other = World::on(device.clone(), Arc::clone(&sleeper.broker));
    let wanted = other.loaded(DEVICE - 20, 2);
    assert!(sleeper.broker.asked_bytes() > 0);
    other.assert_reads(&wanted, 2);
    let refused = sleeper.pool.wake(&WakeRequest::all()).unwrap_err();
    assert!(matches!(refused, PoolError::DeviceFull { .. }), "{refused}");
    other.lend();
    sleeper.pool.wake(&WakeRequest::all()).unwrap();
    sleeper.assert_reads(&block, 1);
    sleeper.pool.close().unwrap();
    other.pool.close().unwrap();
    drop((sleeper, other));
    assert_eq!(device.memory_info().unwrap().free_bytes, device.info().total_bytes);
}

#[test]
fn what_asks_no_broker_is_left_some_memory() {
    // A share of a device does not count what others hold of it.
    if skipped_unless(|kind| kind == DeviceKind::Host, "the device of this test is a share of one") {
        return;
    }
    for kept in [0, 8] {
        let device = TestDevice::open(DEVICE);
        let sleeper = World::on(device.clone(), Arc::default());
        sleeper.loaded(64, 1);
        sleeper.lend();
        let other = World::on(device.clone(), Arc::clone(&sleeper.broker));
        other.pool.keep_free(kept * other.granule);
        let free = || device.memory_info().unwrap().free_bytes / sleeper.granule;
        let block = other.loaded(DEVICE - 64, 2);
        assert_eq!(free() > 0, kept > 0, "of what is free after an allocation");
        // By a wake as well.
        other.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        let hog = device.create(free() * other.granule - 30 * other.granule).unwrap();
        other.wake();
        assert!(free() >= kept && (kept > 0 || free() < 8), "{} granules", free());
        other.assert_reads(&block, 2);
        device.release(hog).unwrap();
        // And by one that creates nothing.
        other.lend();
        let hog = device.create(free() * other.granule).unwrap();
        other.wake();
        assert!(free() >= kept && (kept > 0 || free() < 8), "{} granules", free());
        device.release(hog).unwrap();
        sleeper.pool.close().unwrap();
        other.pool.close().unwrap();
    }
}

#[test]
fn any_call_of_the_driver_may_fail() {
    if !has_descriptors() {
        return;
    }
    for_each_failing_call(|nth| {
        let world = World::open();
        let blocks = [world.loaded(2 * CHUNK + 1, 1), world.loaded(CHUNK, 2)];
        world.lend();
        if nth % 3 == 0 {
            world.broker.give_up(1);
        }
        world.failing.store(nth, Ordering::Relaxed);
        let results = [
            world.pool.wake(&WakeRequest::all()).map(drop),
            world.pool.sleep(&SleepRequest::all(Level::One).lending()).map(drop),
            world.pool.wake(&WakeRequest::all()).map(drop),
        ];
        // Else the calls ended before the one that was to fail.
        let has_failed = world.failing.swap(0, Ordering::Relaxed) == 0;
        world
            .pool
            .wake(&WakeRequest::all())
            .unwrap_or_else(|error| panic!("{nth}: {error}, after {results:?}"));
        for (seed, block) in (1..).zip(&blocks) {
            world.assert_reads(block, seed);
        }
        assert_eq!(world.broker.held_bytes(), 0, "{nth}");
        assert_eq!(world.granules(world.pool.stats().unwrap().mapped_bytes), 3 * CHUNK + 1, "{nth}");
        world.pool.close().unwrap();
        drop(world.pool);
        assert_eq!(world.device.memory_info().unwrap().free_bytes, world.device.info().total_bytes, "{nth}");
        has_failed
    });
}

#[test]
fn a_pool_has_one_broker() {
    if !has_descriptors() {
        return;
    }
    let world = World::open();
    let refused = world.pool.lend_through(Arc::clone(&world.broker) as Arc<dyn Broker>).unwrap_err();
    assert!(matches!(refused, PoolError::InvalidConfig { .. }), "{refused}");
    let device = TestDevice::open(8);
    let without =
        ScriptedDriver::new(device.driver(), |_| Verdict::Pass).with_info(|info| info.memory_name = None);
    let pool = Pool::new(Arc::new(without), PoolConfig::default().in_chunks_of(1).in_segments_of(8)).unwrap();
    let refused = pool.lend_through(Arc::clone(&world.broker) as Arc<dyn Broker>).unwrap_err();
    assert!(matches!(refused, PoolError::InvalidConfig { .. }), "{refused}");
}
