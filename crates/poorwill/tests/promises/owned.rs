//! Blocks that free themselves: on every path, once, and silently where there is nothing to free.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use poorwill::{AllocRequest, Arena, Level, OwnedBlock, PoolConfig, PoolError, SleepRequest, Tag};
use poorwill_testkit::device::TestDevice;

const BYTES: u64 = 1000;

fn arena() -> Arena {
    Arena::over(TestDevice::open(64).driver(), PoolConfig::default().in_chunks_of(4)).unwrap()
}

fn owned(arena: &Arena) -> OwnedBlock {
    arena.alloc_owned(&AllocRequest::new(BYTES, Tag::weights())).unwrap()
}

fn live_blocks(arena: &Arena) -> usize {
    arena.stats().unwrap().live_blocks
}

fn is_shared<T: Send + Sync + 'static>(_: &T) {}

#[test]
fn it_is_the_block_and_frees_it_when_dropped() {
    let arena = arena();
    let block = owned(&arena);
    is_shared(&block);
    assert_eq!((block.requested_bytes, block.range.bytes), (BYTES, 1024));
    assert_eq!(arena.pool().block(block.id).unwrap(), *block);
    assert_eq!(live_blocks(block.arena()), 1);
    let id = block.id;
    thread::spawn(move || drop(block)).join().unwrap();
    assert_eq!(live_blocks(&arena), 0);
    assert!(matches!(arena.free(id), Err(PoolError::StaleBlock { .. })));
}

#[test]
fn an_early_return_and_a_panic_free_it() {
    let arena = arena();
    let fails = || -> Result<OwnedBlock, PoolError> {
        let block = owned(&arena);
        let other = owned(&arena);
        assert_eq!(live_blocks(&arena), 2);
        arena.write_all(block.id, block.range.bytes, &[1])?;
        drop(other);
        Ok(block)
    };
    assert!(matches!(fails(), Err(PoolError::OutOfBlock { .. })));
    assert_eq!(live_blocks(&arena), 0);
    let panics = AssertUnwindSafe(|| {
        let _block = owned(&arena);
        assert_eq!(live_blocks(&arena), 0, "on purpose");
    });
    assert!(catch_unwind(panics).is_err());
    assert_eq!(live_blocks(&arena), 0);
}

#[test]
fn one_that_sleeps_is_freed_as_well() {
    let arena = arena();
    let block = owned(&arena);
    arena.write_all(block.id, 0, &[7; 10]).unwrap();
    arena.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert!(arena.stats().unwrap().backup_bytes > 0);
    drop(block);
    assert_eq!(live_blocks(&arena), 0);
}

#[test]
fn freeing_by_hand_tells_what_dropping_does_not() {
    let arena = arena();
    owned(&arena).free().unwrap();
    assert_eq!(live_blocks(&arena), 0);
    let [freed, dropped] = [owned(&arena), owned(&arena)];
    arena.free(freed.id).unwrap();
    arena.free(dropped.id).unwrap();
    let other = owned(&arena); // At the place of one of them.
    assert!(matches!(freed.free(), Err(PoolError::StaleBlock { .. })));
    drop(dropped);
    assert_eq!(live_blocks(&arena), 1, "nobody else's block goes with it");
    drop(other);
}

#[test]
fn ownership_is_given_up() {
    let arena = arena();
    let block = owned(&arena).into_block();
    assert_eq!(live_blocks(&arena), 1);
    arena.free(block.id).unwrap();
}

#[test]
fn it_keeps_the_arena_and_its_claim() {
    let arena = arena();
    let (driver, envelope) = (arena.driver().clone(), arena.envelope().clone());
    let block = owned(&arena);
    drop(arena);
    assert!(driver.memory_info().unwrap().process.is_none_or(|process| process.used_bytes > 0));
    assert_eq!(envelope.unclaimed_bytes(), 0, "what may still be mapped is nobody else's");
    block.arena().write_all(block.id, 0, &[3; 5]).unwrap();
    assert_eq!(block.arena().read_vec(block.id, 0, 5).unwrap(), [3; 5]);
    drop(block);
    assert!(envelope.unclaimed_bytes() > 0);
    drop(Arena::over(driver, PoolConfig::default()).unwrap());
}

#[test]
fn a_closed_arena_has_taken_it() {
    let arena = arena();
    let [freed, dropped] = [owned(&arena), owned(&arena)];
    arena.clone().close().unwrap();
    assert!(matches!(freed.free(), Err(PoolError::Closed)));
    drop(dropped);
    assert!(matches!(arena.stats(), Err(PoolError::Closed)));
}
