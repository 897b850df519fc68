//! Many threads on one pool: right bytes, true figures, never over the limit, and always an end.
//!
//! Each test runs under a watchdog, so that a deadlock fails instead of hanging.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use fastrand::Rng;
use poorwill_core::{
    AllocRequest, Block, DeviceRange, Dropped, HostBuffer, Level, Pool, PoolConfig, PoolError, SleepRequest,
    StreamId, Tag, TagPolicy, WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::watchdog::{eventually, watched};

const THREADS: u64 = 8;
const LIMIT_GRANULES: u64 = 96;

/// Steps of each thread: enough to come near the limit whether or not the others run beside it.
fn steps() -> u64 {
    DeviceKind::of_this_run().cases(800).max(400).into()
}

fn open(limit_granules: u64, cached_max_bytes: Option<u64>) -> (TestDevice, Arc<Pool>) {
    let device = TestDevice::open(limit_granules * 3 / 2);
    let config = PoolConfig::default()
        .limited_to(limit_granules * device.info().granule_bytes)
        .in_chunks_of(4)
        .in_spans_of(8)
        .in_segments_of(8)
        .caching_at_most(cached_max_bytes);
    // As on a GPU, so that prepared backups are compared.
    let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass);
    let driver = driver.with_info(|info| info.fast_digests = true);
    let pool = Pool::new(Arc::new(driver), config).unwrap();
    (device, Arc::new(pool))
}

/// One of the threads, with its own blocks, tag and stream.
struct Worker {
    pool: Arc<Pool>,
    random: Rng,
    tag: Tag,
    /// Whether a sleep drops its bytes.
    is_dropped: bool,
    stream: StreamId,
    others: Vec<StreamId>,
    /// Blocks with the seed of their pattern.
    live: Vec<(Block, u64)>,
    asleep: bool,
    refused: u64,
}

impl Worker {
    fn random(&mut self, below: u64) -> u64 {
        self.random.u64(..below)
    }

    fn pick(&mut self) -> Option<usize> {
        let count = self.live.len() as u64;
        (count > 0).then(|| usize::try_from(self.random(count)).unwrap())
    }

    fn step(&mut self) {
        match self.random(100) {
            0..40 => self.alloc(),
            40..62 => self.pick().into_iter().for_each(|n| self.free(n)),
            62..65 => self.pick().into_iter().for_each(|n| self.free_part(n)),
            65..75 => self.pick().into_iter().for_each(|n| self.read(n)),
            75..85 => self.pick().into_iter().for_each(|n| self.record_use(n)),
            85..90 => self.fall_asleep(),
            90..95 => self.wake(),
            95..97 => drop(self.pool.trim().unwrap()),
            97 => drop((self.pool.stats().unwrap(), self.pool.snapshot().unwrap())),
            _ => self.prepare(),
        }
    }

    fn alloc(&mut self) {
        let granule = self.pool.driver().info().granule_bytes;
        let bytes = (granule << self.random(5)) / 16 * (1 + self.random(12)) + self.random(600);
        let request = AllocRequest::new(bytes, self.tag.clone()).on(self.stream);
        match self.pool.alloc(&request) {
            Ok(block) => {
                assert!(!self.asleep);
                let seed = self.random(u64::MAX);
                self.live.push((block, seed));
                self.write(self.live.len() - 1);
            }
            Err(PoolError::Asleep { .. }) => assert!(self.asleep),
            Err(PoolError::OverLimit { .. }) => {
                self.refused += 1;
                // A refused thread frees memory, so that all make progress.
                (0..3).for_each(|_| self.pick().into_iter().for_each(|n| self.free(n)));
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Queues the pattern; reads of the block are queued after it.
    fn write(&mut self, n: usize) {
        let (block, seed) = self.live[n];
        let bytes = pattern::bytes(seed, usize::try_from(block.requested_bytes).unwrap());
        let src = Arc::new(HostBuffer::from(bytes));
        drop(self.pool.write(self.stream, block.id, 0, src, 0, block.requested_bytes).unwrap());
    }

    fn read(&mut self, n: usize) {
        if self.asleep {
            return;
        }
        let (block, seed) = self.live[n];
        let len = usize::try_from(block.requested_bytes).unwrap();
        let dst = HostBuffer::from(vec![0; len]);
        let copy = self.pool.read(self.stream, block.id, 0, dst, 0, block.requested_bytes).unwrap();
        assert!(*copy.wait().unwrap() == pattern::bytes(seed, len)[..], "bytes of {block:?}");
    }

    /// Another stream reads the block, and no thread waits for it.
    fn record_use(&mut self, n: usize) {
        if self.asleep {
            return;
        }
        let (block, _) = self.live[n];
        let which = usize::try_from(self.random(self.others.len() as u64)).unwrap();
        let other = self.others[which];
        self.pool.record_use(block.id, other).unwrap();
        let dst = HostBuffer::from(vec![0; usize::try_from(block.requested_bytes).unwrap()]);
        drop(self.pool.read(other, block.id, 0, dst, 0, block.requested_bytes).unwrap());
    }

    fn free(&mut self, n: usize) {
        let (block, _) = self.live.swap_remove(n);
        self.pool.free(block.id).unwrap();
        assert!(matches!(self.pool.free(block.id), Err(PoolError::StaleBlock { .. })));
    }

    /// Frees the rest of a block after an address in it, in two calls.
    fn free_part(&mut self, n: usize) {
        let (block, seed) = self.live[n];
        let units = block.range.bytes / 512;
        let [first, second] = [0; 2].map(|_| 1 + self.random(units));
        let (kept, middle) = (first.min(second), first.max(second));
        if kept == middle {
            return;
        }
        let part = DeviceRange::new(block.range.addr + kept * 512, (middle - kept) * 512);
        let rest = self.pool.free_part(block.id, part).unwrap();
        assert!(matches!(self.pool.free(block.id), Err(PoolError::StaleBlock { .. })));
        self.live[n] = (rest[0], seed);
        rest[1..].iter().for_each(|behind| self.pool.free(behind.id).unwrap());
    }

    fn fall_asleep(&mut self) {
        let tags = Some(vec![self.tag.clone()]);
        match self.pool.sleep(&SleepRequest::all(Level::One).choosing(tags)) {
            Ok(_) => self.asleep |= !self.live.is_empty(),
            Err(error) => panic!("{error}"),
        }
    }

    /// Of its own tag, or of all: preparations of other tags are overtaken sooner or later.
    fn prepare(&mut self) {
        let tags = (self.random(2) == 0).then(|| vec![self.tag.clone()]);
        let preparation = self.pool.prepare_sleep(&SleepRequest::all(Level::One).choosing(tags)).unwrap();
        match self.random(4) {
            0 => preparation.cancel(),
            1 => drop(preparation.wait().unwrap()),
            _ => {} // Goes on by itself.
        }
    }

    fn wake(&mut self) {
        match self.pool.wake(&WakeRequest::of([self.tag.clone()])) {
            Ok(_) if self.asleep && self.is_dropped => {
                self.asleep = false;
                (0..self.live.len()).for_each(|n| self.write(n));
            }
            Ok(_) => self.asleep = false,
            Err(PoolError::OverLimit { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// All bytes are right, and everything is freed.
    fn end(mut self) -> u64 {
        while self.asleep {
            self.wake();
            if self.asleep {
                // The others have taken the memory, and free it when they end.
                self.pick().into_iter().for_each(|n| self.free(n));
                self.asleep &= !self.live.is_empty();
            }
        }
        while !self.live.is_empty() {
            self.read(0);
            self.free(0);
        }
        self.refused
    }
}

fn work(cached_max_bytes: Option<u64>) {
    let (device, pool) = open(LIMIT_GRANULES, cached_max_bytes);
    let limit_bytes = pool.stats().unwrap().limit_bytes;
    let streams: Vec<StreamId> = (0..4).map(|_| device.stream_create().unwrap()).collect();
    let (over, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let refused: u64 = thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|nth| {
                let which = usize::try_from(nth).unwrap() % streams.len();
                let tag = Tag::new(&format!("worker.{nth}")).unwrap();
                let is_dropped = nth % 2 == 0;
                if is_dropped {
                    pool.declare_tag(&tag, TagPolicy::discardable(Dropped::Zeros)).unwrap();
                }
                let mut worker = Worker {
                    pool: Arc::clone(&pool),
                    random: Rng::with_seed(nth),
                    tag,
                    is_dropped,
                    stream: streams[which],
                    others: streams.iter().copied().filter(|other| *other != streams[which]).collect(),
                    live: Vec::new(),
                    asleep: false,
                    refused: 0,
                };
                scope.spawn(move || {
                    (0..steps()).for_each(|_| worker.step());
                    worker.end()
                })
            })
            .collect();
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                let used_bytes = device.memory_info().unwrap().process.unwrap().used_bytes;
                over.fetch_max(used_bytes, Ordering::Relaxed);
                thread::yield_now();
            }
        });
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                let preparation = pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap();
                preparation.wait().unwrap();
                thread::yield_now();
            }
        });
        let refused = workers.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>();
        ended.store(true, Ordering::Relaxed);
        refused.into_iter().map(|refused| refused.unwrap()).sum()
    });
    let stats = pool.stats().unwrap();
    assert!(over.into_inner() <= limit_bytes && stats.peak_mapped_bytes <= limit_bytes, "over the limit");
    assert!(stats.peak_mapped_bytes > limit_bytes / 2 && refused > 0, "the limit was never near");
    assert_eq!((stats.live_blocks, stats.live_bytes), (0, 0));
    if cached_max_bytes == Some(0) {
        eventually("the cache is above its mark", || pool.stats().unwrap().mapped_bytes == 0);
    }
    pool.trim().unwrap();
    let stats = pool.stats().unwrap();
    assert_eq!(
        [stats.mapped_bytes, stats.cached_bytes, stats.deferred_release_bytes, stats.reserved_bytes],
        [0; 4]
    );
    assert_eq!(stats.backup_bytes, 0, "nothing lives that has a backup");
    eventually("preparations have ended", || device.host_bytes() == 0);
    pool.close().unwrap();
    let info = device.memory_info().unwrap();
    assert_eq!(info.free_bytes, info.total_bytes);
    assert_eq!(device.resident_bytes(), 0);
}

#[test]
fn many_threads_share_a_pool_that_keeps_what_it_has() {
    watched(|| work(None));
}

#[test]
fn many_threads_share_a_pool_that_keeps_nothing() {
    watched(|| work(Some(0)));
}

/// Above its mark the cache shrinks by itself, as soon as the work in flight has passed.
#[test]
fn a_cache_above_its_mark_is_released_without_a_call() {
    watched(|| {
        let (device, pool) = open(64, Some(0));
        let granule = device.info().granule_bytes;
        let stream = device.stream_create().unwrap();
        let blocks: Vec<Block> = [600, 3 * granule + 1, 9 * granule]
            .map(|bytes| pool.alloc(&AllocRequest::new(bytes, Tag::weights()).on(stream)).unwrap())
            .into();
        let latch = Arc::new(Latch::default());
        for block in &blocks {
            let bytes = vec![1; usize::try_from(block.requested_bytes).unwrap()];
            drop(latch::write(&pool, stream, block, &latch, &bytes));
        }
        blocks.iter().for_each(|block| pool.free(block.id).unwrap());
        assert!(pool.stats().unwrap().mapped_bytes >= 12 * granule, "nothing goes while work is held");
        latch.open();
        eventually("the work has passed", || pool.stats().unwrap().mapped_bytes == 0);
        pool.close().unwrap();
    });
}

/// A block that waits for other streams is free again as soon as their work has passed.
#[test]
fn a_block_that_waits_for_other_streams_is_free_again_without_a_call() {
    watched(|| {
        let (device, pool) = open(64, None);
        let (own, other) = (device.stream_create().unwrap(), device.stream_create().unwrap());
        let request = AllocRequest::new(5000, Tag::weights()).on(own);
        let block = pool.alloc(&request).unwrap();
        pool.record_use(block.id, other).unwrap();
        let latch = Arc::new(Latch::default());
        drop(latch::write(&pool, other, &block, &latch, &[1; 5000]));
        pool.free(block.id).unwrap();
        let is_waiting = || {
            let segments = pool.snapshot().unwrap().segments;
            let mut blocks = segments.iter().flat_map(|segment| &segment.blocks);
            blocks.any(|block| block.kind == poorwill_core::BlockKind::Waiting)
        };
        assert!(is_waiting());
        latch.open();
        eventually("the work has passed", || !is_waiting());
        let created_bytes = pool.stats().unwrap().created_bytes;
        assert_eq!(pool.alloc(&request).unwrap().range, block.range);
        assert_eq!(pool.stats().unwrap().created_bytes, created_bytes);
        pool.close().unwrap();
    });
}

/// Live memory that fits means success, even if other threads free the needed memory.
#[test]
fn threads_that_stay_within_their_share_are_never_refused() {
    watched(|| {
        let (device, pool) = open(LIMIT_GRANULES, None);
        let granule = device.info().granule_bytes;
        let share = LIMIT_GRANULES / THREADS;
        thread::scope(|scope| {
            for nth in 0..THREADS {
                let (pool, device) = (&pool, &device);
                scope.spawn(move || {
                    let streams = [device.stream_create().unwrap(), StreamId::DEFAULT];
                    let mut live: Vec<(Block, u64)> = Vec::new();
                    let mut random = Rng::with_seed(nth);
                    for step in 0..3 * steps() {
                        let granules = random.u64(1..=share);
                        while live.iter().map(|(_, granules)| granules).sum::<u64>() + granules > share {
                            let (block, _) = live.swap_remove(random.usize(..live.len()));
                            pool.free(block.id).unwrap();
                        }
                        let tag = if nth % 2 == 0 { Tag::kv_cache() } else { Tag::weights() };
                        let request = AllocRequest::new(granules * granule, tag).on(streams[0]);
                        let block = pool.alloc(&request.aligned_to(granule));
                        let block =
                            block.unwrap_or_else(|error| panic!("thread {nth}, step {step}: {error}"));
                        live.push((block, granules));
                        let user = streams[usize::from(random.u8(..4) == 0)];
                        pool.record_use(block.id, user).unwrap();
                        let src = Arc::new(HostBuffer::from(vec![1; 4096]));
                        drop(pool.write(user, block.id, 0, src, 0, 4096).unwrap());
                    }
                    live.iter().for_each(|(block, _)| pool.free(block.id).unwrap());
                });
            }
        });
        pool.close().unwrap();
    });
}
