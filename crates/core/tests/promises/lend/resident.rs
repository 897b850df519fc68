//! Resident memory: no copy while it is not needed elsewhere, a backup before it leaves, and never a byte lost.

use poorwill_core::{CancellationToken, Changes};

use super::*;

fn world() -> Option<World> {
    if !has_descriptors() {
        return None;
    }
    let world = World::open();
    world.pool.declare_changes(&Tag::weights(), Changes::Volatile).unwrap();
    Some(world)
}

fn free_granules(world: &World) -> u64 {
    world.device.memory_info().unwrap().free_bytes / world.granule
}

#[test]
fn bytes_that_change_all_the_time_stay_without_a_copy() {
    let Some(world) = world() else { return };
    for round in 0..3 {
        let blocks: Vec<Block> = (0..3).map(|seed| world.loaded(1 + 5 * seed, seed + round)).collect();
        let slept = world.lend();
        assert_eq!((slept.copied_bytes, slept.lent_bytes, slept.released_bytes), (0, 0, 0), "{slept:?}");
        assert_eq!((world.granules(slept.resident_bytes), slept.lend_refused), (18, None));
        let stats = world.pool.stats().unwrap();
        assert_eq!((stats.resident_bytes, stats.mapped_bytes), (slept.resident_bytes, slept.resident_bytes));
        assert_eq!((stats.cached_bytes, world.broker.announced_bytes()), (0, slept.resident_bytes));
        assert!(world.pool.alloc(&AllocRequest::new(1, Tag::weights())).is_err());
        let woken = world.wake();
        assert_eq!((woken.returned_bytes, woken.copied_bytes), (slept.resident_bytes, 0), "round {round}");
        assert_eq!((world.broker.announced_bytes(), world.pool.stats().unwrap().resident_bytes), (0, 0));
        for (seed, block) in (0..).zip(blocks) {
            world.assert_reads(&block, seed + round);
            world.pool.free(block.id).unwrap();
        }
    }
    world.pool.close().unwrap();
}

#[test]
fn a_pool_leaves_its_own_where_others_have_none() {
    // A share of a device does not count what others hold of it.
    if skipped_unless(|kind| kind == DeviceKind::Host, "the device of this test is a share of one") {
        return;
    }
    let Some(world) = world() else { return };
    let other = Tag::new("other").unwrap();
    world.loaded(40, 1);
    world.pool.alloc(&AllocRequest::new(40 * world.granule, other.clone())).unwrap();
    world.pool.keep_free(30 * world.granule);
    let resident_bytes = world.lend().resident_bytes;
    world.pool.wake(&WakeRequest::of([other])).unwrap();
    assert_eq!(world.pool.stats().unwrap().resident_bytes, resident_bytes);
    world.pool.close().unwrap();
}

#[test]
fn what_others_need_is_backed_up_and_released_and_no_more() {
    let Some(world) = world() else { return };
    let blocks: Vec<Block> = (0..5).map(|seed| world.loaded(CHUNK * 2, seed)).collect();
    for wanted in [0, 1, 9, 30, 1000] {
        let resident = world.lend().resident_bytes;
        let before = free_granules(&world);
        let given = world.pool.give_up(wanted * world.granule).unwrap();
        assert!(given >= (wanted * world.granule).min(resident), "{given} of {wanted}");
        assert!(world.granules(given) < wanted + 2 * CHUNK, "{given} of {wanted}");
        assert_eq!(free_granules(&world) - before, world.granules(given));
        assert_eq!(world.broker.announced_bytes(), resident - given);
        let more = world.pool.give_up(wanted.min(1)).unwrap();
        let woken = world.wake();
        assert_eq!((woken.copied_bytes, woken.returned_bytes), (given + more, resident - given - more));
        assert_eq!(woken.verified_bytes, given + more);
        for (seed, block) in (0..).zip(&blocks) {
            world.assert_reads(block, seed);
        }
        assert_eq!(world.pool.give_up(1).unwrap(), 0, "nothing sleeps");
    }
    world.pool.close().unwrap();
}

#[test]
fn without_a_broker_nothing_stays() {
    let Some(world) = world() else { return };
    let block = world.loaded(7, 1);
    world.broker.fail(true);
    let slept = world.lend();
    assert_eq!((slept.resident_bytes, world.granules(slept.released_bytes)), (0, 7));
    assert!(slept.lend_refused.is_some_and(|reason| reason.contains("start another")));
    world.wake();
    world.assert_reads(&block, 1);
    world.broker.fail(false);
    assert_eq!(world.granules(world.lend().resident_bytes), 7);
    // As an arena does when its broker is lost.
    assert_eq!(world.granules(world.broker.have_given_up(u64::MAX)), 7);
    world.wake();
    world.assert_reads(&block, 1);
    world.pool.close().unwrap();
}

#[test]
fn a_sleep_that_releases_backs_up_what_stayed() {
    let Some(world) = world() else { return };
    let block = world.loaded(3 * CHUNK + 1, 5);
    world.lend();
    let released = world.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert_eq!(world.granules(released.released_bytes), 3 * CHUNK + 1);
    let stats = world.pool.stats().unwrap();
    assert_eq!((stats.resident_bytes, stats.mapped_bytes, world.broker.announced_bytes()), (0, 0, 0));
    assert_eq!(world.granules(world.wake().copied_bytes), 3 * CHUNK + 1);
    world.assert_reads(&block, 5);
    world.pool.close().unwrap();
}

#[test]
fn what_is_dropped_freed_or_closed_asleep_does_not_stay() {
    let Some(world) = world() else { return };
    let (first, second) = (world.loaded(2 * CHUNK, 1), world.loaded(CHUNK, 2));
    world.lend();
    world.pool.free(first.id).unwrap();
    let woken = world.wake();
    assert_eq!(world.granules(woken.returned_bytes), CHUNK);
    world.assert_reads(&second, 2);
    world.lend();
    world.pool.discard(&[Tag::weights()]).unwrap();
    assert_eq!(world.pool.stats().unwrap().mapped_bytes, 0);
    world.wake();
    pattern::fill(&world.pool, second.id, 3, usize::try_from(second.requested_bytes).unwrap()).unwrap();
    world.pool.mark_restored(&[Tag::weights()]).unwrap();
    world.lend();
    world.pool.free(second.id).unwrap();
    world.pool.trim().unwrap();
    assert_eq!(world.pool.stats().unwrap().mapped_bytes, 0, "its addresses are gone, and its memory");
    world.wake();
    world.loaded(CHUNK, 4);
    world.lend();
    world.pool.close().unwrap();
    drop(world.pool);
    assert_eq!(world.device.memory_info().unwrap().free_bytes, world.device.info().total_bytes);
}

#[test]
fn a_discard_that_fails_drops_nothing() {
    let Some(world) = world() else { return };
    let block = world.loaded(2 * CHUNK, 1);
    let resident = world.lend().resident_bytes;
    let token = CancellationToken::default();
    token.cancel();
    token.scope(|| world.pool.discard(&[Tag::weights()])).unwrap_err();
    assert_eq!(world.wake().returned_bytes, resident);
    world.assert_reads(&block, 1);
    world.pool.close().unwrap();
}

#[test]
fn after_a_backup_that_failed_parts_can_leave_one_by_one() {
    let Some(_) = world() else { return };
    for_each_failing_call(|nth| {
        let Some(world) = world() else { return false };
        let blocks = [world.loaded(3 * CHUNK, 1), world.loaded(CHUNK + 1, 2)];
        world.lend();
        world.failing.store(nth, Ordering::Relaxed);
        let failed = world.pool.give_up(u64::MAX);
        let has_failed = world.failing.swap(0, Ordering::Relaxed) == 0;
        while world.pool.give_up(1).unwrap() > 0 {}
        assert_eq!(world.pool.stats().unwrap().mapped_bytes, 0, "{nth}: {failed:?}");
        assert_eq!(world.granules(world.wake().copied_bytes), 4 * CHUNK + 1, "{nth}: {failed:?}");
        for (seed, block) in (1..).zip(&blocks) {
            world.assert_reads(block, seed);
        }
        world.pool.close().unwrap();
        has_failed
    });
}

#[test]
fn a_chunk_whose_blocks_are_gone_is_given_up_without_a_backup() {
    let Some(world) = world() else { return };
    let (first, second) = (world.loaded(2 * CHUNK, 1), world.loaded(2 * CHUNK, 2));
    world.lend();
    world.pool.free(first.id).unwrap();
    let before = free_granules(&world);
    let given = world.granules(world.pool.give_up(u64::MAX).unwrap());
    assert_eq!((given, free_granules(&world) - before), (4 * CHUNK, 4 * CHUNK));
    assert_eq!(world.granules(world.wake().copied_bytes), 2 * CHUNK);
    world.assert_reads(&second, 2);
    world.pool.close().unwrap();
}

#[test]
fn a_pool_that_lacks_memory_gives_up_its_own() {
    let Some(world) = world() else { return };
    let block = world.loaded(60, 1);
    world.lend();
    let request = AllocRequest::new(50 * world.granule, Tag::new("activations").unwrap());
    world.pool.alloc(&request).unwrap();
    assert!(world.granules(world.pool.stats().unwrap().resident_bytes) <= 46);
    assert!(world.pool.wake(&WakeRequest::of([Tag::weights()])).is_err(), "both do not fit");
    world.pool.discard(&[request.tag]).unwrap();
    world.pool.wake(&WakeRequest::of([Tag::weights()])).unwrap();
    world.assert_reads(&block, 1);
    world.pool.close().unwrap();
}

#[test]
fn any_call_of_the_driver_may_fail_and_no_byte_is_lost() {
    let Some(_) = world() else { return };
    for_each_failing_call(|nth| {
        let Some(world) = world() else { return false };
        let blocks = [world.loaded(2 * CHUNK + 1, 1), world.loaded(CHUNK, 2)];
        world.failing.store(nth, Ordering::Relaxed);
        let results = [
            world.pool.sleep(&SleepRequest::all(Level::One).lending()).map(drop),
            world.pool.give_up(world.granule).map(drop),
            world.pool.wake(&WakeRequest::all()).map(drop),
            world.pool.sleep(&SleepRequest::all(Level::One).lending()).map(drop),
            world.pool.sleep(&SleepRequest::all(Level::One)).map(drop),
        ];
        // Else the calls ended before the one that was to fail.
        let has_failed = world.failing.swap(0, Ordering::Relaxed) == 0;
        world
            .pool
            .wake(&WakeRequest::all())
            .unwrap_or_else(|error| panic!("{nth}: {error}, after {results:?}"));
        for (seed, block) in (1..).zip(&blocks) {
            world.assert_reads(block, seed);
        }
        let stats = world.pool.stats().unwrap();
        assert_eq!((world.granules(stats.mapped_bytes), stats.resident_bytes), (3 * CHUNK + 1, 0), "{nth}");
        world.pool.close().unwrap();
        drop(world.pool);
        assert_eq!(world.device.memory_info().unwrap().free_bytes, world.device.info().total_bytes, "{nth}");
        has_failed
    });
}
