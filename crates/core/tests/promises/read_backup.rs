//! Backups read on the host: equal to what the device had, whatever way they are stored, or an error that says why not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use poorwill_core::backup::{Backups, Compress, Disk, HostBackups};
use poorwill_core::pool::BackupProblem;
use poorwill_core::{
    AllocRequest, BlockId, DeviceRange, Driver, DriverErrorKind, Level, Pool, PoolConfig, PoolError,
    SleepRequest, StoredAs, Tag, WakeRequest, chain,
};
use poorwill_driver::disk::{DiskConfig, FileDisk};
use poorwill_testkit::backups::{Coding, TestBackups};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::disk::TestDisk;
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::tenant::{Known, Tenant};

const GRANULES: u64 = 96;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stored {
    Raw,
    Viewable,
    Codes,
    Spilled,
    CodesSpilled,
    ViewableSpilled,
}

impl Stored {
    const ALL: [Self; 6] =
        [Self::Raw, Self::Viewable, Self::Codes, Self::Spilled, Self::CodesSpilled, Self::ViewableSpilled];

    fn is_spilled(self) -> bool {
        matches!(self, Self::Spilled | Self::CodesSpilled | Self::ViewableSpilled)
    }

    fn is_viewable(self) -> bool {
        matches!(self, Self::Viewable | Self::ViewableSpilled)
    }
}

struct Setting {
    stored: Stored,
    pool: Arc<Pool>,
    tenant: Tenant,
    _device: TestDevice,
}

fn config() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8)
}

fn quick(device: &TestDevice) -> Arc<dyn Driver> {
    let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass);
    Arc::new(driver.with_info(|info| info.fast_digests = true))
}

fn all() -> SleepRequest {
    SleepRequest::all(Level::One)
}

impl Setting {
    fn new(stored: Stored) -> Self {
        let device = TestDevice::open(GRANULES);
        let driver = quick(&device);
        let is_codes = matches!(stored, Stored::Codes | Stored::CodesSpilled);
        let compress = if is_codes { Compress::Always } else { Compress::Off };
        let disk: Arc<dyn Disk> =
            Arc::new(FileDisk::open(&DiskConfig::in_folder(std::env::temp_dir())).unwrap());
        let backups = HostBackups::new(Arc::clone(&driver))
            .compressing(compress)
            .spilling_to(stored.is_spilled().then_some(disk));
        let pool = Arc::new(Pool::with_backups(driver, config(), Arc::new(backups)).unwrap());
        if stored.is_viewable() {
            pool.declare_backups(&Tag::weights(), StoredAs::Viewable).unwrap();
        }
        Self { stored, tenant: Tenant::new(&pool, 11), pool, _device: device }
    }

    fn granule(&self) -> u64 {
        self.tenant.granule()
    }

    /// Weights with a short code.
    fn load(&mut self, bytes: u64) -> usize {
        let nth = self.tenant.load(bytes, &Tag::weights());
        simplify(&mut self.tenant, nth);
        nth
    }

    fn sleep(&self) {
        self.pool.sleep(&all()).unwrap();
        if self.stored.is_spilled() {
            assert!(self.pool.spill(None).unwrap() > 0);
        }
    }

    fn range(&self, nth: usize) -> DeviceRange {
        let block = self.pool.block(self.tenant.blocks[nth].block.id).unwrap();
        DeviceRange::new(block.range.addr, block.requested_bytes)
    }

    fn read(&self, range: DeviceRange) -> Result<Vec<u8>, PoolError> {
        let mut bytes = vec![0xEE; usize::try_from(range.bytes).unwrap()];
        self.pool.read_backup(range.addr, &mut bytes).map(|()| bytes)
    }
}

/// Bytes that have a short code.
fn simplify(tenant: &mut Tenant, nth: usize) {
    for pair in tenant.blocks[nth].bytes.chunks_exact_mut(2) {
        pair[1] = (pair[1] & 0x80) | 0x3C | (pair[1] & 1);
    }
    tenant.write(nth);
}

fn problem(error: &PoolError) -> Option<BackupProblem> {
    match error {
        PoolError::Backup { problem, .. } => Some(*problem),
        _ => None,
    }
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}

#[test]
fn any_range_reads_as_the_device_had_it_asleep_and_awake() {
    for stored in Stored::ALL {
        let mut setting = Setting::new(stored);
        let granule = setting.granule();
        let blocks: Vec<usize> =
            [21 * granule, granule * 5 / 2, 700, 4096, 3 * granule].map(|bytes| setting.load(bytes)).into();
        for cycle in 0..3 {
            setting.tenant.touch_granule(blocks[0], 5 * cycle);
            setting.sleep();
            let slept: Vec<Vec<u8>> =
                blocks.iter().map(|nth| setting.tenant.blocks[*nth].bytes.clone()).collect();
            for is_awake in [false, true] {
                if is_awake {
                    setting.pool.wake(&WakeRequest::all()).unwrap();
                    setting.tenant.verify();
                    // Backups are of the last sleep.
                    setting.tenant.touch_granule(blocks[0], 1);
                }
                for (nth, bytes) in blocks.iter().zip(&slept) {
                    let range = setting.range(*nth);
                    assert!(setting.read(range).unwrap() == *bytes, "{stored:?}, block {nth}");
                    for _ in 0..DeviceKind::of_this_run().cases(16) {
                        let from = setting.tenant.random(range.bytes);
                        let len = 1 + setting.tenant.random((range.bytes - from).min(3 * granule));
                        let part = range.slice(from, len).unwrap();
                        let wanted = &bytes[index(from)..index(from + len)];
                        assert!(setting.read(part).unwrap() == wanted, "{stored:?}: {part} of {range}");
                    }
                }
            }
        }
        setting.pool.close().unwrap();
    }
}

#[test]
fn what_is_not_stored_is_refused_and_says_why() {
    for stored in Stored::ALL {
        let mut setting = Setting::new(stored);
        let granule = setting.granule();
        let nth = setting.load(6 * granule);
        let range = setting.range(nth);
        let not_stored = |setting: &Setting, when: &str| {
            let error = setting.read(range).unwrap_err();
            assert_eq!(problem(&error), Some(BackupProblem::NotStored), "{stored:?}, {when}: {error}");
            for words in ["`weights`", "0x", "sleep"] {
                assert!(error.to_string().contains(words), "{error}");
            }
            assert!(setting.pool.view_backup(range).is_err());
        };
        not_stored(&setting, "before the first sleep");
        for outside in [
            DeviceRange::new(8, 1),
            DeviceRange::new(range.addr - 1, 2),
            DeviceRange::new(range.addr, range.bytes + 1),
            DeviceRange::new(u64::MAX, 2),
        ] {
            let error = setting.read(outside).unwrap_err();
            assert!(matches!(error, PoolError::OutsideBlocks { .. }), "{outside}: {error}");
            let error = setting.pool.view_backup(outside).unwrap_err();
            assert!(matches!(error, PoolError::OutsideBlocks { .. }), "{outside}: {error}");
        }
        setting.sleep();
        setting.read(range).unwrap();
        setting.pool.wake(&WakeRequest::all()).unwrap();
        setting.read(range).unwrap();
        setting.pool.drop_backups(Some(&[Tag::weights()])).unwrap();
        not_stored(&setting, "after its backups were dropped");
        setting.pool.sleep(&SleepRequest::all(Level::Two)).unwrap();
        not_stored(&setting, "after a sleep that drops it");
        setting.pool.wake(&WakeRequest::all()).unwrap();
        not_stored(&setting, "undefined");
        setting.pool.mark_restored(&[Tag::weights()]).unwrap();
        setting.sleep();
        setting.pool.discard(&[Tag::weights()]).unwrap();
        not_stored(&setting, "discarded");
        setting.tenant.free(nth);
        assert!(matches!(setting.read(range).unwrap_err(), PoolError::OutsideBlocks { .. }), "freed");
        assert!(setting.pool.read_backup(0, &mut []).is_ok());
        setting.pool.close().unwrap();
        assert!(matches!(setting.read(range).unwrap_err(), PoolError::Closed));
    }
}

/// The bytes of a freed block are not those of the next one at its address.
#[test]
fn a_new_block_has_no_backup_where_an_old_one_had() {
    let mut setting = Setting::new(Stored::Raw);
    let [old, _] = [1024, 1024].map(|bytes| setting.load(bytes));
    setting.sleep();
    setting.pool.wake(&WakeRequest::all()).unwrap();
    let at = setting.range(old);
    setting.tenant.free(old);
    let new = setting.load(1024);
    let range = setting.range(new);
    assert_eq!(at, range, "the same place");
    assert_eq!(problem(&setting.read(range).unwrap_err()), Some(BackupProblem::NewBlock));
    setting.sleep();
    for nth in 0..2 {
        assert!(setting.read(setting.range(nth)).unwrap() == setting.tenant.blocks[nth].bytes);
    }
}

#[test]
fn spoiled_bytes_are_never_handed_out() {
    let device = TestDevice::open(GRANULES);
    let driver = quick(&device);
    for compress in [Compress::Off, Compress::Always] {
        let disk = Arc::new(TestDisk::new(1 << 30, |_| false));
        let backups = HostBackups::new(Arc::clone(&driver))
            .compressing(compress)
            .spilling_to(Arc::clone(&disk) as Arc<dyn Disk>);
        let pool = Arc::new(Pool::with_backups(Arc::clone(&driver), config(), Arc::new(backups)).unwrap());
        let mut tenant = Tenant::new(&pool, 3);
        let nth = tenant.load(6 * tenant.granule(), &Tag::weights());
        simplify(&mut tenant, nth);
        let range = pool.block(tenant.blocks[nth].block.id).unwrap().range;
        pool.sleep(&all()).unwrap();
        pool.spill(None).unwrap();
        let mut bytes = vec![0; index(range.bytes)];
        pool.read_backup(range.addr, &mut bytes).unwrap();
        let mut is_first = true;
        disk.change(|stored| {
            if std::mem::take(&mut is_first) {
                stored[..4096].iter_mut().for_each(|byte| *byte ^= 1);
            }
        });
        let untouched = DeviceRange::new(range.addr + 5 * tenant.granule(), tenant.granule());
        pool.read_backup(untouched.addr, &mut bytes[..index(untouched.bytes)]).unwrap();
        let error = pool.read_backup(range.addr, &mut bytes).unwrap_err();
        assert_eq!(problem(&error), Some(BackupProblem::Spoiled), "{error}");
        assert!(chain(&error).contains("weights"), "{error}");
    }
}

#[test]
fn a_storage_that_cannot_be_read_says_so() {
    let device = TestDevice::open(GRANULES);
    let driver = quick(&device);
    let store = TestBackups::new(&driver, Coding::Xored, u64::MAX);
    let backups = Arc::new(store) as Arc<dyn Backups>;
    let pool = Arc::new(Pool::with_backups(Arc::clone(&driver), config(), backups).unwrap());
    let mut tenant = Tenant::new(&pool, 3);
    let nth = tenant.load(tenant.granule(), &Tag::weights());
    let range = pool.block(tenant.blocks[nth].block.id).unwrap().range;
    pool.sleep(&all()).unwrap();
    match pool.read_backup(range.addr, &mut [0; 8]).unwrap_err() {
        PoolError::Driver { source, .. } => {
            assert!(matches!(source.kind, DriverErrorKind::Unsupported { .. }), "{source}");
        }
        error => panic!("{error}"),
    }
    let error = pool.view_backup(range).unwrap_err();
    assert_eq!(problem(&error), Some(BackupProblem::NotRaw), "{error}");
}

#[test]
fn views_are_refused_where_the_bytes_are_not_in_one_place() {
    let expected = [
        (Stored::Raw, Some(BackupProblem::Split)),
        (Stored::Codes, Some(BackupProblem::Split)),
        (Stored::Spilled, Some(BackupProblem::Split)),
        (Stored::ViewableSpilled, Some(BackupProblem::OnDisk)),
        (Stored::Viewable, None),
    ];
    for (stored, wanted) in expected {
        let mut setting = Setting::new(stored);
        let granule = setting.granule();
        let nth = setting.load(21 * granule);
        let range = setting.range(nth);
        setting.sleep();
        let viewed = setting.pool.view_backup(range);
        assert_eq!(viewed.as_ref().err().and_then(problem), wanted, "{stored:?}");
        if let Ok(view) = viewed {
            assert!(*view == *setting.tenant.blocks[nth].bytes);
            view.verify().unwrap();
        }
        // A part of one extent.
        let part = DeviceRange::new(range.addr + 3, 5);
        let wanted = match stored {
            Stored::Codes => Some(BackupProblem::NotRaw),
            Stored::Spilled | Stored::ViewableSpilled => Some(BackupProblem::OnDisk),
            _ => None,
        };
        let viewed = setting.pool.view_backup(part);
        assert_eq!(viewed.as_ref().err().and_then(problem), wanted, "{stored:?}");
        if let Ok(view) = viewed {
            assert_eq!((&*view, view.range()), (&setting.tenant.blocks[nth].bytes[3..8], part));
        }
    }
}

/// Blocks of any size have their backup at one address, which stays while nothing views it.
#[test]
fn a_viewable_block_keeps_its_host_address_over_sleeps() {
    let mut setting = Setting::new(Stored::Viewable);
    let granule = setting.granule();
    let blocks: Vec<usize> = [21 * granule, granule * 5 / 2, granule * 7 / 4, 700, 5 * granule]
        .map(|bytes| setting.load(bytes))
        .into();
    let mut addresses: Vec<Vec<usize>> = Vec::new();
    for cycle in 0..4 {
        setting.sleep();
        let views: Vec<_> =
            blocks.iter().map(|nth| setting.pool.view_backup(setting.range(*nth)).unwrap()).collect();
        for (nth, view) in blocks.iter().zip(&views) {
            assert!(**view == *setting.tenant.blocks[*nth].bytes, "block {nth} in cycle {cycle}");
        }
        addresses.push(views.iter().map(|view| view.as_ptr().addr()).collect());
        drop(views);
        setting.pool.wake(&WakeRequest::all()).unwrap();
        setting.tenant.verify();
        setting.tenant.touch_granule(blocks[0], cycle);
        setting.tenant.touch_granule(blocks[4], cycle);
        if cycle == 1 {
            setting.pool.prepare_sleep(&all()).unwrap().wait().unwrap();
        }
    }
    assert!(addresses.windows(2).all(|pair| pair[0] == pair[1]), "{addresses:x?}");
}

#[test]
fn a_view_stays_as_it_is_whatever_happens() {
    let mut setting = Setting::new(Stored::Viewable);
    let nth = setting.load(9 * setting.granule());
    let range = setting.range(nth);
    setting.sleep();
    let bytes = setting.tenant.blocks[nth].bytes.clone();
    let view = setting.pool.view_backup(range).unwrap();
    let unchanged = |when: &str| {
        assert!(*view == *bytes, "{when}");
        view.verify().unwrap();
    };
    setting.pool.wake(&WakeRequest::all()).unwrap();
    unchanged("awake");
    setting.tenant.touch_granule(nth, 2);
    setting.pool.prepare_sleep(&all()).unwrap().wait().unwrap();
    unchanged("prepared");
    setting.sleep();
    unchanged("slept again");
    let newer = setting.pool.view_backup(range).unwrap();
    assert!(*newer == *setting.tenant.blocks[nth].bytes);
    assert_ne!(newer.as_ptr(), view.as_ptr());
    drop(newer);
    setting.pool.wake(&WakeRequest::all()).unwrap();
    setting.tenant.verify();
    let held_bytes = setting.pool.driver().host_memory().used_bytes;
    setting.pool.drop_backups(None).unwrap();
    unchanged("dropped");
    let kept_bytes = setting.pool.driver().host_memory().used_bytes;
    assert_eq!(held_bytes - kept_bytes, range.bytes, "only the newer one came back");
    setting.tenant.free(nth);
    unchanged("freed");
    setting.pool.close().unwrap();
    unchanged("closed");
    let driver = Arc::clone(setting.pool.driver());
    drop(view);
    driver.host_trim().unwrap();
    assert_eq!(driver.host_memory().held_bytes, 0, "all host memory is back");
}

/// A later declaration counts from the next sleep on, both ways.
#[test]
fn a_tag_can_become_viewable_and_compact_again() {
    let mut setting = Setting::new(Stored::Codes);
    let nth = setting.load(10 * setting.granule());
    let range = setting.range(nth);
    let cycle = |setting: &mut Setting| {
        setting.sleep();
        let viewed = setting.pool.view_backup(range);
        assert!(setting.read(range).unwrap() == setting.tenant.blocks[nth].bytes);
        setting.pool.wake(&WakeRequest::all()).unwrap();
        setting.tenant.verify();
        setting.tenant.touch_granule(nth, 1);
        viewed.err().and_then(|error| problem(&error))
    };
    assert_eq!(cycle(&mut setting), Some(BackupProblem::Split));
    setting.pool.declare_backups(&Tag::weights(), StoredAs::Viewable).unwrap();
    assert_eq!([cycle(&mut setting), cycle(&mut setting)], [None, None]);
    setting.pool.declare_backups(&Tag::weights(), StoredAs::Compact).unwrap();
    assert_eq!(cycle(&mut setting), Some(BackupProblem::Split));
}

#[test]
fn freed_blocks_and_parts_leave_the_rest_viewable() {
    let mut setting = Setting::new(Stored::Viewable);
    let granule = setting.granule();
    let request = AllocRequest::new(20 * granule, Tag::weights());
    let block = setting.pool.alloc(&request).unwrap();
    let other = setting.load(6 * granule);
    setting.sleep();
    let held_bytes = setting.pool.stats().unwrap().backup_bytes;
    assert_eq!(held_bytes, 26 * granule);
    setting.tenant.free(other);
    assert_eq!(setting.pool.stats().unwrap().backup_bytes, 20 * granule, "its backup goes with a block");
    let middle = DeviceRange::new(block.range.addr + 5 * granule, 2 * granule);
    let rest: Vec<BlockId> =
        setting.pool.free_part(block.id, middle).unwrap().into_iter().map(|block| block.id).collect();
    for cycle in 0..2 {
        for id in &rest {
            let range = setting.pool.block(*id).unwrap().range;
            let view = setting.pool.view_backup(range).unwrap();
            assert!(*view == *setting.read(range).unwrap(), "cycle {cycle}");
        }
        setting.pool.wake(&WakeRequest::all()).unwrap();
        setting.sleep();
    }
    setting.pool.wake(&WakeRequest::all()).unwrap();
    setting.pool.drop_backups(None).unwrap();
    assert_eq!(setting.pool.driver().host_memory().held_bytes, 0, "page-locked memory is back");
}

/// Whatever is allocated and freed between sleeps, and wherever in a granule it begins.
#[test]
fn every_block_of_a_viewable_tag_is_viewed_as_a_whole() {
    let mut setting = Setting::new(Stored::Viewable);
    let granule = setting.granule();
    for cycle in 0..u64::from(DeviceKind::of_this_run().cases(40)) {
        for _ in 0..4 {
            let tenant = &mut setting.tenant;
            let count = tenant.blocks.len() as u64;
            if count > 12 || (count > 0 && tenant.random(3) == 0) {
                let nth = tenant.random(count);
                tenant.free(index(nth));
            } else {
                let most = [700, 2 * granule, 9 * granule][index(tenant.random(3))];
                let bytes = 1 + tenant.random(most);
                let block = setting.pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
                let (tag, seed) = (Tag::weights(), cycle);
                let bytes = pattern::bytes(seed, index(bytes));
                tenant.blocks.push(Known { block, tag, bytes });
                tenant.write(tenant.blocks.len() - 1);
            }
        }
        if cycle % 5 == 3 {
            setting.pool.prepare_sleep(&all()).unwrap().wait().unwrap();
        }
        setting.sleep();
        for nth in 0..setting.tenant.blocks.len() {
            let view = setting.pool.view_backup(setting.range(nth)).unwrap();
            assert!(*view == *setting.tenant.blocks[nth].bytes, "block {nth} in cycle {cycle}");
            view.verify().unwrap();
        }
        setting.pool.wake(&WakeRequest::all()).unwrap();
        setting.tenant.verify();
    }
}

#[test]
fn reads_beside_sleeps_and_wakes_are_right_or_refused() {
    for stored in [Stored::Raw, Stored::Viewable, Stored::Codes, Stored::CodesSpilled] {
        let mut setting = Setting::new(stored);
        let nth = setting.load(12 * setting.granule());
        let range = setting.range(nth);
        // Each version is one byte throughout, but for its codes.
        setting.tenant.blocks[nth].bytes.fill(1);
        setting.tenant.write(nth);
        setting.sleep();
        let (pool, is_done) = (Arc::clone(&setting.pool), AtomicBool::new(false));
        let is_uniform = |bytes: &[u8]| bytes.iter().all(|byte| *byte == bytes[0] && *byte > 0);
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut read = 0_u32;
                while !is_done.load(Ordering::Relaxed) || read == 0 {
                    let mut bytes = vec![0; index(range.bytes)];
                    match pool.read_backup(range.addr, &mut bytes) {
                        Ok(()) => read += 1,
                        Err(error) => assert_eq!(problem(&error), Some(BackupProblem::NotStored), "{error}"),
                    }
                    let granule = index(range.bytes) / 12;
                    assert!(bytes[..1] == [0] || bytes.chunks(granule).all(is_uniform), "{stored:?}");
                    if let Ok(view) = pool.view_backup(range) {
                        view.verify().unwrap();
                        assert!(is_uniform(&view));
                    }
                }
            });
            for version in 2..8 {
                pool.wake(&WakeRequest::all()).unwrap();
                setting.tenant.verify();
                setting.tenant.blocks[nth].bytes.fill(version);
                setting.tenant.write(nth);
                pool.sleep(&all()).unwrap();
                if stored.is_spilled() {
                    pool.spill(None).unwrap();
                }
            }
            is_done.store(true, Ordering::Relaxed);
            reader.join().unwrap();
        });
        pool.wake(&WakeRequest::all()).unwrap();
        setting.tenant.verify();
    }
}
