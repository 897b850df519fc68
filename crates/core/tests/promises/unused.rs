//! Sleeps that are given unused ranges: every other byte comes back, whatever fails, and what is unused costs neither a
//! copy nor host memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use poorwill_core::{
    Changes, DeviceRange, Driver, Level, Pool, PoolConfig, PoolError, SleepReport, SleepRequest, StoredAs,
    Tag, Verify, WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::storing::Storing;
use poorwill_testkit::tenant::{Known, Tenant};
use proptest::prelude::*;

const GRANULES: u64 = 96;

/// Failures in a row that a call has to get over.
const ATTEMPTS: usize = 9;

/// The number of the call that fails, where one does.
type FailingCall = Arc<AtomicU64>;

struct World {
    device: TestDevice,
    tenant: Tenant,
    /// Calls until one fails, where it is not 0.
    countdown: FailingCall,
}

impl World {
    fn new(storing: Storing, config: PoolConfig) -> Self {
        let device = TestDevice::open(GRANULES);
        let countdown = FailingCall::default();
        let calls = Arc::clone(&countdown);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            let before = calls.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
            if before == Ok(1) { Verdict::device_failure(call) } else { Verdict::Pass }
        });
        let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| info.fast_digests = true));
        let pool = Pool::new(driver, storing.of(config.in_segments_of(8))).unwrap();
        Self { device, tenant: Tenant::new(&Arc::new(pool), 7).storing(storing), countdown }
    }

    fn granule(&self) -> u64 {
        self.tenant.granule()
    }

    fn load(&mut self, granules: u64) -> usize {
        self.tenant.load(granules * self.granule(), &Tag::weights())
    }

    /// Of a block, in granules.
    fn range(&self, nth: usize, granules: std::ops::Range<u64>) -> DeviceRange {
        let block = self.tenant.blocks[nth].block.range;
        DeviceRange::new(
            block.addr + granules.start * self.granule(),
            (granules.end - granules.start) * self.granule(),
        )
    }

    fn sleep(&self, unused: &[DeviceRange]) -> SleepReport {
        self.tenant.pool.sleep(&request(unused)).unwrap()
    }

    fn wake(&mut self, unused: &[DeviceRange]) {
        self.tenant.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
        assert_eq!(self.tenant.pool.lost_ranges().unwrap(), []);
        self.adopt(unused);
        self.tenant.verify();
    }

    /// Bytes of whole unused granules are whatever they are.
    fn adopt(&mut self, unused: &[DeviceRange]) {
        let granule = self.granule();
        for Known { block, bytes, .. } in &mut self.tenant.blocks {
            let read = pattern::read(&self.tenant.pool, block.id, bytes.len()).unwrap();
            let first = block.range.addr;
            for granule in whole_granules(unused, granule) {
                let from = granule.addr.max(first);
                let to = granule.end().min(first + bytes.len() as u64);
                if from < to {
                    let part = index(from - first)..index(to - first);
                    bytes[part.clone()].copy_from_slice(&read[part]);
                }
            }
        }
    }

    /// Granules that a live block touches.
    fn live_granules(&self) -> std::collections::BTreeSet<u64> {
        let granule = self.granule();
        let blocks = self.tenant.blocks.iter().map(|known| known.block.range);
        blocks.flat_map(|range| range.addr / granule..=(range.end() - 1) / granule).collect()
    }

    fn unused_bytes(&self, unused: &[DeviceRange]) -> u64 {
        let live = self.live_granules();
        let whole = whole_granules(unused, self.granule());
        whole.iter().filter(|range| live.contains(&(range.addr / self.granule()))).count() as u64
            * self.granule()
    }

    /// Repeats `call` until it succeeds; its `failing`-th driver call fails. All bytes are there after each failure.
    fn retry<T>(&self, failing: u64, call: impl Fn(&Pool) -> Result<T, PoolError>) -> (T, bool) {
        self.countdown.store(failing, Ordering::SeqCst);
        for _ in 0..ATTEMPTS {
            let result = call(&self.tenant.pool);
            let was_reached = self.countdown.swap(0, Ordering::SeqCst) == 0;
            match result {
                Ok(value) => return (value, was_reached),
                Err(PoolError::SleepFailed { .. } | PoolError::Driver { .. }) => self.tenant.verify(),
                Err(PoolError::Stranded { .. }) => {
                    self.tenant.pool.wake(&WakeRequest::all()).unwrap();
                    self.tenant.verify();
                }
                Err(PoolError::WakeFailed { .. } | PoolError::Shortfall { .. }) => {}
                Err(error) => panic!("call {failing} failed: {error}"),
            }
        }
        panic!("call {failing} failed, and it does not succeed after that");
    }
}

fn request(unused: &[DeviceRange]) -> SleepRequest {
    SleepRequest::all(Level::One).without(unused)
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}

/// Each once.
fn whole_granules(unused: &[DeviceRange], granule: u64) -> Vec<DeviceRange> {
    let covers = |at: u64| {
        // A byte after the other would take long: ranges begin and end at eighths of granules.
        (0..8).all(|eighth| {
            let part = DeviceRange::new(at + eighth * granule / 8, granule / 8);
            unused.iter().any(|range| range.contains(&part))
        })
    };
    let touched = unused.iter().flat_map(|range| range.addr / granule..=range.end() / granule);
    let touched: std::collections::BTreeSet<u64> = touched.collect();
    let starts = touched.into_iter().map(|number| number * granule).filter(|at| covers(*at));
    starts.map(|at| DeviceRange::new(at, granule)).collect()
}

fn config() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4)
}

#[test]
fn unused_granules_are_neither_copied_nor_stored() {
    let mut world = World::new(Storing::Raw, config());
    let (granule, nth) = (world.granule(), world.load(10));
    let unused = [world.range(nth, 2..7)];
    let sleep = world.sleep(&unused);
    assert_eq!((sleep.copied_bytes, sleep.unused_bytes), (5 * granule, 5 * granule));
    assert_eq!(sleep.released_bytes, 10 * granule, "all memory is released");
    assert_eq!(
        world.tenant.pool.stats().unwrap().backup_bytes,
        5 * granule,
        "host memory for used bytes only"
    );
    assert_eq!(world.device.resident_bytes(), 0);
    world.wake(&unused);
    let sleep = world.sleep(&unused);
    assert_eq!((sleep.copied_bytes, sleep.unchanged_bytes), (0, 5 * granule));
    world.wake(&unused);
    let sleep = world.sleep(&[]);
    assert_eq!(
        (sleep.copied_bytes, sleep.unchanged_bytes, sleep.unused_bytes),
        (5 * granule, 5 * granule, 0)
    );
    world.wake(&[]);
}

#[test]
fn what_was_stored_of_unused_granules_is_dropped() {
    let mut world = World::new(Storing::Raw, config());
    let (granule, nth) = (world.granule(), world.load(12));
    world.sleep(&[]);
    world.wake(&[]);
    let unused = [world.range(nth, 0..9)];
    assert_eq!(world.sleep(&unused).unused_bytes, 9 * granule);
    assert!(
        world.tenant.pool.stats().unwrap().backup_bytes <= 4 * granule,
        "backups of unused bytes are gone"
    );
    let wake = world.tenant.pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!((wake.mapped_bytes, wake.copied_bytes), (12 * granule, 3 * granule));
    world.adopt(&unused);
    world.tenant.verify();
}

#[test]
fn used_parts_of_a_block_are_viewable() {
    let mut world = World::new(Storing::Raw, config());
    world.tenant.pool.declare_backups(&Tag::weights(), StoredAs::Viewable).unwrap();
    let (granule, nth) = (world.granule(), world.load(40));
    let unused = [world.range(nth, 3..5), world.range(nth, 38..40)];
    for _ in 0..2 {
        world.sleep(&unused);
        assert_eq!(world.tenant.pool.stats().unwrap().backup_bytes, 36 * granule);
        for used in [0..3, 5..38] {
            let part = index(used.start * granule)..index(used.end * granule);
            let view = world.tenant.pool.view_backup(world.range(nth, used)).unwrap();
            assert!(*view == world.tenant.blocks[nth].bytes[part]);
        }
        let refused = world.tenant.pool.view_backup(world.range(nth, 2..4)).unwrap_err();
        assert!(matches!(refused, PoolError::Backup { .. }), "{refused}");
        world.wake(&unused);
    }
}

#[test]
fn a_wholly_unused_tag_sleeps_and_wakes() {
    let mut world = World::new(Storing::Raw, config());
    let (granule, nth) = (world.granule(), world.load(6));
    let unused = [world.range(nth, 0..6)];
    let sleep = world.sleep(&unused);
    assert_eq!((sleep.copied_bytes, sleep.released_bytes), (0, 6 * granule));
    world.wake(&unused);
}

#[test]
fn parts_of_granules_foreign_ranges_and_overlaps_are_harmless() {
    let mut world = World::new(Storing::Raw, config());
    let (granule, nth) = (world.granule(), world.load(6));
    let block = world.tenant.blocks[nth].block.range;
    let unused = [
        DeviceRange::new(block.addr + 3 * granule, 2 * granule),
        DeviceRange::new(block.addr + granule / 2, granule), // No whole granule.
        DeviceRange::new(block.addr + 3 * granule, granule),
        DeviceRange::new(0, 1000),
        DeviceRange::new(block.end() + (1 << 40), 1 << 20),
        DeviceRange::new(block.addr, 0),
    ];
    let sleep = world.sleep(&unused);
    assert_eq!((sleep.copied_bytes, sleep.unused_bytes), (4 * granule, 2 * granule));
    world.wake(&unused[..1]);
}

#[test]
fn tags_that_are_dropped_ignore_unused_ranges() {
    let mut world = World::new(Storing::Raw, config());
    let granule = world.granule();
    let nth = world.tenant.load(4 * granule, &Tag::kv_cache());
    let sleep = world.sleep(&[world.range(nth, 0..4)]);
    assert_eq!((sleep.discarded_bytes, sleep.unused_bytes), (4 * granule, 0));
}

#[test]
fn a_range_past_the_last_address_is_refused() {
    let mut world = World::new(Storing::Raw, config());
    world.load(2);
    let wrong = [DeviceRange::new(u64::MAX - 10, 100)];
    let refused = world.tenant.pool.sleep(&request(&wrong)).unwrap_err();
    assert!(matches!(refused, PoolError::InvalidRange { bytes: 100, .. }), "{refused}");
    let refused = world.tenant.pool.prepare_sleep(&request(&wrong)).unwrap_err();
    assert!(matches!(refused, PoolError::InvalidRange { bytes: 100, .. }), "{refused}");
    world.tenant.verify();
}

#[test]
fn whichever_call_fails_nothing_that_was_used_is_lost() {
    let stride = DeviceKind::of_this_run().stride_of_cycles();
    for storing in Storing::ALL {
        let mut failing = 1;
        while fails_at(storing, failing) {
            failing += stride as u64;
        }
        assert!(failing > 20, "only {failing} calls were made");
    }
}

/// Whether any step made so many calls.
fn fails_at(storing: Storing, failing: u64) -> bool {
    let mut world = World::new(storing, config());
    let (first, second) = (world.load(9), world.load(5));
    let mut was_reached = false;
    let rounds: [Vec<DeviceRange>; 4] = [
        Vec::new(),
        vec![world.range(first, 1..6), world.range(second, 4..5)],
        vec![world.range(first, 0..9)],
        vec![world.range(first, 5..6), world.range(second, 0..2)],
    ];
    for unused in &rounds {
        let (_, reached) = world.retry(failing, |pool| pool.sleep(&request(unused)));
        was_reached |= reached;
        let wake = WakeRequest::all().verifying(Verify::All);
        was_reached |= world.retry(failing, |pool| pool.wake(&wake)).1;
        world.adopt(unused);
        world.tenant.verify();
        world.tenant.touch_granule(first, 4);
        world.tenant.touch_granule(second, 1);
    }
    was_reached
}

/// A step between two sleeps, or the sleep.
#[derive(Debug, Clone)]
enum Step {
    Load {
        eighths: u64,
    },
    Free(usize),
    Touch {
        nth: usize,
        at: u64,
    },
    Declare(Changes),
    Prepare,
    /// Starts and lengths in eighths of a granule, from the n-th block on.
    Cycle(Vec<(usize, u64, u64)>),
}

fn step() -> impl Strategy<Value = Step> {
    let unused = proptest::collection::vec((any::<usize>(), 0..120u64, 0..100u64), 0..6);
    prop_oneof![
        4 => (1..110u64).prop_map(|eighths| Step::Load { eighths }),
        1 => any::<usize>().prop_map(Step::Free),
        4 => (any::<usize>(), any::<u64>()).prop_map(|(nth, at)| Step::Touch { nth, at }),
        1 => prop_oneof![Just(Changes::Compared), Just(Changes::Volatile)].prop_map(Step::Declare),
        1 => Just(Step::Prepare),
        4 => unused.prop_map(Step::Cycle),
    ]
}

impl World {
    fn step(&mut self, step: &Step) {
        let (granule, count) = (self.granule(), self.tenant.blocks.len());
        match step {
            Step::Load { eighths } => {
                let used: u64 = self.tenant.blocks.iter().map(|known| known.block.range.bytes).sum();
                if used + eighths * granule / 8 < (GRANULES - 32) * granule {
                    self.tenant.load(eighths * granule / 8, &Tag::weights());
                }
            }
            Step::Free(nth) if count > 0 => self.tenant.free(nth % count),
            Step::Touch { nth, at } if count > 0 => {
                let nth = nth % count;
                let bytes = self.tenant.blocks[nth].bytes.len() as u64;
                self.tenant.touch(nth, at % bytes);
            }
            Step::Declare(changes) => self.tenant.pool.declare_changes(&Tag::weights(), *changes).unwrap(),
            Step::Prepare => drop(self.tenant.pool.prepare_sleep(&request(&[])).unwrap().wait().unwrap()),
            Step::Cycle(parts) => self.cycle(parts),
            _ => {}
        }
    }

    fn cycle(&mut self, parts: &[(usize, u64, u64)]) {
        let (granule, count) = (self.granule(), self.tenant.blocks.len());
        let eighth = granule / 8;
        let unused = parts.iter().filter(|_| count > 0).map(|(nth, from, eighths)| {
            let block = self.tenant.blocks[nth % count].block.range;
            DeviceRange::new(block.addr / eighth * eighth + from * eighth, eighths * eighth)
        });
        let unused: Vec<DeviceRange> = unused.collect();
        let sleep = self.sleep(&unused);
        assert_eq!(sleep.unused_bytes, self.unused_bytes(&unused));
        let live_bytes = self.live_granules().len() as u64 * granule;
        assert_eq!(sleep.copied_bytes + sleep.unchanged_bytes + sleep.unused_bytes, live_bytes);
        assert_eq!(self.device.resident_bytes(), 0);
        self.wake(&unused);
    }
}

fn proptest_config() -> ProptestConfig {
    let cases = DeviceKind::of_this_run().cases(48);
    // Failures are printed in full; CI would leave a file of seeds in the tree.
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 2000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(proptest_config())]

    #[test]
    fn every_used_byte_comes_back(
        storing in proptest::sample::select(Storing::ALL.as_slice()),
        keeps in any::<bool>(),
        is_viewable in any::<bool>(),
        chunk_granules in prop_oneof![Just(1u64), Just(4)],
        steps in proptest::collection::vec(step(), 10..80),
    ) {
        let mut config = PoolConfig::default().in_chunks_of(chunk_granules);
        config.keep_backups = Some(keeps);
        let mut world = World::new(storing, config);
        if is_viewable {
            world.tenant.pool.declare_backups(&Tag::weights(), StoredAs::Viewable).unwrap();
        }
        for step in &steps {
            world.step(step);
        }
    }
}
