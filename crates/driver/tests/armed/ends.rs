//! How devices end, and where page-locked memory stays: what must hold although calls of the library fail.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use poorwill_core::{
    AllocRequest, CopyPart, Driver, HostBuffer, HostMemory, Level, Pool, PoolConfig, SleepRequest, StreamId,
    Tag, WakeRequest,
};
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::pattern;

use super::fake::{Fake, alone, mapped, open};

/// Where an error leaves it open whether work has finished, its memory is kept.
#[test]
fn memory_of_work_in_flight_outlives_a_device_whose_end_failed() {
    let _turn = alone();
    let fake = Fake::load();
    let device = open(0);
    let range = mapped(&device, 1);
    let stream = device.stream_create().unwrap();
    let latch = Arc::new(Latch::default());
    latch::hold(&device, stream, &latch);
    let source = latch::source(&device, &pattern::bytes(1, usize::try_from(range.bytes).unwrap()));
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let copy = device.copy_to_device(stream, Arc::clone(&source), &parts).unwrap();
    // The wait for the device fails as it ends.
    fake.arm_all();
    drop(device);
    fake.disarm();
    drop(copy); // After the end of the device, too.
    let holders = Arc::strong_count(&source);
    latch.open();
    // Gives the fake time to run the copy with the memory that is still here.
    open(0).synchronize().unwrap();
    assert_eq!(holders, 2, "the copy has not run yet, and nobody holds its memory");
}

/// And so are the kernels, of which one may run.
#[test]
fn kernels_that_may_run_outlive_a_device_whose_end_failed() {
    let _turn = alone();
    let fake = Fake::load();
    let calls_of_end = |fails: u64| {
        let device = open(0);
        fake.arm(0, 0);
        drop(device);
        let calls = fake.disarm();
        let names: Vec<String> = (0..calls).map(|number| fake.called(number)).collect();
        let waited = names.iter().position(|name| name == "cuCtxSynchronize").unwrap();
        let device = open(0);
        fake.arm(waited as u64, fails);
        drop(device);
        let calls = fake.disarm();
        (0..calls).filter(|number| fake.called(*number) == "cuModuleUnload").count()
    };
    assert!(calls_of_end(0) > 0, "where nothing fails they are unloaded");
    assert_eq!(calls_of_end(1), 0, "unloaded under work that nobody has waited for");
}

#[test]
fn pages_that_stay_registered_stay_mapped() {
    let _turn = alone();
    let fake = Fake::load();
    let device = open(0);
    let before = fake.census(0).registered_host_ranges;
    let buffer = device.host_alloc(5 << 20).unwrap();
    let at = buffer.as_ptr() as usize;
    drop(buffer);
    fake.arm_all();
    drop(device);
    fake.disarm();
    let registered = fake.census(0).registered_host_ranges > before;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let still_mapped = maps.lines().any(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split(' ').next().unwrap();
        let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16).unwrap());
        (start..end).contains(&at)
    });
    assert!(!registered || still_mapped, "unmapped while the driver has it registered");
}

/// A view of other owners' memory, whichever call fails, alone or with the next one.
#[test]
fn what_was_locked_for_a_view_that_failed_is_let_go_of() {
    let _turn = alone();
    let fake = Fake::load();
    let (device, memory) = (open(0), vec![0u8; 1 << 20]);
    let start = memory.as_ptr().expose_provenance();
    let before = fake.census(0).registered_host_ranges;
    let looks = |first, count| {
        fake.arm(first, count);
        let is_seen = device.host_view(start..start + memory.len(), true).is_ok();
        (is_seen, fake.disarm())
    };
    let (is_seen, calls) = looks(0, 0);
    assert!(is_seen && calls > 2);
    for (first, count) in (0..calls).flat_map(|first| [(first, 1), (first, 2)]) {
        looks(first, count);
        // Whatever was left of it has gone before there is a new one.
        let view = device.host_view(start..start + memory.len(), true).unwrap().unwrap();
        assert!(view.is_registered_here(), "calls {first} to {}", first + count);
        drop(view);
        assert_eq!(fake.census(0).registered_host_ranges, before, "calls {first} to {}", first + count);
    }
}

/// `keep_backups: false`: no backups stay in host memory after a wake.
#[test]
fn backups_that_are_not_kept_leave_host_memory() {
    let _turn = alone();
    let fake = Fake::load();
    let device = Arc::new(open(0));
    let before = fake.census(0).registered_host_ranges;
    let config = PoolConfig::default().keeping_backups(false);
    let pool = Pool::new(Arc::clone(&device) as Arc<dyn Driver>, config).unwrap();
    let block = pool.alloc(&AllocRequest::new(64 << 20, Tag::weights())).unwrap();
    pattern::fill(&pool, block.id, 3, 64 << 20).unwrap();
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(pool.stats().unwrap().backup_bytes, 0);
    pool.free(block.id).unwrap();
    drop(pool);
    assert_eq!(fake.census(0).registered_host_ranges, before, "page-locked, and of use to nobody");
}

/// Host memory that lies unused must not be what keeps host memory from being had.
#[test]
fn unused_page_locked_memory_is_released() {
    let _turn = alone();
    let fake = Fake::load();
    let device = open(0);
    let before = fake.census(0).registered_host_ranges;
    drop(device.host_alloc(64 << 20).unwrap());
    // Another size, and the system has no more to lock.
    fake.arm(0, 1);
    let refused = device.host_alloc(32 << 20);
    fake.disarm();
    let after = fake.census(0).registered_host_ranges;
    assert!(refused.is_ok() || after == before, "refused with 64 MiB lying idle: {refused:?}");
}

/// A buffer of the caller's that panics when dropped.
#[derive(Debug)]
struct BombBuffer(Vec<u8>);

impl HostMemory for BombBuffer {
    fn as_slice(&self) -> &[u8] {
        &self.0
    }
    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for BombBuffer {
    fn drop(&mut self) {
        panic!("dropping the buffer");
    }
}

#[test]
fn a_buffer_whose_end_panics_takes_no_other_with_it() {
    let _turn = alone();
    let device = open(0);
    let range = mapped(&device, 1);
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let (quick, held) = (device.stream_create().unwrap(), device.stream_create().unwrap());
    let len = usize::try_from(range.bytes).unwrap();
    let (first, latch) = (Arc::new(Latch::default()), Arc::new(Latch::default()));
    latch::hold(&device, quick, &first);
    let bomb = Arc::new(HostBuffer::new(BombBuffer(vec![0; len])));
    drop(device.copy_to_device(quick, bomb, &parts).unwrap());
    latch::hold(&device, held, &latch);
    let source = latch::source(&device, &pattern::bytes(1, len));
    drop(device.copy_to_device(held, Arc::clone(&source), &parts).unwrap());
    // The call that finds the first copy complete drops its buffer: this one, or the next.
    first.open();
    let waited = catch_unwind(AssertUnwindSafe(|| device.stream_synchronize(quick).unwrap()));
    let looked = catch_unwind(AssertUnwindSafe(|| device.memory_info().unwrap()));
    let panicked = waited.is_err() || looked.is_err();
    let holders = Arc::strong_count(&source);
    latch.open(); // Before anything can fail: the device's end waits for it.
    assert!(panicked, "the buffer was let go of");
    assert_eq!(holders, 2, "the copy that was held still had its memory");
    device.synchronize().unwrap();
    assert_eq!(Arc::strong_count(&source), 1);
}

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("dropping the payload");
    }
}

/// Otherwise it would end the whole test program, on a thread of the driver's.
#[test]
fn a_panic_whose_payload_panics_fails_that_work_and_nothing_else() {
    let _turn = alone();
    let device = open(0);
    let work = device.launch_host(StreamId::DEFAULT, Box::new(|| std::panic::panic_any(Bomb))).unwrap();
    assert!(work.wait().is_err());
    device.launch_host(StreamId::DEFAULT, Box::new(|| ())).unwrap().wait().unwrap();
}
