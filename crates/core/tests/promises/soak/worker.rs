//! A thread of the program: its own tags and blocks, what the oracle knows of them, and the checks after each step.

use std::sync::Arc;

use fastrand::Rng;
use poorwill_core::backup::Compress;
use poorwill_core::pool::BackupView;
use poorwill_core::{
    Block, Changes, Dropped, HostBuffer, PoolError, Preparation, SleepAction, StoredAs, StreamId, Tag,
    TagPolicy, TagState, chain,
};
use poorwill_testkit::granules;
use poorwill_testkit::model::Model;
use poorwill_testkit::pattern;
use poorwill_testkit::watchdog::eventually;

use super::setup::World;

/// A live block, and what it holds.
pub(super) struct Known {
    /// For the model.
    pub(super) id: u64,
    pub(super) block: Block,
    pub(super) tag: usize,
    pub(super) bytes: Vec<u8>,
    /// What it held before: backups of awake tags may be as old.
    pub(super) before: Vec<Vec<u8>>,
}

impl Known {
    pub(super) fn set(&mut self, bytes: Vec<u8>) {
        self.before.push(std::mem::replace(&mut self.bytes, bytes));
    }
}

pub(super) struct Worker {
    pub(super) world: Arc<World>,
    pub(super) random: Rng,
    pub(super) tags: Vec<(Tag, TagPolicy)>,
    pub(super) model: Model,
    pub(super) live: Vec<Known>,
    pub(super) next: u64,
    pub(super) preparing: Vec<Preparation>,
    /// Views of backups, and what they showed.
    pub(super) views: Vec<(BackupView, Vec<u8>)>,
}

const POLICIES: [(&str, TagPolicy); 6] = [
    ("weights", TagPolicy::new(SleepAction::Backup, SleepAction::Drop, Dropped::Undefined)),
    ("viewable", TagPolicy::PRESERVED),
    ("cache", TagPolicy::discardable(Dropped::Zeros)),
    ("scratch", TagPolicy::discardable(Dropped::Undefined)),
    ("volatile", TagPolicy::PRESERVED),
    ("mixed", TagPolicy::new(SleepAction::Drop, SleepAction::Backup, Dropped::Zeros)),
];

impl Worker {
    pub(super) fn new(world: &Arc<World>, seed: u64, nth: u64) -> Self {
        let mut model = Model::default();
        let declare = |(name, policy): (&str, TagPolicy)| {
            let tag = Tag::new(&format!("{name}.{nth}")).unwrap();
            world.pool.declare_tag(&tag, policy).unwrap();
            model.declare(tag.clone(), policy);
            match name {
                "viewable" => world.pool.declare_backups(&tag, StoredAs::Viewable).unwrap(),
                "volatile" => world.pool.declare_changes(&tag, Changes::Volatile).unwrap(),
                _ => {}
            }
            (tag, policy)
        };
        let tags = POLICIES.into_iter().map(declare).collect();
        let random = Rng::with_seed(seed.wrapping_mul(64).wrapping_add(nth));
        let (live, preparing, views) = Default::default();
        Self { world: Arc::clone(world), random, tags, model, live, next: 0, preparing, views }
    }

    pub(super) fn step(&mut self) {
        match self.random.u8(..100) {
            0..28 => self.alloc(),
            28..40 => self.pick().into_iter().for_each(|n| self.free(n)),
            40..45 => self.pick().into_iter().for_each(|n| self.free_part(n)),
            45..54 => self.pick().into_iter().for_each(|n| self.write(n)),
            54..59 => self.pick().into_iter().for_each(|n| self.check_bytes(n)),
            59..69 => self.sleep(),
            69..81 => self.wake(),
            81..84 => self.spill(),
            84 => self.drop_backups(),
            85..88 => self.pick().into_iter().for_each(|n| self.read_backup(n)),
            88..90 => self.pick().into_iter().for_each(|n| self.view_backup(n)),
            90 => self.hold(),
            91 => self.trim(),
            92..94 => self.prepare(),
            94..97 => self.restore(),
            _ if self.world.setup.lends => self.take_lent(),
            _ if self.world.setup.spoils() => self.world.spoil(&mut self.random),
            _ => self.drop_views(),
        }
        self.check();
    }

    pub(super) fn one_in(&mut self, count: u8) -> bool {
        self.random.u8(..count) == 0
    }

    pub(super) fn pick(&mut self) -> Option<usize> {
        (!self.live.is_empty()).then(|| self.random.usize(..self.live.len()))
    }

    /// At least one of the tags; often all.
    pub(super) fn some_tags(&mut self) -> Vec<Tag> {
        let is_all = self.one_in(3);
        let mut tags: Vec<Tag> = self.tags.iter().map(|(tag, _)| tag.clone()).collect();
        self.random.shuffle(&mut tags);
        tags.truncate(if is_all { tags.len() } else { self.random.usize(1..=3) });
        tags
    }

    pub(super) fn state(&self, n: usize) -> TagState {
        self.model.state(&self.tags[self.live[n].tag].0)
    }

    /// Bytes of every kind: codes are short of most of them.
    pub(super) fn content(&mut self, len: usize) -> Vec<u8> {
        let seed = self.random.u64(..);
        let has_codes = self.world.setup.compress == Compress::Always;
        match self.random.u8(..6) {
            0 => vec![0; len],
            1 => seed.to_le_bytes().iter().copied().cycle().take(len).collect(),
            2..4 if has_codes => pattern::weights(seed, len),
            4 if has_codes => {
                let mut bytes = granules::mixed(seed, 1);
                bytes.resize(len, 0);
                bytes
            }
            _ => pattern::bytes(seed, len),
        }
    }

    pub(super) fn write_at(&self, n: usize, offset: usize, bytes: Vec<u8>) -> Result<(), PoolError> {
        let (len, src) = (bytes.len() as u64, Arc::new(HostBuffer::from(bytes)));
        let id = self.live[n].block.id;
        let copy = self.world.pool.write(StreamId::DEFAULT, id, offset as u64, src, 0, len)?;
        copy.wait().unwrap();
        Ok(())
    }

    pub(super) fn read_at(&self, n: usize, offset: usize, len: usize) -> Result<Vec<u8>, PoolError> {
        let (dst, id) = (HostBuffer::from(vec![0xEE; len]), self.live[n].block.id);
        let copy = self.world.pool.read(StreamId::DEFAULT, id, offset as u64, dst, 0, len as u64)?;
        Ok(copy.wait().unwrap().to_vec())
    }

    /// All bytes of a block, or the right refusal.
    pub(super) fn check_bytes(&mut self, n: usize) {
        let read = self.read_at(n, 0, self.live[n].bytes.len());
        match (self.state(n), read) {
            (TagState::Awake, Ok(read)) => self.expect_bytes(n, 0, &read),
            (TagState::Undefined, Err(PoolError::Undefined { .. })) => self.world.saw("undefined bytes"),
            (state, Err(PoolError::Asleep { .. })) if state.is_asleep() => {}
            (state, Err(error)) => panic!("{state}: {}", chain(&error)),
            (state, Ok(_)) => panic!("bytes of a tag that is {state}"),
        }
    }

    pub(super) fn expect_bytes(&self, n: usize, offset: usize, read: &[u8]) {
        let known = &self.live[n];
        let expected = &known.bytes[offset..offset + read.len()];
        if read != expected {
            let at = read.iter().zip(expected).position(|(read, expected)| read != expected);
            panic!("{:?} of {}: wrong byte at {at:?} from {offset}", known.block, self.tags[known.tag].0);
        }
    }

    pub(super) fn check_bytes_of(&mut self, tags: &[Tag]) {
        for n in 0..self.live.len() {
            if tags.contains(&self.tags[self.live[n].tag].0) {
                self.check_bytes(n);
            }
        }
    }

    /// What holds after every step.
    fn check(&mut self) {
        self.end_preparations();
        let pool = &self.world.pool;
        for (tag, _) in &self.tags {
            assert_eq!(pool.tag_state(tag).unwrap(), self.model.state(tag), "{tag}");
        }
        for known in &self.live {
            assert_eq!(pool.block(known.block.id).unwrap(), known.block, "a block has moved");
        }
        let stats = pool.stats().unwrap();
        let most_bytes = self.world.setup.limit_granules * self.world.granule;
        assert!(stats.mapped_bytes.max(stats.peak_mapped_bytes) <= most_bytes, "{stats:?}");
        if let Some(disk) = &stats.disk {
            assert!(disk.limit_bytes.is_none_or(|limit_bytes| disk.used_bytes <= limit_bytes), "{stats:?}");
        }
        // What is refused counts for a moment.
        eventually("host memory is within its limit", || {
            let host = pool.driver().host_memory();
            host.limit_bytes.is_none_or(|limit_bytes| host.held_bytes <= limit_bytes)
        });
        if !self.world.setup.is_alone() {
            return;
        }
        let live_bytes: u64 = self.live.iter().map(|known| known.block.range.bytes).sum();
        assert_eq!((stats.live_bytes, stats.live_blocks), (live_bytes, self.live.len()));
        let is_device_figure = || {
            let used_bytes = pool.driver().memory_info().unwrap().process.unwrap().used_bytes;
            pool.stats().unwrap().mapped_bytes == used_bytes
        };
        if self.world.setup.cached_granules.is_none() {
            assert!(is_device_figure(), "the pool's figure is not the device's");
        } else {
            // A thread gives memory back meanwhile.
            eventually("the pool's figure is the device's", is_device_figure);
        }
    }

    /// Wakes everything, as far as it fits, and frees it.
    pub(super) fn end(&mut self) {
        while !self.live.is_empty() {
            if self.live.iter().any(|known| self.model.state(&self.tags[known.tag].0).is_asleep()) {
                self.wake();
            }
            self.check();
            self.pick().into_iter().for_each(|n| self.check_bytes(n));
            self.pick().into_iter().for_each(|n| self.free(n));
        }
        self.drop_views();
        self.preparing.drain(..).for_each(|preparation| drop(preparation.wait()));
    }
}
