//! Random allocations, frees, writes, sleeps, wakes and preparations, compared with the plain model after every step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use poorwill_core::{
    AllocRequest, Block, BlockKind, Changes, DeviceRange, DriverErrorKind, Dropped, Level, Op, Pool,
    PoolConfig, PoolError, Preparation, SleepRequest, Tag, TagPolicy, Verify, WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::model::{Model, Reads};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::storing::Storing;
use proptest::prelude::*;

/// What the pool may map: a limit on a larger device, or the whole of a device without one.
const CAPACITY_GRANULES: u64 = 64;

#[derive(Debug, Clone)]
enum Step {
    /// `eighths` of a granule of the `tag`-th tag.
    Alloc {
        tag: usize,
        eighths: u64,
        odd: u64,
    },
    /// The n-th live block, modulo their number.
    Free(usize),
    /// From one sixteenth of the n-th live block to another.
    FreePart {
        n: usize,
        from: u64,
        to: u64,
    },
    Fill(usize),
    Sleep {
        level: Level,
        tags: Option<u8>,
    },
    Wake {
        tags: Option<u8>,
    },
    Discard {
        tags: u8,
    },
    MarkRestored(usize),
    Trim,
    /// In the background of the next steps, or waited for.
    Prepare {
        tags: Option<u8>,
        wait: bool,
    },
    Declare {
        tag: usize,
        changes: Changes,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let tags = || prop_oneof![2 => Just(None), 3 => any::<u8>().prop_map(Some)];
    let level = prop_oneof![2 => Just(Level::One), 1 => Just(Level::Two)];
    let changes = prop_oneof![Just(Changes::Compared), Just(Changes::Immutable), Just(Changes::Volatile)];
    // Sizes of all magnitudes: from one byte to a fifth of the limit.
    let alloc = (0..5usize, 0..7u32, 1..3u64, 0..600u64).prop_map(|(tag, log, factor, odd)| Step::Alloc {
        tag,
        eighths: factor << log,
        odd,
    });
    prop_oneof![
        10 => alloc,
        6 => any::<usize>().prop_map(Step::Free),
        4 => (any::<usize>(), 0..16u64, 1..=16u64).prop_map(|(n, from, to)| Step::FreePart { n, from, to }),
        6 => any::<usize>().prop_map(Step::Fill),
        3 => (level, tags()).prop_map(|(level, tags)| Step::Sleep { level, tags }),
        5 => tags().prop_map(|tags| Step::Wake { tags }),
        1 => any::<u8>().prop_map(|tags| Step::Discard { tags }),
        2 => (0..5usize).prop_map(Step::MarkRestored),
        1 => Just(Step::Trim),
        2 => (tags(), any::<bool>()).prop_map(|(tags, wait)| Step::Prepare { tags, wait }),
        1 => (0..5usize, changes).prop_map(|(tag, changes)| Step::Declare { tag, changes }),
    ]
}

struct Run {
    storing: Storing,
    device: TestDevice,
    pool: Pool,
    tags: [Tag; 5],
    model: Model,
    blocks: BTreeMap<u64, Block>,
    tag_of: BTreeMap<u64, usize>,
    changes: [Changes; 5],
    preparing: Vec<Preparation>,
    next: u64,
}

impl Run {
    /// A device `in_pieces` refuses chunks larger than the pool's chunk size most of the time.
    fn new(
        storing: Storing,
        limited: bool,
        in_pieces: bool,
        [chunk_granules, span_granules]: [u64; 2],
    ) -> Self {
        let capacity_granules = if limited { CAPACITY_GRANULES * 3 / 2 } else { CAPACITY_GRANULES };
        let device = TestDevice::open(capacity_granules);
        let granule = device.info().granule_bytes;
        let config = storing
            .of(PoolConfig::default())
            .limited_to(limited.then_some(CAPACITY_GRANULES * granule))
            .in_chunks_of(chunk_granules)
            .in_spans_of(span_granules)
            .in_segments_of(8);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            let is_large = call.op == Op::Create && call.bytes > chunk_granules * granule;
            let kind = DriverErrorKind::OutOfMemory { asked_bytes: call.bytes, free_bytes: call.bytes };
            if in_pieces && is_large && call.number % 5 > 0 { Verdict::Fail(kind) } else { Verdict::Pass }
        });
        let driver = driver.with_info(|info| info.fast_digests = limited || info.fast_digests);
        let pool = Pool::new(Arc::new(driver), config).unwrap();
        let scratch = Tag::new("scratch").unwrap();
        let tags =
            [Tag::weights(), Tag::kv_cache(), Tag::runtime(), Tag::new("lora").unwrap(), scratch.clone()];
        let mut model = Model::default();
        for tag in &tags {
            model.declare(tag.clone(), TagPolicy::built_in(tag));
        }
        let policy = TagPolicy::discardable(Dropped::Undefined);
        pool.declare_tag(&scratch, policy).unwrap();
        pool.declare_tag(&tags[3], TagPolicy::PRESERVED).unwrap();
        model.declare(scratch, policy);
        let (blocks, tag_of, changes, preparing) = Default::default();
        Self { storing, device, pool, tags, model, blocks, tag_of, changes, preparing, next: 0 }
    }

    fn chosen(&self, mask: u8) -> Vec<Tag> {
        self.tags
            .iter()
            .enumerate()
            .filter(|(i, _)| mask & (1 << i) != 0)
            .map(|(_, tag)| tag.clone())
            .collect()
    }

    fn live(&self, n: usize) -> Option<(u64, Block)> {
        let count = self.blocks.len().max(1);
        self.blocks.iter().nth(n % count).map(|(id, block)| (*id, *block))
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Alloc { tag, eighths, odd } => self.alloc(*tag, eighths * self.granule() / 8 + odd),
            Step::Free(n) => {
                let Some((id, block)) = self.live(*n) else { return };
                self.pool.free(block.id).unwrap();
                assert!(matches!(self.pool.free(block.id), Err(PoolError::StaleBlock { .. })));
                self.model.free(id);
                self.blocks.remove(&id);
            }
            Step::FreePart { n, from, to } => self.free_part(*n, *from, *to),
            Step::Fill(n) => {
                let Some((id, block)) = self.live(*n) else { return };
                self.next += 1;
                let len = usize::try_from(block.requested_bytes).unwrap();
                // A promise not to change is taken back before a change, and made again after it.
                let tag = self.tag_of[&id];
                let promised = self.changes[tag] == Changes::Immutable;
                let declare = |changes| self.pool.declare_changes(&self.tags[tag], changes).unwrap();
                promised.then(|| declare(Changes::Compared));
                let bytes = self.storing.bytes(self.next, len);
                let filled = pattern::write(&self.pool, block.id, bytes).is_ok();
                promised.then(|| declare(Changes::Immutable));
                assert_eq!(filled, self.model.fill(id, self.next));
            }
            Step::Sleep { level, tags } => self.sleep(*level, tags.map(|mask| self.chosen(mask))),
            Step::Wake { tags } => self.wake(tags.map(|mask| self.chosen(mask)).as_deref()),
            Step::Discard { tags } => {
                let tags = self.chosen(*tags);
                let report = self.pool.discard(&tags).unwrap();
                assert_eq!(sorted(report.tags), sorted(self.model.discard(&tags)));
                self.check_bytes();
            }
            Step::MarkRestored(tag) => {
                let tag = self.tags[*tag].clone();
                let restored = self.pool.mark_restored(std::slice::from_ref(&tag)).is_ok();
                assert_eq!(restored, self.model.mark_restored(&tag).is_some());
            }
            Step::Trim => {
                self.pool.trim().unwrap();
            }
            Step::Prepare { tags, wait } => {
                let tags = tags.map(|mask| self.chosen(mask));
                match self.pool.prepare_sleep(&SleepRequest::all(Level::One).choosing(tags)) {
                    Ok(preparation) if *wait => drop(preparation.wait().unwrap()),
                    Ok(preparation) => self.preparing.push(preparation),
                    Err(PoolError::SleepConflict { .. } | PoolError::Undefined { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Declare { tag, changes } => {
                self.pool.declare_changes(&self.tags[*tag], *changes).unwrap();
                self.changes[*tag] = *changes;
            }
        }
    }

    fn granule(&self) -> u64 {
        self.device.info().granule_bytes
    }

    fn alloc(&mut self, which: usize, bytes: u64) {
        let tag = self.tags[which].clone();
        // Freeing some of them in parts all the same must do no harm.
        let is_freed_in_parts = self.next.is_multiple_of(2);
        let mut request = AllocRequest::new(bytes.max(1), tag.clone());
        request.is_freed_in_parts = is_freed_in_parts;
        self.next += 1;
        match self.pool.alloc(&request) {
            Ok(block) => {
                assert!(self.model.alloc(self.next, &tag, bytes), "{tag} sleeps, and a block was given out");
                let apart = |other: &Block| !other.range.overlaps(&block.range);
                assert!(self.blocks.values().all(apart), "{block:?} overlaps another block");
                assert!(block.range.addr.is_multiple_of(512) && block.range.bytes >= bytes);
                self.blocks.insert(self.next, block);
                self.tag_of.insert(self.next, which);
            }
            Err(PoolError::Asleep { .. }) => assert!(self.model.state(&tag).is_asleep()),
            Err(error @ (PoolError::OverLimit { .. } | PoolError::DeviceFull { .. })) => {
                // Right only if it does not depend on the cache. One exception: a block may end in a granule that is
                // in use, and need one less than promised.
                let headroom_bytes = self.headroom_bytes();
                assert!(
                    headroom_bytes < bytes.next_multiple_of(self.granule()),
                    "{headroom_bytes} are free: {error}"
                );
                self.pool.trim().unwrap();
                match self.pool.alloc(&request) {
                    Ok(block) => self.pool.free(block.id).unwrap(),
                    Err(PoolError::OverLimit { .. } | PoolError::DeviceFull { .. }) => {}
                    Err(error) => panic!("a false refusal, and then {error}"),
                }
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// The space that live blocks of awake tags leave, in bytes. They take the granules that they touch or pin.
    fn headroom_bytes(&self) -> u64 {
        CAPACITY_GRANULES * self.granule() - self.used_bytes(|tag| !self.model.state(tag).is_asleep())
    }

    /// The bytes of granules that live blocks of these tags touch or pin.
    fn used_bytes(&self, of: impl Fn(&Tag) -> bool) -> u64 {
        let granule = self.granule();
        let segments = self.pool.snapshot().unwrap().segments.into_iter();
        let used = segments.filter(|segment| of(&segment.tag)).flat_map(|segment| segment.blocks);
        let used = used.filter(|block| matches!(block.kind, BlockKind::Live | BlockKind::Pinned));
        let granules = used.flat_map(|b| b.addr / granule..(b.addr + b.bytes).div_ceil(granule));
        granules.collect::<BTreeSet<u64>>().len() as u64 * granule
    }

    fn free_part(&mut self, n: usize, from: u64, to: u64) {
        let Some((id, block)) = self.live(n) else { return };
        let sixteenth = |nth: u64| block.range.bytes * nth / 16 / 512 * 512;
        let (from, to) = (sixteenth(from.min(to)), sixteenth(to.max(from)));
        let part = DeviceRange::new(block.range.addr + from, to - from);
        match self.pool.free_part(block.id, part) {
            Ok(rest) => {
                assert!(matches!(self.pool.free(block.id), Err(PoolError::StaleBlock { .. })));
                let named: Vec<(u64, Block)> = (self.next + 1..).zip(rest).collect();
                self.next += 2;
                let model = |(id, rest): &(u64, Block)| {
                    (*id, rest.range.addr - block.range.addr, rest.requested_bytes)
                };
                self.model.free_part(id, &named.iter().map(model).collect::<Vec<_>>());
                let mut pieces: Vec<DeviceRange> = named.iter().map(|(_, rest)| rest.range).collect();
                pieces.push(part);
                pieces.sort_unstable();
                assert!(pieces.windows(2).all(|pair| pair[0].end() == pair[1].addr), "{pieces:?}");
                let whole = DeviceRange::new(pieces[0].addr, pieces.iter().map(|piece| piece.bytes).sum());
                assert_eq!(whole, block.range);
                self.blocks.remove(&id);
                let tag = self.tag_of[&id];
                for (id, rest) in named {
                    let is_last = rest.range.end() == block.range.end();
                    let slack = if is_last { block.range.bytes - block.requested_bytes } else { 0 };
                    assert_eq!(rest.requested_bytes, rest.range.bytes - slack);
                    self.blocks.insert(id, rest);
                    self.tag_of.insert(id, tag);
                }
            }
            Err(PoolError::InvalidPart { .. }) => assert_eq!(part.bytes, 0),
            Err(error) => panic!("{error}"),
        }
    }

    fn sleep(&mut self, level: Level, tags: Option<Vec<Tag>>) {
        let free_before = self.device.memory_info().unwrap().free_bytes;
        let falling = self.model.sleep(level, tags.as_deref());
        match (self.pool.sleep(&SleepRequest::all(level).choosing(tags)), falling) {
            (Ok(report), Some(falling)) => {
                let freed = self.device.memory_info().unwrap().free_bytes - free_before;
                assert_eq!(sorted(report.tags), sorted(falling));
                assert_eq!(
                    (report.released_bytes, freed),
                    (report.planned_release_bytes, report.planned_release_bytes)
                );
            }
            (Err(PoolError::SleepConflict { .. } | PoolError::Undefined { .. }), None) => {}
            (result, falling) => panic!("{result:?} where the model says {falling:?}"),
        }
        self.check_bytes();
    }

    fn wake(&mut self, tags: Option<&[Tag]>) {
        match self
            .pool
            .wake(&WakeRequest::default().choosing(tags.map(<[Tag]>::to_vec)).verifying(Verify::All))
        {
            Ok(report) => {
                assert_eq!(sorted(report.tags), sorted(self.model.wake(tags)));
                assert_eq!(report.copied_bytes, report.verified_bytes);
            }
            Err(error @ (PoolError::OverLimit { .. } | PoolError::DeviceFull { .. })) => {
                // Others took the memory meanwhile; everything still sleeps.
                let waking = |tag: &Tag| {
                    self.model.state(tag).is_asleep() && tags.is_none_or(|tags| tags.contains(tag))
                };
                assert!(self.used_bytes(waking) > self.headroom_bytes(), "a false refusal: {error}");
            }
            Err(error) => panic!("{error}"),
        }
        self.check_bytes();
    }

    /// What must hold after every step.
    fn check(&mut self) {
        let is_over = |preparation: &mut Preparation| preparation.progress().is_ended;
        self.preparing.extract_if(.., is_over).for_each(|preparation| drop(preparation.wait().unwrap()));
        let stats = self.pool.stats().unwrap();
        let used_bytes = self.device.memory_info().unwrap().process.unwrap().used_bytes;
        assert_eq!(stats.mapped_bytes, used_bytes, "our accounting and the device's");
        assert!(stats.mapped_bytes <= CAPACITY_GRANULES * self.granule(), "over the limit");
        if self.preparing.is_empty() {
            assert_eq!(stats.backup_bytes, self.device.host_bytes(), "host memory is exactly the backups");
        }
        assert_eq!(stats.live_blocks, self.blocks.len());
        assert_eq!(stats.live_bytes, self.blocks.values().map(|block| block.range.bytes).sum::<u64>());
        for tag in &self.tags {
            assert_eq!(self.pool.tag_state(tag).unwrap(), self.model.state(tag), "{tag}");
        }
        for block in self.blocks.values() {
            assert_eq!(self.pool.block(block.id).unwrap(), *block, "a block has moved");
        }
        self.check_snapshot();
    }

    /// Blocks fill their segments without gaps, and no two free ones of a kind touch.
    fn check_snapshot(&self) {
        let mut live: Vec<DeviceRange> = Vec::new();
        for segment in self.pool.snapshot().unwrap().segments {
            let mut at = segment.addr;
            let mut last = BlockKind::Live;
            for block in &segment.blocks {
                assert_eq!(block.addr, at);
                // Pinned parts of two chunks may be neighbours.
                let apart = block.kind != last || matches!(last, BlockKind::Live | BlockKind::Pinned);
                assert!(apart, "two free neighbours of a kind");
                last = block.kind;
                at += block.bytes;
                let is_live = block.kind == BlockKind::Live;
                assert_eq!(is_live, block.requested_bytes.is_some());
                live.extend(is_live.then_some(DeviceRange::new(block.addr, block.bytes)));
            }
            assert_eq!(at, segment.addr + segment.bytes);
        }
        let mut expected: Vec<DeviceRange> = self.blocks.values().map(|block| block.range).collect();
        expected.sort_unstable();
        assert_eq!(live, expected);
    }

    fn check_bytes(&self) {
        for (id, tag, _, reads) in self.model.blocks() {
            let block = self.blocks[&id];
            let len = usize::try_from(block.requested_bytes).unwrap();
            let read = pattern::read(&self.pool, block.id, len);
            match reads {
                Reads::Pattern { seed, offset } => {
                    assert!(read.unwrap() == self.storing.part(seed, offset, len), "bytes of {tag}");
                }
                Reads::Zeros => assert!(read.unwrap().iter().all(|byte| *byte == 0), "zeros of {tag}"),
                Reads::Anything => drop(read.unwrap()),
                Reads::Refused => drop(read.unwrap_err()),
            }
        }
    }

    fn end(self) {
        self.check_bytes();
        self.pool.close().unwrap();
        let info = self.device.memory_info().unwrap();
        assert_eq!(info.free_bytes, info.total_bytes);
        assert_eq!((self.device.resident_bytes(), self.device.host_bytes()), (0, 0));
    }
}

pub(crate) fn sorted(mut tags: Vec<Tag>) -> Vec<Tag> {
    tags.sort_unstable();
    tags
}

fn config() -> ProptestConfig {
    let cases = DeviceKind::of_this_run().cases(100);
    // Failures are printed in full; CI would leave a file of seeds in the tree.
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 2000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_pool_does_what_the_model_says(
        storing in proptest::sample::select(Storing::ALL.as_slice()),
        limited in any::<bool>(),
        in_pieces in any::<bool>(),
        sizes in proptest::sample::select(vec![[4, 0], [4, 8], [4, 13], [2, 6], [2, 16], [1, 256]]),
        steps in proptest::collection::vec(step(), 100..500),
    ) {
        let mut run = Run::new(storing, limited, in_pieces, sizes);
        for step in &steps {
            run.step(step);
            run.check();
        }
        run.end();
    }
}
