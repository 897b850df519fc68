//! What other threads do during a driver call. No spoiled backup is forgotten, none of their bytes are lost with one,
//! and no wait becomes longer than its deadline.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use poorwill_core::backup::Backups;
use poorwill_core::{
    AllocRequest, Block, Driver, DriverErrorKind, HostBuffer, Level, Op, Pool, PoolConfig, PoolError,
    SleepRequest, StreamId, Tag, TagState, Verify, WakeRequest,
};
use poorwill_testkit::backups::{Coding, TestBackups};
use poorwill_testkit::clock::Clock;
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use poorwill_testkit::watchdog::watched;

type Act = dyn Fn(&Pool, Call) + Send + Sync;

/// A pool, and an action during a call of its driver.
#[derive(Default)]
struct Midst {
    pool: OnceLock<Weak<Pool>>,
    act: Mutex<Option<Arc<Act>>>,
    /// Whether digests fail for lack of host memory.
    fails: AtomicBool,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Midst {
    fn set(&self, act: impl Fn(&Pool, Call) + Send + Sync + 'static) {
        *self.act.lock().unwrap() = Some(Arc::new(act));
    }

    fn call(&self, call: Call) {
        let Some(pool) = self.pool.get().and_then(Weak::upgrade) else { return };
        let act = self.act.lock().unwrap().clone();
        if let Some(act) = act.filter(|_| !INSIDE.replace(true)) {
            act(&pool, call);
            INSIDE.set(false);
        }
    }
}

struct World {
    pool: Arc<Pool>,
    store: TestBackups,
    midst: Arc<Midst>,
    clock: Arc<Clock>,
    _device: TestDevice,
}

fn world(config: PoolConfig) -> World {
    let device = TestDevice::open(256);
    let midst = Arc::new(Midst::default());
    let inside = Arc::clone(&midst);
    let clock = Arc::new(Clock::default());
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        inside.call(call);
        match call.op == Op::Digest && inside.fails.load(Ordering::Relaxed) {
            true => Verdict::Fail(DriverErrorKind::OutOfHostMemory { asked_bytes: 1, reason: "test".into() }),
            false => Verdict::Pass,
        }
    });
    let driver: Arc<dyn Driver> = Arc::new(driver.by(&clock).with_info(|info| info.fast_digests = true));
    let store = TestBackups::new(&driver, Coding::Xored, u64::MAX);
    let backups: Arc<dyn Backups> = Arc::new(store.clone());
    let pool = Arc::new(Pool::with_backups(driver, config, backups).unwrap());
    midst.pool.set(Arc::downgrade(&pool)).unwrap();
    World { pool, store, midst, clock, _device: device }
}

fn small() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8)
}

fn load(pool: &Pool, bytes: u64, seed: u64) -> (Block, Vec<u8>) {
    let block = pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
    let known = pattern::bytes(seed, usize::try_from(bytes).unwrap());
    let src = Arc::new(HostBuffer::from(known.clone()));
    pool.write(StreamId::DEFAULT, block.id, 0, src, 0, bytes).unwrap().wait().unwrap();
    (block, known)
}

fn level_1() -> SleepRequest {
    SleepRequest::all(Level::One)
}

/// A block that is new while the backup of the old bytes is being updated is not lost with that backup.
#[test]
fn a_new_block_is_not_lost_with_a_backup_that_is_being_prepared() {
    // The granules digested first: all of the first extent, which is out of the index then.
    replaced_while_prepared(4);
}

/// Nor one that is new while the device's bytes are compared with a spoiled backup.
#[test]
fn a_new_block_is_not_lost_while_a_spoiled_backup_is_compared() {
    // The one granule that has spoiled.
    replaced_while_prepared(1);
}

/// A block is freed and another made in its place when the device is asked to digest so many granules.
fn replaced_while_prepared(granules: u64) {
    let World { pool, store, midst, .. } = &world(small());
    let granule = pool.driver().info().granule_bytes;
    let (old, _) = load(pool, 128 * granule, 1);
    pool.sleep(&level_1()).unwrap();
    store.spoil(1);
    pool.wake(&WakeRequest::all().verifying(Verify::Sample)).unwrap();
    let new = Arc::new(Mutex::new(None));
    let (once, made) = (AtomicBool::new(false), Arc::clone(&new));
    midst.set(move |pool, call| {
        let is_it = call.op == Op::Digest && !call.waiting && call.bytes == granules * granule;
        if is_it && !once.swap(true, Ordering::Relaxed) {
            pool.free(old.id).unwrap();
            *made.lock().unwrap() = Some(load(pool, 128 * granule, 2));
        }
    });
    let prepared = pool.prepare_sleep(&level_1()).unwrap().wait();
    let (block, known) = new.lock().unwrap().take().unwrap();
    assert_eq!(block.range, old.range, "where the other was");
    assert_eq!(pool.lost_ranges().unwrap(), [], "nobody but its owner has touched it: {prepared:?}");
    prepared.unwrap();
    assert_eq!(pool.tag_state(&Tag::weights()).unwrap(), TagState::Awake);
    assert!(pattern::read(pool, block.id, known.len()).unwrap() == known);
    pool.sleep(&level_1()).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    assert!(pattern::read(pool, block.id, known.len()).unwrap() == known);
}

/// A block in the place of one that was freed during the wake is not lost with the old backup.
#[test]
fn a_new_block_is_not_lost_with_the_backup_of_one_that_was_freed_during_a_wake() {
    let World { pool, store, midst, .. } = &world(small());
    let granule = pool.driver().info().granule_bytes;
    let blocks: Vec<(Block, Vec<u8>)> = (0..200).map(|seed| load(pool, granule / 2, seed)).collect();
    pool.sleep(&level_1()).unwrap();
    store.spoil(5);
    // Two to a granule, one after the other.
    let spoiled = blocks[10].0.range.addr..blocks[11].0.range.end();
    assert!(spoiled.start.is_multiple_of(granule) && spoiled.end - spoiled.start == granule);
    let (freed, rest): (Vec<_>, Vec<_>) =
        blocks.into_iter().partition(|(block, _)| spoiled.contains(&block.range.addr));
    assert_eq!(freed.len(), 2);
    let once = AtomicBool::new(false);
    let freed: Vec<_> = freed.into_iter().map(|(block, _)| block.id).collect();
    midst.set(move |pool, call| {
        if call.op == Op::CopyToDevice && !call.waiting && !once.swap(true, Ordering::Relaxed) {
            freed.iter().for_each(|block| pool.free(*block).unwrap());
        }
    });
    pool.wake(&WakeRequest::all().verifying(Verify::Sample)).unwrap();
    let (block, known) = load(pool, granule / 2, 1000);
    assert!(spoiled.contains(&block.range.addr), "where others were");
    let slept = pool.sleep(&level_1());
    assert_eq!(pool.lost_ranges().unwrap(), [], "{slept:?}");
    slept.unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    assert!(pattern::read(pool, block.id, known.len()).unwrap() == known);
    assert!(rest.iter().all(|(block, known)| pattern::read(pool, block.id, known.len()).unwrap() == *known));
}

/// A spoiled backup that was loaded unseen stays suspect until it is checked. That also holds when a block is made
/// beside it while it is being updated.
#[test]
fn a_spoiled_backup_is_not_forgotten_because_a_block_is_made_beside_it() {
    let World { pool, store, midst, .. } = &world(small());
    let granule = pool.driver().info().granule_bytes;
    let mut blocks: Vec<(Block, Vec<u8>)> = (0..200).map(|seed| load(pool, granule / 2, seed)).collect();
    pool.sleep(&level_1()).unwrap();
    // Granules 4 to 7 are stored together, two blocks in each.
    store.spoil(6);
    pool.wake(&WakeRequest::all().verifying(Verify::Sample)).unwrap();
    assert!(pattern::read(pool, blocks[13].0.id, 2048).unwrap() != blocks[13].1, "unseen");
    let hole = blocks[10].0.range.addr..blocks[11].0.range.end();
    for (block, _) in blocks.drain(10..12) {
        pool.free(block.id).unwrap();
    }
    assert_eq!(pool.trim().unwrap(), granule);
    let new = Arc::new(Mutex::new(None));
    let (once, made) = (AtomicBool::new(false), Arc::clone(&new));
    midst.set(move |pool, call| {
        let is_it = call.op == Op::Digest && !call.waiting && call.bytes == 3 * granule;
        if is_it && !once.swap(true, Ordering::Relaxed) {
            *made.lock().unwrap() = Some(load(pool, granule / 2, 1000));
        }
    });
    let prepared = pool.prepare_sleep(&level_1()).unwrap().wait();
    let (block, known) = new.lock().unwrap().take().unwrap();
    assert!(hole.contains(&block.range.addr), "beside what is prepared");
    blocks.push((block, known));
    let slept = pool.sleep(&level_1());
    if slept.is_ok() {
        pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
    }
    let lost = pool.lost_ranges().unwrap();
    for (block, known) in &blocks {
        if lost.iter().all(|lost| lost.block != block.id) {
            let is_right = pattern::read(pool, block.id, known.len()).unwrap() == *known;
            assert!(is_right, "{}: wrong, and {prepared:?}, {slept:?}", block.id);
        }
    }
    assert!(!lost.is_empty());
}

/// Nor when the update panics: a caller's storage or driver may panic.
#[test]
fn a_spoiled_backup_is_not_forgotten_when_its_preparation_panics() {
    let World { pool, store, midst, .. } = &world(small());
    let granule = pool.driver().info().granule_bytes;
    let (block, known) = load(pool, 128 * granule, 1);
    pool.sleep(&level_1()).unwrap();
    store.spoil(1);
    pool.wake(&WakeRequest::all().verifying(Verify::Sample)).unwrap();
    let once = AtomicBool::new(false);
    midst.set(move |_, call| {
        let is_first = call.op == Op::Digest && !once.swap(true, Ordering::Relaxed);
        assert!(!is_first, "a panic of the driver");
    });
    pool.prepare_sleep(&level_1()).unwrap().wait().unwrap_err();
    match pool.sleep(&level_1()) {
        Ok(_) => {
            pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
            assert!(
                pattern::read(pool, block.id, known.len()).unwrap() == known,
                "wrong, and nobody says so"
            );
        }
        Err(error) => assert!(matches!(error, PoolError::Lost { .. } | PoolError::Poisoned), "{error}"),
    }
}

/// Bytes on the device are not lost because a query of them failed.
#[test]
fn bytes_that_cannot_be_queried_are_not_lost() {
    let World { pool, store, midst, .. } = &world(small());
    let granule = pool.driver().info().granule_bytes;
    let (block, known) = load(pool, 128 * granule, 1);
    pool.sleep(&level_1()).unwrap();
    pool.wake(&WakeRequest::all().verifying(Verify::Sample)).unwrap();
    // The device has the right bytes.
    store.spoil(1);
    midst.fails.store(true, Ordering::Relaxed);
    let dropped = pool.drop_backups(None);
    midst.fails.store(false, Ordering::Relaxed);
    assert_eq!(pool.lost_ranges().unwrap(), [], "{dropped:?}");
    assert!(pattern::read(pool, block.id, known.len()).unwrap() == known);
    // Now it can be queried, and has what was stored.
    pool.drop_backups(None).unwrap();
    pool.sleep(&level_1()).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    assert!(pattern::read(pool, block.id, known.len()).unwrap() == known);
}

/// A request that waits at the limit is refused at its deadline, however much others free meanwhile.
#[test]
fn a_request_is_refused_in_time_while_others_free_and_allocate() {
    const ROUNDS: u64 = 2_000;
    watched(|| {
        let granule = TestDevice::open(1).info().granule_bytes;
        let World { pool, midst, clock, .. } = &world(small().limited_to(8 * granule));
        let tag = Tag::runtime();
        pool.alloc(&AllocRequest::new(4 * granule, Tag::weights())).unwrap();
        let small = AllocRequest::new(512, tag);
        pool.alloc(&small).unwrap();
        pool.free(pool.alloc(&small).unwrap().id).unwrap();
        let rounds = Arc::new(AtomicU64::new(0));
        let (counted, ticking) = (Arc::clone(&rounds), Arc::clone(clock));
        midst.set(move |pool, call| {
            // Another thread, which goes on allocating and freeing for a while.
            if call.op == Op::Capturing && counted.fetch_add(1, Ordering::Relaxed) < ROUNDS {
                ticking.advance(Duration::from_secs(1));
                pool.free(pool.alloc(&small).unwrap().id).unwrap();
            }
        });
        let request = AllocRequest::new(6 * granule, Tag::weights()).within(Duration::from_secs(10));
        let refused = pool.alloc(&request).unwrap_err();
        let rounds = rounds.load(Ordering::Relaxed);
        assert!(rounds < 100, "it waited for {rounds} s instead of 10: {refused}");
        assert!(matches!(refused, PoolError::TimedOut { .. } | PoolError::OverLimit { .. }), "{refused}");
    });
}
