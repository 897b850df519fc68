//! Backups on disk: bytes come back exactly, host memory is released, and nothing is lost when a disk fails.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use poorwill_core::backup::{Backups, Compress, Disk, Footprint, HostBackups};
use poorwill_core::pool::{Corruption, Phase};
use poorwill_core::{
    ByteSize, Driver, DriverErrorKind, Level, Op, Pool, PoolConfig, PoolError, SleepRequest, StoredAs, Tag,
    TagState, Verify, WakeRequest, chain,
};
use poorwill_driver::disk::{DiskConfig, DiskIo, FileDisk};
use poorwill_driver::{HostConfig, HostDevice, HostMemoryConfig};
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::disk::{DiskCall, TestDisk};
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::eventually;

const GRANULES: u64 = 64;

fn config() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8)
}

fn all() -> SleepRequest {
    SleepRequest::all(Level::One)
}

fn pool(driver: &Arc<dyn Driver>, compress: Compress, disk: Arc<dyn Disk>) -> Arc<Pool> {
    let backups = HostBackups::new(Arc::clone(driver)).compressing(compress).spilling_to(disk);
    Arc::new(Pool::with_backups(Arc::clone(driver), config(), Arc::new(backups)).unwrap())
}

/// Bytes that have a short code.
fn simplify(tenant: &mut Tenant, nth: usize) {
    for pair in tenant.blocks[nth].bytes.chunks_exact_mut(2) {
        pair[1] = (pair[1] & 0x80) | 0x3C | (pair[1] & 1);
    }
    tenant.write(nth);
}

#[test]
fn what_is_spilled_comes_back_whatever_changes() {
    let variants = [
        (Compress::Off, true, DiskConfig::in_folder(std::env::temp_dir())),
        (Compress::Always, true, DiskConfig::in_folder(std::env::temp_dir()).by(DiskIo::Threads)),
        (Compress::Always, false, DiskConfig::in_folder(std::env::temp_dir()).directly(false)),
        (Compress::Off, false, DiskConfig::in_folder("/dev/shm").by(DiskIo::Threads)),
    ];
    for (compress, is_fast, disk) in variants {
        let device = TestDevice::open(GRANULES);
        let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass).with_info(|info| {
            (info.fast_digests, info.fast_codec) = (is_fast, is_fast);
        });
        let disk = Arc::new(FileDisk::open(&disk).unwrap());
        let driver: Arc<dyn Driver> = Arc::new(driver);
        let pool = pool(&driver, compress, Arc::clone(&disk) as Arc<dyn Disk>);
        let mut tenant = Tenant::new(&pool, 3);
        let granule = tenant.granule();
        let weights = tenant.load(21 * granule, &Tag::weights());
        let other = tenant.load(granule * 5 / 2, &Tag::runtime());
        simplify(&mut tenant, weights);
        for cycle in 0..u64::from(DeviceKind::of_this_run().cases(24)) {
            match tenant.random(4) {
                0 => tenant.touch_granule(other, cycle % 2),
                1 => (0..21).for_each(|nth| tenant.touch_granule(weights, nth)),
                2 => {
                    let granule = tenant.random(21);
                    tenant.touch_granule(weights, granule);
                }
                _ => {}
            }
            pool.sleep(&all()).unwrap();
            let before = pool.stats().unwrap();
            let tags = [Tag::weights()];
            let spilled_bytes = match tenant.random(3) {
                0 => 0,
                1 => pool.spill(Some(&tags)).unwrap(),
                _ => pool.spill(None).unwrap(),
            };
            let after = pool.stats().unwrap();
            assert_eq!(after.backup_bytes + spilled_bytes, before.backup_bytes, "{after:?}");
            assert_eq!(after.backup_disk_bytes, before.backup_disk_bytes + spilled_bytes, "{after:?}");
            assert_eq!(after.backup_raw_bytes, before.backup_raw_bytes, "{after:?}");
            device.expect_host_bytes(after.backup_bytes, "what is on disk takes no host memory");
            let verify = if tenant.random(2) == 0 { Verify::All } else { Verify::Sample };
            let woken = pool.wake(&WakeRequest::all().verifying(verify)).unwrap();
            assert_eq!(woken.disk_read_bytes, after.backup_disk_bytes, "{woken:?}");
            tenant.verify();
        }
        pool.sleep(&all()).unwrap();
        pool.spill(None).unwrap();
        pool.wake(&WakeRequest::all()).unwrap();
        if is_fast {
            let again = pool.sleep(&all()).unwrap();
            assert_eq!(again.copied_bytes, 0, "what is on disk need not be read to be compared");
            assert_eq!(pool.stats().unwrap().backup_bytes, 0);
            pool.wake(&WakeRequest::all()).unwrap();
        }
        pool.drop_backups(None).unwrap();
        eventually("the disk has its space back", || disk.info().used_bytes == 0);
    }
}

#[test]
fn without_a_disk_nothing_is_spilled() {
    let device = TestDevice::open(GRANULES);
    let pool = Arc::new(Pool::new(device.driver(), config()).unwrap());
    let refused = chain(&pool.spill(None).unwrap_err());
    assert!(refused.contains("no disk"), "{refused}");
    let disk = Arc::new(TestDisk::new(1 << 30, |_| false));
    let pool = self::pool(&device.driver(), Compress::Off, disk);
    let unknown = pool.spill(Some(&[Tag::new("nobody").unwrap()]));
    assert!(matches!(unknown, Err(PoolError::UnknownTag { .. })), "{unknown:?}");
    assert_eq!(pool.spill(None).unwrap(), 0, "nothing sleeps");
}

/// A host device whose host memory holds `granules` granules. Chunks of 4 make extents of 4: with one of these on disk, 8
/// stay free.
fn short_of_memory(granules: u64) -> Option<Arc<dyn Driver>> {
    if skipped_unless(|kind| kind == DeviceKind::Host, "the host memory of another device has no limit here")
    {
        return None;
    }
    let config = HostConfig::of_pages(4 * GRANULES);
    let memory = HostMemoryConfig::default().limited_to(granules * config.granule_bytes);
    Some(Arc::new(HostDevice::open(&config.backing_up_in(memory)).unwrap()))
}

#[test]
fn pressure_moves_the_longest_sleepers_out() {
    let Some(driver) = short_of_memory(33) else { return };
    let disk = Arc::new(TestDisk::new(1 << 30, |_| false));
    let tenants: Vec<Tenant> = (0..4)
        .map(|seed| {
            let mut tenant =
                Tenant::new(&pool(&driver, Compress::Off, Arc::clone(&disk) as Arc<dyn Disk>), seed);
            tenant.load(10 * tenant.granule(), &Tag::weights());
            tenant
        })
        .collect();
    let granule = tenants[0].granule();
    let on_disk = |nth: usize| tenants[nth].pool.stats().unwrap().backup_disk_bytes / granule;
    for (nth, wanted) in [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [10, 10, 0, 0]].into_iter().enumerate() {
        tenants[nth].pool.sleep(&all()).unwrap();
        assert_eq!([0, 1, 2, 3].map(on_disk), wanted, "after {nth} fell asleep");
    }
    for nth in [1, 0, 3, 2] {
        tenants[nth].pool.wake(&WakeRequest::all()).unwrap();
        tenants[nth].verify();
    }
}

/// A storage, its disk, and one that shares its driver.
fn storages(driver: &Arc<dyn Driver>) -> [HostBackups; 2] {
    let disk: Arc<dyn Disk> = Arc::new(TestDisk::new(1 << 30, |_| false));
    [(); 2].map(|()| HostBackups::new(Arc::clone(driver)).spilling_to(Arc::clone(&disk)))
}

#[test]
fn with_a_disk_all_fits_that_fits_without() {
    let Some(driver) = short_of_memory(20) else { return };
    let granule = driver.info().granule_bytes;
    let [backups, _] = storages(&driver);
    assert!(backups.buffers(&[Footprint::raw(40 * granule)]).is_err());
    let large = backups.buffers(&[Footprint::raw(16 * granule)]).unwrap();
    drop(large);
    let small = backups.buffers(&vec![Footprint::raw(granule); 20]).unwrap();
    assert_eq!(small.len(), 20, "what is gone keeps nothing free");
}

#[test]
fn what_is_on_disk_now_keeps_twice_its_largest_free() {
    let Some(driver) = short_of_memory(20) else { return };
    let granule = driver.info().granule_bytes;
    let [backups, other] = storages(&driver);
    let spilled = |granules: u64| {
        let mut made = backups.buffers(&[Footprint::raw(granules * granule)]).unwrap();
        made.pop().unwrap().wait().unwrap().spill().unwrap().wait().unwrap()
    };
    let fits = |storage: &HostBackups, granules: u64| storage.buffers(&[Footprint::raw(granules * granule)]);
    let (small, large) = (spilled(2), spilled(6));
    for storage in [&backups, &other] {
        drop(fits(storage, 8).unwrap());
        let refused = fits(storage, 9).unwrap_err();
        let [asked, reserve] = [9, 12].map(|granules| ByteSize(granules * granule).to_string());
        let wanted = format!("{asked} for backups, and {reserve} to read others from disk");
        assert!(refused.to_string().contains(&wanted), "{refused}");
    }
    drop(large);
    drop(fits(&other, 16).unwrap());
    assert!(fits(&backups, 17).is_err());
    drop(small);
    drop(fits(&backups, 20).unwrap());
}

#[test]
fn a_block_larger_than_host_memory_leaves_is_read_in_parts() {
    let Some(driver) = short_of_memory(60) else { return };
    let disk = Arc::new(TestDisk::new(1 << 30, |_| false));
    let pool = pool(&driver, Compress::Off, Arc::clone(&disk) as Arc<dyn Disk>);
    let mut tenant = Tenant::new(&pool, 5);
    let (granule, view) = (tenant.granule(), Tag::new("view").unwrap());
    pool.declare_backups(&view, StoredAs::Viewable).unwrap();
    tenant.load(45 * granule, &view);
    tenant.load(20 * granule, &Tag::weights());
    pool.sleep(&all().choosing(vec![view])).unwrap();
    pool.spill(None).unwrap();
    pool.sleep(&all()).unwrap();
    let stats = pool.stats().unwrap();
    assert_eq!((stats.backup_disk_bytes, stats.backup_bytes), (45 * granule, 20 * granule));
    // What arrives wrong once is copied once more, through no more host memory.
    disk.garble_reads(1);
    let woken = pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
    assert_eq!(woken.disk_read_bytes, 45 * granule);
    tenant.verify();
}

/// A write to disk takes long enough for its tag to wake, change and sleep again.
#[test]
fn what_was_stored_anew_is_not_replaced_by_what_was_moved() {
    let device = TestDevice::open(GRANULES);
    let of_test = Arc::new(Mutex::new(None::<(Arc<Pool>, Tenant)>));
    let (midst, is_first) = (Arc::clone(&of_test), AtomicBool::new(true));
    let disk = TestDisk::new(1 << 30, move |call| {
        if call == DiskCall::Written && is_first.swap(false, Ordering::Relaxed) {
            let mut midst = midst.lock().unwrap();
            let (pool, tenant) = midst.as_mut().unwrap();
            pool.wake(&WakeRequest::all()).unwrap();
            (0..6).for_each(|granule| tenant.touch_granule(0, granule));
            pool.sleep(&all()).unwrap();
        }
        false
    });
    let pool = pool(&device.driver(), Compress::Off, Arc::new(disk.clone()));
    let mut tenant = Tenant::new(&pool, 17);
    tenant.load(6 * tenant.granule(), &Tag::weights());
    pool.sleep(&all()).unwrap();
    *of_test.lock().unwrap() = Some((Arc::clone(&pool), tenant));
    assert_eq!(pool.spill(None).unwrap(), 0, "nothing of what sleeps now was moved");
    assert_eq!(disk.used_bytes(), 0);
    pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
    let (_, tenant) = of_test.lock().unwrap().take().unwrap();
    tenant.verify();
}

/// Each takes the memory that stays free for reads.
#[test]
fn two_wakes_at_a_time_read_through_little_host_memory() {
    let Some(driver) = short_of_memory(20) else { return };
    let disk: Arc<dyn Disk> = Arc::new(TestDisk::new(1 << 30, |_| false));
    let tenants: Vec<Tenant> = (0..2)
        .map(|seed| {
            let mut tenant = Tenant::new(&pool(&driver, Compress::Off, Arc::clone(&disk)), seed);
            tenant.load(40 * tenant.granule(), &Tag::weights());
            tenant
        })
        .collect();
    for _ in 0..20 {
        tenants.iter().for_each(|tenant| _ = tenant.pool.sleep(&all()).unwrap());
        let barrier = Barrier::new(2);
        thread::scope(|scope| {
            for tenant in &tenants {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    tenant.pool.wake(&WakeRequest::all()).unwrap();
                });
            }
        });
        tenants.iter().for_each(Tenant::verify);
    }
}

/// Host memory for fewer granules than one tag has: parts of itself are moved while it falls asleep.
#[test]
fn a_tag_larger_than_host_memory_sleeps_and_wakes() {
    for compress in [Compress::Off, Compress::Always] {
        let Some(driver) = short_of_memory(20) else { return };
        let disk = Arc::new(TestDisk::new(1 << 30, |_| false));
        let pool = pool(&driver, compress, Arc::clone(&disk) as Arc<dyn Disk>);
        let mut tenant = Tenant::new(&pool, 5);
        let (granule, tag) = (tenant.granule(), Tag::weights());
        for _ in 0..4 {
            tenant.load(10 * granule, &tag);
        }
        for cycle in 0..6 {
            pool.sleep(&all()).unwrap();
            let stats = pool.stats().unwrap();
            assert_eq!(stats.backup_raw_bytes, 40 * granule);
            assert!(stats.backup_bytes <= 12 * granule && stats.backup_disk_bytes > 0, "{stats:?}");
            pool.wake(&WakeRequest::all()).unwrap();
            tenant.verify();
            (0..cycle).for_each(|nth| tenant.touch_granule(0, nth));
        }
    }
}

#[test]
fn a_full_disk_loses_nothing() {
    let Some(driver) = short_of_memory(20) else { return };
    let granule = driver.info().granule_bytes;
    let disk = Arc::new(TestDisk::new(12 * granule, |_| false));
    let [mut first, mut second, mut third] = [1, 2, 3]
        .map(|seed| Tenant::new(&pool(&driver, Compress::Off, Arc::clone(&disk) as Arc<dyn Disk>), seed));
    for tenant in [&mut first, &mut second, &mut third] {
        tenant.load(10 * granule, &Tag::weights());
    }
    first.pool.sleep(&all()).unwrap();
    second.pool.sleep(&all()).unwrap();
    let refused = third.pool.sleep(&all()).unwrap_err();
    let text = chain(&refused);
    assert!(matches!(refused, PoolError::SleepFailed { phase: Phase::Copy, .. }), "{refused}");
    assert!(text.contains("host memory") && text.contains("to disk either"), "{text}");
    assert_eq!(third.pool.tag_state(&Tag::weights()).unwrap(), TagState::Awake);
    third.verify();
    first.pool.wake(&WakeRequest::all()).unwrap();
    third.pool.sleep(&all()).unwrap();
    for tenant in [&second, &third] {
        tenant.pool.wake(&WakeRequest::all()).unwrap();
    }
    [first, second, third].iter().for_each(Tenant::verify);
}

#[test]
fn a_full_disk_of_another_pool_hinders_none() {
    let (Some(theirs), Some(driver)) = (short_of_memory(20), short_of_memory(20)) else { return };
    let full = Arc::new(TestDisk::new(1, |_| false));
    let mut other = Tenant::new(&pool(&theirs, Compress::Off, full as Arc<dyn Disk>), 3);
    other.load(10 * other.granule(), &Tag::weights());
    other.pool.sleep(&all()).unwrap();
    let disk = Arc::new(TestDisk::new(1 << 30, |_| false));
    let mut tenant = Tenant::new(&pool(&driver, Compress::Off, disk as Arc<dyn Disk>), 5);
    tenant.load(40 * tenant.granule(), &Tag::weights());
    tenant.pool.sleep(&all()).unwrap();
    for tenant in [&tenant, &other] {
        tenant.pool.wake(&WakeRequest::all()).unwrap();
        tenant.verify();
    }
}

#[test]
fn every_call_of_the_disk_may_fail() {
    for compress in [Compress::Off, Compress::Always] {
        let mut failures = 0;
        for nth in 0..u64::MAX {
            let (calls, device) = (Arc::new(AtomicU64::new(0)), TestDevice::open(GRANULES));
            let counted = Arc::clone(&calls);
            let fails = move |_: DiskCall| counted.fetch_add(1, Ordering::Relaxed) == nth;
            let disk = Arc::new(TestDisk::new(1 << 30, fails));
            let pool = pool(&device.driver(), compress, Arc::clone(&disk) as Arc<dyn Disk>);
            let mut tenant = Tenant::new(&pool, nth);
            tenant.load(22 * tenant.granule(), &Tag::weights());
            for _ in 0..2 {
                pool.sleep(&all()).unwrap();
                let before = pool.stats().unwrap().backup_bytes;
                if let Err(error) = pool.spill(None) {
                    assert!(matches!(error, PoolError::Driver { .. }), "{error}");
                    failures += 1;
                    pool.spill(None).unwrap();
                }
                assert_eq!(
                    pool.stats().unwrap().backup_disk_bytes,
                    before + pool.stats().unwrap().backup_bytes
                );
                if let Err(error) = pool.wake(&WakeRequest::all()) {
                    assert!(matches!(error, PoolError::WakeFailed { phase: Phase::Copy, .. }), "{error}");
                    assert_eq!(pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
                    failures += 1;
                    pool.wake(&WakeRequest::all()).unwrap();
                }
                tenant.verify();
                if let Err(error) = pool.drop_backups(None) {
                    // It looks at what the wake has not compared.
                    assert!(matches!(error, PoolError::Driver { .. }), "{error}");
                    failures += 1;
                    pool.drop_backups(None).unwrap();
                }
                assert_eq!(disk.used_bytes(), 0);
                device.expect_no_host_bytes("all is given back");
            }
            if calls.load(Ordering::Relaxed) <= nth {
                break;
            }
        }
        assert!(failures >= 8, "only {failures} calls failed");
    }
}

#[test]
fn torn_and_spoiled_bytes_are_errors_and_never_wrong_bytes() {
    for (compress, at) in [(Compress::Off, 5_000), (Compress::Always, 5_000), (Compress::Always, 3)] {
        let (device, disk) = (TestDevice::open(GRANULES), TestDisk::new(1 << 30, |_| false));
        let pool = pool(&device.driver(), compress, Arc::new(disk.clone()));
        let mut tenant = Tenant::new(&pool, 7);
        let weights = tenant.load(6 * tenant.granule(), &Tag::weights());
        simplify(&mut tenant, weights);
        pool.sleep(&all()).unwrap();
        pool.spill(None).unwrap();
        let mut torn = Vec::new();
        disk.change(|bytes| torn.push(bytes.split_off(bytes.len() - 1)));
        let refused = pool.wake(&WakeRequest::all()).unwrap_err();
        assert!(
            matches!(&refused, PoolError::WakeFailed { source, .. } if source.op == Op::DiskRead),
            "{refused}"
        );
        assert_eq!(pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
        let mut torn = torn.into_iter();
        disk.change(|bytes| {
            bytes.extend(torn.next().unwrap());
            bytes[at] ^= 4;
        });
        let request = || WakeRequest::all().verifying(Verify::All);
        let refused = pool.wake(&request()).unwrap_err();
        let PoolError::Corrupt { location: Corruption::Backup, lost } = &refused else { panic!("{refused}") };
        assert_eq!(lost.len(), 2, "one in each extent: {lost:?}");
        disk.change(|bytes| bytes[at] ^= 4);
        pool.wake(&request()).unwrap();
        tenant.verify();
    }
}

/// Whatever wins: no byte is lost, and all space comes back.
#[test]
fn spills_beside_wakes_sleeps_and_drops() {
    let (device, disk) = (TestDevice::open(GRANULES), TestDisk::new(1 << 30, |_| false));
    let pool = pool(&device.driver(), Compress::Off, Arc::new(disk.clone()));
    let mut tenant = Tenant::new(&pool, 11);
    tenant.load(22 * tenant.granule(), &Tag::weights());
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..40 {
                barrier.wait();
                pool.spill(None).unwrap();
            }
        });
        for cycle in 0..40 {
            pool.sleep(&all()).unwrap();
            barrier.wait();
            pool.wake(&WakeRequest::all()).unwrap();
            if cycle % 3 == 0 {
                pool.drop_backups(None).unwrap();
            }
        }
    });
    tenant.verify();
    pool.drop_backups(None).unwrap();
    assert_eq!(disk.used_bytes(), 0);
    device.expect_no_host_bytes("all is given back");
}

#[test]
fn a_wake_that_lacks_host_memory_for_a_read_says_so() {
    let device = TestDevice::open(GRANULES);
    let is_short = Arc::new(AtomicBool::new(false));
    let short = Arc::clone(&is_short);
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        if call.op == Op::HostAlloc && short.load(Ordering::Relaxed) {
            let reason = "made so by the test".to_owned();
            Verdict::Fail(DriverErrorKind::OutOfHostMemory { asked_bytes: 1, reason })
        } else {
            Verdict::Pass
        }
    });
    let driver: Arc<dyn Driver> = Arc::new(driver);
    let pool = pool(&driver, Compress::Off, Arc::new(TestDisk::new(1 << 30, |_| false)));
    let mut tenant = Tenant::new(&pool, 13);
    tenant.load(6 * tenant.granule(), &Tag::weights());
    pool.sleep(&all()).unwrap();
    pool.spill(None).unwrap();
    is_short.store(true, Ordering::Relaxed);
    let refused = pool.wake(&WakeRequest::all()).unwrap_err();
    assert!(chain(&refused).contains("host memory"), "{refused}");
    is_short.store(false, Ordering::Relaxed);
    pool.wake(&WakeRequest::all()).unwrap();
    tenant.verify();
}
