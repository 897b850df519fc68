//! Sleeps that keep ranges of dropped tags, or whole tags awake: what is kept comes back and is defined, whatever fails;
//! the rest is dropped as ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use poorwill_core::{
    Changes, DeviceRange, Driver, HostBuffer, Level, Pool, PoolConfig, PoolError, SleepReport, SleepRequest,
    StreamId, Tag, TagState, WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::storing::Storing;
use poorwill_testkit::tenant::{Known, Tenant};
use poorwill_testkit::watchdog::eventually;
use proptest::prelude::*;

const GRANULES: u64 = 96;

struct World {
    device: TestDevice,
    tenant: Tenant,
    /// Calls until one fails, where it is not 0.
    countdown: Arc<AtomicU64>,
    /// Bytes of the weights that are defined, where a sleep has dropped the rest.
    defined: Option<Vec<DeviceRange>>,
}

impl World {
    fn new(storing: Storing, keeps: bool) -> Self {
        let device = TestDevice::open(GRANULES);
        let countdown = Arc::<AtomicU64>::default();
        let calls = Arc::clone(&countdown);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            let before = calls.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
            if before == Ok(1) { Verdict::device_failure(call) } else { Verdict::Pass }
        });
        let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| info.fast_digests = true));
        let mut config = PoolConfig::default().in_chunks_of(4).in_segments_of(8);
        config.keep_backups = Some(keeps);
        let pool = Pool::new(driver, storing.of(config)).unwrap();
        let tenant = Tenant::new(&Arc::new(pool), 7).storing(storing);
        Self { device, tenant, countdown, defined: None }
    }

    fn pool(&self) -> &Pool {
        &self.tenant.pool
    }

    fn granule(&self) -> u64 {
        self.tenant.granule()
    }

    fn load(&mut self, granules: u64, tag: &Tag) -> usize {
        self.tenant.load(granules * self.granule(), tag)
    }

    /// Of a block, in bytes.
    fn range(&self, nth: usize, bytes: std::ops::Range<u64>) -> DeviceRange {
        DeviceRange::new(self.tenant.blocks[nth].block.range.addr + bytes.start, bytes.end - bytes.start)
    }

    fn sleep(&self, kept: &[DeviceRange]) -> SleepReport {
        self.pool().sleep(&dropping(kept)).unwrap()
    }

    /// Until it succeeds; the `failing`-th driver call fails. Returns whether there were so many.
    fn retry<T>(&self, failing: u64, call: impl Fn(&Pool) -> Result<T, PoolError>) -> bool {
        self.countdown.store(failing, Ordering::SeqCst);
        for _ in 0..9 {
            let result = call(self.pool());
            let was_reached = self.countdown.swap(0, Ordering::SeqCst) == 0;
            match result {
                Ok(_) | Err(PoolError::Shortfall { .. }) => return was_reached,
                Err(PoolError::Stranded { .. }) => drop(self.pool().wake(&WakeRequest::all()).unwrap()),
                Err(
                    PoolError::SleepFailed { .. } | PoolError::Driver { .. } | PoolError::WakeFailed { .. },
                ) => {}
                Err(error) => panic!("call {failing} failed: {error}"),
            }
        }
        panic!("call {failing} failed, and it does not succeed after that");
    }

    /// What a sleep with `kept` leaves defined of the weights.
    fn note_dropped(&mut self, kept: &[DeviceRange]) {
        let now = match self.defined.take() {
            None => kept.to_vec(),
            Some(before) => kept.iter().flat_map(|range| common(range, &before)).collect(),
        };
        self.defined = Some(now);
    }

    /// After a wake from level 2: the kept bytes are there, and the weights' others are refused.
    fn check(&mut self, kept: &[DeviceRange]) {
        let granule = self.granule();
        let defined = self.defined.clone().unwrap_or_default();
        for Known { block, tag, bytes } in &mut self.tenant.blocks {
            let pool = &self.tenant.pool;
            if *tag == Tag::kv_cache() {
                let read = pattern::read(pool, block.id, bytes.len()).unwrap();
                for (nth, byte) in bytes.iter_mut().enumerate() {
                    let at = (block.range.addr + nth as u64) / granule * granule;
                    let granule = DeviceRange::new(at, granule);
                    if nth % 512 == 0 && common(&granule, kept).is_empty() {
                        assert_eq!(read[nth], 0, "dropped bytes of the cache come back as zeros");
                    }
                    *byte = read[nth];
                }
                continue;
            }
            for part in common(&DeviceRange::new(block.range.addr, bytes.len() as u64), &defined) {
                let offset = part.addr - block.range.addr;
                let buffer = HostBuffer::from(vec![0; usize::try_from(part.bytes).unwrap()]);
                let read = pool.read(StreamId::DEFAULT, block.id, offset, buffer, 0, part.bytes).unwrap();
                let (read, from) = (read.wait().unwrap(), usize::try_from(offset).unwrap());
                assert!(read[..] == bytes[from..from + read.len()], "kept bytes have changed");
            }
            let whole = DeviceRange::new(block.range.addr, bytes.len() as u64);
            let defined_bytes: u64 = common(&whole, &defined).iter().map(|part| part.bytes).sum();
            let refused = pattern::read(pool, block.id, bytes.len());
            assert_eq!(refused.is_ok(), defined_bytes == whole.bytes, "dropped bytes are not read");
        }
    }

    /// Writes the weights again.
    fn restore(&mut self) {
        let weights =
            (0..self.tenant.blocks.len()).filter(|nth| self.tenant.blocks[*nth].tag == Tag::weights());
        weights.for_each(|nth| self.tenant.write(nth));
        self.pool().mark_restored(&[Tag::weights()]).unwrap();
        self.defined = None;
        self.tenant.verify();
    }
}

fn dropping(kept: &[DeviceRange]) -> SleepRequest {
    SleepRequest::all(Level::Two).keeping(kept)
}

/// The parts of `range` in any of the `others`, each once.
fn common(range: &DeviceRange, others: &[DeviceRange]) -> Vec<DeviceRange> {
    let mut others = others.to_vec();
    others.sort_unstable();
    let (mut parts, mut from) = (Vec::new(), range.addr);
    for other in others {
        let start = other.addr.max(from);
        let end = other.end().min(range.end());
        if start < end {
            parts.push(DeviceRange::new(start, end - start));
            from = end;
        }
    }
    parts
}

#[test]
fn kept_granules_are_stored_and_the_rest_is_dropped() {
    for keeps in [false, true] {
        let mut world = World::new(Storing::Raw, keeps);
        let granule = world.granule();
        let (first, second) = (world.load(9, &Tag::weights()), world.load(5, &Tag::kv_cache()));
        let kept =
            [world.range(first, 3 * granule - 1..3 * granule + 1), world.range(second, granule..granule + 1)];
        let sleep = world.sleep(&kept);
        assert_eq!((sleep.kept_bytes, sleep.copied_bytes), (3 * granule, 3 * granule));
        assert_eq!((sleep.discarded_bytes, sleep.released_bytes), (11 * granule, 14 * granule));
        assert_eq!(world.pool().tag_state(&Tag::weights()).unwrap(), TagState::AsleepDropped);
        assert_eq!(
            (world.device.resident_bytes(), world.pool().stats().unwrap().backup_bytes),
            (0, 3 * granule)
        );
        let wake = world.pool().wake(&WakeRequest::all()).unwrap();
        assert_eq!((wake.mapped_bytes, wake.copied_bytes), (14 * granule, 3 * granule));
        assert_eq!(wake.undefined_tags, [Tag::weights()]);
        world.note_dropped(&kept);
        world.check(&kept);
        assert_eq!(world.pool().lost_ranges().unwrap(), [], "nothing was lost");
        let sleep = world.sleep(&kept);
        // Nothing was written since.
        let (copied, unchanged) = if keeps { (0, 3 * granule) } else { (3 * granule, 0) };
        assert_eq!((sleep.copied_bytes, sleep.unchanged_bytes), (copied, unchanged));
        world.pool().wake(&WakeRequest::all()).unwrap();
        world.note_dropped(&kept);
        world.check(&kept);
        world.restore();
    }
}

/// The cache of an engine that computes: codes of what it had would be too short for what it has.
#[test]
fn what_has_changed_is_copied_alone_whatever_codes_it_would_take() {
    let mut world = World::new(Storing::Codes, true);
    let granule = world.granule();
    let nth = world.load(12, &Tag::weights());
    let fill = |world: &mut World, from: u64, bytes: Vec<u8>| {
        let from = usize::try_from(from).unwrap();
        world.tenant.blocks[nth].bytes[from..from + bytes.len()].copy_from_slice(&bytes);
        world.tenant.write(nth);
    };
    fill(&mut world, 0, pattern::weights(1, usize::try_from(12 * granule).unwrap()));
    let kept = [world.range(nth, 0..8 * granule)];
    world.sleep(&kept);
    let held_bytes = world.pool().stats().unwrap().backup_bytes;
    for round in 0..3 {
        world.pool().wake(&WakeRequest::all()).unwrap();
        world.note_dropped(&kept);
        world.check(&kept);
        fill(&mut world, 5 * granule, pattern::bytes(round, usize::try_from(granule).unwrap()));
        world.restore();
        let sleep = world.sleep(&kept);
        assert_eq!((sleep.copied_bytes, sleep.unchanged_bytes), (granule, 7 * granule));
        assert_eq!(world.pool().stats().unwrap().backup_bytes, held_bytes);
    }
}

#[test]
fn what_a_sleep_will_take_more_of_is_made_while_it_is_awake() {
    let mut world = World::new(Storing::Raw, true);
    if skipped_unless(
        |kind| kind == DeviceKind::Host,
        "on other devices, other tests use the same storage meanwhile",
    ) {
        return;
    }
    let granule = world.granule();
    let nth = world.load(64, &Tag::weights());
    let held_bytes = |world: &World| world.device.driver().host_memory().held_bytes;
    let mut round = |granules: u64| {
        let kept = [world.range(nth, 0..granules * granule)];
        world.sleep(&kept);
        let asleep_bytes = held_bytes(&world);
        world.pool().wake(&WakeRequest::all()).unwrap();
        world.note_dropped(&kept);
        world.check(&kept);
        world.restore();
        eventually("it is made", || {
            world.device.driver().host_memory().used_bytes == world.pool().stats().unwrap().backup_bytes
        });
        (asleep_bytes / granule, held_bytes(&world) / granule)
    };
    assert_eq!(round(16), (16, 32));
    assert_eq!(round(32), (32, 48), "what was made ahead is used");
    assert_eq!(round(32), (48, 48), "nothing more was taken");
    assert_eq!(world.pool().drop_backups(None).unwrap(), 48 * granule);
    assert_eq!(held_bytes(&world), 0);
}

#[test]
fn what_is_kept_no_longer_takes_no_host_memory() {
    for storing in Storing::ALL {
        let mut world = World::new(storing, true);
        let granule = world.granule();
        let nth = world.load(12, &Tag::weights());
        for granules in [8, 7, 2, 5] {
            let kept = [world.range(nth, 0..granules * granule)];
            let sleep = world.sleep(&kept);
            assert_eq!(sleep.copied_bytes + sleep.unchanged_bytes, granules * granule);
            assert_eq!(world.pool().stats().unwrap().backup_bytes, granules * granule);
            world.pool().wake(&WakeRequest::all()).unwrap();
            world.note_dropped(&kept);
            world.check(&kept);
            world.restore();
        }
    }
}

/// What was promised of a tag does not hold for bytes that a sleep has dropped.
#[test]
fn bytes_beside_kept_ones_are_written_again_though_none_were_to_change() {
    let mut world = World::new(Storing::Raw, true);
    let granule = world.granule();
    let nth = world.load(70, &Tag::weights());
    world.pool().declare_changes(&Tag::weights(), Changes::Immutable).unwrap();
    let kept = [world.range(nth, 0..40 * granule + 100)];
    world.sleep(&kept);
    world.pool().wake(&WakeRequest::all()).unwrap();
    world.note_dropped(&kept);
    world.check(&kept);
    let from = usize::try_from(40 * granule + 100).unwrap();
    world.tenant.blocks[nth].bytes[from..].iter_mut().for_each(|byte| *byte ^= 0xFF);
    world.restore();
    for _ in 0..2 {
        world.pool().sleep(&SleepRequest::all(Level::One)).unwrap();
        world.pool().wake(&WakeRequest::all()).unwrap();
        world.tenant.verify();
    }
}

#[test]
fn what_level_1_has_stored_of_dropped_bytes_is_released() {
    let mut world = World::new(Storing::Raw, true);
    let granule = world.granule();
    let nth = world.load(12, &Tag::weights());
    world.pool().sleep(&SleepRequest::all(Level::One)).unwrap();
    world.pool().wake(&WakeRequest::all()).unwrap();
    let kept = [world.range(nth, 8 * granule..8 * granule + 100)];
    let sleep = world.sleep(&kept);
    assert_eq!((sleep.copied_bytes + sleep.unchanged_bytes, sleep.kept_bytes), (granule, granule));
    let stored_bytes = world.pool().stats().unwrap().backup_bytes;
    assert!(stored_bytes <= 4 * granule, "an extent at most: {stored_bytes}");
    let wake = world.pool().wake(&WakeRequest::all()).unwrap();
    assert_eq!(wake.copied_bytes, granule);
    world.note_dropped(&kept);
    world.check(&kept);
    world.restore();
}

#[test]
fn discarding_a_tag_that_sleeps_drops_what_was_kept() {
    let mut world = World::new(Storing::Raw, true);
    let nth = world.load(4, &Tag::weights());
    let kept = [world.range(nth, 0..8)];
    world.sleep(&kept);
    let discarded = world.pool().discard(&[Tag::weights()]).unwrap();
    assert_eq!(discarded.tags, [Tag::weights()]);
    assert_eq!(world.pool().stats().unwrap().backup_bytes, 0);
    assert_eq!(world.pool().discard(&[Tag::weights()]).unwrap().already_asleep_tags, [Tag::weights()]);
    assert_eq!(world.pool().wake(&WakeRequest::all()).unwrap().copied_bytes, 0);
    world.note_dropped(&[]);
    world.check(&[]);
}

#[test]
fn a_block_freed_in_its_sleep_takes_its_kept_bytes_along() {
    let mut world = World::new(Storing::Raw, true);
    let (first, second) = (world.load(4, &Tag::weights()), world.load(6, &Tag::weights()));
    let kept = [world.range(first, 0..8), world.range(second, 0..8)];
    world.sleep(&kept);
    world.tenant.free(first);
    assert_eq!(world.pool().stats().unwrap().backup_bytes, world.granule());
    world.pool().wake(&WakeRequest::all()).unwrap();
    world.note_dropped(&kept);
    world.check(&kept);
    world.restore();
}

#[test]
fn ranges_of_backed_up_tags_and_of_nothing_have_no_effect() {
    let mut world = World::new(Storing::Raw, true);
    let granule = world.granule();
    let (nth, weights) = (world.load(3, &Tag::runtime()), world.load(2, &Tag::weights()));
    let mut kept = vec![world.range(nth, 0..granule), DeviceRange::new(0, 100), world.range(weights, 5..5)];
    let sleep = world.sleep(&kept);
    assert_eq!((sleep.kept_bytes, sleep.copied_bytes, sleep.discarded_bytes), (0, 3 * granule, 2 * granule));
    world.pool().wake(&WakeRequest::all()).unwrap();
    kept.push(DeviceRange::new(u64::MAX - 10, 100));
    let refused = world.pool().sleep(&dropping(&kept)).unwrap_err();
    assert!(matches!(refused, PoolError::InvalidRange { declared: "kept", .. }), "{refused}");
    assert_eq!(world.pool().tag_state(&Tag::runtime()).unwrap(), TagState::Awake);
}

#[test]
fn tags_that_are_kept_awake_keep_their_memory() {
    let mut world = World::new(Storing::Raw, true);
    let granule = world.granule();
    world.load(3, &Tag::weights());
    world.load(2, &Tag::kv_cache());
    let own = Tag::new("own").unwrap();
    world.load(1, &own);
    for level in [Level::One, Level::Two] {
        let request = SleepRequest::all(level).keeping_awake([Tag::weights()]);
        let sleep = world.pool().sleep(&request).unwrap();
        assert_eq!(sleep.tags, [Tag::kv_cache(), own.clone()]);
        assert_eq!(world.device.resident_bytes(), 3 * granule);
        assert_eq!(world.pool().tag_state(&Tag::weights()).unwrap(), TagState::Awake);
        world.pool().wake(&WakeRequest::all()).unwrap();
        world.defined = Some(vec![world.range(0, 0..3 * granule), world.range(2, 0..granule)]);
        world.check(&[]);
        world.tenant.verify();
    }
    let request = SleepRequest::of([Tag::weights(), own.clone()], Level::One).keeping_awake([own.clone()]);
    assert_eq!(world.pool().sleep(&request).unwrap().tags, [Tag::weights()]);
    world.pool().wake(&WakeRequest::all()).unwrap();
    let request = SleepRequest::all(Level::One).keeping_awake([Tag::new("wieghts").unwrap()]);
    for refused in
        [world.pool().sleep(&request).unwrap_err(), world.pool().prepare_sleep(&request).unwrap_err()]
    {
        assert!(matches!(refused, PoolError::UnknownTag { .. }), "{refused}");
        assert!(refused.to_string().contains("wieghts"), "{refused}");
    }
    let request = SleepRequest::all(Level::One).keeping_awake([Tag::weights()]);
    let prepared = world.pool().prepare_sleep(&request).unwrap().wait().unwrap();
    assert_eq!(prepared.tags, [own]);
    world.tenant.verify();
}

#[test]
fn whichever_call_fails_nothing_that_was_kept_is_lost() {
    let stride = DeviceKind::of_this_run().stride_of_cycles() as u64;
    for storing in Storing::ALL {
        let mut failing = 1;
        while fails_at(storing, failing) {
            failing += stride;
        }
        assert!(failing > 20, "only {failing} calls were made");
    }
}

/// Whether any step made so many calls.
fn fails_at(storing: Storing, failing: u64) -> bool {
    let mut world = World::new(storing, true);
    let granule = world.granule();
    let (first, second) = (world.load(9, &Tag::weights()), world.load(5, &Tag::kv_cache()));
    let mut was_reached = false;
    let rounds = [
        vec![world.range(first, granule..granule + 9), world.range(second, 0..1)],
        vec![world.range(first, 0..7 * granule), world.range(second, 2 * granule..5 * granule)],
        vec![world.range(first, 8 * granule..9 * granule)],
    ];
    for kept in &rounds {
        was_reached |= world.retry(failing, |pool| pool.sleep(&dropping(kept)));
        was_reached |= world.retry(failing, |pool| pool.wake(&WakeRequest::all()));
        world.note_dropped(kept);
        world.check(kept);
        world.restore();
    }
    was_reached
}

#[derive(Debug, Clone)]
enum Step {
    Load {
        eighths: u64,
        is_cache: bool,
    },
    Free(usize),
    Touch {
        nth: usize,
        at: u64,
    },
    LevelOne,
    /// Blocks, starts and lengths in bytes of a 512th of a granule; whether the weights are written after it.
    LevelTwo(Vec<(usize, u64, u64)>, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let kept = proptest::collection::vec((any::<usize>(), 0..5000u64, 0..2000u64), 0..6);
    prop_oneof![
        4 => (1..110u64, any::<bool>()).prop_map(|(eighths, is_cache)| Step::Load { eighths, is_cache }),
        1 => any::<usize>().prop_map(Step::Free),
        2 => (any::<usize>(), any::<u64>()).prop_map(|(nth, at)| Step::Touch { nth, at }),
        1 => Just(Step::LevelOne),
        5 => (kept, any::<bool>()).prop_map(|(kept, writes)| Step::LevelTwo(kept, writes)),
    ]
}

impl World {
    fn step(&mut self, step: &Step) {
        let (granule, count) = (self.granule(), self.tenant.blocks.len());
        match step {
            Step::Load { eighths, is_cache } => {
                let used: u64 = self.tenant.blocks.iter().map(|known| known.block.range.bytes).sum();
                if used + eighths * granule / 8 < (GRANULES - 32) * granule && self.defined.is_none() {
                    let tag = if *is_cache { Tag::kv_cache() } else { Tag::weights() };
                    self.tenant.load(eighths * granule / 8, &tag);
                }
            }
            Step::Free(nth) if count > 0 && self.defined.is_none() => self.tenant.free(nth % count),
            Step::Touch { nth, at } if count > 0 && self.defined.is_none() => {
                let bytes = self.tenant.blocks[nth % count].bytes.len() as u64;
                self.tenant.touch(nth % count, at % bytes);
            }
            Step::LevelOne if self.defined.is_none() => {
                self.pool().sleep(&SleepRequest::of([Tag::weights()], Level::One)).unwrap();
                self.pool().wake(&WakeRequest::all()).unwrap();
                self.tenant.verify();
            }
            Step::LevelTwo(parts, writes) if count > 0 => {
                let kept = parts.iter().map(|(nth, from, length)| {
                    let block = self.tenant.blocks[nth % count].block.range;
                    let (from, length) = (from * granule / 512, length * granule / 512);
                    DeviceRange::new(block.addr + from, length)
                });
                let kept: Vec<DeviceRange> = kept.collect();
                self.sleep(&kept);
                assert_eq!(self.device.resident_bytes(), 0);
                self.pool().wake(&WakeRequest::all()).unwrap();
                self.note_dropped(&kept);
                self.check(&kept);
                if *writes {
                    self.restore();
                }
            }
            _ => {}
        }
    }
}

fn proptest_config() -> ProptestConfig {
    let cases = DeviceKind::of_this_run().cases(32);
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 2000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(proptest_config())]

    #[test]
    fn every_kept_byte_comes_back(
        storing in proptest::sample::select(Storing::ALL.as_slice()),
        keeps in any::<bool>(),
        steps in proptest::collection::vec(step(), 8..40),
    ) {
        let mut world = World::new(storing, keeps);
        for step in &steps {
            world.step(step);
        }
    }
}
