//! Copies in other devices' memory: wakes read them, and whatever becomes of them, every byte is right and nothing of them
//! is left.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use poorwill_core::lend::Broker;
use poorwill_core::peer::{Peer, PeerMemory};
use poorwill_core::{
    AllocRequest, Block, BlockId, Level, Op, Pool, PoolConfig, PoolError, SleepReport, SleepRequest,
    StreamId, Tag, Verify, WakeReport, WakeRequest,
};
use poorwill_testkit::broker::HeldMemory;
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::pattern;
use poorwill_testkit::peer::TestPeer;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const CHUNK: u64 = 4;
const DEVICE: u64 = 96;
const PEERS: usize = 2;

struct World {
    device: TestDevice,
    /// The other devices.
    others: Vec<TestDevice>,
    peers: Vec<Arc<TestPeer>>,
    brokers: Vec<Arc<HeldMemory>>,
    pool: Pool,
    granule: u64,
    /// The number of the driver's call that fails next; 0: none.
    failing: Arc<AtomicU64>,
    /// Brokers that ask for all before anything is mapped.
    asks: Arc<Mutex<Option<Vec<Arc<HeldMemory>>>>>,
}

impl World {
    fn open() -> Option<Self> {
        let device = TestDevice::open(DEVICE);
        if skipped_unless(
            |_| device.info().memory_name.is_some(),
            "the device has no descriptors of its memory",
        ) {
            return None;
        }
        let failing = Arc::new(AtomicU64::new(0));
        let (countdown, asks) = (Arc::clone(&failing), Arc::new(Mutex::new(None::<Vec<Arc<HeldMemory>>>)));
        let asking = Arc::clone(&asks);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            if call.op == Op::Create {
                let brokers = asking.lock().unwrap().take().unwrap_or_default();
                brokers.iter().for_each(|broker| _ = broker.have_given_up(u64::MAX));
            }
            let left =
                countdown.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            if left != Ok(1) || matches!(call.op, Op::EventQuery | Op::EventDestroy) {
                return Verdict::Pass;
            }
            Verdict::device_failure(call)
        });
        let driver = driver.with_info(|info| info.fast_digests = true);
        let config = PoolConfig::default().in_chunks_of(CHUNK).in_spans_of(4 * CHUNK).in_segments_of(8);
        let pool = Pool::new(Arc::new(driver), config.keeping_backups(true)).unwrap();
        let others: Vec<TestDevice> = (0..PEERS).map(|_| TestDevice::open(DEVICE)).collect();
        let peers: Vec<Arc<TestPeer>> =
            others.iter().map(|other| Arc::new(TestPeer::new(other.driver()))).collect();
        let brokers: Vec<Arc<HeldMemory>> = (0..PEERS).map(|_| Arc::default()).collect();
        let peer = |(memory, broker): (&Arc<TestPeer>, &Arc<HeldMemory>)| Peer {
            memory: Arc::clone(memory) as Arc<dyn PeerMemory>,
            broker: Arc::clone(broker) as Arc<dyn Broker>,
        };
        pool.copy_to(peers.iter().zip(&brokers).map(peer).collect()).unwrap();
        let granule = device.info().granule_bytes;
        Some(Self { device, others, peers, brokers, pool, granule, failing, asks })
    }

    fn loaded(&self, granules: u64, seed: u64) -> Block {
        let bytes = granules * self.granule;
        let block = self.pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
        self.fill(block.id, seed, bytes);
        block
    }

    fn fill(&self, block: BlockId, seed: u64, bytes: u64) {
        pattern::fill(&self.pool, block, seed, usize::try_from(bytes).unwrap()).unwrap();
    }

    fn assert_reads(&self, block: &Block, seed: u64) {
        let len = usize::try_from(block.requested_bytes).unwrap();
        assert!(pattern::read(&self.pool, block.id, len).unwrap() == pattern::bytes(seed, len), "{block:?}");
    }

    fn sleep(&self) -> SleepReport {
        self.pool.sleep(&SleepRequest::all(Level::One)).unwrap()
    }

    fn wake(&self) -> WakeReport {
        self.pool.wake(&WakeRequest::all()).unwrap()
    }

    /// From then on the chunks are laid out as wakes do it, and all have copies.
    fn settle(&self) {
        for _ in 0..2 {
            self.sleep();
            self.wake();
        }
    }

    fn granules(&self, bytes: u64) -> u64 {
        assert_eq!(bytes % self.granule, 0);
        bytes / self.granule
    }

    /// What the brokers hold, in granules.
    fn held(&self) -> u64 {
        self.brokers.iter().map(|broker| self.granules(broker.held_bytes())).sum()
    }

    /// Closes the pool, and looks for what is left.
    fn end(self) {
        self.pool.close().unwrap();
        assert_eq!(self.held(), 0, "a closed pool leaves no copies");
        let devices = self.others.iter().chain([&self.device]);
        for device in devices {
            let info = device.memory_info().unwrap();
            assert_eq!(info.free_bytes, info.total_bytes, "{device}");
        }
    }
}

#[test]
fn wakes_read_copies_that_are_made_once() {
    let Some(world) = World::open() else { return };
    let blocks: Vec<Block> = (0..3).map(|seed| world.loaded(5 + 4 * seed, seed)).collect();
    let all = 5 + 9 + 13;
    for round in 0..4 {
        let slept = world.sleep();
        // The first wake lays the chunks out anew.
        let is_made = round < 2;
        assert_eq!(world.granules(slept.peer_bytes), if is_made { all } else { 0 }, "round {round}");
        assert_eq!(world.granules(slept.released_bytes), all, "what copies take is not this device's");
        assert_eq!((world.held(), world.granules(world.pool.stats().unwrap().peer_bytes)), (all, all));
        let woken = world.wake();
        assert_eq!((world.granules(woken.peer_bytes), world.granules(woken.copied_bytes)), (all, all));
        assert_eq!((woken.read_bytes, woken.verified_bytes), (0, woken.copied_bytes), "round {round}");
        for (seed, block) in (0..).zip(&blocks) {
            world.assert_reads(block, seed);
        }
        assert_eq!(world.held(), all, "brokers have them, awake or asleep");
    }
    world.end();
}

#[test]
fn what_brokers_gave_up_comes_from_backups_and_is_copied_again() {
    let Some(world) = World::open() else { return };
    let blocks: Vec<Block> = (0..6).map(|seed| world.loaded(CHUNK * (1 + seed % 3), seed)).collect();
    let all: u64 = (0..6).map(|seed| CHUNK * (1 + seed % 3)).sum();
    let mut gone = 0;
    world.settle();
    for taken in [1, 9, 17, 10_000] {
        assert_eq!(world.granules(world.sleep().peer_bytes), gone, "what was gone");
        gone = world.granules(world.brokers[0].give_up(taken * world.granule));
        let woken = world.wake();
        assert_eq!(world.granules(woken.peer_bytes), all - gone);
        assert_eq!(world.granules(woken.copied_bytes), all);
        for (seed, block) in (0..).zip(&blocks) {
            world.assert_reads(block, seed);
        }
    }
    world.end();
}

#[test]
fn what_was_given_up_awake_is_copied_by_the_next_sleep() {
    let Some(world) = World::open() else { return };
    let block = world.loaded(4 * CHUNK, 1);
    world.settle();
    world.brokers.iter().for_each(|broker| _ = broker.give_up(u64::MAX));
    assert_eq!(world.granules(world.sleep().peer_bytes), 4 * CHUNK);
    assert_eq!(world.granules(world.wake().peer_bytes), 4 * CHUNK);
    world.assert_reads(&block, 1);
    world.end();
}

/// A neighbour that needs its memory has it, though a wake is reading there.
#[test]
fn what_a_wake_has_at_hand_is_given_up_when_a_broker_asks() {
    let Some(world) = World::open() else { return };
    let blocks: Vec<Block> = (0..5).map(|seed| world.loaded(2 * CHUNK, seed)).collect();
    world.settle();
    world.sleep();
    *world.asks.lock().unwrap() = Some(world.brokers.clone());
    let woken = world.wake();
    assert!(world.asks.lock().unwrap().is_none(), "the broker asked");
    assert_eq!((woken.peer_bytes, world.granules(woken.copied_bytes)), (0, 10 * CHUNK));
    for (seed, block) in (0..).zip(&blocks) {
        world.assert_reads(block, seed);
    }
    assert_eq!(world.held(), 0);
    world.end();
}

#[test]
fn a_panic_in_a_wake_leaves_copies_with_their_brokers() {
    let Some(world) = World::open() else { return };
    let block = world.loaded(4 * CHUNK, 1);
    world.settle();
    world.sleep();
    let request = WakeRequest::all().telling(|_| panic!("on purpose"));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.pool.wake(&request)));
    assert!(panicked.is_err());
    assert_eq!(world.held(), 4 * CHUNK);
    assert_eq!(world.granules(world.wake().peer_bytes), 4 * CHUNK);
    world.assert_reads(&block, 1);
    world.end();
}

#[test]
fn what_changed_is_copied_anew_and_the_rest_stays() {
    let Some(world) = World::open() else { return };
    let (changing, same) = (world.loaded(2 * CHUNK, 1), world.loaded(3 * CHUNK, 2));
    world.sleep();
    world.wake();
    world.sleep();
    for seed in 10..14 {
        world.wake();
        world.fill(changing.id, seed, changing.requested_bytes);
        if seed % 2 == 0 {
            // Its backup is current then, before the sleep looks.
            world.pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap().wait().unwrap();
        }
        assert_eq!(world.granules(world.sleep().peer_bytes), 2 * CHUNK);
        assert_eq!(world.held(), 5 * CHUNK);
        let woken = world.wake();
        assert_eq!((world.granules(woken.peer_bytes), woken.read_bytes), (5 * CHUNK, 0));
        world.assert_reads(&changing, seed);
        world.assert_reads(&same, 2);
        world.sleep();
    }
    world.wake();
    world.end();
}

#[test]
fn a_spoiled_copy_gives_no_wrong_byte() {
    let Some(world) = World::open() else { return };
    let block = world.loaded(3 * CHUNK, 4);
    world.sleep();
    let broker = world.brokers.iter().find(|broker| broker.held_bytes() > 0).unwrap();
    let taken = broker.take().unwrap();
    let range = world.device.reserve(taken.bytes).unwrap();
    let backing = world.device.import(taken.descriptor.as_fd(), taken.bytes).unwrap();
    world.device.map(range, backing).unwrap();
    world.device.set_access(range).unwrap();
    let second = range.slice(world.granule, world.granule).unwrap();
    world.device.zero(StreamId::DEFAULT, second).unwrap().wait().unwrap();
    world.device.unmap(range).unwrap();
    world.device.release(backing).unwrap();
    world.device.unreserve(range).unwrap();
    let spoiled = world.granules(taken.bytes);
    broker.lend(vec![taken]).unwrap();
    for round in 0..3 {
        // A sample would hardly find it, and the next sleep would take it for a change of the owner's.
        world.pool.wake(&WakeRequest::all().verifying(Verify::Sample)).unwrap();
        world.assert_reads(&block, 4);
        let left = if round == 0 { 3 * CHUNK - spoiled } else { 3 * CHUNK };
        assert_eq!(world.held(), left, "round {round}: what differs is not kept");
        let slept = world.sleep();
        assert_eq!(slept.copied_bytes, 0, "round {round}: nothing has changed");
    }
    world.wake();
    world.end();
}

#[test]
fn peers_that_fail_or_are_full_cost_nothing_but_the_copies() {
    let Some(world) = World::open() else { return };
    let blocks: Vec<Block> = (0..3).map(|seed| world.loaded(4 * CHUNK, seed)).collect();
    let check = |copied: u64| {
        assert_eq!(world.granules(world.sleep().peer_bytes), copied);
        let woken = world.wake();
        assert_eq!(world.granules(woken.copied_bytes), 12 * CHUNK);
        for (seed, block) in (0..).zip(&blocks) {
            world.assert_reads(block, seed);
        }
        world.brokers.iter().for_each(|broker| _ = broker.give_up(u64::MAX));
        woken.peer_bytes
    };
    world.settle();
    world.brokers.iter().for_each(|broker| _ = broker.give_up(u64::MAX));
    world.peers.iter().for_each(|peer| peer.set_idle(4 * CHUNK * world.granule - 1));
    assert_eq!(check(0), 0, "none has room for a chunk");
    world.peers.iter().for_each(|peer| peer.set_idle(5 * CHUNK * world.granule));
    assert_eq!(world.granules(check(8 * CHUNK)), 8 * CHUNK, "one chunk each");
    world.peers[0].set_idle(u64::MAX);
    world.peers[0].set_failing(true);
    assert_eq!(world.granules(check(4 * CHUNK)), 4 * CHUNK, "one has less than it says");
    world.peers[1].set_idle(u64::MAX);
    world.brokers[1].fail(true);
    assert_eq!(check(0), 0, "its broker has ended");
    world.brokers[1].fail(false);
    assert_eq!(world.granules(check(12 * CHUNK)), 12 * CHUNK);
    world.end();
}

#[test]
fn what_is_freed_dropped_or_discarded_leaves_no_copy() {
    let Some(world) = World::open() else { return };
    let (first, second) = (world.loaded(2 * CHUNK, 1), world.loaded(CHUNK, 2));
    world.sleep();
    world.pool.free(first.id).unwrap();
    world.wake();
    world.assert_reads(&second, 2);
    world.pool.trim().unwrap();
    world.sleep();
    assert_eq!(world.held(), CHUNK, "the other block has gone");
    world.pool.discard(&[Tag::weights()]).unwrap();
    assert_eq!(world.held(), 0, "at once");
    world.wake();
    world.fill(second.id, 3, second.requested_bytes);
    world.pool.mark_restored(&[Tag::weights()]).unwrap();
    assert_eq!(world.granules(world.sleep().peer_bytes), CHUNK);
    world.wake();
    world.assert_reads(&second, 3);
    world.pool.sleep(&SleepRequest::all(Level::Two)).unwrap();
    assert_eq!(world.held(), 0, "at once");
    world.wake();
    world.fill(second.id, 4, second.requested_bytes);
    world.pool.mark_restored(&[Tag::weights()]).unwrap();
    world.sleep();
    assert_eq!(world.held(), CHUNK);
    world.pool.free(second.id).unwrap();
    world.wake();
    let other = Tag::new("other").unwrap();
    world.pool.alloc(&AllocRequest::new(world.granule, other)).unwrap();
    world.sleep();
    assert_eq!(world.held(), 0, "its tag has no blocks");
    world.end();
}

#[test]
fn peers_are_given_once() {
    let Some(world) = World::open() else { return };
    let again = world.pool.copy_to(Vec::new()).unwrap_err();
    assert!(again.to_string().contains("already"), "{again}");
    world.end();
}

/// Whatever call fails, bytes are right or an error says so, and the next try succeeds.
#[test]
fn a_call_that_fails_costs_no_byte() {
    let mut calls = (1..).step_by(DeviceKind::of_this_run().stride());
    while calls.next().is_some_and(|call| {
        let Some(world) = World::open() else { return false };
        let block = world.loaded(2 * CHUNK + 1, 5);
        let small = world.loaded(1, 6);
        world.sleep();
        world.wake();
        world.failing.store(call, Ordering::Relaxed);
        let mut left = call;
        for _ in 0..2 {
            let slept = world.pool.sleep(&SleepRequest::all(Level::One));
            let is_known = |error: &PoolError| {
                use PoolError::{Driver, Shortfall, SleepFailed, Stranded};
                matches!(error, Driver { .. } | Shortfall { .. } | SleepFailed { .. } | Stranded { .. })
            };
            assert!(slept.as_ref().err().is_none_or(is_known), "{slept:?}");
            let woken = world.pool.wake(&WakeRequest::all());
            if woken.is_err() {
                world.pool.wake(&WakeRequest::all()).unwrap();
            }
            left = world.failing.swap(0, Ordering::Relaxed);
            world.assert_reads(&block, 5);
            world.assert_reads(&small, 6);
            world.failing.store(left, Ordering::Relaxed);
        }
        world.failing.store(0, Ordering::Relaxed);
        world.sleep();
        world.wake();
        world.assert_reads(&block, 5);
        world.end();
        left == 0
    }) {}
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Alloc(u64),
    Write(usize),
    Free(usize),
    Prepare,
    Cycle,
    GiveUp(usize, u64),
    Full(usize, bool),
    Broker(usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (1..=14u64).prop_map(Step::Alloc),
        2 => any::<usize>().prop_map(Step::Write),
        1 => any::<usize>().prop_map(Step::Free),
        1 => Just(Step::Prepare),
        4 => Just(Step::Cycle),
        2 => (0..PEERS, 1..30u64).prop_map(|(peer, granules)| Step::GiveUp(peer, granules)),
        1 => (0..PEERS, any::<bool>()).prop_map(|(peer, fails)| Step::Full(peer, fails)),
        1 => (0..PEERS, any::<bool>()).prop_map(|(peer, fails)| Step::Broker(peer, fails)),
    ]
}

/// Blocks with the seed of their bytes.
fn take(world: &World, live: &mut Vec<(Block, u64)>, seed: u64, step: Step) {
    match step {
        Step::Alloc(granules) => {
            if live.iter().map(|(block, _)| block.range.bytes).sum::<u64>() + granules * world.granule
                <= DEVICE / 2 * world.granule
            {
                live.push((world.loaded(granules, seed), seed));
            }
        }
        Step::Write(nth) if !live.is_empty() => {
            let nth = nth % live.len();
            world.fill(live[nth].0.id, seed, live[nth].0.requested_bytes);
            live[nth].1 = seed;
        }
        Step::Free(nth) if !live.is_empty() => {
            let (block, _) = live.swap_remove(nth % live.len());
            world.pool.free(block.id).unwrap();
        }
        Step::Prepare => {
            _ = world.pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap().wait().unwrap();
        }
        Step::Cycle => {
            world.sleep();
            let woken = world.wake();
            assert!(woken.peer_bytes <= woken.copied_bytes, "{woken:?}");
            live.iter().for_each(|(block, seed)| world.assert_reads(block, *seed));
        }
        Step::GiveUp(peer, granules) => _ = world.brokers[peer].give_up(granules * world.granule),
        Step::Full(peer, fails) => world.peers[peer].set_failing(fails),
        Step::Broker(peer, fails) => world.brokers[peer].fail(fails),
        Step::Write(_) | Step::Free(_) => {}
    }
}

#[test]
fn random_steps_never_give_a_wrong_byte() {
    let cases = DeviceKind::of_this_run().cases(64);
    let steps = prop::collection::vec(step(), 1..40);
    let tried = TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(cases) }).run(
        &steps,
        |steps| {
            let Some(world) = World::open() else { return Ok(()) };
            let mut live = Vec::new();
            for (seed, step) in (1..).zip(steps) {
                take(&world, &mut live, seed, step);
            }
            take(&world, &mut live, 0, Step::Cycle);
            world.brokers.iter().for_each(|broker| broker.fail(false));
            world.end();
            Ok(())
        },
    );
    tried.unwrap();
}
