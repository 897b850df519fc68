//! A long random program over the whole of a pool: one thread or five allocate, write, sleep, wake, stage, prepare, spill,
//! hold, lend, read backups and trim, over eleven configurations of its storage.
//!
//! After each step, bytes, addresses and figures are the oracle's. A run ends with nothing mapped, stored or on disk.
//! `POORWILL_SEED=17` runs one program of each configuration, as a failure prints it. With several threads, or with
//! preparations, that repeats the draws and not the schedule. `POORWILL_EFFORT=long` makes a million steps.

mod losses;
mod memory;
mod setup;
mod sleeps;
mod stored;
mod worker;

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::panic::catch_unwind;
use std::sync::{Arc, Mutex};
use std::thread;

use poorwill_core::backup::Compress;
use poorwill_driver::disk::DiskIo;
use poorwill_testkit::broken::Defect;
use poorwill_testkit::device::DeviceKind;
use poorwill_testkit::effort::seed_of_this_run;
use poorwill_testkit::watchdog::watched;

use self::setup::{Setup, Storage, World};
use self::worker::Worker;

/// Of all threads of a run: short enough to read what a seed does.
const STEPS: u64 = 500;

/// Twenty times as many in a long run.
const RUNS: u32 = 11;

fn seeds() -> RangeInclusive<u64> {
    match seed_of_this_run() {
        Some(seed) => seed..=seed,
        None => 1..=DeviceKind::of_this_run().cases(RUNS).into(),
    }
}

/// Prints how to run a failed program again.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("POORWILL_SEED={} runs this program again", self.0);
        }
    }
}

fn soak(setup: Setup) {
    if setup.skipped() {
        return;
    }
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    for seed in seeds() {
        let _replay = Replay(seed);
        let seen = Arc::clone(&seen);
        watched(move || seen.lock().unwrap().append(&mut run(setup, seed)));
    }
    let seen = seen.lock().unwrap();
    let is_all = seeds().count() >= RUNS as usize;
    let missed: Vec<_> = setup.hard_cases().filter(|what| !seen.contains(what)).collect();
    assert!(missed.is_empty() || !is_all, "never seen: {missed:?}");
}

/// Returns what was seen.
fn run(setup: Setup, seed: u64) -> BTreeSet<&'static str> {
    let world = Arc::new(World::open(setup, seed));
    thread::scope(|scope| {
        for nth in 0..setup.threads {
            let mut worker = Worker::new(&world, seed, nth);
            scope.spawn(move || {
                (0..STEPS / setup.threads).for_each(|_| worker.step());
                worker.end();
            });
        }
    });
    world.expect_empty();
    world.seen.lock().unwrap().clone()
}

#[test]
fn raw() {
    soak(Setup { chunk_granules: 4, ..Setup::default() });
}

#[test]
fn chunks_of_a_granule_and_nothing_kept() {
    soak(Setup { chunk_granules: 1, keeps: false, cached_granules: Some(0), ..Setup::default() });
}

#[test]
fn codes() {
    soak(Setup { compress: Compress::Always, ..Setup::default() });
}

#[test]
fn a_disk_by_ring_and_little_host_memory() {
    soak(Setup { storage: Storage::Short { host: 24, disk: 20, io: DiskIo::Auto }, ..Setup::default() });
}

#[test]
fn codes_on_a_disk_by_threads_and_little_host_memory() {
    let storage = Storage::Short { host: 16, disk: 12, io: DiskIo::Threads };
    soak(Setup { compress: Compress::Always, storage, ..Setup::default() });
}

#[test]
fn bits_flip_on_disk() {
    soak(Setup { storage: Storage::Spoiled, ..Setup::default() });
}

#[test]
fn bits_of_codes_flip_on_disk() {
    soak(Setup { compress: Compress::Always, storage: Storage::Spoiled, ..Setup::default() });
}

#[test]
fn lent_memory() {
    soak(Setup { lends: true, ..Setup::default() });
}

#[test]
fn five_threads_that_lend_beside_codes() {
    soak(Setup {
        threads: 5,
        limit_granules: 120,
        lends: true,
        compress: Compress::Always,
        ..Setup::default()
    });
}

#[test]
fn five_threads_with_codes_on_a_disk() {
    let storage = Storage::Short { host: 40, disk: 400, io: DiskIo::Auto };
    soak(Setup { threads: 5, limit_granules: 120, compress: Compress::Always, storage, ..Setup::default() });
}

#[test]
fn five_threads_with_a_small_disk() {
    let storage = Storage::Short { host: 40, disk: 24, io: DiskIo::Auto };
    let setup = Setup { threads: 5, limit_granules: 120, storage, ..Setup::default() };
    soak(Setup { chunk_granules: 16, keeps: false, cached_granules: Some(16), ..setup });
}

/// A program that a broken driver passes would prove nothing.
#[test]
fn the_soak_notices_what_is_broken() {
    use Defect::{CopyIsShort, ReleaseHoards, UndoLosesBytes, UnmapDoesNothing};
    for defect in [UndoLosesBytes, UnmapDoesNothing, ReleaseHoards, CopyIsShort] {
        let setup = Setup { defect: Some(defect), ..Setup::default() };
        let fails = |seed| catch_unwind(|| watched(move || drop(run(setup, seed)))).is_err();
        assert!((0..20).any(fails), "{defect:?} is not noticed");
    }
}
