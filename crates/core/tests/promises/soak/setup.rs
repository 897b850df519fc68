//! The configurations, and the pool of one.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use fastrand::Rng;
use poorwill_core::backup::{Compress, Disk, HostBackups};
use poorwill_core::lend::Broker;
use poorwill_core::{Driver, Pool, PoolConfig};
use poorwill_driver::disk::{DiskConfig, DiskIo, FileDisk};
use poorwill_driver::{HostConfig, HostDevice, HostMemoryConfig};
use poorwill_testkit::broken::{BrokenDriver, Defect};
use poorwill_testkit::broker::HeldMemory;
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::disk::TestDisk;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::watchdog::eventually;

/// Where backups are, beside host memory.
#[derive(Debug, Clone, Copy)]
pub(super) enum Storage {
    /// Nowhere.
    Host,
    /// On disk, too, and both have limits in granules.
    Short { host: u64, disk: u64, io: DiskIo },
    /// On a disk whose bits flip.
    Spoiled,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Setup {
    pub(super) threads: u64,
    pub(super) limit_granules: u64,
    pub(super) chunk_granules: u64,
    pub(super) cached_granules: Option<u64>,
    pub(super) keeps: bool,
    pub(super) compress: Compress,
    pub(super) storage: Storage,
    /// Half of the sleeps lend, to a broker that gives up at random, and ends now and then.
    pub(super) lends: bool,
    /// Of the driver, to see that the program notices it.
    pub(super) defect: Option<Defect>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            threads: 1,
            limit_granules: 80,
            chunk_granules: 2,
            cached_granules: None,
            keeps: true,
            compress: Compress::Off,
            storage: Storage::Host,
            lends: false,
            defect: None,
        }
    }
}

impl Setup {
    pub(super) fn skipped(&self) -> bool {
        let is_limited = matches!(self.storage, Storage::Short { .. });
        let fits = |kind| kind == DeviceKind::Host || !is_limited;
        skipped_unless(fits, "the host memory of another device has no limit here")
            || self.lends && !lends_here()
    }

    pub(super) fn spoils(&self) -> bool {
        matches!(self.storage, Storage::Spoiled)
    }

    pub(super) fn is_short(&self) -> bool {
        matches!(self.storage, Storage::Short { .. })
    }

    pub(super) fn has_disk(&self) -> bool {
        !matches!(self.storage, Storage::Host)
    }

    /// What some run must meet: a program without the hard cases would prove nothing.
    pub(super) fn hard_cases(self) -> impl Iterator<Item = &'static str> + use<> {
        let always = [
            "a sleep",
            "a wake",
            "a conflict",
            "a sleep that was undone",
            "a wake that was undone",
            "a part that was freed",
            "a hold",
            "a backup that was read",
            "a view",
            "undefined bytes",
        ];
        let of_disk = self.has_disk().then_some("a spill");
        let of_spoiled = self.spoils().then_some(["a spoiled backup", "an accepted loss"]);
        // With several threads, the schedule decides whether these are met.
        let of_one = self.is_alone().then_some(["a refused allocation", "a refused wake"]);
        let is_scarce =
            matches!(self.storage, Storage::Short { host, disk, .. } if host + disk < self.limit_granules);
        let of_short = (is_scarce && self.is_alone()).then_some("too little host memory");
        let of_lent =
            self.lends.then_some(["memory that came back", "memory that was taken", "resident memory"]);
        let pairs = of_spoiled.into_iter().chain(of_one).flatten();
        let pairs = pairs.chain(of_lent.into_iter().flatten());
        always.into_iter().chain(of_disk).chain(pairs).chain(of_short)
    }

    /// Whether no other thread changes the pool's figures.
    pub(super) fn is_alone(&self) -> bool {
        self.threads == 1
    }

    fn config(&self, granule: u64) -> PoolConfig {
        PoolConfig::default()
            .limited_to(self.limit_granules * granule)
            .in_chunks_of(self.chunk_granules)
            .in_spans_of(self.chunk_granules * 4)
            .in_segments_of(self.chunk_granules * 8)
            .caching_at_most(self.cached_granules.map(|granules| granules * granule))
            .keeping_backups(self.keeps)
    }
}

fn lends_here() -> bool {
    let shares_memory = TestDevice::open(1).info().memory_name.is_some();
    !skipped_unless(|_| shares_memory, "the device has no descriptors of its memory")
}

#[derive(Debug)]
enum Device {
    Any(TestDevice),
    Short(Arc<HostDevice>),
}

impl Device {
    fn open(setup: &Setup) -> Self {
        let granules = setup.limit_granules * 3 / 2;
        let Storage::Short { host, .. } = setup.storage else { return Self::Any(TestDevice::open(granules)) };
        let config = HostConfig::of_pages(granules);
        let memory = HostMemoryConfig::default().limited_to(host * config.granule_bytes);
        Self::Short(Arc::new(HostDevice::open(&config.backing_up_in(memory)).unwrap()))
    }

    fn driver(&self) -> Arc<dyn Driver> {
        match self {
            Self::Any(device) => device.driver(),
            Self::Short(device) => Arc::clone(device) as Arc<dyn Driver>,
        }
    }

    /// Of the device and of the host.
    fn in_use(&self) -> [u64; 2] {
        match self {
            Self::Any(device) => [device.resident_bytes(), device.host_bytes()],
            Self::Short(device) => [device.resident_bytes().unwrap(), device.host_bytes()],
        }
    }
}

/// One pool, its device, and the disk whose bits flip.
#[derive(Debug)]
pub(super) struct World {
    pub(super) setup: Setup,
    pub(super) pool: Pool,
    pub(super) broker: Arc<HeldMemory>,
    pub(super) granule: u64,
    pub(super) seen: Mutex<BTreeSet<&'static str>>,
    device: Device,
    spoiled: TestDisk,
}

impl World {
    /// Every second one has the fast digests of a GPU.
    pub(super) fn open(setup: Setup, seed: u64) -> Self {
        let device = Device::open(&setup);
        let driver = ScriptedDriver::new(Arc::new(BrokenDriver::new(device.driver(), setup.defect)), |_| {
            Verdict::Pass
        });
        let is_fast = seed.is_multiple_of(2);
        let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| info.fast_digests |= is_fast));
        let granule = driver.info().granule_bytes;
        let spoiled = TestDisk::new(u64::MAX, |_| false);
        let disk: Option<Arc<dyn Disk>> = match setup.storage {
            Storage::Host => None,
            Storage::Short { disk: granules, io, .. } => {
                let disk = DiskConfig::in_folder(std::env::temp_dir());
                Some(Arc::new(FileDisk::open(&disk.limited_to(granules * granule).by(io)).unwrap()))
            }
            Storage::Spoiled => Some(Arc::new(spoiled.clone())),
        };
        let backups = HostBackups::new(Arc::clone(&driver)).compressing(setup.compress).spilling_to(disk);
        let pool = Pool::with_backups(driver, setup.config(granule), Arc::new(backups)).unwrap();
        let broker = Arc::new(HeldMemory::default());
        if setup.lends {
            pool.lend_through(Arc::clone(&broker) as Arc<dyn Broker>).unwrap();
        }
        Self { setup, pool, broker, granule, seen: Mutex::default(), device, spoiled }
    }

    /// Something that a run has to meet.
    pub(super) fn saw(&self, what: &'static str) {
        self.seen.lock().unwrap().insert(what);
    }

    /// Flips some bits of what is on disk.
    pub(super) fn spoil(&self, random: &mut Rng) {
        self.spoiled.change(|bytes| {
            if random.u8(..4) == 0 {
                let at = random.usize(..bytes.len());
                bytes[at] ^= 1 << random.u8(..8);
            }
        });
    }

    /// At the end, when no block is left.
    pub(super) fn expect_empty(&self) {
        eventually("nothing is held", || {
            self.pool.trim().unwrap();
            let stats = self.pool.stats().unwrap();
            let disk_bytes = stats.disk.map_or(0, |disk| disk.used_bytes);
            [stats.mapped_bytes, stats.backup_bytes, stats.backup_disk_bytes, disk_bytes] == [0; 4]
        });
        assert_eq!(self.pool.stats().unwrap().live_blocks, 0);
        self.pool.close().unwrap();
        // As the end of a connection does, with what was lent of addresses that are gone.
        self.broker.fail(true);
        eventually("the device and the host have all memory back", || {
            self.pool.driver().memory_info().unwrap();
            self.device.in_use() == [0; 2]
        });
    }
}
