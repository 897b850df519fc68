//! How the work of the bookkeeping grows with tags and blocks. Visits are counted, and nothing is timed.

use super::parts::physical::Counters;
use super::state::PoolState;
use super::tools::config::PoolConfig;
use super::tools::handle::{AllocRequest, BlockId};
use super::tools::keys::TagKey;
use super::tools::mapping::Backing;
use super::tools::shape::Shape;
use super::tools::units::UNIT_BYTES;
use super::tools::visits;
use crate::driver::{BackingId, DeviceInfo, DeviceRange};
use crate::tag::Tag;

const GRANULE: u64 = 64 << 10;
const SEGMENT: u64 = 8 * GRANULE;

struct Model {
    state: PoolState,
    tags: Vec<TagKey>,
    blocks: Vec<BlockId>,
    next_addr: u64,
}

impl Model {
    /// With so many small blocks, each tag in turn getting one.
    fn new(tags: usize, blocks: usize) -> Self {
        let config = PoolConfig::default().in_chunks_of(4).in_spans_of(4).in_segments_of(SEGMENT / GRANULE);
        let shape = Shape::new(&config, &DeviceInfo::new("test", "test", GRANULE, u64::MAX));
        let (state, tags, made) = (PoolState::new(shape, 1, None), 0..tags, Vec::new());
        let mut model = Self { state, tags: Vec::new(), blocks: made, next_addr: SEGMENT };
        let tags: Vec<Tag> = tags.map(|nth| Tag::new(&format!("lora-{nth:05}")).unwrap()).collect();
        for tag in tags.iter().cycle().take(blocks) {
            let block = model.alloc(tag);
            model.blocks.push(block);
        }
        model.tags = tags.iter().map(|tag| model.state.tag_key(tag)).collect();
        model
    }

    fn alloc(&mut self, tag: &Tag) -> BlockId {
        let (request, state) = (AllocRequest::new(UNIT_BYTES, tag.clone()), &mut self.state);
        let key = state.tag_key(tag);
        let list = state.heap_mut().find_list(key, request.stream);
        let list = list.unwrap_or_else(|| state.make_list(key, &request, |_| true).unwrap());
        if let Some(ready) = state.heap().ready_candidate(key, list, (UNIT_BYTES, UNIT_BYTES), GRANULE) {
            return state.take(&ready, list, UNIT_BYTES, &request).id;
        }
        let candidate = loop {
            if let Some(found) = state.heap().cheapest_candidate(key, list, (UNIT_BYTES, UNIT_BYTES), GRANULE)
            {
                break found;
            }
            state.heap_mut().add_segment(key, list, DeviceRange::new(self.next_addr, SEGMENT));
            self.next_addr += 2 * SEGMENT;
        };
        let mut placement = state.heap_mut().occupy(&candidate, list, UNIT_BYTES, GRANULE);
        let mapped = Backing::Mapped { id: BackingId(self.next_addr), open: true };
        placement.lacking.iter_mut().for_each(|mapping| mapping.backing = mapped);
        state.finish(&placement, list, &request).id
    }

    /// Visits of each step, while these tags fall asleep, are planned to wake, and wake.
    fn cycle(&mut self, tags: &[TagKey]) -> Vec<usize> {
        let (state, counters) = (&mut self.state, Counters::default());
        let (planned, plan) = visits::of(|| state.plan_discard(tags));
        assert_eq!((plan.tags.len(), plan.leaving.len()), (tags.len(), tags.len()), "one chunk for each");
        let (slept, ()) = visits::of(|| state.commit_sleep(&plan));
        let (laid_out, ()) = visits::of(|| state.heap_mut().lay_out(tags, GRANULE));
        let (planned_back, _) = visits::of(|| state.plan_wake(tags, tags, true));
        let (woken, ()) = visits::of(|| tags.iter().for_each(|tag| state.wake(*tag)));
        let (looked, _) = visits::of(|| tags.iter().filter(|tag| state.is_whole(**tag)).count());
        let (cached, _) = visits::of(|| state.cached_bytes(&counters));
        vec![planned, slept, laid_out, planned_back, woken, looked, cached]
    }

    /// Visits of all frees, in no order.
    fn free_all(&mut self) -> usize {
        let mut blocks = std::mem::take(&mut self.blocks);
        fastrand::Rng::with_seed(3).shuffle(&mut blocks);
        visits::of(|| blocks.into_iter().for_each(|block| assert!(!self.state.free("free", block).unwrap())))
            .0
    }
}

/// `at` has the figures of n, 2n and 4n: twice as much is twice the work.
fn assert_linear(what: &str, at: [usize; 3]) {
    let [first, second, third] = at;
    assert!(first > 0 && third - second <= 2 * (second - first) + second / 20, "{what}: {at:?}");
}

#[test]
fn a_call_for_one_tag_visits_no_other() {
    let of = |tags: usize| {
        let mut model = Model::new(tags, tags);
        let one = model.tags[tags / 2];
        let cycle = model.cycle(&[one]);
        (cycle, visits::of(|| model.state.tidy(one)).0, visits::of(|| model.state.tidy_absent(one)).0)
    };
    let few = of(10);
    assert!(few.0[0] > 0);
    assert_eq!([of(20), of(200)], [few.clone(), few]);
}

#[test]
fn a_call_for_all_tags_visits_each_as_often_whatever_their_number() {
    let of = |tags: usize| {
        let mut model = Model::new(tags, tags);
        let all = model.tags.clone();
        let mut steps = model.cycle(&all);
        steps.push(visits::of(|| model.state.stats(&Counters::default())).0);
        steps.push(visits::of(|| model.state.snapshot()).0);
        steps.push(model.free_all());
        steps
    };
    let at = [50, 100, 200].map(of);
    for step in (0..at[0].len()).filter(|step| at[2][*step] > 0) {
        assert_linear(&format!("step {step}"), [0, 1, 2].map(|size| at[size][step]));
    }
}

#[test]
fn blocks_are_made_and_freed_in_any_order_by_visiting_their_neighbours() {
    let of = |blocks: usize| {
        let (made, mut model) = visits::of(|| Model::new(1, blocks));
        (made, model.free_all())
    };
    let at = [1_000, 2_000, 4_000].map(of);
    assert_linear("allocations", at.map(|(made, _)| made));
    assert_linear("frees", at.map(|(_, freed)| freed));
    assert!(at[2].0 + at[2].1 < 4_000 * 60, "{at:?}");
}

#[test]
fn what_is_cached_is_what_no_live_block_of_a_tag_with_memory_has() {
    let mut model = Model::new(3, 9);
    let live = |state: &PoolState| {
        let held = state.tags().iter().filter(|(_, entry)| entry.state().is_held());
        held.map(|(tag, _)| state.heap().live_of(tag).live_bytes).sum::<u64>()
    };
    let asleep = model.state.plan_discard(&model.tags[..2]);
    model.state.commit_sleep(&asleep);
    assert_eq!((model.state.heap().held_live_bytes(), live(&model.state)), (3 * UNIT_BYTES, 3 * UNIT_BYTES));
    for block in model.blocks.drain(..6) {
        assert!(!model.state.free("free", block).unwrap());
        assert_eq!(model.state.heap().held_live_bytes(), live(&model.state));
    }
    model.tags[..2].iter().for_each(|tag| model.state.wake(*tag));
    assert_eq!((model.state.heap().held_live_bytes(), live(&model.state)), (3 * UNIT_BYTES, 3 * UNIT_BYTES));
}
