//! Sizes chosen to fit badly: as long as live blocks leave enough granules, an allocation succeeds, and the limit is
//! kept.
//!
//! The oracle looks at nothing but the addresses of live blocks.

use std::sync::Arc;

use fastrand::Rng;
use poorwill_core::{AllocRequest, Block, DriverErrorKind, Op, Pool, PoolConfig, PoolError, Tag};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

/// Granules of a chunk, a span and a segment: every combination of the least, the usual and something between.
const SHAPES: [[u64; 3]; 9] = [
    [1, 1, 1],
    [1, 256, 8],
    [4, 4, 1],
    [4, 0, 8],
    [16, 256, 32],
    [3, 3, 7],
    [4, 8, 1],
    [3, 11, 7],
    [2, 16, 8],
];

struct World {
    device: TestDevice,
    pool: Pool,
    granule: u64,
    limit_bytes: u64,
    live: Vec<Block>,
    served: u64,
    refused: u64,
}

impl World {
    fn new(device: TestDevice, config: PoolConfig) -> Self {
        let granule = device.info().granule_bytes;
        let pool = Pool::new(device.driver(), config).unwrap();
        let limit_bytes = pool.stats().unwrap().limit_bytes;
        Self { device, pool, granule, limit_bytes, live: Vec::new(), served: 0, refused: 0 }
    }

    /// A world of small granules with a limit of `granules`, on a device that has half as much again.
    fn of_granules(granules: u64, shape: [u64; 3]) -> Self {
        let device = TestDevice::open(granules * 3 / 2 + 1);
        let limit_bytes = Some(granules * device.info().granule_bytes);
        Self::new(device, config_of(shape).limited_to(limit_bytes))
    }

    /// The same with a device of just that size, which refuses large chunks most of the time, whatever it has free.
    fn in_pieces(granules: u64, shape: [u64; 3]) -> Self {
        let device = TestDevice::open(granules);
        let granule = device.info().granule_bytes;
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            let is_large = call.op == Op::Create && call.bytes > shape[0] * granule;
            let kind = DriverErrorKind::OutOfMemory { asked_bytes: call.bytes, free_bytes: call.bytes };
            if is_large && call.number % 5 > 0 { Verdict::Fail(kind) } else { Verdict::Pass }
        });
        let pool = Pool::new(Arc::new(driver), config_of(shape)).unwrap();
        let limit_bytes = granules * granule;
        Self { device, pool, granule, limit_bytes, live: Vec::new(), served: 0, refused: 0 }
    }

    /// Granules under live blocks, in bytes.
    fn touched_bytes(&self) -> u64 {
        let granule = self.granule;
        let ends = |block: &Block| (block.range.addr / granule, block.range.end().div_ceil(granule));
        let mut touched: Vec<(u64, u64)> = self.live.iter().map(ends).collect();
        touched.sort_unstable();
        let (mut granules, mut counted) = (0, 0);
        for (start, end) in touched {
            granules += end.saturating_sub(counted.max(start));
            counted = end.max(counted);
        }
        granules * granule
    }

    fn alloc(&mut self, request: &AllocRequest) -> bool {
        let needed_bytes = request.bytes.next_multiple_of(self.granule);
        let headroom_bytes = self.limit_bytes / self.granule * self.granule - self.touched_bytes();
        match self.pool.alloc(request) {
            Ok(block) => {
                let apart = |other: &Block| !other.range.overlaps(&block.range);
                assert!(self.live.iter().all(apart), "{block:?} overlaps another block");
                assert!(block.range.addr.is_multiple_of(request.align));
                self.live.push(block);
                self.served += 1;
                true
            }
            Err(PoolError::OverLimit { .. } | PoolError::DeviceFull { .. })
                if headroom_bytes < needed_bytes =>
            {
                self.refused += 1;
                false
            }
            Err(error) => {
                panic!("{headroom_bytes} are not touched, and {needed_bytes} were refused: {error}")
            }
        }
    }

    fn free(&mut self, n: usize) {
        if !self.live.is_empty() {
            let block = self.live.swap_remove(n % self.live.len());
            self.pool.free(block.id).unwrap();
        }
    }

    fn check(&self) {
        let stats = self.pool.stats().unwrap();
        let used_bytes = self.device.memory_info().unwrap().process.unwrap().used_bytes;
        assert_eq!(stats.mapped_bytes, used_bytes, "our accounting and the device's");
        assert!(stats.peak_mapped_bytes <= self.limit_bytes, "over the limit");
        assert_eq!(stats.live_bytes, self.live.iter().map(|block| block.range.bytes).sum::<u64>());
    }

    fn end(mut self) {
        while !self.live.is_empty() {
            self.free(0);
        }
        self.pool.trim().unwrap();
        let stats = self.pool.stats().unwrap();
        assert_eq!([stats.live_bytes, stats.mapped_bytes, stats.reserved_bytes], [0; 3]);
        self.pool.close().unwrap();
    }
}

fn config_of([chunk_granules, span_granules, segment_granules]: [u64; 3]) -> PoolConfig {
    PoolConfig::default()
        .in_chunks_of(chunk_granules)
        .in_spans_of(span_granules)
        .in_segments_of(segment_granules)
}

fn tag(n: u64) -> Tag {
    [Tag::weights(), Tag::kv_cache(), Tag::runtime()][usize::try_from(n % 3).unwrap()].clone()
}

/// A size whose logarithm is evenly distributed: a power of two, plus an even choice up to the next.
fn log_uniform(random: &mut Rng, least: u64, most: u64) -> u64 {
    let base = least << random.u32(..=(most / least).ilog2());
    random.u64(base..2 * base).min(most)
}

#[test]
fn sizes_of_all_magnitudes_fit_where_live_memory_leaves_space() {
    for seed in 0..DeviceKind::of_this_run().cases(4).into() {
        let device = TestDevice::with_capacity(12 * GIB);
        let config = PoolConfig::default().limited_to(8 * GIB);
        let mut world = World::new(device, config);
        let mut random = Rng::with_seed(seed);
        for _ in 0..2500 {
            if random.u8(..100) < 60 {
                let bytes = log_uniform(&mut random, 512, 3 * GIB);
                let granule_aligned = random.u8(..4) == 0;
                let bytes = if granule_aligned { bytes.next_multiple_of(world.granule) } else { bytes };
                let is_freed_in_parts = random.bool();
                let mut request = AllocRequest::new(bytes, tag(random.u64(..)));
                request.is_freed_in_parts = is_freed_in_parts;
                if !world.alloc(&request) {
                    // When nothing fits any more, blocks are freed so that large sizes get their turn.
                    (0..4).for_each(|_| world.free(random.usize(..)));
                }
            } else {
                world.free(random.usize(..));
            }
            world.check();
        }
        assert!(world.served > 1000 && world.refused > 10, "{} and {}", world.served, world.refused);
        if world.device.kind() == DeviceKind::Host {
            assert_eq!(world.device.resident_bytes(), 0, "nothing was touched");
        }
        world.end();
    }
}

/// From bug reports: three quarters of the limit as one block, freed, and then seven eighths.
#[test]
fn after_a_freed_block_a_larger_one_fits_under_every_limit() {
    for shape in SHAPES {
        for granules in (1..=200).step_by(DeviceKind::of_this_run().stride()) {
            for tags in [[0, 0], [1, 1], [1, 0], [0, 1]] {
                let mut world = World::of_granules(granules, shape);
                for (eighths, nth) in [6, 7, 8].into_iter().zip([tags[0], tags[1], tags[0]]) {
                    let bytes = (granules * world.granule * eighths / 8).max(1);
                    let request = AllocRequest::new(bytes, tag(nth));
                    assert!(world.alloc(&request), "{granules} of {shape:?}, {request}");
                    world.check();
                    world.free(0);
                }
                world.end();
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// Bytes and log2 of the alignment.
    Alloc {
        bytes: u64,
        align: u32,
        tag: u64,
    },
    Free(usize),
    FreeAll,
    Trim,
}

fn step() -> impl Strategy<Value = Step> {
    let granule = TestDevice::open(1).info().granule_bytes;
    let bytes = prop_oneof![
        3 => any::<u64>().prop_map(move |seed| log_uniform(&mut Rng::with_seed(seed), 512, 64 * granule)),
        2 => (1..40u64).prop_map(move |granules| granules * granule),
        1 => (1..40u64, 0..2u64).prop_map(move |(granules, more)| granules * granule - 512 + more * 1024),
    ];
    prop_oneof![
        12 => (bytes, 0..=granule.ilog2(), 0..3u64)
            .prop_map(|(bytes, align, tag)| Step::Alloc { bytes, align, tag }),
        8 => any::<usize>().prop_map(Step::Free),
        1 => Just(Step::FreeAll),
        1 => Just(Step::Trim),
    ]
}

fn config() -> ProptestConfig {
    let cases = DeviceKind::of_this_run().cases(100);
    // Failures are printed in full; CI would leave a file of seeds in the tree.
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 2000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn what_live_memory_leaves_can_be_had_in_pools_of_any_shape(
        shape in proptest::sample::select(SHAPES.to_vec()),
        granules in 1..120u64,
        in_pieces in any::<bool>(),
        steps in proptest::collection::vec(step(), 50..300),
    ) {
        let open = if in_pieces { World::in_pieces } else { World::of_granules };
        let mut world = open(granules, shape);
        for step in &steps {
            match step {
                Step::Alloc { bytes, align, tag } => {
                    let request = AllocRequest::new(*bytes, self::tag(*tag)).aligned_to(1 << align);
                    world.alloc(&request);
                }
                Step::Free(n) => world.free(*n),
                Step::FreeAll => while !world.live.is_empty() {
                    world.free(0);
                },
                Step::Trim => drop(world.pool.trim().unwrap()),
            }
            world.check();
        }
        world.end();
    }
}

const TIB: u64 = 1 << 40;

/// The largest block that addresses can be counted for: whole granules below 2 TiB.
#[test]
fn sizes_at_the_edges_are_served_or_refused() {
    let bytes = TestDevice::capacity_bytes_max().min(4 * TIB);
    let device = TestDevice::with_capacity(bytes);
    let granule = device.info().granule_bytes;
    let pool = Pool::new(device.driver(), PoolConfig::default()).unwrap();
    let kept = pool.alloc(&AllocRequest::new(4096, Tag::weights())).unwrap();
    let before = pool.snapshot().unwrap();
    let most = 2 * TIB - granule;
    let edges = [2 * TIB - 512, 2 * TIB, 2 * TIB + granule, 4 * TIB, 1 << 63, u64::MAX - 511, u64::MAX];
    for bytes in edges.into_iter().chain([most + 1, most + 512, most + granule - 1]) {
        for request in [AllocRequest::new(bytes, Tag::kv_cache()), AllocRequest::new(bytes, Tag::weights())] {
            for align in [1, granule] {
                let error = pool.alloc(&request.clone().aligned_to(align)).unwrap_err();
                assert!(matches!(error, PoolError::InvalidRequest { .. }), "{bytes}: {error}");
                assert!(error.to_string().contains(&most.to_string()), "the largest is named: {error}");
            }
        }
    }
    assert_eq!(pool.snapshot().unwrap(), before);
    for bytes in [most - granule + 1, most] {
        // All of it is spans, where there is so much.
        match pool.alloc(&AllocRequest::new(bytes, Tag::kv_cache())) {
            Ok(block) => {
                assert!(device.info().total_bytes > bytes && block.range.bytes >= bytes);
                pool.free(block.id).unwrap();
                pool.trim().unwrap();
            }
            Err(PoolError::OverLimit { .. }) => assert!(device.info().total_bytes < 2 * TIB),
            Err(error) => panic!("{bytes}: {error}"),
        }
    }
    pool.free(kept.id).unwrap();
    pool.trim().unwrap();
    assert_eq!(pool.stats().unwrap().mapped_bytes, 0);
}
