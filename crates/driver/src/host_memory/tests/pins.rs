//! Whether one buffer is page-locked: as requested, and never in a slab of the other kind.

use super::*;

fn alloc(
    arena: &Arc<HostArena>,
    bytes: u64,
    pin: BufferPin,
) -> Result<(ArenaBuffer, Option<String>), DriverError> {
    arena.alloc_as(bytes, pin)
}

fn refusal(made: Result<(ArenaBuffer, Option<String>), DriverError>) -> String {
    let refusal = made.map(drop).unwrap_err().to_string();
    assert!(!refusal.contains("  "), "{refusal}");
    refusal
}

#[test]
fn a_buffer_is_locked_as_it_was_asked_for() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    for (pin, is_pinned) in [
        (BufferPin::Auto, true),
        (BufferPin::Never, false),
        (BufferPin::Always, true),
        (BufferPin::Never, false),
    ] {
        let (buffer, because) = alloc(&arena, 5 * MIB, pin).unwrap();
        assert_eq!((buffer.is_pinned(), because), (is_pinned, None), "{pin:?}");
    }
    // Each kind has its slab, which the next request of that kind uses.
    assert_eq!((arena.info().held_bytes, arena.info().pinned_bytes), (10 * MIB, 5 * MIB));
    assert_eq!((accounts.mapped_bytes(), accounts.locked_bytes()), (10 * MIB, 5 * MIB));
    arena.trim();
    assert_eq!((arena.info().held_bytes, accounts.mapped_bytes(), accounts.locked_bytes()), (0, 0, 0));
}

#[test]
fn places_of_one_kind_are_never_given_to_the_other() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    let mut random = Rng::with_seed(7);
    let mut live: Vec<(ArenaBuffer, bool)> = Vec::new();
    for step in 0..4000 {
        if random.u64(..5) < 3 || live.is_empty() {
            let pin = [BufferPin::Auto, BufferPin::Never, BufferPin::Always][random.usize(..3)];
            let bytes = 1 + random.u64(..3 * MIB);
            let (buffer, because) = alloc(&arena, bytes, pin).unwrap();
            assert_eq!((buffer.is_pinned(), because), (pin != BufferPin::Never, None), "step {step}");
            assert_eq!(buffer.len() as u64, bytes);
            let range = |buffer: &ArenaBuffer| buffer.start().addr()..buffer.start().addr() + buffer.len();
            let new = range(&buffer);
            assert!(live.iter().all(|(old, _)| range(old).end <= new.start || new.end <= range(old).start));
            live.push((buffer, pin != BufferPin::Never));
        } else {
            drop(live.swap_remove(random.usize(..live.len())));
        }
        if step % 97 == 0 {
            arena.trim();
        }
        assert!(live.iter().all(|(buffer, is_pinned)| buffer.is_pinned() == *is_pinned), "step {step}");
        let info = arena.info();
        assert_eq!(info.used_bytes, live.iter().map(|(buffer, _)| buffer.len() as u64).sum::<u64>());
        assert_eq!((info.held_bytes, info.pinned_bytes), (accounts.mapped_bytes(), accounts.locked_bytes()));
    }
    live.clear();
    arena.trim();
    assert_eq!((arena.info().held_bytes, accounts.mapped_bytes()), (0, 0));
}

#[test]
fn where_locking_fails_just_now_auto_is_pageable_and_says_why() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    // The calls reserve addresses, populate them, and lock them.
    let fails_at = |offset: u64| {
        let next = accounts.calls.load(Ordering::Relaxed) + offset;
        *accounts.fails.lock().unwrap() = Some(next);
    };
    fails_at(2);
    let (buffer, because) = alloc(&arena, 3 * MIB, BufferPin::Auto).unwrap();
    assert!(!buffer.is_pinned() && because.unwrap().contains("fails"));
    fails_at(2);
    let refused = refusal(alloc(&arena, 4 * MIB, BufferPin::Always));
    assert!(refused.contains("fails"), "{refused}");
    assert_eq!((arena.info().used_bytes, arena.info().pinned_bytes), (3 * MIB, 0), "nothing is left behind");
    *accounts.fails.lock().unwrap() = None;
    assert!(alloc(&arena, 4 * MIB, BufferPin::Always).unwrap().0.is_pinned(), "no refusal is remembered");
}

#[test]
fn where_nothing_is_ever_locked_only_always_is_refused() {
    let files = FakeSystem::new();
    for by_machine in [true, false] {
        let (arena, accounts) = if by_machine {
            let (arena, accounts) = mock_arena(options(&files, None));
            accounts.is_unsupported.store(true, Ordering::Relaxed);
            (arena, accounts)
        } else {
            let mut options = options(&files, None);
            options.config.pin = Pin::Never;
            mock_arena(options)
        };
        let reason = if by_machine { "not here" } else { "switched off" };
        let (buffer, because) = alloc(&arena, MIB, BufferPin::Auto).unwrap();
        assert!(!buffer.is_pinned() && because.unwrap().contains(reason));
        let (other, because) = alloc(&arena, MIB, BufferPin::Never).unwrap();
        assert_eq!((other.is_pinned(), because), (false, None));
        let refused = refusal(alloc(&arena, MIB, BufferPin::Always));
        assert!(refused.contains(reason) && refused.contains("1 MiB"), "{refused}");
        drop((buffer, other));
        assert_eq!((arena.info().used_bytes, accounts.locked_bytes()), (0, 0));
    }
}

#[test]
fn any_failing_call_leaves_nothing_behind_whatever_was_asked_for() {
    for pin in [BufferPin::Auto, BufferPin::Never, BufferPin::Always] {
        for fails in 0..6 {
            let files = FakeSystem::new();
            let (arena, accounts) = mock_arena(options(&files, None));
            *accounts.fails.lock().unwrap() = Some(fails);
            let made = alloc(&arena, 7 * MIB, pin);
            let used = if made.is_ok() { 7 * MIB } else { 0 };
            assert_eq!(arena.info().used_bytes, used, "{pin:?}, call {fails}");
            assert_eq!(accounts.mapped_bytes(), arena.info().held_bytes, "{pin:?}, call {fails}");
            drop(made);
            arena.trim();
            assert_eq!((arena.info().held_bytes, accounts.mapped_bytes()), (0, 0), "{pin:?}, call {fails}");
        }
    }
}

#[test]
fn the_limit_is_for_both_kinds_together() {
    let files = FakeSystem::new();
    let (arena, _) = mock_arena(options(&files, Some(10 * MIB)));
    let locked = alloc(&arena, 6 * MIB, BufferPin::Always).unwrap();
    let refused = refusal(alloc(&arena, 6 * MIB, BufferPin::Never));
    assert!(
        refused.contains("6 MiB") && refused.contains("12 MiB") && refused.contains("10 MiB"),
        "{refused}"
    );
    drop(locked);
    // Unused slabs of the other kind are released for it.
    assert!(!alloc(&arena, 6 * MIB, BufferPin::Never).unwrap().0.is_pinned());
    assert!(arena.info().held_bytes <= 10 * MIB);
}

#[test]
fn what_was_dropped_for_good_goes_and_what_may_be_asked_for_again_stays() {
    for pin in [BufferPin::Auto, BufferPin::Never] {
        let files = FakeSystem::new();
        let (arena, accounts) = mock_arena(options(&files, None));
        let held = || (arena.info().held_bytes, accounts.mapped_bytes());
        let kept = wait_for_all(arena.alloc_all(&[GIB]).unwrap());
        let sizes = [3 * GIB, GIB / 2 + 1, 5 * GIB];
        let made = sizes.map(|bytes| alloc(&arena, bytes, pin).unwrap().0);
        drop(kept);
        for (buffer, bytes) in made.into_iter().zip(sizes) {
            let before = held().0;
            drop(buffer);
            assert_eq!(held().0, before, "kept for the next request");
            arena.release_surplus(bytes);
            let left = before - bytes.next_multiple_of(page());
            assert_eq!(held(), (left, left), "{pin:?}");
        }
        // As much as is kept, and no more than was dropped.
        assert_eq!(held().0, GIB);
        arena.release_surplus(u64::MAX / 2);
        assert_eq!(held().0, GIB);
        let made = alloc(&arena, 2 * GIB, pin).unwrap();
        drop(made);
        arena.release_surplus(GIB - page());
        assert_eq!(held().0, 3 * GIB, "both are larger");
        // The arena keeps what the device does not unregister.
        accounts.unlocks_nothing.store(pin == BufferPin::Auto, Ordering::Relaxed);
        arena.release_surplus(2 * GIB);
        assert_eq!(held().0, if pin == BufferPin::Auto { 3 * GIB } else { GIB });
        accounts.unlocks_nothing.store(false, Ordering::Relaxed);
        arena.trim();
        assert_eq!(held(), (0, 0));
    }
}

#[test]
fn sizes_that_do_not_come_again_do_not_pile_up() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    for nth in 0..400 {
        drop(arena.alloc(4 * MIB + nth * 4096).unwrap());
    }
    let held_bytes = arena.info().held_bytes;
    assert!((512 * MIB..1280 * MIB).contains(&held_bytes), "{held_bytes} of 2.4 GiB are kept for later");
    assert_eq!(accounts.mapped_bytes(), held_bytes);
    arena.trim();
    assert_eq!((accounts.mapped_bytes(), arena.info().held_bytes), (0, 0));
}
