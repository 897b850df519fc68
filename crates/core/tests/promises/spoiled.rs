//! Backups that spoil in host memory: wrong bytes are never taken for right ones, whatever spoils and whichever call
//! looks. All that is lost is reported, and the rest comes back.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use poorwill_core::backup::Backups;
use poorwill_core::pool::Corruption;
use poorwill_core::{
    AllocRequest, Changes, DeviceRange, Driver, HostBuffer, Level, LostRange, Op, Pool, PoolConfig,
    PoolError, PrepareEnd, SleepRequest, StreamId, Tag, TagState, Verify, WakeReport, WakeRequest,
};
use poorwill_testkit::backups::{Coding, TestBackups};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::latch::Latch;
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use poorwill_testkit::tenant::{Known, Tenant};
use proptest::prelude::*;

fn small() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8)
}

fn level_1() -> SleepRequest {
    SleepRequest::all(Level::One)
}

fn sample() -> WakeRequest {
    WakeRequest::all().verifying(Verify::Sample)
}

fn everything() -> WakeRequest {
    WakeRequest::all().verifying(Verify::All)
}

/// A number of granules or blocks; on a GPU, whose granules are of 2 MiB, `fewer`.
fn or_on_a_gpu<T>(usually: T, fewer: T) -> T {
    if matches!(DeviceKind::of_this_run(), DeviceKind::Cuda(_)) { fewer } else { usually }
}

/// A pool whose backups spoil, and its tenant.
struct World {
    device: TestDevice,
    store: TestBackups,
    tenant: Tenant,
}

impl World {
    fn new(fast_digests: bool, config: PoolConfig) -> Self {
        let device = TestDevice::open(256);
        let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass);
        let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| info.fast_digests = fast_digests));
        let store = TestBackups::new(&driver, Coding::Xored, u64::MAX);
        let backups: Arc<dyn Backups> = Arc::new(store.clone());
        let pool = Pool::with_backups(driver, config, backups).unwrap();
        let tenant = Tenant::new(&Arc::new(pool), 3);
        Self { device, store, tenant }
    }

    fn pool(&self) -> &Pool {
        &self.tenant.pool
    }

    fn granule(&self) -> u64 {
        self.tenant.granule()
    }

    fn sleep(&self, prepares: bool) -> Result<(), PoolError> {
        if prepares {
            self.pool().prepare_sleep(&level_1())?.wait()?;
        }
        self.pool().sleep(&level_1()).map(drop)
    }

    /// The device's bytes of `range`, which is in the `nth` block.
    fn read(&self, nth: usize, range: DeviceRange) -> Result<Vec<u8>, PoolError> {
        let block = self.tenant.blocks[nth].block;
        let dst = HostBuffer::from(vec![0xEE; usize::try_from(range.bytes).unwrap()]);
        let offset = range.addr - block.range.addr;
        let read = self.pool().read(StreamId::DEFAULT, block.id, offset, dst, 0, range.bytes)?;
        Ok(read.wait().unwrap().to_vec())
    }

    fn known(&self, nth: usize, range: DeviceRange) -> &[u8] {
        let known = &self.tenant.blocks[nth];
        let start = usize::try_from(range.addr - known.block.range.addr).unwrap();
        &known.bytes[start..start + usize::try_from(range.bytes).unwrap()]
    }

    /// The parts of the `nth` block that are lost, and those that are not.
    fn parts(&self, nth: usize, lost: &[LostRange]) -> [Vec<DeviceRange>; 2] {
        let known = &self.tenant.blocks[nth];
        let (mut at, end) = (known.block.range.addr, known.block.range.addr + known.bytes.len() as u64);
        let of_block = lost.iter().filter(|lost| lost.block == known.block.id);
        let lost: Vec<DeviceRange> = of_block.map(|lost| lost.range).collect();
        let mut rest = Vec::new();
        for gone in &lost {
            rest.push(DeviceRange::new(at, gone.addr - at));
            at = gone.end();
        }
        rest.push(DeviceRange::new(at, end - at));
        rest.retain(|part| part.bytes > 0);
        [lost, rest]
    }

    /// Whether every byte is the owner's, but for the lost ones, which cannot be read.
    fn is_right(&self) -> bool {
        let lost = self.pool().lost_ranges().unwrap();
        let mut right = true;
        for nth in 0..self.tenant.blocks.len() {
            let [gone, rest] = self.parts(nth, &lost);
            for part in gone {
                let refused = self.read(nth, DeviceRange::new(part.addr, 1)).unwrap_err();
                assert!(matches!(refused, PoolError::Lost { .. }), "{refused}");
                assert!(self.read(nth, DeviceRange::new(part.end() - 1, 1)).is_err());
            }
            right &= rest.iter().all(|part| self.read(nth, *part).unwrap() == self.known(nth, *part));
        }
        right
    }

    /// Writes what is lost again, and nothing else, and says so.
    fn restore(&self, lost: &[LostRange], by_block: bool) {
        for lost in lost {
            let nth = self.tenant.blocks.iter().position(|known| known.block.id == lost.block).unwrap();
            let bytes = self.known(nth, lost.range).to_vec();
            let src = Arc::new(HostBuffer::from(bytes));
            let stream = StreamId::DEFAULT;
            let written = self.pool().write(stream, lost.block, lost.offset_bytes, src, 0, lost.range.bytes);
            written.unwrap().wait().unwrap();
            let refused = self.read(nth, lost.range);
            assert!(matches!(refused, Err(PoolError::Lost { .. })), "it is not marked yet");
        }
        let blocks: BTreeSet<_> = lost.iter().map(|lost| lost.block).collect();
        let tags: BTreeSet<Tag> = lost.iter().map(|lost| lost.tag.clone()).collect();
        let tags: Vec<Tag> = tags.into_iter().collect();
        if by_block {
            let restored = blocks.iter().flat_map(|block| self.pool().mark_block_restored(*block).unwrap());
            assert_eq!(restored.count(), lost.len());
        } else {
            assert_eq!(self.pool().mark_restored(&tags).unwrap(), tags);
        }
        for tag in tags {
            assert_eq!(self.pool().tag_state(&tag).unwrap(), TagState::Awake);
        }
        assert_eq!(self.pool().lost_ranges().unwrap(), []);
    }

    /// Frees granules of a block. Returns their range.
    fn free_part(&mut self, nth: usize, first: u64, count: u64) -> DeviceRange {
        let granule = self.granule();
        let known = self.tenant.blocks.swap_remove(nth);
        let whole = known.block.range;
        let part = whole.slice(first * granule, count * granule).unwrap();
        for block in self.pool().free_part(known.block.id, part).unwrap() {
            let start = usize::try_from(block.range.addr - whole.addr).unwrap();
            let bytes = known.bytes[start..][..usize::try_from(block.range.bytes).unwrap()].to_vec();
            self.tenant.blocks.push(Known { block, tag: known.tag.clone(), bytes });
        }
        part
    }

    /// The whole granule at `addr`.
    fn granule_at(&self, addr: u64) -> DeviceRange {
        DeviceRange::new(addr / self.granule() * self.granule(), self.granule())
    }

    /// The granules that hold any of these.
    fn granules(&self, lost: &[LostRange]) -> BTreeSet<DeviceRange> {
        let of = |lost: &LostRange| {
            let starts =
                (lost.range.addr..lost.range.end()).step_by(usize::try_from(self.granule()).unwrap());
            let starts: Vec<u64> = starts.chain([lost.range.end() - 1]).collect();
            starts.into_iter().map(|addr| self.granule_at(addr)).collect::<Vec<_>>()
        };
        lost.iter().flat_map(of).collect()
    }
}

/// From a review: one bit outside the sample, and then cycles that compare everything.
#[test]
fn a_spoiled_bit_never_becomes_the_truth() {
    for fast_digests in [true, false] {
        let mut world = World::new(fast_digests, PoolConfig::default());
        world.tenant.load(or_on_a_gpu(128, 32) * world.granule(), &Tag::weights());
        world.pool().sleep(&level_1()).unwrap();
        world.store.spoil(5);
        let lost = match world.pool().wake(&WakeRequest::all()) {
            Err(PoolError::Corrupt { location: Corruption::Backup, lost }) if fast_digests => lost,
            Ok(woken) if !fast_digests => {
                assert!(woken.verified_bytes < woken.copied_bytes, "a sample");
                let PoolError::Lost { lost, .. } = world.sleep(false).unwrap_err() else { panic!() };
                assert_eq!(world.pool().tag_state(&Tag::weights()).unwrap(), TagState::Undefined);
                let again = world.sleep(false).unwrap_err();
                assert!(matches!(again, PoolError::Lost { lost: same, .. } if same == lost));
                lost
            }
            other => panic!("{other:?}"),
        };
        assert_eq!((lost.len(), lost[0].range.bytes), (1, world.granule()));
        if fast_digests {
            let woken = world.pool().wake(&WakeRequest::all().accepting_losses()).unwrap();
            assert_eq!((&woken.lost, woken.undefined_tags), (&lost, vec![Tag::weights()]));
        }
        assert!(world.is_right());
        world.restore(&lost, false);
        world.sleep(false).unwrap();
        world.pool().wake(&everything()).unwrap();
        assert!(world.is_right());
    }
}

/// From a review: a hundred blocks, and one bit.
#[test]
fn one_spoiled_granule_does_not_keep_the_rest_asleep() {
    let blocks = or_on_a_gpu(100, 20);
    for fast_digests in [true, false] {
        let mut world = World::new(fast_digests, small());
        let granule = world.granule();
        for _ in 0..blocks {
            world.tenant.load(2 * granule, &Tag::weights());
        }
        world.pool().sleep(&level_1()).unwrap();
        let granules = world.store.stored_granules();
        assert_eq!(granules, 2 * blocks);
        for spoiled in [0, granules / 3, granules - 1] {
            world.store.spoil(spoiled);
        }
        let free_bytes = world.device.memory_info().unwrap().free_bytes;
        for _ in 0..3 {
            let error = world.pool().wake(&everything()).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("accepting losses") && text.contains("bytes "), "{text}");
            let PoolError::Corrupt { lost, location: Corruption::Backup } = error else { panic!("{error}") };
            assert_eq!(lost.len(), 3, "all are named");
            assert_eq!(world.device.memory_info().unwrap().free_bytes, free_bytes, "all sleep");
        }
        let woken = world.pool().wake(&WakeRequest::all().accepting_losses()).unwrap();
        assert_eq!((woken.lost.len(), woken.verified_bytes), (3, (granules as u64 - 3) * granule));
        assert_eq!(woken.lost, world.pool().lost_ranges().unwrap());
        assert_eq!(world.pool().tag_state(&Tag::weights()).unwrap(), TagState::Undefined);
        assert!(world.is_right());
        // By block, by freeing it, and by tag.
        world.restore_one(&woken.lost[0]);
        let nth = world.tenant.blocks.iter().position(|known| known.block.id == woken.lost[1].block).unwrap();
        world.tenant.free(nth);
        let left = world.pool().lost_ranges().unwrap();
        assert_eq!(left, woken.lost[2..]);
        let refused = world.sleep(false).unwrap_err();
        assert!(matches!(&refused, PoolError::Lost { lost, .. } if *lost == left), "{refused}");
        assert!(refused.to_string().contains(&left[0].block.to_string()), "{refused}");
        world.restore(&left, false);
        world.sleep(false).unwrap();
        world.pool().wake(&everything()).unwrap();
        assert!(world.is_right());
    }
}

impl World {
    /// One of several.
    fn restore_one(&self, lost: &LostRange) {
        let nth = self.tenant.blocks.iter().position(|known| known.block.id == lost.block).unwrap();
        self.tenant.write(nth);
        assert_eq!(self.pool().mark_block_restored(lost.block).unwrap(), std::slice::from_ref(lost));
        assert_eq!(self.pool().mark_block_restored(lost.block).unwrap(), []);
        assert_eq!(self.pool().tag_state(&lost.tag).unwrap(), TagState::Undefined, "others are");
    }
}

/// How a backup may spoil: which bytes of a granule of `bytes`.
fn patterns(bytes: usize) -> Vec<Vec<usize>> {
    vec![vec![0], vec![bytes / 2], vec![bytes - 1], vec![1023, 1024], (0..bytes).step_by(512).collect()]
}

/// One run of the fault suite: a granule, or two, spoils while the tag sleeps.
fn spoil_asleep(fast_digests: bool, changes: Changes, verify: Option<Verify>, prepares: bool, case: usize) {
    let context = format!("fast {fast_digests}, {changes:?}, {verify:?}, prepares {prepares}, case {case}");
    let mut world = World::new(fast_digests, small());
    let granule = world.granule();
    let weights = world.tenant.load(9 * granule, &Tag::weights());
    world.tenant.load(700, &Tag::weights());
    world.tenant.load(2 * granule, &Tag::runtime());
    for tag in [Tag::weights(), Tag::runtime()] {
        world.pool().declare_changes(&tag, changes).unwrap();
    }
    // Once more, so that immutable bytes are skipped.
    for _ in 0..2 {
        world.sleep(false).unwrap();
        world.pool().wake(&everything()).unwrap();
    }
    world.sleep(prepares).unwrap();
    let count = world.store.stored_granules();
    let patterns = patterns(usize::try_from(granule).unwrap());
    let spoiled: BTreeSet<usize> = [case % count, (case * 7 + case / count) % count].into_iter().collect();
    spoiled.iter().for_each(|nth| world.store.spoil_bytes(*nth, &patterns[case % patterns.len()]));
    let request = WakeRequest::all().verifying(verify);
    let lost = match world.pool().wake(&request) {
        Err(PoolError::Corrupt { location: Corruption::Backup, .. }) => {
            let woken = world.pool().wake(&request.accepting_losses()).unwrap();
            assert!(!woken.lost.is_empty(), "{context}");
            woken.lost
        }
        woken => {
            let woken: WakeReport = woken.unwrap();
            let is_sample = verify == Some(Verify::Sample) || !fast_digests;
            assert!(is_sample && woken.lost.is_empty() && changes != Changes::Volatile, "{context}");
            // The owner does not know, and works on.
            if changes != Changes::Immutable {
                (0..9).for_each(|nth| world.tenant.touch_granule(weights, nth));
            }
            match world.sleep(prepares) {
                Err(PoolError::Lost { lost, .. }) => lost,
                Ok(()) => {
                    assert_eq!(changes, Changes::Immutable, "{context}: written over unseen");
                    let PoolError::Corrupt { .. } = world.pool().wake(&everything()).unwrap_err() else {
                        panic!("{context}")
                    };
                    world.pool().wake(&everything().accepting_losses()).unwrap().lost
                }
                Err(error) => panic!("{context}: {error}"),
            }
        }
    };
    assert!(world.is_right(), "{context}");
    let named = world.granules(&lost);
    assert!(named.len() <= spoiled.len(), "{context}: only what has spoiled is lost");
    if verify.is_none() && fast_digests {
        assert_eq!(named.len(), spoiled.len(), "{context}: all are named");
    }
    world.restore(&lost, case.is_multiple_of(2));
    // Spoiled granules of several tags that a sample did not include may be found later.
    let mut rounds = 0;
    loop {
        rounds += 1;
        assert!(rounds < 5, "{context}");
        match world.sleep(prepares) {
            Ok(()) => match world.pool().wake(&everything().accepting_losses()).unwrap().lost {
                lost if lost.is_empty() => break,
                lost => world.restore(&lost, true),
            },
            Err(PoolError::Lost { lost, .. }) => world.restore(&lost, true),
            Err(error) => panic!("{context}: {error}"),
        }
        assert!(world.is_right(), "{context}");
    }
    assert!(world.is_right(), "{context}");
    world.pool().close().unwrap();
    assert_eq!((world.store.used_bytes(), world.device.resident_bytes()), (0, 0), "{context}");
}

#[test]
fn whatever_spoils_is_lost_by_name_and_nothing_else_is() {
    let stride = DeviceKind::of_this_run().stride_of_cycles();
    let mut cases = 0..;
    for fast_digests in [true, false] {
        for changes in [Changes::Compared, Changes::Immutable, Changes::Volatile] {
            for verify in [None, Some(Verify::Sample), Some(Verify::All)] {
                for prepares in [false, true] {
                    for case in cases.by_ref().take(26).filter(|case| case % stride == 0) {
                        spoil_asleep(fast_digests, changes, verify, prepares, case);
                    }
                }
            }
        }
    }
}

/// Reported at this point: a preparation that finds it reports it, and so does the sleep after it.
#[test]
fn a_preparation_finds_what_the_last_wake_did_not() {
    let mut world = World::new(true, small());
    let granule = world.granule();
    let block = world.tenant.load(100 * granule, &Tag::weights());
    world.sleep(false).unwrap();
    [5, 6, 90].into_iter().for_each(|nth| world.store.spoil(nth));
    world.pool().wake(&sample()).unwrap();
    let refused = world.pool().prepare_sleep(&level_1()).unwrap().wait().unwrap_err();
    let PoolError::Lost { lost, .. } = &refused else { panic!("{refused}") };
    assert_eq!(world.granules(lost).len(), 3, "{refused}");
    assert!(world.is_right());
    // No other preparation or sleep begins before they are restored.
    for refused in [world.sleep(false).unwrap_err(), world.sleep(true).unwrap_err()] {
        assert!(matches!(&refused, PoolError::Lost { lost: same, .. } if same == lost), "{refused}");
    }
    world.restore(lost, true);
    let report = world.pool().prepare_sleep(&level_1()).unwrap().wait().unwrap();
    assert_eq!((report.end, report.copied_bytes), (PrepareEnd::Finished, 3 * granule));
    world.tenant.touch_granule(block, 5);
    world.sleep(true).unwrap();
    world.pool().wake(&everything()).unwrap();
    assert!(world.is_right());
}

/// A backup that spoils while its tag is awake costs nothing if the device has the right bytes.
#[test]
fn a_backup_that_spoils_while_the_device_is_right_is_made_anew() {
    for changes in [Changes::Compared, Changes::Volatile] {
        let mut world = World::new(false, small());
        world.tenant.load(100 * world.granule(), &Tag::weights());
        world.sleep(false).unwrap();
        world.pool().wake(&sample()).unwrap();
        world.pool().declare_changes(&Tag::weights(), changes).unwrap();
        [5, 50].into_iter().for_each(|nth| world.store.spoil(nth));
        world.sleep(false).unwrap();
        world.pool().wake(&everything()).unwrap();
        assert!(world.is_right());
    }
}

/// When most of a block is freed, the rest is backed up anew; the old backup is checked before.
#[test]
fn backups_replaced_by_other_extents_are_checked() {
    for (prepares, spoils_before) in [(false, true), (true, true), (false, false), (true, false)] {
        let mut world = World::new(true, small());
        let granule = world.granule();
        let block = world.tenant.load(4 * granule, &Tag::weights());
        world.sleep(false).unwrap();
        spoils_before.then(|| world.store.spoil(3));
        world.pool().wake(&sample()).unwrap();
        (!spoils_before).then(|| world.store.spoil(3));
        world.free_part(block, 0, 3);
        if spoils_before {
            let refused = world.sleep(prepares).unwrap_err();
            let PoolError::Lost { lost, .. } = &refused else { panic!("{refused}") };
            assert_eq!(world.granules(lost).len(), 1);
            assert!(world.is_right());
            world.restore(lost, true);
        }
        world.sleep(prepares).unwrap();
        world.pool().wake(&everything()).unwrap();
        assert!(world.is_right());
    }
}

/// Bytes loaded from a spoiled backup are not lost once their blocks were freed, and their addresses reused.
#[test]
fn a_new_block_does_not_lose_what_was_stored_of_another() {
    for (fast_digests, prepares) in [(false, false), (true, false), (true, true)] {
        let granule = World::new(fast_digests, small()).granule();
        // There are no other addresses.
        let mut world = World::new(fast_digests, small().limited_to(4 * granule));
        (0..8).for_each(|_| {
            world.tenant.load(granule / 2, &Tag::weights());
        });
        world.sleep(false).unwrap();
        world.store.spoil(1);
        world.pool().wake(&sample()).unwrap();
        let first = world.tenant.blocks.iter().map(|known| known.block.range.addr).min().unwrap();
        let freed = DeviceRange::new(first + granule, granule);
        let is_freed = |known: &Known| freed.contains(&known.block.range);
        while let Some(nth) = world.tenant.blocks.iter().position(is_freed) {
            world.tenant.free(nth);
        }
        let new = world.tenant.load(granule / 2, &Tag::weights());
        assert!(is_freed(&world.tenant.blocks[new]), "the same place");
        world.sleep(prepares).unwrap();
        world.pool().wake(&everything()).unwrap();
        assert!(world.is_right());
    }
}

/// An immutable tag whose backup has spoiled: its owner did not break the promise.
#[test]
fn a_spoiled_backup_is_no_broken_promise() {
    let mut world = World::new(true, small());
    let granule = world.granule();
    world.tenant.load(100 * granule, &Tag::weights());
    for _ in 0..2 {
        world.sleep(false).unwrap();
        world.pool().wake(&everything()).unwrap();
        world.pool().declare_changes(&Tag::weights(), Changes::Immutable).unwrap();
    }
    world.sleep(false).unwrap();
    // All but the sample of the third wake.
    (0..100).filter(|nth| nth % 64 != 2).for_each(|nth| world.store.spoil(nth));
    world.pool().wake(&sample()).unwrap();
    let refused = world.sleep(false).unwrap_err();
    let PoolError::Lost { lost, .. } = &refused else { panic!("{refused}") };
    assert_eq!(world.granules(lost).len(), 98);
    assert!(world.is_right());
}

/// A copy that fails once is repeated. A second failure is an error, and nothing is lost.
#[test]
fn a_transfer_that_goes_wrong_is_made_once_more() {
    for (garbled, accepting) in [(1, false), (2, false), (3, true)] {
        let mut world = World::new(true, small());
        world.tenant.load(world.granule(), &Tag::weights());
        world.sleep(false).unwrap();
        world.store.garble(garbled);
        let request = WakeRequest::all();
        let request = if accepting { request.accepting_losses() } else { request };
        match world.pool().wake(&request) {
            Ok(woken) => assert_eq!((garbled, woken.verified_bytes), (1, world.granule())),
            Err(PoolError::Corrupt { location: Corruption::Transfer, lost }) => {
                assert_eq!((garbled > 1, lost.len()), (true, 1));
                assert_eq!(world.pool().tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
                world.store.garble(0);
                world.pool().wake(&everything()).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
        assert!(world.is_right());
    }
}

/// A sleep stores the digests that the device had, so the wake notices. A preparation stores those of what arrived, so the
/// sleep behind it does.
#[test]
fn a_copy_to_the_backup_that_goes_wrong_is_noticed() {
    for prepares in [false, true] {
        let mut world = World::new(true, small());
        let first = world.tenant.load(world.granule(), &Tag::weights());
        world.tenant.load(3 * world.granule(), &Tag::weights());
        world.store.garble_saves(1);
        world.sleep(prepares).unwrap();
        if prepares {
            world.pool().wake(&everything()).unwrap();
            assert!(world.is_right());
            continue;
        }
        let refused = world.pool().wake(&everything()).unwrap_err();
        let PoolError::Corrupt { location: Corruption::Backup, lost } = &refused else { panic!("{refused}") };
        assert_eq!(world.granules(lost).len(), 1);
        world.pool().wake(&everything().accepting_losses()).unwrap();
        world.tenant.write(first);
        assert!(world.is_right());
    }
}

/// A backup is checked before it is dropped, which would be impossible afterwards.
#[test]
fn backups_that_are_not_kept_are_compared_whatever_the_sample() {
    for (keep_backups, changes) in [(false, Changes::Compared), (true, Changes::Volatile)] {
        let mut world = World::new(false, small().keeping_backups(keep_backups));
        let granule = world.granule();
        world.tenant.load(100 * granule, &Tag::weights());
        world.pool().declare_changes(&Tag::weights(), changes).unwrap();
        world.sleep(false).unwrap();
        world.store.spoil(77);
        let refused = world.pool().wake(&sample()).unwrap_err();
        assert!(matches!(refused, PoolError::Corrupt { .. }), "{refused}");
        assert_eq!(world.pool().wake(&sample().accepting_losses()).unwrap().lost.len(), 1);
        assert!(world.is_right());
    }
}

/// When host memory is short, backups of awake tags are dropped; the bytes loaded from them are checked before.
#[test]
fn backups_dropped_for_lack_of_host_memory_are_checked() {
    let device = TestDevice::open(64);
    let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass);
    let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| info.fast_digests = true));
    let granule = driver.info().granule_bytes;
    let store = TestBackups::new(&driver, Coding::Xored, 12 * granule);
    let pool = Pool::with_backups(driver, small(), Arc::new(store.clone()) as Arc<dyn Backups>).unwrap();
    let tenant = Tenant::new(&Arc::new(pool), 3);
    let mut world = World { device, store, tenant };
    world.tenant.load(8 * granule, &Tag::weights());
    world.sleep(false).unwrap();
    world.store.spoil(6);
    world.pool().wake(&sample()).unwrap();
    world.tenant.load(8 * granule, &Tag::runtime());
    let only = SleepRequest::of([Tag::runtime()], Level::One);
    world.pool().sleep(&only).unwrap();
    assert_eq!(world.pool().lost_ranges().unwrap().len(), 1);
    assert_eq!(world.pool().tag_state(&Tag::weights()).unwrap(), TagState::Undefined);
    world.pool().wake(&everything()).unwrap();
    assert!(world.is_right());
}

/// *Undefined* keeps its meaning: a tag that a sleep dropped is undefined as a whole.
#[test]
fn what_a_sleep_dropped_is_marked_by_tag() {
    let mut world = World::new(true, small());
    let granule = world.granule();
    let block = world.tenant.load(4 * granule, &Tag::weights());
    let id = world.tenant.blocks[block].block.id;
    world.sleep(false).unwrap();
    world.store.spoil(2);
    let woken = world.pool().wake(&WakeRequest::all().accepting_losses()).unwrap();
    assert_eq!(
        woken.lost[0].offset_bytes,
        woken.lost[0].range.addr - world.tenant.blocks[block].block.range.addr
    );
    world.pool().sleep(&SleepRequest::all(Level::Two)).unwrap();
    let asleep = world.pool().mark_block_restored(id).unwrap_err();
    assert!(matches!(asleep, PoolError::Asleep { .. }), "{asleep}");
    world.pool().wake(&WakeRequest::all()).unwrap();
    assert_eq!(world.pool().lost_ranges().unwrap(), [], "all of it is undefined, not a part");
    for refused in [
        world.pool().mark_block_restored(id).map(drop).unwrap_err(),
        world.sleep(false).unwrap_err(),
        world.read(block, world.tenant.blocks[block].block.range).map(drop).unwrap_err(),
    ] {
        assert!(matches!(refused, PoolError::Undefined { .. }), "{refused}");
    }
    world.tenant.write(block);
    world.pool().mark_restored(&[Tag::weights()]).unwrap();
    assert!(world.is_right());
    world.tenant.free(block);
    assert!(matches!(world.pool().mark_block_restored(id), Err(PoolError::StaleBlock { .. })));
}

/// Freeing a block removes its lost ranges: its tag is whole again, and so are new blocks in its place.
#[test]
fn what_is_freed_awake_is_lost_no_more() {
    let mut world = World::new(true, small());
    let granule = world.granule();
    let [first, _] = [4, 4].map(|granules| world.tenant.load(granules * granule, &Tag::weights()));
    world.sleep(false).unwrap();
    (0..4).for_each(|nth| world.store.spoil(nth));
    let woken = world.pool().wake(&WakeRequest::all().accepting_losses()).unwrap();
    assert_eq!((woken.lost.len(), woken.lost[0].range.bytes), (1, 4 * granule), "neighbours are one range");
    let nth = world.tenant.blocks.iter().position(|known| known.block.id == woken.lost[0].block).unwrap();
    let place = world.tenant.blocks[nth].block.range;
    world.tenant.free(nth);
    assert_eq!(world.pool().lost_ranges().unwrap(), []);
    assert_eq!(world.pool().tag_state(&Tag::weights()).unwrap(), TagState::Awake);
    let again = world.tenant.load(4 * granule, &Tag::weights());
    assert_eq!((first, world.tenant.blocks[again].block.range), (0, place), "the same place");
    assert!(world.is_right());
    world.sleep(false).unwrap();
    world.pool().wake(&everything()).unwrap();
    assert!(world.is_right());
}

/// A block freed while asleep has nothing to lose.
#[test]
fn what_is_freed_asleep_is_not_missed() {
    let mut world = World::new(true, small());
    let granule = world.granule();
    let half = granule / 2;
    let blocks: Vec<usize> = (0..8).map(|_| world.tenant.load(half, &Tag::weights())).collect();
    world.sleep(false).unwrap();
    (0..world.store.stored_granules()).for_each(|nth| world.store.spoil(nth));
    let PoolError::Corrupt { lost, .. } = world.pool().wake(&everything()).unwrap_err() else { panic!() };
    assert_eq!(lost.len(), blocks.len());
    for _ in 1..blocks.len() {
        world.tenant.free(0);
    }
    let PoolError::Corrupt { lost, .. } = world.pool().wake(&everything()).unwrap_err() else { panic!() };
    assert_eq!(lost.len(), 1);
    world.tenant.free(0);
    world.pool().wake(&everything()).unwrap();
    assert!(world.is_right());
}

#[derive(Debug, Clone)]
enum Step {
    Touch(u64),
    Rewrite(usize),
    Replace(usize),
    Spoil { nth: usize, pattern: usize },
    Sleep { prepares: bool },
    Wake { verify: Option<Verify>, accepting: bool },
    Declare(usize, Changes),
}

fn step() -> impl Strategy<Value = Step> {
    let verify = || prop_oneof![Just(None), Just(Some(Verify::Sample)), Just(Some(Verify::All))];
    let changes = prop_oneof![Just(Changes::Compared), Just(Changes::Immutable), Just(Changes::Volatile)];
    prop_oneof![
        4 => any::<u64>().prop_map(Step::Touch),
        1 => any::<usize>().prop_map(Step::Rewrite),
        1 => any::<usize>().prop_map(Step::Replace),
        2 => (any::<usize>(), 0..5usize).prop_map(|(nth, pattern)| Step::Spoil { nth, pattern }),
        4 => any::<bool>().prop_map(|prepares| Step::Sleep { prepares }),
        4 => (verify(), any::<bool>()).prop_map(|(verify, accepting)| Step::Wake { verify, accepting }),
        1 => (0..2usize, changes).prop_map(|(tag, changes)| Step::Declare(tag, changes)),
    ]
}

/// Random cycles, with the bytes as they have to be.
struct Run {
    world: World,
    fast_digests: bool,
    changes: [Changes; 2],
    asleep: bool,
    spoiled: usize,
}

const TAGS: [fn() -> Tag; 2] = [Tag::weights, Tag::runtime];

impl Run {
    fn new(fast_digests: bool, config: PoolConfig) -> Self {
        let mut world = World::new(fast_digests, config);
        let granule = world.granule();
        let sizes = [5 * granule, 300, granule, 9 * granule + 100, 4 * granule, 1000];
        for (nth, bytes) in sizes.into_iter().enumerate() {
            world.tenant.load(bytes, &TAGS[nth % 2]());
        }
        Self { world, fast_digests, changes: [Changes::Compared; 2], asleep: false, spoiled: 0 }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Touch(which) if !self.asleep => {
                let nth = usize::try_from(which % self.world.tenant.blocks.len() as u64).unwrap();
                let offset = which / 7 % self.world.tenant.blocks[nth].bytes.len() as u64;
                self.writing(nth, |tenant| tenant.touch(nth, offset));
            }
            Step::Rewrite(nth) if !self.asleep => {
                let nth = nth % self.world.tenant.blocks.len();
                self.writing(nth, |tenant| tenant.write(nth));
            }
            Step::Replace(nth) if !self.asleep => {
                let nth = nth % self.world.tenant.blocks.len();
                let (bytes, tag) = {
                    let known = &self.world.tenant.blocks[nth];
                    (known.bytes.len() as u64, known.tag.clone())
                };
                self.world.tenant.free(nth);
                self.world.tenant.load(bytes, &tag);
            }
            Step::Spoil { nth, pattern } => {
                let count = self.world.store.stored_granules();
                if count > 0 {
                    let patterns = patterns(usize::try_from(self.world.granule()).unwrap());
                    self.world.store.spoil_bytes(nth % count, &patterns[pattern]);
                    self.spoiled += 1;
                }
            }
            Step::Sleep { prepares } if !self.asleep => self.sleep(prepares),
            Step::Wake { verify, accepting } if self.asleep => self.wake(verify, accepting),
            Step::Declare(tag, changes) => {
                self.world.pool().declare_changes(&TAGS[tag](), changes).unwrap();
                self.changes[tag] = changes;
            }
            _ => {}
        }
    }

    /// A promise not to change is taken back before a change, and made again after it.
    fn writing(&mut self, nth: usize, write: impl FnOnce(&mut Tenant)) {
        let tag = self.world.tenant.blocks[nth].tag.clone();
        let promised = self.changes[usize::from(tag != Tag::weights())] == Changes::Immutable;
        let declare = |world: &World, changes| world.pool().declare_changes(&tag, changes).unwrap();
        promised.then(|| declare(&self.world, Changes::Compared));
        write(&mut self.world.tenant);
        promised.then(|| declare(&self.world, Changes::Immutable));
    }

    fn lost(&self, lost: &[LostRange]) {
        let granules = self.world.granules(lost).len();
        assert!(granules <= self.spoiled, "{granules} are lost, and {} were spoiled", self.spoiled);
        self.world.restore(lost, granules.is_multiple_of(2));
    }

    fn sleep(&mut self, prepares: bool) {
        match self.world.sleep(prepares) {
            Ok(()) => self.asleep = true,
            Err(PoolError::Lost { lost, .. }) => self.lost(&lost),
            Err(error) => panic!("{error}"),
        }
    }

    fn wake(&mut self, verify: Option<Verify>, accepting: bool) {
        let request = WakeRequest::all().verifying(verify);
        let request = if accepting { request.accepting_losses() } else { request };
        let all = match verify {
            None => self.fast_digests || accepting,
            Some(verify) => verify == Verify::All,
        };
        match self.world.pool().wake(&request) {
            Ok(woken) => {
                self.asleep = false;
                assert!(woken.lost.is_empty() || accepting);
                let seen = woken.verified_bytes == woken.copied_bytes || !woken.lost.is_empty();
                assert!(seen || !all);
                if seen {
                    assert!(self.world.is_right(), "wrong bytes, and every report says verified");
                }
                if !woken.lost.is_empty() {
                    self.lost(&woken.lost);
                }
            }
            Err(PoolError::Corrupt { location: Corruption::Backup, lost }) => {
                assert!(!accepting && self.world.granules(&lost).len() <= self.spoiled);
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// In any case the bytes are right or were reported lost.
    fn end(mut self) {
        for _ in 0..4 {
            if self.asleep {
                self.wake(Some(Verify::All), true);
            }
            // Tags that lost something have restored it, and are awake.
            self.sleep(false);
        }
        assert!(self.asleep, "no sleep for all that is restored");
        self.wake(Some(Verify::All), true);
        assert!(self.world.is_right());
        self.world.pool().close().unwrap();
        assert_eq!((self.world.store.used_bytes(), self.world.device.resident_bytes()), (0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: DeviceKind::of_this_run().cases(or_on_a_gpu(150, 50)),
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_cycle_ends_with_unreported_wrong_bytes(
        fast_digests in any::<bool>(),
        keep_backups in prop_oneof![3 => Just(true), 1 => Just(false)],
        chunk_granules in proptest::sample::select(vec![1, 2, 4]),
        steps in proptest::collection::vec(step(), 10..80),
    ) {
        let config = small().in_chunks_of(chunk_granules).keeping_backups(keep_backups);
        let mut run = Run::new(fast_digests, config);
        for step in &steps {
            run.step(step);
        }
        run.end();
    }
}

/// While a sleep of a tag is prepared, the tag is forgotten and another takes its place. A spoiled backup of a third
/// tag is then lost, and nothing else.
#[test]
fn a_tag_that_is_forgotten_under_a_preparation_loses_nothing_of_others() {
    let device = TestDevice::open(256);
    let (is_armed, latch) = (Arc::new(AtomicBool::new(false)), Arc::new(Latch::default()));
    let reached = Arc::new(Latch::default());
    let script = {
        let (is_armed, latch, reached) = (Arc::clone(&is_armed), Arc::clone(&latch), Arc::clone(&reached));
        move |call: Call| {
            let prepares = thread::current().name() == Some("poorwill-prepare");
            if call.op == Op::Digest && prepares && is_armed.swap(false, Ordering::Relaxed) {
                reached.open();
                latch.pass();
            }
            Verdict::Pass
        }
    };
    let driver = ScriptedDriver::new(device.driver(), script);
    let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| info.fast_digests = true));
    let store = TestBackups::new(&driver, Coding::Xored, u64::MAX);
    let backups: Arc<dyn Backups> = Arc::new(store.clone());
    let pool = Arc::new(Pool::with_backups(driver, small(), backups).unwrap());
    let mut tenant = Tenant::new(&pool, 3);
    let granule = tenant.granule();
    tenant.load(4 * granule, &Tag::new("adapter").unwrap());
    let lora = tenant.load(4 * granule, &Tag::new("lora").unwrap());
    tenant.load(100 * granule, &Tag::weights());
    pool.sleep(&level_1()).unwrap();
    store.spoil(8 + 50);
    pool.wake(&sample()).unwrap();
    is_armed.store(true, Ordering::Relaxed);
    let preparation = pool.prepare_sleep(&level_1()).unwrap();
    reached.pass();
    pool.free(tenant.blocks[lora].block.id).unwrap();
    pool.trim().unwrap();
    for nth in 0..200 {
        let tag = Tag::new(&format!("t{nth}")).unwrap();
        let block = pool.alloc(&AllocRequest::new(512, tag)).unwrap();
        pool.free(block.id).unwrap();
    }
    latch.open();
    let PoolError::Lost { lost, .. } = preparation.wait().unwrap_err() else { panic!("not lost") };
    assert!(lost.iter().all(|lost| lost.tag == Tag::weights()), "{lost:?}");
    pool.stats().unwrap();
}
