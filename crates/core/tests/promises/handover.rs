//! Others allocate while a wake maps, and while a sleep unmaps and releases. A waiting thread gets the lock of
//! physical memory between two groups of mappings. Memory reserved for the wake stays its own.
//!
//! A script stops the thread that holds the lock, in the driver, until the other is known to wait for the lock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::thread;

use poorwill_core::{
    AllocRequest, Block, Level, Op, Pool, PoolConfig, PoolError, SleepRequest, Tag, TagState, WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::{eventually, watched};

/// The thread of the long sleep or wake.
const MOVER: &str = "mover";
/// The thread that needs memory meanwhile.
const OTHER: &str = "other";
/// Granules that sleep: in mappings of two, so several groups.
const ASLEEP: u64 = 160;
const LIMIT: u64 = 170;
/// Granules of a mapping.
const PIECE: u64 = 2;
/// Reclaimable granules when the wake begins.
const IDLE: u64 = 40;

/// Stops the mover at some of its calls.
#[derive(Default)]
struct Script {
    pool: OnceLock<Weak<Pool>>,
    /// The call at which the mover waits until the other thread waits, too, or has ended.
    stops_at: Mutex<Option<Op>>,
    /// Starts the other thread.
    begin: Mutex<Option<mpsc::Sender<()>>>,
    other_is_done: AtomicBool,
    /// Calls that move memory, by thread.
    log: Mutex<Vec<(String, Op)>>,
    /// So many of the mover's calls pass before one fails.
    passing: AtomicU64,
}

impl Script {
    fn ask(&self, call: Call) -> Verdict {
        let who = thread::current().name().unwrap_or_default().to_owned();
        let moves = matches!(call.op, Op::Create | Op::Map | Op::SetAccess | Op::Unmap | Op::Release);
        if !moves || !(who == MOVER || who == OTHER) {
            return Verdict::Pass;
        }
        let is_mover = who == MOVER;
        if is_mover && *self.stops_at.lock().unwrap() == Some(call.op) {
            drop(self.begin.lock().unwrap().take());
            let pool = self.pool.get().and_then(Weak::upgrade).unwrap();
            let done = || self.other_is_done.load(Ordering::Acquire);
            eventually("the other one waits", || done() || pool.waiting_for_turn() > 0);
        }
        self.log.lock().unwrap().push((who, call.op));
        if is_mover && self.passing.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Verdict::device_failure(call);
        }
        Verdict::Pass
    }

    /// The log's last entry of a call of a thread.
    fn last(&self, who: &str, op: Op) -> Option<usize> {
        self.log.lock().unwrap().iter().rposition(|(by, called)| by == who && *called == op)
    }
}

struct World {
    device: TestDevice,
    pool: Arc<Pool>,
    script: Arc<Script>,
}

impl World {
    fn new(limit_granules: Option<u64>) -> Self {
        let device = TestDevice::open(256);
        let script = Arc::new(Script { passing: AtomicU64::new(u64::MAX), ..Script::default() });
        let asked = Arc::clone(&script);
        let driver = ScriptedDriver::new(device.driver(), move |call| asked.ask(call));
        let limit_bytes = limit_granules.map(|granules| granules * device.info().granule_bytes);
        let config = PoolConfig::default().in_chunks_of(PIECE).in_spans_of(PIECE).in_segments_of(4);
        let config = config.limited_to(limit_bytes);
        let pool = Arc::new(Pool::new(Arc::new(driver), config).unwrap());
        script.pool.set(Arc::downgrade(&pool)).unwrap();
        Self { device, pool, script }
    }

    fn granule(&self) -> u64 {
        self.device.info().granule_bytes
    }

    fn alloc(&self, granules: u64, tag: Tag) -> Result<Block, PoolError> {
        self.pool.alloc(&AllocRequest::new(granules * self.granule(), tag))
    }

    /// Runs `moves` on one thread, which stops at every `op`, and `others` on another, which begins after the first
    /// stop.
    fn beside<T: Send, U: Send>(
        &self,
        op: Op,
        moves: impl FnOnce() -> T + Send,
        others: impl FnOnce() -> U + Send,
    ) -> (T, U) {
        self.script.log.lock().unwrap().clear();
        self.script.other_is_done.store(false, Ordering::Release);
        *self.script.stops_at.lock().unwrap() = Some(op);
        let (begin, begun) = mpsc::channel();
        *self.script.begin.lock().unwrap() = Some(begin);
        let ended = thread::scope(|scope| {
            let other = move || {
                begun.recv().unwrap_err(); // Dropped: now.
                let done = others();
                self.script.other_is_done.store(true, Ordering::Release);
                done
            };
            let other = thread::Builder::new().name(OTHER.into()).spawn_scoped(scope, other).unwrap();
            let mover = thread::Builder::new().name(MOVER.into()).spawn_scoped(scope, moves).unwrap();
            let moved = mover.join().unwrap();
            // It may have failed before it stopped.
            drop(self.script.begin.lock().unwrap().take());
            (moved, other.join().unwrap())
        });
        *self.script.stops_at.lock().unwrap() = None;
        ended
    }

    fn sleep(&self) {
        self.pool.sleep(&SleepRequest::of([Tag::kv_cache()], Level::One)).unwrap();
    }

    /// Blocks of `granules`, until there is no more memory.
    fn alloc_all(&self, granules: u64) -> Vec<Block> {
        let mut blocks = Vec::new();
        loop {
            match self.alloc(granules, Tag::runtime()) {
                Ok(block) => blocks.push(block),
                Err(PoolError::OverLimit { .. }) => return blocks,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn free(&self, blocks: &[Block]) {
        blocks.iter().for_each(|block| self.pool.free(block.id).unwrap());
    }
}

#[test]
fn others_allocate_while_a_wake_maps() {
    watched(|| {
        let world = World::new(None);
        world.alloc(ASLEEP, Tag::kv_cache()).unwrap();
        world.sleep();
        let wake = || world.pool.wake(&WakeRequest::all());
        let (woken, block) = world.beside(Op::Map, wake, || world.alloc(3, Tag::runtime()));
        woken.unwrap();
        block.unwrap();
        let [other, mover] = [OTHER, MOVER].map(|who| world.script.last(who, Op::Map).unwrap());
        assert!(other < mover, "it waited for the whole wake");
    });
}

#[test]
fn others_allocate_while_a_sleep_unmaps_and_releases() {
    watched(|| {
        for stop in [Op::Unmap, Op::Release] {
            let world = World::new(None);
            world.alloc(ASLEEP, Tag::kv_cache()).unwrap();
            let (_, block) = world.beside(stop, || world.sleep(), || world.alloc(3, Tag::runtime()));
            block.unwrap();
            let (other, mover) = (world.script.last(OTHER, Op::Map), world.script.last(MOVER, stop));
            assert!(other.unwrap() < mover.unwrap(), "it waited for all of {stop:?}");
            world.pool.wake(&WakeRequest::all()).unwrap();
        }
    });
}

/// Memory that a sleep has unmapped belongs to the sleep: others cannot have it before the sleep is sure to succeed.
#[test]
fn a_sleep_that_fails_while_others_allocate_is_undone() {
    watched(|| {
        let world = World::new(Some(LIMIT));
        let mut tenant = Tenant::new(&world.pool, 5);
        tenant.load(ASLEEP * world.granule(), &Tag::weights());
        let sleep = || world.pool.sleep(&SleepRequest::of([Tag::weights()], Level::One));
        for passing in (0..).step_by(DeviceKind::of_this_run().stride()) {
            world.script.passing.store(passing, Ordering::Relaxed);
            let within = AllocRequest::new(3 * world.granule(), Tag::runtime());
            let (slept, block) = world.beside(Op::Unmap, sleep, || world.pool.alloc(&within));
            world.script.passing.store(u64::MAX, Ordering::Relaxed);
            world.free(&[block.unwrap()]);
            let Err(error) = slept else { break };
            if let PoolError::SleepFailed { .. } = error {
                assert_eq!(world.pool.tag_state(&Tag::weights()).unwrap(), TagState::Awake);
            } else {
                assert!(matches!(error, PoolError::Shortfall { .. }), "{error}");
                world.pool.wake(&WakeRequest::all()).unwrap();
            }
            tenant.verify();
        }
        world.pool.wake(&WakeRequest::all()).unwrap();
        tenant.verify();
        assert!(world.pool.stats().unwrap().peak_mapped_bytes <= LIMIT * world.granule());
    });
}

/// Whichever call of the wake fails: memory released for it stays its own as long as it may need it. The limit holds,
/// and afterwards nothing is reserved.
#[test]
fn memory_released_for_a_wake_stays_its_own() {
    watched(|| {
        // Blocks of others as large as the wake's mappings, also beside free memory of other sizes. And one block of
        // all that is left, with no single granules free.
        for (others, of_other_sizes) in [(PIECE, &[1, 3][..]), (LIMIT - ASLEEP, &[])] {
            let stride = DeviceKind::of_this_run().stride();
            let mut calls = (0..).step_by(stride);
            while !wakes_beside_others(calls.next().unwrap(), others, of_other_sizes) {}
        }
    });
}

/// A wake of which `passing` calls pass, while others allocate blocks of so many granules. Returns whether it
/// succeeded.
fn wakes_beside_others(passing: u64, others: u64, of_other_sizes: &[u64]) -> bool {
    let world = World::new(Some(LIMIT));
    let limit_bytes = LIMIT * world.granule();
    world.alloc(ASLEEP, Tag::kv_cache()).unwrap();
    world.sleep();
    // Reclaimable memory of the mappings' size, more than the wake's first group takes.
    let idle = [IDLE].iter().chain(of_other_sizes);
    let idle: Vec<Block> = idle.map(|granules| world.alloc(*granules, Tag::runtime()).unwrap()).collect();
    world.free(&idle);
    let created_bytes = world.pool.stats().unwrap().created_bytes;
    world.script.passing.store(passing, Ordering::Relaxed);
    let wake = || world.pool.wake(&WakeRequest::all());
    let (woken, blocks) = world.beside(Op::Map, wake, || world.alloc_all(others));
    world.script.passing.store(u64::MAX, Ordering::Relaxed);
    let stats = world.pool.stats().unwrap();
    assert!(stats.peak_mapped_bytes <= limit_bytes, "call {passing}");
    let succeeded = woken.is_ok();
    if succeeded {
        assert_eq!(blocks.len() as u64 * others, LIMIT - ASLEEP, "all that the wake leaves");
        let created_bytes = stats.created_bytes - created_bytes;
        assert!(
            created_bytes <= limit_bytes - IDLE * world.granule(),
            "what was idle was given up for others"
        );
    } else {
        assert!(matches!(woken, Err(PoolError::WakeFailed { .. })), "call {passing}: {woken:?}");
    }
    world.free(&blocks);
    world.pool.discard(&[Tag::kv_cache()]).unwrap();
    world.pool.trim().unwrap();
    let whole = world.alloc(LIMIT, Tag::runtime()).unwrap();
    world.free(&[whole]);
    world.pool.close().unwrap();
    succeeded
}
