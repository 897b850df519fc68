//! Single calls and their outcome: the table of tags, limits, conflicts, bad input, and reports that agree with the
//! device. The properties and the fault suite cover the combinations.

use std::sync::{Arc, Mutex};

use poorwill_core::pool::Corruption;
use poorwill_core::{
    AllocRequest, Block, Driver, DriverErrorKind, Dropped, HostBuffer, Level, Op, Pool, PoolConfig,
    PoolError, Release, SleepRequest, StreamId, Tag, TagPolicy, TagState, Verify, WakeRequest, chain,
};
use poorwill_testkit::broken::{BrokenDriver, Defect};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};

const GRANULES: u64 = 64;

fn device() -> TestDevice {
    TestDevice::open(GRANULES)
}

fn small_config() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8)
}

fn pool() -> (TestDevice, Pool) {
    let device = device();
    let pool = Pool::new(device.driver(), small_config()).unwrap();
    (device, pool)
}

fn limited(granules: u64) -> (TestDevice, Pool) {
    let device = device();
    let config = small_config().limited_to(granules * device.info().granule_bytes);
    let pool = Pool::new(device.driver(), config).unwrap();
    (device, pool)
}

fn loaded(pool: &Pool, granules: u64, tag: &Tag, seed: u64) -> Block {
    let bytes = granules * pool.driver().info().granule_bytes;
    let block = pool.alloc(&AllocRequest::new(bytes, tag.clone())).unwrap();
    pattern::fill(pool, block.id, seed, usize::try_from(bytes).unwrap()).unwrap();
    block
}

fn assert_reads(pool: &Pool, block: &Block, seed: u64) {
    let len = usize::try_from(block.requested_bytes).unwrap();
    assert!(pattern::read(pool, block.id, len).unwrap() == pattern::bytes(seed, len));
}

#[test]
fn reports_agree_with_the_device() {
    let (device, pool) = pool();
    let granule = device.info().granule_bytes;
    let weights = loaded(&pool, 10, &Tag::weights(), 1);
    let kv = loaded(&pool, 6, &Tag::kv_cache(), 2);
    let cached = loaded(&pool, 5, &Tag::weights(), 3);
    pool.free(cached.id).unwrap();
    let mapped = pool.stats().unwrap().mapped_bytes;
    let before = device.memory_info().unwrap().free_bytes;
    let sleep = pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert_eq!(sleep.tags, [Tag::kv_cache(), Tag::weights()]);
    assert_eq!(
        (sleep.planned_release_bytes, sleep.released_bytes),
        (mapped, mapped),
        "the cached block goes too"
    );
    assert_eq!(sleep.release, Release::Confirmed);
    assert_eq!(sleep.device_free_before_bytes, before);
    assert_eq!(sleep.device_free_after_bytes, Some(before + mapped));
    assert_eq!(
        (sleep.copied_bytes, sleep.unchanged_bytes, sleep.discarded_bytes),
        (10 * granule, 0, 6 * granule)
    );
    assert_eq!(sleep.unaccounted_bytes, 0);
    assert_eq!(device.resident_bytes(), 0);
    let wake = pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
    assert_eq!(wake.tags, [Tag::kv_cache(), Tag::weights()]);
    assert_eq!(wake.mapped_bytes, 16 * granule, "the cached block does not come back");
    assert_eq!(
        (wake.copied_bytes, wake.verified_bytes, wake.zeroed_bytes),
        (10 * granule, 10 * granule, 6 * granule)
    );
    assert!(wake.undefined_tags.is_empty());
    assert_reads(&pool, &weights, 1);
    let len = usize::try_from(kv.requested_bytes).unwrap();
    assert!(pattern::read(&pool, kv.id, len).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn what_has_not_changed_is_not_copied_again() {
    let device = device();
    let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass);
    let driver = driver.with_info(|info| info.fast_digests = true);
    let pool = Pool::new(Arc::new(driver), small_config()).unwrap();
    let granule = device.info().granule_bytes;
    let block = loaded(&pool, 12, &Tag::weights(), 1);
    let all = SleepRequest::all(Level::One);
    assert_eq!(pool.sleep(&all).unwrap().copied_bytes, 12 * granule);
    pool.wake(&WakeRequest::all()).unwrap();
    let again = pool.sleep(&all).unwrap();
    assert_eq!((again.copied_bytes, again.unchanged_bytes), (0, 12 * granule));
    pool.wake(&WakeRequest::all()).unwrap();
    let one = Arc::new(HostBuffer::from(vec![0xAB]));
    pool.write(StreamId::DEFAULT, block.id, 5 * granule + 7, one, 0, 1).unwrap().wait().unwrap();
    let changed = pool.sleep(&all).unwrap();
    assert_eq!((changed.copied_bytes, changed.unchanged_bytes), (granule, 11 * granule));
    pool.wake(&WakeRequest::all()).unwrap();
    let mut expected = pattern::bytes(1, usize::try_from(12 * granule).unwrap());
    expected[usize::try_from(5 * granule + 7).unwrap()] = 0xAB;
    assert!(pattern::read(&pool, block.id, expected.len()).unwrap() == expected);
}

#[test]
fn backups_can_be_dropped_at_the_wake() {
    let device = device();
    let config = small_config().keeping_backups(false);
    let pool = Pool::new(device.driver(), config).unwrap();
    let block = loaded(&pool, 12, &Tag::weights(), 1);
    for _ in 0..2 {
        let sleep = pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        assert_eq!((sleep.copied_bytes, device.host_bytes()), (block.range.bytes, block.range.bytes));
        pool.wake(&WakeRequest::all()).unwrap();
        assert_eq!(device.host_bytes(), 0);
    }
    assert_reads(&pool, &block, 1);
}

#[test]
fn level_2_leaves_weights_undefined_until_they_are_restored() {
    let (_, pool) = pool();
    let weights = loaded(&pool, 3, &Tag::weights(), 1);
    let runtime = loaded(&pool, 2, &Tag::runtime(), 2);
    let sleep = pool.sleep(&SleepRequest::all(Level::Two)).unwrap();
    assert_eq!(sleep.copied_bytes, runtime.range.bytes);
    assert_eq!(pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepDropped);
    assert!(matches!(pool.mark_restored(&[Tag::weights()]), Err(PoolError::Asleep { .. })));
    assert_eq!(pool.wake(&WakeRequest::all()).unwrap().undefined_tags, [Tag::weights()]);
    assert_reads(&pool, &runtime, 2);
    assert!(pattern::read(&pool, weights.id, 1).unwrap_err().contains("mark_restored"));
    let level_1 = pool.sleep(&SleepRequest::all(Level::One));
    assert!(matches!(level_1, Err(PoolError::Undefined { .. })), "garbage is not backed up: {level_1:?}");
    assert_eq!(pool.tag_state(&Tag::runtime()).unwrap(), TagState::Awake, "nothing has happened");
    pattern::fill(&pool, weights.id, 3, usize::try_from(weights.requested_bytes).unwrap()).unwrap();
    assert_eq!(pool.mark_restored(&[Tag::weights(), Tag::runtime()]).unwrap(), [Tag::weights()]);
    assert_reads(&pool, &weights, 3);
    assert!(pool.mark_restored(&[Tag::weights()]).unwrap().is_empty());
}

#[test]
fn sleeping_sleepers_and_waking_the_awake_do_nothing_and_say_so() {
    let (_, pool) = pool();
    loaded(&pool, 3, &Tag::weights(), 1);
    loaded(&pool, 3, &Tag::kv_cache(), 2);
    let nothing = pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!((nothing.tags.len(), nothing.mapped_bytes), (0, 0));
    assert_eq!(nothing.already_awake_tags, [Tag::kv_cache(), Tag::weights()]);
    let only = SleepRequest::of([Tag::kv_cache(), Tag::kv_cache()], Level::One);
    assert_eq!(pool.sleep(&only).unwrap().tags, [Tag::kv_cache()]);
    let rest = pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert_eq!((rest.tags, rest.already_asleep_tags), (vec![Tag::weights()], vec![Tag::kv_cache()]));
    let again = pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert_eq!((again.tags.len(), again.released_bytes, again.already_asleep_tags.len()), (0, 0, 2));
    let conflict = pool.sleep(&SleepRequest::all(Level::Two)).unwrap_err();
    assert!(
        matches!(&conflict, PoolError::SleepConflict { tag, .. } if *tag == Tag::weights()),
        "{conflict}"
    );
    assert!(conflict.to_string().contains("wake it first"));
    let one = pool.wake(&WakeRequest::of([Tag::weights()])).unwrap();
    assert_eq!(one.tags, [Tag::weights()]);
    assert_eq!(pool.tag_state(&Tag::kv_cache()).unwrap(), TagState::AsleepDropped);
}

#[test]
fn a_conflict_is_found_before_anything_is_awaited() {
    let called = Arc::new(Mutex::new(Vec::new()));
    let calls = Arc::clone(&called);
    let driver = ScriptedDriver::new(device().driver(), move |call| {
        calls.lock().unwrap().push(call.op);
        Verdict::Pass
    });
    let pool = Pool::new(Arc::new(driver), small_config()).unwrap();
    loaded(&pool, 3, &Tag::weights(), 1);
    loaded(&pool, 2, &Tag::runtime(), 2);
    pool.sleep(&SleepRequest::of([Tag::weights()], Level::One)).unwrap();
    called.lock().unwrap().clear();
    let conflict = pool.sleep(&SleepRequest::all(Level::Two)).unwrap_err();
    assert!(matches!(conflict, PoolError::SleepConflict { .. }), "{conflict}");
    let called = std::mem::take(&mut *called.lock().unwrap());
    assert_eq!(called, [Op::Capturing]);
    assert_eq!(pool.tag_state(&Tag::runtime()).unwrap(), TagState::Awake);
}

#[test]
fn discard_drops_whatever_the_policy_says() {
    let (device, pool) = pool();
    let runtime = loaded(&pool, 5, &Tag::runtime(), 1);
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert!(device.host_bytes() > 0);
    let asleep = pool.discard(&[Tag::runtime()]).unwrap();
    assert_eq!((asleep.tags.as_slice(), asleep.released_bytes), ([Tag::runtime()].as_slice(), 0));
    assert_eq!(device.host_bytes(), 0, "the backup goes too");
    assert_eq!(pool.discard(&[Tag::runtime()]).unwrap().already_asleep_tags, [Tag::runtime()]);
    assert_eq!(pool.wake(&WakeRequest::all()).unwrap().undefined_tags, [Tag::runtime()]);
    assert_eq!(pool.block(runtime.id).unwrap(), runtime);
    let awake = pool.discard(&[Tag::runtime()]).unwrap();
    assert_eq!(awake.released_bytes, awake.planned_release_bytes);
    assert_eq!(awake.discarded_bytes, runtime.range.bytes);
}

#[test]
fn declared_tags_follow_their_declaration() {
    let (_, pool) = pool();
    let zeroed = Tag::new("scratch.zeroed").unwrap();
    let policy = TagPolicy::discardable(Dropped::Zeros);
    pool.declare_tag(&zeroed, policy).unwrap();
    pool.declare_tag(&zeroed, policy).unwrap();
    let block = loaded(&pool, 2, &zeroed, 1);
    let conflict = pool.declare_tag(&zeroed, TagPolicy::PRESERVED);
    assert!(matches!(conflict, Err(PoolError::PolicyConflict { .. })));
    assert_eq!(pool.sleep(&SleepRequest::all(Level::One)).unwrap().copied_bytes, 0);
    pool.wake(&WakeRequest::all()).unwrap();
    assert!(pattern::read(&pool, block.id, 64).unwrap().iter().all(|byte| *byte == 0));
    loaded(&pool, 1, &Tag::weights(), 2);
    let late = pool.declare_tag(&Tag::weights(), TagPolicy::PRESERVED);
    assert!(matches!(late, Err(PoolError::PolicyConflict { .. })), "weights have blocks already");
}

#[test]
fn the_limit_is_kept_and_named() {
    let (device, pool) = limited(8);
    let granule = device.info().granule_bytes;
    let too_much = pool.alloc(&AllocRequest::new(9 * granule, Tag::weights())).unwrap_err();
    assert!(matches!(too_much, PoolError::OverLimit { needed_bytes, .. } if needed_bytes == 9 * granule));
    assert!(too_much.to_string().contains("raise the limit"), "{too_much}");
    let six = loaded(&pool, 6, &Tag::weights(), 1);
    let refused = pool.alloc(&AllocRequest::new(3 * granule, Tag::kv_cache())).unwrap_err();
    let PoolError::OverLimit { usage, .. } = &refused else { panic!("{refused}") };
    assert_eq!(
        (usage.live_bytes, usage.mapped_bytes, usage.limit_bytes),
        (6 * granule, 6 * granule, 8 * granule)
    );
    pool.free(six.id).unwrap();
    let seven = loaded(&pool, 7, &Tag::kv_cache(), 2);
    assert!(pool.stats().unwrap().mapped_bytes <= 8 * granule, "what was cached was reclaimed for it");
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    let other = loaded(&pool, 8, &Tag::runtime(), 3);
    let over_limit = pool.wake(&WakeRequest::all()).unwrap_err();
    assert!(matches!(over_limit, PoolError::OverLimit { .. }), "{over_limit}");
    assert_eq!(pool.tag_state(&Tag::kv_cache()).unwrap(), TagState::AsleepDropped);
    assert_reads(&pool, &other, 3);
    pool.free(other.id).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(pool.block(seven.id).unwrap(), seven);
}

/// From bug reports: three quarters of the limit, freed, then seven eighths.
#[test]
fn a_freed_block_never_stands_in_the_way_of_a_larger_one() {
    for limit in [8, 16, 24, 40, 56] {
        let (device, pool) = limited(limit);
        let granule = device.info().granule_bytes;
        let first = loaded(&pool, limit * 3 / 4, &Tag::weights(), 1);
        pool.free(first.id).unwrap();
        let second = loaded(&pool, limit * 7 / 8, &Tag::weights(), 2);
        assert_reads(&pool, &second, 2);
        assert!(pool.stats().unwrap().mapped_bytes <= limit * granule);
    }
}

#[test]
fn a_full_device_is_named_and_waking_waits_for_its_turn() {
    let device = device();
    let granule = device.info().granule_bytes;
    let (mine, theirs) = (device.driver(), device.driver());
    let (mine, theirs) =
        (Pool::new(mine, small_config()).unwrap(), Pool::new(theirs, small_config()).unwrap());
    let weights = loaded(&mine, 40, &Tag::weights(), 1);
    let kept = loaded(&mine, 2, &Tag::runtime(), 2);
    let tags = Some(vec![Tag::weights()]);
    let report = mine.sleep(&SleepRequest::all(Level::One).choosing(tags.clone())).unwrap();
    assert_eq!(report.unaccounted_bytes, 0);
    let holder = loaded(&theirs, 40, &Tag::weights(), 3);
    for _ in 0..2 {
        let full = mine.wake(&WakeRequest::default().choosing(tags.clone())).unwrap_err();
        let PoolError::DeviceFull { source, shortage, .. } = &full else { panic!("{full}") };
        assert!(matches!(source.kind, DriverErrorKind::OutOfMemory { .. }));
        let shown =
            [shortage.needed_bytes, shortage.free_bytes, shortage.total_bytes].map(|bytes| bytes / granule);
        assert_eq!(shown, [40, GRANULES - 42, GRANULES], "figures of when everything was undone");
        assert!(full.to_string().contains("are held by others"), "{full}");
        assert_eq!(mine.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
        assert_eq!(mine.stats().unwrap().mapped_bytes, kept.range.bytes, "nothing is half-mapped");
    }
    assert_reads(&theirs, &holder, 3);
    assert_reads(&mine, &kept, 2);
    let seen = mine.sleep(&SleepRequest::of([Tag::runtime()], Level::One)).unwrap();
    assert_eq!(seen.unaccounted_bytes, 40 * granule, "what this process holds outside this pool");
    theirs.close().unwrap();
    mine.wake(&WakeRequest::all()).unwrap();
    assert_reads(&mine, &weights, 1);
}

#[test]
fn bad_requests_are_refused_and_cost_nothing() {
    let (device, pool) = pool();
    let granule = device.info().granule_bytes;
    let ask = |bytes, align| pool.alloc(&AllocRequest::new(bytes, Tag::weights()).aligned_to(align));
    for (bytes, align) in
        [(0, 512), (1, 0), (1, 3), (1, 2 * granule), (u64::MAX, 512), (u64::MAX - 511, 512), (1 << 63, 1)]
    {
        assert!(
            matches!(ask(bytes, align), Err(PoolError::InvalidRequest { .. })),
            "{bytes} aligned to {align}"
        );
    }
    assert!(ask(1 << 62, 512).is_err());
    assert!(ask(granule, granule).unwrap().range.addr.is_multiple_of(granule));
    let block = loaded(&pool, 1, &Tag::weights(), 1);
    let buffer = || HostBuffer::from(vec![0; 16]);
    for (offset, bytes) in [(granule, 1), (granule - 1, 2), (u64::MAX, 1), (1, u64::MAX)] {
        let read = pool.read(StreamId::DEFAULT, block.id, offset, buffer(), 0, bytes);
        assert!(matches!(read, Err(PoolError::OutOfBlock { .. })), "{read:?}");
    }
    let (_, other) = self::pool();
    assert!(matches!(other.free(block.id), Err(PoolError::StaleBlock { .. })), "a handle of another pool");
    let unknown = Tag::new("nobody").unwrap();
    let sleep = pool.sleep(&SleepRequest::of([unknown.clone()], Level::One)).unwrap_err();
    assert!(sleep.to_string().contains("known are cudagraph, kv_cache, runtime, weights"), "{sleep}");
    assert!(matches!(pool.wake(&WakeRequest::of([unknown])), Err(PoolError::UnknownTag { .. })));
    pool.free(block.id).unwrap();
    assert!(matches!(pool.free(block.id), Err(PoolError::StaleBlock { .. })));
    assert!(matches!(pool.block(block.id), Err(PoolError::StaleBlock { .. })));
}

#[test]
fn bad_configurations_are_refused() {
    let device = device().driver();
    let granule = device.info().granule_bytes;
    let defaults = PoolConfig::default;
    for config in [
        defaults().limited_to(0),
        defaults().limited_to(granule - 1),
        defaults().in_chunks_of(0),
        defaults().in_segments_of(0),
        defaults().in_chunks_of(u64::MAX),
    ] {
        let error = Pool::new(Arc::clone(&device), config).unwrap_err();
        assert!(matches!(error, PoolError::InvalidConfig { .. }), "{error}");
    }
    let odd = defaults().limited_to(3 * granule + 1);
    let pool = Pool::new(device, odd).unwrap();
    assert!(pool.alloc(&AllocRequest::new(3 * granule, Tag::weights())).is_ok());
    assert!(pool.alloc(&AllocRequest::new(1, Tag::weights())).is_err());
}

#[test]
fn a_backup_that_changed_is_reported_and_never_woken() {
    let device = device();
    let rotting = Arc::new(BrokenDriver::new(device.driver(), Some(Defect::HostMemoryRots)));
    let pool = Pool::new(Arc::clone(&rotting) as Arc<dyn Driver>, small_config()).unwrap();
    let block = loaded(&pool, 10, &Tag::weights(), 1);
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    rotting.rot();
    for _ in 0..2 {
        let error = pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap_err();
        let PoolError::Corrupt { lost, location } = &error else { panic!("{error}") };
        assert_eq!((&lost[0].tag, *location), (&Tag::weights(), Corruption::Backup));
        assert!(lost.iter().all(|lost| lost.block == block.id && block.range.contains(&lost.range)));
        assert!(error.to_string().contains("discard the tag"), "{error}");
        assert_eq!(pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
        assert_eq!(device.memory_info().unwrap().free_bytes, device.info().total_bytes);
    }
    pool.discard(&[Tag::weights()]).unwrap();
    assert_eq!(
        pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap().undefined_tags,
        [Tag::weights()]
    );
}

#[test]
fn a_failed_copy_is_distinguished_from_a_bad_backup() {
    let device = device();
    let driver = BrokenDriver::new(device.driver(), Some(Defect::CopyIsShort));
    let pool = Pool::new(Arc::new(driver), small_config()).unwrap();
    let request = AllocRequest::new(3 * device.info().granule_bytes, Tag::weights());
    let block = pool.alloc(&request).unwrap();
    // Written by the device itself, since this pool's own writes lose a byte.
    let parts = [poorwill_core::CopyPart { device: block.range, host_offset: 0 }];
    let bytes = pattern::bytes(1, usize::try_from(block.range.bytes).unwrap());
    device.copy_to_device(StreamId::DEFAULT, Arc::new(bytes.into()), &parts).unwrap().wait().unwrap();
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    let error = pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap_err();
    assert!(matches!(error, PoolError::Corrupt { location: Corruption::Transfer, .. }), "{error}");
}

#[test]
fn a_device_that_does_not_release_memory_is_never_confirmed() {
    let driver = BrokenDriver::new(device().driver(), Some(Defect::ReleaseHoards));
    let pool = Pool::new(Arc::new(driver), small_config()).unwrap();
    loaded(&pool, 3, &Tag::weights(), 1);
    let report = pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert_eq!(report.release, Release::Ledger);
    assert_eq!(report.device_free_after_bytes, Some(report.device_free_before_bytes), "the figures tell");
}

#[test]
fn a_silent_device_is_no_reason_to_fail_after_the_point_of_no_return() {
    let asked = std::sync::atomic::AtomicU64::new(0);
    let driver = ScriptedDriver::new(device().driver(), move |call| {
        let second =
            call.op == Op::MemoryInfo && asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) > 0;
        if second { Verdict::device_failure(call) } else { Verdict::Pass }
    });
    let pool = Pool::new(Arc::new(driver), small_config()).unwrap();
    loaded(&pool, 3, &Tag::weights(), 1);
    let report = pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert_eq!((report.release, report.device_free_after_bytes), (Release::Ledger, None));
    assert_eq!(pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
}

#[test]
fn slow_devices_change_nothing_but_the_time() {
    let driver = ScriptedDriver::new(device().driver(), |call| match call.op {
        Op::CopyToHost | Op::CopyToDevice | Op::Digest => Verdict::Delay(std::time::Duration::from_millis(3)),
        _ => Verdict::Pass,
    });
    let pool = Pool::new(Arc::new(driver), small_config()).unwrap();
    let blocks: Vec<Block> = (0..6).map(|seed| loaded(&pool, 5, &Tag::weights(), seed)).collect();
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    blocks.iter().zip(0..).for_each(|(block, seed)| assert_reads(&pool, block, seed));
}

#[test]
fn reports_have_the_documented_shape() {
    let (_, pool) = pool();
    loaded(&pool, 3, &Tag::weights(), 1);
    let sleep = serde_json::to_value(pool.sleep(&SleepRequest::all(Level::One)).unwrap()).unwrap();
    let wake = serde_json::to_value(pool.wake(&WakeRequest::all()).unwrap()).unwrap();
    for name in [
        "level",
        "tags",
        "seconds",
        "planned_release_bytes",
        "released_bytes",
        "shared_backup_bytes",
        "release",
        "copied_bytes",
        "unchanged_bytes",
        "unused_bytes",
        "discarded_bytes",
        "unaccounted_bytes",
        "device_free_before_bytes",
        "device_free_after_bytes",
    ] {
        assert!(sleep.get(name).is_some(), "{name} in {sleep}");
    }
    for name in ["copy_s", "digest_s", "unmap_s", "release_s"] {
        assert!(sleep["phases"][name].is_f64());
    }
    assert_eq!(
        (&sleep["level"], &sleep["release"], &sleep["tags"]),
        (&1.into(), &"confirmed".into(), &serde_json::json!(["weights"]))
    );
    for name in [
        "tags",
        "seconds",
        "mapped_bytes",
        "copied_bytes",
        "zeroed_bytes",
        "verified_bytes",
        "undefined_tags",
    ] {
        assert!(wake.get(name).is_some(), "{name} in {wake}");
    }
    for name in ["create_s", "map_s", "copy_s", "verify_s"] {
        assert!(wake["phases"][name].is_f64());
    }
}

#[test]
fn blocks_are_aligned_as_requested_wherever_they_go() {
    let (_, pool) = pool();
    let granule = pool.driver().info().granule_bytes;
    pool.alloc(&AllocRequest::new(700, Tag::weights())).unwrap();
    for align in [1, 512, 1024, 2048, granule] {
        let block = pool.alloc(&AllocRequest::new(700, Tag::weights()).aligned_to(align)).unwrap();
        assert!(block.range.addr.is_multiple_of(align.max(512)), "{align}");
    }
}

#[test]
fn a_sleep_without_host_memory_leaves_nothing_there() {
    let device = device();
    let asked = std::sync::atomic::AtomicU64::new(0);
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        let nth =
            (call.op == Op::HostAlloc).then(|| asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        // In the middle of the announced buffers, and once more when one is requested on its own.
        let fails = nth.is_some_and(|nth| [3, 4].contains(&nth));
        let none = DriverErrorKind::OutOfHostMemory { asked_bytes: 1, reason: "none is left".into() };
        if fails { Verdict::Fail(none) } else { Verdict::Pass }
    });
    let pool = Pool::new(Arc::new(driver), small_config()).unwrap();
    let block = loaded(&pool, 20, &Tag::weights(), 1);
    let error = pool.sleep(&SleepRequest::all(Level::One)).unwrap_err();
    assert!(chain(&error).contains("none is left"), "{error}");
    assert_eq!(device.host_bytes(), 0, "the next try finds the memory that this one had taken");
    assert_reads(&pool, &block, 1);
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
}

#[test]
fn a_tag_without_blocks_is_not_undefined() {
    let (_, pool) = pool();
    let old = loaded(&pool, 3, &Tag::weights(), 1);
    pool.sleep(&SleepRequest::all(Level::Two)).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    pool.free(old.id).unwrap();
    let new = loaded(&pool, 3, &Tag::weights(), 2);
    assert_reads(&pool, &new, 2);
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
}
