//! Requests for several buffers: all or none, of the requested kind, and nothing left of dropped ones.

use poorwill_core::driver::Result as DriverResult;

use super::super::group::BufferMade;
use super::*;

fn made(pending: Vec<BufferMade>) -> Vec<DriverResult<(HostBuffer, Option<String>)>> {
    pending.into_iter().map(Pending::wait).collect()
}

fn held(arena: &Arc<HostArena>, accounts: &Accounts) -> [u64; 4] {
    let info = arena.info();
    [info.held_bytes, info.used_bytes, accounts.mapped_bytes(), accounts.locked_bytes()]
}

#[test]
fn each_is_of_the_kind_that_was_asked_for() {
    let files = FakeSystem::new();
    let sizes = [3 * MIB, 1, 70 * MIB + 5, 4096];
    let total: u64 = sizes.iter().sum();
    for (pin, is_pinned) in [(BufferPin::Auto, true), (BufferPin::Always, true), (BufferPin::Never, false)] {
        let (arena, accounts) = mock_arena(options(&files, None));
        let buffers = made(arena.alloc_all_as(&sizes, pin).unwrap());
        let whys: Vec<_> = buffers.iter().map(|made| made.as_ref().unwrap().1.clone()).collect();
        assert_eq!(whys, vec![None; sizes.len()]);
        let info = arena.info();
        assert_eq!((info.used_bytes, info.pinned_bytes > 0), (total, is_pinned), "{pin:?}");
        assert!(info.held_bytes <= total + 4 * page(), "{}", info.held_bytes);
        drop(buffers);
        arena.trim();
        assert_eq!(held(&arena, &accounts), [0; 4]);
    }
}

#[test]
fn what_does_not_fit_is_refused_at_the_call_and_holds_nothing() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, Some(100 * MIB)));
    for pin in [BufferPin::Auto, BufferPin::Always, BufferPin::Never] {
        let calls = accounts.calls.load(Ordering::Relaxed);
        let error = arena.alloc_all_as(&[60 * MIB, 41 * MIB], pin).unwrap_err().to_string();
        for word in ["101 MiB", "100 MiB", "held before"] {
            assert!(error.contains(word), "{word}: {error}");
        }
        assert_eq!(accounts.calls.load(Ordering::Relaxed), calls, "nothing was begun");
        assert_eq!(held(&arena, &accounts), [0; 4]);
    }
    drop(made(arena.alloc_all_as(&[60 * MIB, 40 * MIB], BufferPin::Auto).unwrap()));
    assert!(arena.alloc_all_as(&[1, 0], BufferPin::Auto).unwrap_err().to_string().contains("0 bytes"));
}

#[test]
fn where_the_machine_may_not_have_it_all_is_made_at_the_call_or_nothing_stays() {
    let files = FakeSystem::new();
    files.machine(16 * GIB, 8 * GIB);
    let (arena, accounts) = mock_arena(options(&files, None));
    // This machine reports less than it turns out to have.
    let pending = arena.alloc_all_as(&[4 * GIB, 2 * GIB, 2 * GIB], BufferPin::Auto);
    if let Ok(pending) = pending {
        assert_eq!(accounts.populated.lock().unwrap().len(), 3, "all is there");
        drop(pending);
    }
    arena.trim();
    // Here it has less and less.
    let system = files.0.path().to_owned();
    accounts.halfway.set(move || {
        fs::write(system.join("proc/meminfo"), "MemTotal: 16777216 kB\nMemAvailable: 2097152 kB\n").unwrap();
    });
    let error = arena.alloc_all_as(&[4 * GIB, 4 * GIB], BufferPin::Auto).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::OutOfHostMemory { .. }), "{error}");
    for word in ["8 GiB", "held before", "the machine has"] {
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
    assert_eq!((arena.info().held_bytes, arena.info().used_bytes), (0, 0));
    arena.close();
    assert_eq!(held(&arena, &accounts), [0; 4]);
}

#[test]
fn what_fails_on_the_way_fails_where_it_is_waited_for() {
    let files = FakeSystem::new();
    for offset in 0..8 {
        let (arena, accounts) = mock_arena(options(&files, None));
        *accounts.fails.lock().unwrap() = Some(offset);
        let sizes = [200 * MIB; 3];
        for outcome in made(arena.alloc_all_as(&sizes, BufferPin::Auto).unwrap()) {
            // Memory that could not be locked is pageable and says why.
            if let Ok((_, Some(why))) = outcome {
                assert!(why.contains("fails"), "{why}");
            }
        }
        arena.trim();
        assert_eq!(held(&arena, &accounts), [0; 4], "call {offset}");
    }
}

#[test]
fn nothing_stays_of_dropped_requests() {
    let files = FakeSystem::new();
    for _ in 0..20 {
        let (arena, accounts) = mock_arena(options(&files, None));
        let mut pending = arena.alloc_all_as(&[100 * MIB; 12], BufferPin::Auto).unwrap();
        drop(pending.remove(0).wait().unwrap());
        drop(pending);
        arena.trim();
        assert_eq!((arena.info().held_bytes, arena.info().used_bytes), (0, 0));
        assert!(accounts.populated.lock().unwrap().is_empty(), "addresses are left at most");
        // The addresses go once the makers have seen that they are not wanted.
        arena.close();
        assert_eq!(held(&arena, &accounts), [0; 4]);
    }
}

#[test]
fn trimming_waits_for_abandoned_slabs() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    let ((begins, begun), (goes_on, may_go_on)) = (mpsc::channel(), mpsc::channel::<()>());
    accounts.halfway.set(move || {
        begins.send(()).unwrap();
        may_go_on.recv().unwrap();
    });
    let pending = arena.alloc_all_as(&[100 * MIB; 2], BufferPin::Never).unwrap();
    begun.recv().unwrap();
    drop(pending);
    assert!(arena.info().held_bytes >= 100 * MIB, "it is being made");
    thread::scope(|scope| {
        let trimming = scope.spawn(|| arena.trim());
        goes_on.send(()).unwrap();
        trimming.join().unwrap();
    });
    arena.close();
    assert_eq!(held(&arena, &accounts), [0; 4]);
}
