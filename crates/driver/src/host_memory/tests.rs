//! Promises of the arena, tested with a mock backend that touches no memory, and with the real one.

mod groups;
mod pins;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::{fmt, fs, thread};

use fastrand::Rng;
use poorwill_core::{DriverError, DriverErrorKind, HostBuffer, Pending};
use poorwill_testkit::pattern;
use poorwill_testkit::watchdog::eventually;

use super::region::{Progress, RegionOptions};
use super::*;
use crate::process::Owner;
use crate::system::System;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// Keeps accounts only; its addresses must not be touched.
#[derive(Debug, Default)]
struct Accounts {
    mapped: Mutex<BTreeMap<usize, usize>>,
    populated: Mutex<BTreeMap<usize, usize>>,
    locked: Mutex<BTreeMap<usize, usize>>,
    next: AtomicU64,
    calls: AtomicU64,
    /// The number, from 0, of the call that fails.
    fails: Mutex<Option<u64>>,
    unlocks_nothing: AtomicBool,
    /// Every lock fails halfway: registered, but unusable.
    locks_halfway: AtomicBool,
    is_unsupported: AtomicBool,
    panics: AtomicBool,
    /// Runs when half of the next region is populated.
    halfway: Hook,
    /// Runs before the next region is unlocked.
    unlocking: Hook,
    peak: AtomicU64,
}

#[derive(Default)]
struct Hook(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

impl Hook {
    fn set(&self, todo: impl FnOnce() + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(todo));
    }

    fn run(&self) {
        let todo = self.0.lock().unwrap().take();
        todo.into_iter().for_each(|todo| todo());
    }
}

impl Accounts {
    fn call(&self) -> Result<(), String> {
        let nth = self.calls.fetch_add(1, Ordering::Relaxed);
        if *self.fails.lock().unwrap() == Some(nth) { Err(format!("call {nth} fails")) } else { Ok(()) }
    }

    fn expect_calm(&self) {
        assert!(!self.panics.load(Ordering::Relaxed), "as the test asks for");
    }

    fn mapped_bytes(&self) -> u64 {
        self.mapped.lock().unwrap().values().map(|bytes| *bytes as u64).sum()
    }

    fn locked_bytes(&self) -> u64 {
        self.locked.lock().unwrap().values().map(|bytes| *bytes as u64).sum()
    }
}

#[derive(Debug, Clone, Default)]
struct MockBackend(Arc<Accounts>);

impl Backend for MockBackend {
    fn map(&self, options: &RegionOptions) -> Result<Region, String> {
        self.0.call()?;
        let step = (options.bytes as u64).next_multiple_of(2 * MIB) + 2 * MIB;
        let start = usize::try_from((1 << 44) + self.0.next.fetch_add(step, Ordering::Relaxed)).unwrap();
        self.0.mapped.lock().unwrap().insert(start, options.bytes);
        Ok(Region::mock(start, options.bytes))
    }

    fn map_row(&self, options: &RegionOptions, sizes: &[usize]) -> Result<Vec<Region>, String> {
        let row = self.map(options)?;
        let mut mapped = self.0.mapped.lock().unwrap();
        mapped.remove(&row.start());
        let regions = row.split(sizes);
        mapped.extend(regions.iter().map(|region| (region.start(), region.bytes())));
        Ok(regions)
    }

    fn populate(&self, region: &Region, _: usize, progress: &Progress) -> Result<(), String> {
        self.0.call()?;
        self.0.expect_calm();
        progress(region.bytes() / 2);
        self.0.halfway.run();
        progress(region.bytes() - region.bytes() / 2);
        let mut populated = self.0.populated.lock().unwrap();
        populated.insert(region.start(), region.bytes());
        let bytes = populated.values().map(|bytes| *bytes as u64).sum();
        self.0.peak.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn unmap(&self, region: Region) {
        self.0.populated.lock().unwrap().remove(&region.start());
        assert!(!self.0.locked.lock().unwrap().contains_key(&region.start()), "unmapped while locked");
        assert_eq!(self.0.mapped.lock().unwrap().remove(&region.start()), Some(region.bytes()));
    }

    fn lock(&self, region: &Region) -> Result<Option<u64>, Refusal> {
        if self.0.is_unsupported.load(Ordering::Relaxed) {
            return Err(Refusal::Unsupported("not here".into()));
        }
        self.0.call().map_err(Refusal::Failed)?;
        self.0.locked.lock().unwrap().insert(region.start(), region.bytes());
        if self.0.locks_halfway.load(Ordering::Relaxed) {
            return Err(Refusal::HalfRegistered("halfway".into()));
        }
        Ok(Some(region.start() as u64 + (1 << 46)))
    }

    fn unlock(&self, region: &Region) -> bool {
        if self.0.unlocks_nothing.load(Ordering::Relaxed) {
            return false;
        }
        self.0.unlocking.run();
        assert_eq!(self.0.locked.lock().unwrap().remove(&region.start()), Some(region.bytes()));
        true
    }
}

struct FakeSystem(tempfile::TempDir);

impl FakeSystem {
    fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        files.machine(2048 * GIB, 2048 * GIB);
        files
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn machine(&self, total: u64, available: u64) {
        let text = format!("MemTotal: {} kB\nMemAvailable: {} kB\n", total >> 10, available >> 10);
        self.put("proc/meminfo", &text);
    }

    fn group(&self, version: u32, limit: u64, used: u64) {
        let (folder, limit_file, used_file) = if version == 2 {
            self.put("sys/fs/cgroup/cgroup.controllers", "memory\n");
            self.put("proc/self/cgroup", "0::/a\n");
            ("sys/fs/cgroup/a", "memory.max", "memory.current")
        } else {
            self.put("proc/self/cgroup", "4:memory:/a\n");
            ("sys/fs/cgroup/memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes")
        };
        self.put(&format!("{folder}/{limit_file}"), &limit.to_string());
        self.put(&format!("{folder}/{used_file}"), &used.to_string());
    }

    fn system(&self) -> System {
        System::at(self.0.path())
    }
}

fn options(files: &FakeSystem, limit_bytes: Option<u64>) -> Options {
    let config = HostMemoryConfig { limit_bytes, pin: Pin::Auto };
    let system = files.system();
    Options { config, pageable_because: None, node: None, releases_surplus: true, is_shared: false, system }
}

fn mock_arena(options: Options) -> (Arc<HostArena>, Arc<Accounts>) {
    let machine = MockBackend::default();
    let accounts = Arc::clone(&machine.0);
    (HostArena::new(Owner::this().unwrap(), Box::new(machine), options), accounts)
}

fn plain(options: Options) -> Arc<HostArena> {
    HostArena::new(Owner::this().unwrap(), Box::new(Plain), options)
}

fn wait(pending: Vec<Pending<HostBuffer>>) -> Vec<Result<HostBuffer, DriverError>> {
    pending.into_iter().map(Pending::wait).collect()
}

fn wait_for_all(pending: Vec<Pending<HostBuffer>>) -> Vec<HostBuffer> {
    wait(pending).into_iter().map(Result::unwrap).collect()
}

fn reason(error: DriverError) -> String {
    match error.kind {
        DriverErrorKind::OutOfHostMemory { asked_bytes, reason } => {
            format!("{} asked for: {reason}", poorwill_core::ByteSize(asked_bytes))
        }
        other => panic!("{other}"),
    }
}

#[test]
fn what_is_held_is_what_was_asked_for() {
    for (total, chunk, most) in [
        (65 * GIB, 32 * MIB, 65 * GIB),
        (257 * GIB, 32 * MIB, 257 * GIB),
        (257 * GIB, 2 * MIB, 257 * GIB),
        (65 * GIB, 37_777_777, 65 * GIB + GIB / 10),
        (257 * GIB, 1_234_567_891, 257 * GIB + GIB / 10),
        (65 * GIB, 65 * GIB, 65 * GIB),
    ] {
        let files = FakeSystem::new();
        // Slab makers look for a surplus afterwards, possibly after the buffers are gone.
        let (arena, accounts) = mock_arena(Options { releases_surplus: false, ..options(&files, None) });
        let mut sizes = vec![chunk; usize::try_from(total / chunk).unwrap()];
        sizes.extend((total % chunk > 0).then_some(total % chunk));
        let buffers = wait_for_all(arena.alloc_all(&sizes).unwrap());
        assert!(buffers.iter().map(|buffer| buffer.len() as u64).eq(sizes.iter().copied()));
        let info = arena.info();
        assert_eq!((info.used_bytes, info.pinned_bytes), (total, info.held_bytes));
        assert!((total..=most).contains(&info.held_bytes), "{} for {total}", info.held_bytes);
        assert_eq!((accounts.mapped_bytes(), accounts.locked_bytes()), (info.held_bytes, info.held_bytes));
        assert!(accounts.peak.load(Ordering::Relaxed) <= most + 16 * MIB, "probing takes little");
        drop(buffers);
        assert_eq!((arena.info().used_bytes, arena.info().held_bytes), (0, info.held_bytes), "kept");
        // The same request again takes no call.
        let calls = accounts.calls.load(Ordering::Relaxed);
        drop(wait_for_all(arena.alloc_all(&sizes).unwrap()));
        let again = (accounts.calls.load(Ordering::Relaxed), arena.info().held_bytes);
        assert_eq!(again, (calls, info.held_bytes));
        arena.trim();
        assert_eq!((accounts.mapped_bytes(), accounts.locked_bytes(), arena.info().held_bytes), (0, 0, 0));
    }
}

#[test]
fn any_failing_call_leaves_nothing_behind() {
    let sizes: Vec<u64> = (0..40).map(|nth| (1 + nth % 7) * 3 * MIB + nth * 1000).collect();
    for fails in 0.. {
        let files = FakeSystem::new();
        let (arena, accounts) = mock_arena(options(&files, None));
        let small = arena.alloc(4096).unwrap();
        let before = accounts.calls.load(Ordering::Relaxed);
        *accounts.fails.lock().unwrap() = Some(before + fails);
        let made = wait(arena.alloc_all(&sizes).unwrap());
        let has_failed = accounts.calls.load(Ordering::Relaxed) > before + fails;
        let (good, bad): (Vec<_>, Vec<_>) = made.into_iter().partition(Result::is_ok);
        // The first call reserves all addresses; if it fails, each slab reserves its own.
        assert_eq!(has_failed && fails > 0, !bad.is_empty(), "call {fails}");
        assert!(bad.iter().all(|one| one.as_ref().unwrap_err().to_string().contains(" fails")));
        let info = arena.info();
        let used: u64 = good.iter().map(|one| one.as_ref().unwrap().len() as u64).sum();
        assert_eq!(info.used_bytes, used + 4096);
        assert_eq!((accounts.mapped_bytes(), accounts.locked_bytes()), (info.held_bytes, info.held_bytes));
        drop(good);
        *accounts.fails.lock().unwrap() = None;
        assert_eq!(
            wait_for_all(arena.alloc_all(&sizes).unwrap()).len(),
            sizes.len(),
            "the next call succeeds"
        );
        drop(small);
        arena.trim();
        assert_eq!((accounts.mapped_bytes(), arena.info().held_bytes), (0, 0));
        if !has_failed {
            assert!(fails > 10);
            break;
        }
    }
}

#[test]
fn unused_slabs_go_where_memory_is_lacking() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    drop(arena.alloc(40 * MIB).unwrap());
    for call in 0..3 {
        let now = accounts.calls.load(Ordering::Relaxed);
        *accounts.fails.lock().unwrap() = Some(now + call);
        let buffer = arena.alloc(50 * MIB + call).unwrap();
        assert_eq!(arena.info().held_bytes, (50 * MIB + call).next_multiple_of(page()));
        drop(buffer);
        drop(arena.alloc(51 * MIB).unwrap());
        arena.trim();
        drop(arena.alloc(40 * MIB).unwrap());
    }
}

#[test]
fn what_the_device_does_not_let_go_of_stays() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    drop(arena.alloc(3 * MIB).unwrap());
    accounts.unlocks_nothing.store(true, Ordering::Relaxed);
    arena.trim();
    assert_eq!((arena.info().held_bytes, arena.info().pinned_bytes), (3 * MIB, 3 * MIB));
    drop(arena.alloc(2 * MIB).unwrap());
    assert_eq!((arena.info().held_bytes, accounts.mapped_bytes()), (3 * MIB, 3 * MIB), "and is of use");
    drop(arena);
    assert_eq!(accounts.mapped_bytes(), 3 * MIB, "mapped as long as it is locked");
}

#[test]
fn what_was_locked_halfway_is_held_until_it_is_let_go_of() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    accounts.locks_halfway.store(true, Ordering::Relaxed);
    accounts.unlocks_nothing.store(true, Ordering::Relaxed);
    assert!(reason(arena.alloc(MIB).unwrap_err()).contains("halfway"));
    assert_eq!((arena.info().held_bytes, accounts.mapped_bytes()), (MIB, MIB));
    accounts.locks_halfway.store(false, Ordering::Relaxed);
    arena.trim();
    assert_eq!((arena.info().held_bytes, accounts.mapped_bytes()), (MIB, MIB));
    accounts.unlocks_nothing.store(false, Ordering::Relaxed);
    arena.trim();
    assert_eq!((arena.info().held_bytes, accounts.mapped_bytes()), (0, 0));
}

#[test]
fn where_locking_is_not_supported_memory_is_pageable_and_says_why() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    let first = arena.alloc(MIB).unwrap();
    accounts.is_unsupported.store(true, Ordering::Relaxed);
    let second = arena.alloc(2 * MIB).unwrap();
    assert_eq!((first.is_pinned(), second.is_pinned()), (true, false));
    let info = arena.info();
    assert_eq!((info.held_bytes, info.pinned_bytes), (3 * MIB, MIB));
    assert_eq!(arena.details().pageable_because.as_deref(), Some("not here"));
    let never = HostMemoryConfig { limit_bytes: None, pin: Pin::Never };
    let (arena, accounts) = mock_arena(Options { config: never, ..options(&files, None) });
    assert!(!arena.alloc(MIB).unwrap().is_pinned());
    assert_eq!(accounts.locked_bytes(), 0);
    assert!(arena.details().pageable_because.unwrap().contains("Pin::Never"));
}

#[test]
fn addresses_tell_what_lies_there() {
    let files = FakeSystem::new();
    let (arena, _accounts) = mock_arena(options(&files, None));
    let buffers = [arena.alloc(10_000).unwrap(), arena.alloc(20_000).unwrap()];
    for buffer in &buffers {
        let (start, len) = (buffer.start().addr(), buffer.len());
        assert_eq!(arena.memory_kind(start, len), MemoryKind::Pinned(start as u64 + (1 << 46)));
        assert_eq!(arena.memory_kind(start + 7, len - 7), MemoryKind::Pinned(start as u64 + 7 + (1 << 46)));
        assert_eq!(arena.memory_kind(start, len + (256 << 10)), MemoryKind::Foreign, "beyond its slab");
    }
    assert_eq!(arena.memory_kind(1 << 20, 1), MemoryKind::Foreign);
    assert_eq!(arena.memory_kind(usize::MAX, 2), MemoryKind::Foreign);
}

#[test]
fn the_limit_of_the_caller() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, Some(100 * MIB)));
    let first = arena.alloc(60 * MIB).unwrap();
    let error = reason(arena.alloc(41 * MIB).unwrap_err());
    for words in ["41 MiB", "60 MiB held", "100 MiB", "raise the limit"] {
        assert!(error.contains(words), "{words}: {error}");
    }
    reason(arena.alloc_all(&[20 * MIB, 20 * MIB, 4096]).unwrap_err());
    assert_eq!((arena.info().held_bytes, arena.info().used_bytes), (60 * MIB, 60 * MIB), "atomic");
    drop(first);
    // Unused slabs are released for it.
    let other = arena.alloc(90 * MIB).unwrap();
    assert_eq!((arena.info().held_bytes, accounts.mapped_bytes()), (90 * MIB, 90 * MIB));
    assert_eq!(arena.info().limit_bytes, Some(100 * MIB));
    drop(other);
}

/// Partially free slabs must not prevent the whole request.
#[test]
fn a_batch_that_fits_beside_nothing_else_is_had() {
    let files = FakeSystem::new();
    let (arena, _accounts) = mock_arena(options(&files, Some(8 * MIB)));
    drop(arena.alloc(6 * MIB).unwrap());
    assert_eq!(wait_for_all(arena.alloc_all(&[4 * MIB, 4 * MIB]).unwrap()).len(), 2);
    assert_eq!(arena.info().held_bytes, 8 * MIB);
}

#[test]
fn what_can_never_be_had_costs_nothing_of_what_is_kept() {
    let files = FakeSystem::new();
    let (arena, _accounts) = mock_arena(options(&files, Some(8 * MIB)));
    drop(arena.alloc(6 * MIB).unwrap());
    reason(arena.alloc(9 * MIB).unwrap_err());
    assert_eq!(arena.info().held_bytes, 6 * MIB);
}

/// A caller must not wait for memory that another caller was refused.
#[test]
fn concurrent_refusals_leave_no_caller_waiting() {
    let files = FakeSystem::new();
    let (arena, _accounts) = mock_arena(options(&files, Some(4 * MIB)));
    thread::scope(|scope| {
        for seed in 0..8 {
            let arena = &arena;
            scope.spawn(move || {
                let mut random = Rng::with_seed(seed);
                for _ in 0..500 {
                    let sizes: Vec<u64> = (0..3).map(|_| 1 + random.u64(..MIB)).collect();
                    drop(arena.alloc_all(&sizes).map(wait));
                }
            });
        }
    });
    assert_eq!(arena.info().used_bytes, 0);
    arena.trim();
    assert_eq!(arena.info().held_bytes, 0);
}

#[test]
fn the_limit_of_control_groups() {
    for version in [1, 2] {
        let files = FakeSystem::new();
        files.group(version, 256 * MIB, 56 * MIB);
        let (arena, accounts) = mock_arena(options(&files, None));
        let error = reason(arena.alloc_all(&[100 * MIB, 100 * MIB]).unwrap_err());
        for words in ["200 MiB", "0 B held", "control group", "256 MiB", "192 MiB", "raise"] {
            assert!(error.contains(words), "{words}: {error}");
        }
        assert_eq!(
            (accounts.peak.load(Ordering::Relaxed), arena.info().held_bytes),
            (0, 0),
            "nothing was touched"
        );
        let buffers = wait_for_all(arena.alloc_all(&[100 * MIB, 90 * MIB]).unwrap());
        files.group(version, 256 * MIB, 246 * MIB);
        reason(arena.alloc(10 * MIB).unwrap_err());
        assert_eq!(arena.info().held_bytes, 190 * MIB);
        drop(buffers);
    }
}

#[test]
fn small_ones_do_not_creep_beyond_a_control_group() {
    let files = FakeSystem::new();
    files.group(2, 64 * MIB, 0);
    let (arena, _accounts) = mock_arena(options(&files, None));
    let mut kept = Vec::new();
    loop {
        let used: u64 = kept.iter().map(|buffer: &ArenaBuffer| buffer.len() as u64).sum();
        files.group(2, 64 * MIB, used); // As the system counts.
        match arena.alloc(MIB) {
            Ok(buffer) => kept.push(buffer),
            Err(error) => break drop(reason(error)),
        }
    }
    assert!((50..=62).contains(&kept.len()), "{} MiB of 64, of which 2 are a margin", kept.len());
}

#[test]
fn the_machine_is_asked_before_a_slab_is_touched() {
    let files = FakeSystem::new();
    files.machine(32 * GIB, 3 * GIB);
    let (arena, accounts) = mock_arena(options(&files, None));
    let made = wait(arena.alloc_all(&[64 * MIB, 5 * GIB, 64 * MIB]).unwrap());
    assert!(made[0].is_ok() && made[2].is_ok(), "what is there can be used");
    let error = reason(made.into_iter().nth(1).unwrap().unwrap_err());
    for words in ["5 GiB", "available", "3 GiB", "32 GiB"] {
        assert!(error.contains(words), "{words}: {error}");
    }
    assert!(accounts.peak.load(Ordering::Relaxed) <= 128 * MIB + 16 * MIB);
    // Releasing another 64 MiB of unused slabs suffices.
    files.machine(32 * GIB, 32 * GIB);
    assert!(wait(arena.alloc_all(&[5 * GIB]).unwrap()).remove(0).is_ok());
}

#[test]
fn the_system_keeps_its_reserve_where_a_device_shares_its_memory() {
    let files = FakeSystem::new();
    files.machine(32 * GIB, 6 * GIB);
    let (own, _) = mock_arena(options(&files, None));
    let (shared, _) = mock_arena(Options { is_shared: true, ..options(&files, None) });
    drop(own.alloc(5 * GIB).unwrap());
    let error = reason(shared.alloc(5 * GIB).unwrap_err());
    assert!(error.contains("2 GiB can be had"), "{error}");
    shared.alloc(2 * GIB).unwrap();
}

/// What is populated no longer counts as available, and must not also count as missing.
#[test]
fn what_has_come_is_not_asked_of_the_machine_again() {
    let files = FakeSystem::new();
    files.machine(32 * GIB, 7 * GIB);
    let (arena, accounts) = mock_arena(options(&files, None));
    let other = Arc::clone(&arena);
    accounts.halfway.set(move || {
        files.machine(32 * GIB, 5 * GIB);
        // 1 GiB is a margin, and 2 GiB are not populated yet.
        reason(other.alloc(2 * GIB + 1).unwrap_err());
        other.alloc(2 * GIB).unwrap();
    });
    drop(arena.alloc(4 * GIB).unwrap());
    assert!(accounts.halfway.0.lock().unwrap().is_none());
}

#[test]
fn waiters_are_notified_of_a_panic() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    accounts.panics.store(true, Ordering::Relaxed);
    for sizes in [vec![64 * MIB; 100], vec![MIB; 3]] {
        for error in wait(arena.alloc_all(&sizes).unwrap()) {
            assert!(reason(error.unwrap_err()).contains("panicked"));
        }
    }
    assert!(reason(arena.alloc(MIB).unwrap_err()).contains("panicked"));
    let info = arena.info();
    assert_eq!((info.held_bytes, info.used_bytes), (0, 0));
    accounts.panics.store(false, Ordering::Relaxed);
    // The same while memory is released.
    drop(wait_for_all(arena.alloc_all(&[GIB; 3]).unwrap()));
    accounts.unlocking.set(|| panic!("as the test asks for"));
    assert_eq!(wait_for_all(arena.alloc_all(&[3 * GIB / 2; 2]).unwrap()).len(), 2);
    arena.close();
    arena.trim();
    assert_eq!(arena.info().held_bytes, 0);
}

/// Releasing may wait for work on the device, and that work for a caller that waits for memory.
#[test]
fn the_first_buffer_is_there_before_memory_is_given_back() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    drop(wait_for_all(arena.alloc_all(&[GIB; 3]).unwrap()));
    let (release, released) = mpsc::channel();
    accounts.unlocking.set(move || released.recv().unwrap());
    let mut pending = arena.alloc_all(&[3 * GIB / 2; 2]).unwrap();
    let last = pending.split_off(1);
    drop(wait_for_all(pending));
    release.send(()).unwrap();
    drop(wait_for_all(last));
}

/// Memory counts as held until the device lets go of it; a caller that needs it waits.
#[test]
fn what_is_being_given_back_is_held_until_it_has_gone() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, Some(6 * GIB)));
    drop(wait_for_all(arena.alloc_all(&[GIB; 3]).unwrap()));
    let (release, released) = mpsc::channel();
    let (begin, begun) = mpsc::channel();
    accounts.unlocking.set(move || {
        begin.send(()).unwrap();
        released.recv().unwrap();
    });
    let mut pending = arena.alloc_all(&[3 * GIB / 2; 2]).unwrap();
    let last = pending.split_off(1);
    let first = wait_for_all(pending);
    begun.recv().unwrap();
    let held = arena.info().held_bytes;
    let other = {
        let arena = Arc::clone(&arena);
        thread::spawn(move || arena.alloc(2 * GIB).map(|buffer| buffer.len() as u64))
    };
    release.send(()).unwrap();
    assert_eq!((held, other.join().unwrap().unwrap()), (6 * GIB, 2 * GIB));
    drop((first, wait_for_all(last)));
    arena.close();
    assert_eq!(arena.info().held_bytes, accounts.mapped_bytes());
}

#[test]
fn what_is_made_ahead_is_used_by_the_next_batch_and_given_up_like_any_other() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, Some(GIB)));
    let sizes = [32 * MIB; 8];
    arena.make_ahead(&sizes);
    eventually("it is made", || arena.info().used_bytes == 0);
    drop(wait_for_all(arena.alloc_all(&sizes).unwrap()));
    assert_eq!((accounts.mapped_bytes(), accounts.locked_bytes()), (256 * MIB, 256 * MIB));
    arena.trim();
    arena.make_ahead(&[700 * MIB]);
    // Both do not fit. It waits for the other, and gets its place.
    drop(wait_for_all(arena.alloc_all(&[600 * MIB]).unwrap()));
    arena.trim();
    arena.make_ahead(&sizes);
    eventually("it is made", || arena.info().used_bytes == 0);
    arena.make_ahead(&[2 * GIB]);
    arena.make_ahead(&[0]);
    arena.make_ahead(&[]);
    assert_eq!(accounts.mapped_bytes(), 256 * MIB, "what does not fit is not made");
    arena.trim();
    assert_eq!(accounts.mapped_bytes(), 0);
}

#[test]
fn dropped_buffers_are_not_waited_for() {
    let files = FakeSystem::new();
    let (arena, accounts) = mock_arena(options(&files, None));
    // No slab is made before all buffers but the last are dropped.
    let checking = arena.checking.lock().unwrap();
    let last = arena.alloc_all(&vec![64 * MIB; 2000]).unwrap().split_off(1999);
    drop(checking);
    assert_eq!(wait_for_all(last).len(), 1);
    arena.close();
    let info = arena.info();
    assert_eq!((accounts.mapped_bytes(), info.used_bytes), (info.held_bytes, 0));
    assert!(info.held_bytes < 100 * GIB, "most were not made any more: {}", info.held_bytes);
    arena.trim();
    assert_eq!((accounts.mapped_bytes(), arena.info().held_bytes), (0, 0));
    let closed = wait(arena.alloc_all(&[MIB]).unwrap()).remove(0).unwrap_err();
    assert!(reason(closed).contains("closed"));
}

#[test]
fn many_threads() {
    let files = FakeSystem::new();
    let arena = plain(options(&files, Some(64 * MIB)));
    thread::scope(|scope| {
        for seed in 0..8 {
            let arena = &arena;
            scope.spawn(move || {
                let mut random = Rng::with_seed(seed);
                let mut kept: Vec<(u8, HostBuffer)> = Vec::new();
                for round in 0..300 {
                    let sizes: Vec<u64> =
                        (0..1 + random.u64(..4)).map(|_| 1 + random.u64(..300_000)).collect();
                    for mut buffer in
                        arena.alloc_all(&sizes).into_iter().flatten().filter_map(|p| p.wait().ok())
                    {
                        let tag = random.u8(..);
                        buffer.fill(tag);
                        kept.push((tag, buffer));
                    }
                    while kept.len() > 8 {
                        let nth = random.usize(..kept.len());
                        let (tag, buffer) = kept.swap_remove(nth);
                        assert!(buffer.iter().all(|byte| *byte == tag), "another buffer's bytes");
                    }
                    if round % 50 == 0 {
                        arena.trim();
                    }
                }
            });
        }
    });
    assert_eq!(arena.info().used_bytes, 0);
    arena.trim();
    assert_eq!(arena.info().held_bytes, 0);
}

#[test]
fn real_memory_is_made_in_the_background() {
    let files = FakeSystem::new();
    let arena = plain(options(&files, None));
    let sizes = [40 * MIB, 4097, 40 * MIB, 3 * MIB, 1];
    let mut buffers = wait_for_all(arena.alloc_all(&sizes).unwrap());
    for (seed, buffer) in (0..).zip(&mut buffers) {
        let bytes = pattern::bytes(seed, buffer.len());
        buffer.copy_from_slice(&bytes);
    }
    for (seed, buffer) in (0..).zip(&buffers) {
        assert!(buffer[..] == pattern::bytes(seed, buffer.len()));
    }
    assert!(arena.info().held_bytes <= sizes.iter().sum::<u64>() + 2 * page());
    let starts: Vec<_> = buffers.iter().map(|buffer| buffer.as_ptr()).collect();
    drop(buffers);
    let again = wait_for_all(arena.alloc_all(&sizes).unwrap());
    assert!(again.iter().filter(|buffer| starts.contains(&buffer.as_ptr())).count() >= 3, "used again");
    assert!(arena.info().held_bytes <= sizes.iter().sum::<u64>() + 2 * page());
    drop(arena);
    assert_eq!(again[4].len(), 1, "memory outlives its arena's owner");
}

#[test]
fn huge_pages_are_used_where_they_are_allowed_and_no_slower() {
    let files = FakeSystem::new();
    files.put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    let (arena, _accounts) = mock_arena(options(&files, None));
    assert_eq!(arena.details().huge_pages, None);
    drop(arena.alloc(300 * MIB).unwrap());
    let never = arena.details().huge_pages.unwrap();
    assert!(!never.used && never.because.contains("never") && never.huge_s.is_none());
    files.put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    let arena = plain(options(&files, None));
    drop(arena.alloc(64 * MIB).unwrap());
    assert_eq!(arena.details().huge_pages, None, "not yet worth it");
    drop(arena.alloc(256 * MIB).unwrap());
    let measured = arena.details().huge_pages.unwrap();
    let (small, huge) = (measured.small_s.unwrap(), measured.huge_s.unwrap());
    assert_eq!(measured.used, huge <= small * 1.1, "{measured:?}");
}

#[test]
fn the_node_of_the_gpu_is_one_with_processors() {
    let files = FakeSystem::new();
    let node_of = |node| {
        let arena = plain(Options { node, ..options(&files, None) });
        arena.node
    };
    assert_eq!(node_of(Some(0)), None, "the kernel does not tell");
    files.put("sys/devices/system/node/has_cpu", "0\n");
    files.put("sys/devices/system/node/has_memory", "0,2-3\n");
    assert_eq!(node_of(Some(0)), None, "there is only one");
    files.put("sys/devices/system/node/has_cpu", "0-1\n");
    assert_eq!([node_of(Some(1)), node_of(Some(2)), node_of(None)], [Some(1), None, None]);
}
