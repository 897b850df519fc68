//! What the host device promises beyond the contract. Memory is really allocated and released, faults are exact
//! to the page, and forked children can do no harm. Few descriptors and mappings are used.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use poorwill_core::{
    AllocRequest, BackingId, CopyPart, DeviceRange, Driver, DriverErrorKind, HostBuffer, HostMemory, Level,
    Pool, PoolConfig, PoolError, SleepRequest, StreamId, Tag, WakeRequest,
};
use poorwill_driver::{HostConfig, HostDevice};
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::watchdog::watched;
use poorwill_testkit::{child, pattern};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const MIB: u64 = 1 << 20;

fn open(capacity_bytes: u64) -> Arc<HostDevice> {
    Arc::new(HostDevice::open(&HostConfig::with_capacity(capacity_bytes)).unwrap())
}

/// Runs the calling test again in a process of its own; what it prints is lost.
fn in_a_child() -> std::process::ExitStatus {
    child::command("child", &[]).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap()
}

fn is_child() -> bool {
    child::role().is_some()
}

fn touch(addr: u64) -> u8 {
    let pointer = std::ptr::with_exposed_provenance::<u8>(usize::try_from(addr).unwrap());
    // SAFETY: the callers name device memory that is mapped and open, or expect the fault.
    unsafe { std::ptr::read_volatile(pointer) }
}

#[test]
fn configurations_are_checked() {
    for (capacity_bytes, granule_bytes) in
        [(0, 2 * MIB), (MIB, 2 * MIB), (u64::MAX, 2 * MIB), (MIB, 0), (MIB, 512), (MIB, 12 << 10)]
    {
        let error =
            HostDevice::open(&HostConfig::with_capacity(capacity_bytes).in_granules_of(granule_bytes))
                .unwrap_err();
        assert!(matches!(error.kind, DriverErrorKind::InvalidArgument { .. }), "{error}");
    }
    let rounded = HostDevice::open(&HostConfig::with_capacity(5 * MIB + 1)).unwrap();
    assert_eq!(rounded.info().total_bytes, 4 * MIB);
}

#[test]
fn released_memory_returns_to_the_system() {
    let device = open(64 * MIB);
    let range = device.reserve(32 * MIB).unwrap();
    let backing = device.create(32 * MIB).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    assert_eq!(device.resident_bytes().unwrap(), 0, "memory nobody touched costs nothing");
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let buffer = Arc::new(HostBuffer::from(pattern::bytes(1, 32 << 20)));
    device.copy_to_device(StreamId::DEFAULT, buffer, &parts).unwrap().wait().unwrap();
    assert_eq!(device.resident_bytes().unwrap(), 32 * MIB);
    assert_eq!(touch(range.addr + 12345), pattern::bytes(1, 12346)[12345]);
    device.zero(StreamId::DEFAULT, DeviceRange::new(range.addr, 16 * MIB)).unwrap().wait().unwrap();
    assert_eq!(device.resident_bytes().unwrap(), 16 * MIB, "zeros are holes");
    device.unmap(range).unwrap();
    assert_eq!(device.resident_bytes().unwrap(), 16 * MIB, "unmapping gives nothing back");
    device.release(backing).unwrap();
    assert_eq!(device.resident_bytes().unwrap(), 0);
    device.unreserve(range).unwrap();
}

#[test]
fn reading_untouched_memory_costs_nothing() {
    let device = open(64 * MIB);
    let range = device.reserve(64 * MIB).unwrap();
    let backing = device.create(64 * MIB).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    device.digest(StreamId::DEFAULT, &[range]).unwrap().wait().unwrap();
    assert_eq!(device.resident_bytes().unwrap(), 0);
}

/// Host memory whose bytes a copy gets only when the test sends a message. Queuing the copy reads the length
/// first, and gets it at once.
#[derive(Debug)]
struct Held {
    bytes: Vec<u8>,
    looks: AtomicUsize,
    word: Mutex<Receiver<()>>,
}

impl HostMemory for Held {
    fn as_slice(&self) -> &[u8] {
        if self.looks.fetch_add(1, Ordering::Relaxed) > 0 {
            // A test that ended without a message has dropped the sender, which ends the wait.
            let _ = self.word.lock().unwrap().recv();
        }
        &self.bytes
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

#[test]
fn an_early_unmap_is_refused_and_changes_nothing() {
    let device = open(64 * MIB);
    let range = device.reserve(4 * MIB).unwrap();
    let backing = device.create(4 * MIB).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    let (go, word) = channel();
    let held = Held { bytes: pattern::bytes(5, 4 << 20), looks: AtomicUsize::new(0), word: Mutex::new(word) };
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let copy = device.copy_to_device(StreamId::DEFAULT, Arc::new(HostBuffer::new(held)), &parts).unwrap();
    let event = device.event_record(StreamId::DEFAULT).unwrap();
    let early = device.unmap(range).unwrap_err();
    assert!(matches!(early.kind, DriverErrorKind::Busy { .. }), "{early}");
    assert!(!device.event_query(event).unwrap(), "an event behind work in flight has not passed");
    go.send(()).unwrap();
    copy.wait().unwrap();
    assert_eq!(touch(range.end() - 1), pattern::bytes(5, 4 << 20)[(4 << 20) - 1]);
    device.unmap(range).unwrap();
}

#[test]
fn launched_work_keeps_its_ranges_mapped() {
    let device = open(64 * MIB);
    let range = device.reserve(4 * MIB).unwrap();
    let backing = device.create(4 * MIB).unwrap();
    device.map(range, backing).unwrap();
    let closed = device.launch(StreamId::DEFAULT, &[range], || ()).unwrap_err();
    assert!(matches!(closed.kind, DriverErrorKind::NotMapped { .. }), "{closed}");
    device.set_access(range).unwrap();
    let (go, word) = channel::<()>();
    let part = DeviceRange::new(range.addr + MIB, 4);
    let work = device.launch(StreamId::DEFAULT, &[part], move || word.recv().unwrap()).unwrap();
    let early = device.unmap(range).unwrap_err();
    assert!(matches!(early.kind, DriverErrorKind::Busy { .. }), "{early}");
    go.send(()).unwrap();
    work.wait().unwrap();
    let panicking = device.launch(StreamId::DEFAULT, &[part], || panic!("on purpose")).unwrap();
    assert!(panicking.wait().is_err());
    device.unmap(range).expect("work that panicked has landed, too");
}

#[test]
fn thirty_gib_in_granules_fit_into_a_thousand_descriptors() {
    if !is_child() {
        return assert!(in_a_child().success());
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(1024), maximum: Some(1024) }).unwrap();
    let device = open(30 << 30);
    let granule = device.info().granule_bytes;
    let range = device.reserve(30 << 30).unwrap();
    let granules = (30 << 30) / granule;
    // Backwards, so that neighbours in the addresses are no neighbours in the file and cannot be merged.
    let backings: Vec<_> = (0..granules)
        .rev()
        .map(|i| {
            let backing = device.create(granule).unwrap();
            device.map(DeviceRange::new(range.addr + i * granule, granule), backing).unwrap();
            backing
        })
        .collect();
    device.set_access(range).unwrap();
    for addr in [range.addr, range.addr + (15 << 30), range.end() - 1] {
        assert_eq!(touch(addr), 0);
    }
    assert!(device.create(granule).unwrap_err().is_out_of_memory());
    device.unmap(range).unwrap();
    backings.into_iter().for_each(|backing| device.release(backing).unwrap());
    assert_eq!(device.memory_info().unwrap().free_bytes, 30 << 30);
}

/// A pool with one block of weights, asleep.
fn asleep() -> (Arc<HostDevice>, Pool, DeviceRange) {
    let device = open(64 * MIB);
    let pool = Pool::new(Arc::clone(&device) as Arc<dyn Driver>, PoolConfig::default()).unwrap();
    let block = pool.alloc(&AllocRequest::new(8 * MIB, Tag::weights())).unwrap();
    pattern::fill(&pool, block.id, 3, 8 << 20).unwrap();
    assert_eq!(touch(block.range.addr), pattern::bytes(3, 1)[0]);
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    (device, pool, block.range)
}

#[test]
fn touching_sleeping_memory_faults() {
    if is_child() {
        let (_device, _pool, range) = asleep();
        std::hint::black_box(touch(range.addr + 4 * MIB));
        return;
    }
    let status = in_a_child();
    assert_eq!(status.signal(), Some(libc::SIGSEGV), "{status}");
}

#[test]
fn touching_awake_memory_does_not() {
    let (_device, pool, range) = asleep();
    pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(touch(range.end() - 1), pattern::bytes(3, 8 << 20)[(8 << 20) - 1]);
}

#[test]
fn faults_are_exact_to_the_page() {
    if is_child() {
        let device = open(64 * MIB);
        let granule = device.info().granule_bytes;
        let range = device.reserve(2 * granule).unwrap();
        let first = DeviceRange::new(range.addr, granule);
        let backing = device.create(granule).unwrap();
        device.map(first, backing).unwrap();
        device.set_access(first).unwrap();
        assert_eq!(touch(first.end() - 1), 0);
        std::hint::black_box(touch(first.end()));
        return;
    }
    let status = in_a_child();
    assert_eq!(status.signal(), Some(libc::SIGSEGV), "{status}");
}

/// Forks; the child's verdict is what `child` returns. Must run alone in its process.
fn fork(child: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the process runs one test on one thread beside the device's own. Those hold no lock of the
    // allocator's that glibc would not take over the fork.
    match unsafe { libc::fork() } {
        0 => {
            let verdict = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
            // SAFETY: ends the child without running the parent's destructors a second time.
            unsafe { libc::_exit(i32::from(!verdict)) }
        }
        pid => {
            let mut status = -1;
            // SAFETY: `status` outlives the call.
            let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
            assert_eq!(waited, pid);
            status
        }
    }
}

#[test]
fn a_forked_child_gets_errors_and_does_no_damage() {
    if !is_child() {
        let status = in_a_child();
        return assert!(status.success(), "{status}");
    }
    let (device, pool, _) = asleep();
    let kv = pool.alloc(&AllocRequest::new(4 * MIB, Tag::new("scratch").unwrap())).unwrap();
    pattern::fill(&pool, kv.id, 9, 4 << 20).unwrap();
    let buffers = [(); 3].map(|()| device.host_alloc(4096).unwrap());
    let status = fork(|| {
        let [looked_at, source, into] = buffers;
        let look = || std::hint::black_box(looked_at[0]);
        let looks = std::panic::catch_unwind(std::panic::AssertUnwindSafe(look));
        let wrong = |error: PoolError| matches!(error, PoolError::WrongProcess(_));
        let refused = wrong(pool.wake(&WakeRequest::all()).unwrap_err())
            && wrong(pool.alloc(&AllocRequest::new(1, Tag::weights())).unwrap_err())
            && wrong(pool.free(kv.id).unwrap_err())
            && wrong(pool.stats().unwrap_err())
            && wrong(pool.close().unwrap_err());
        let kinds = [
            device.create(2 * MIB).unwrap_err().kind,
            device.reserve(2 * MIB).unwrap_err().kind,
            device.synchronize().unwrap_err().kind,
            device.host_alloc(1).unwrap_err().kind,
            device.check_process().unwrap_err().kind,
            device.copy_to_device(StreamId::DEFAULT, Arc::new(source), &[]).unwrap_err().kind,
            device.copy_to_host(StreamId::DEFAULT, into, &[]).unwrap_err().kind,
        ];
        // Dropping both is a no-op here: it neither hangs on threads that do not exist nor releases anything.
        drop(pool);
        drop(device);
        refused
            && looks.is_err()
            && kinds.iter().all(|kind| matches!(kind, DriverErrorKind::WrongProcess { .. }))
    });
    assert_eq!(status, 0, "the child's verdict");
}

#[test]
fn the_parent_of_a_fork_has_lost_nothing() {
    if !is_child() {
        let status = in_a_child();
        return assert!(status.success(), "{status}");
    }
    let (device, pool, range) = asleep();
    let scratch = pool.alloc(&AllocRequest::new(4 * MIB, Tag::new("scratch").unwrap())).unwrap();
    pattern::fill(&pool, scratch.id, 9, 4 << 20).unwrap();
    let used = device.memory_info().unwrap();
    // The memory is not even there in the child: a touch faults instead of changing the parent's bytes.
    let status = fork(|| std::hint::black_box(touch(scratch.range.addr)) == 0);
    assert_eq!(status & 0x7f, libc::SIGSEGV, "the child's status");
    assert_eq!(device.memory_info().unwrap(), used);
    pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(touch(range.addr), pattern::bytes(3, 1)[0]);
    assert!(pattern::read(&pool, scratch.id, 4 << 20).unwrap() == pattern::bytes(9, 4 << 20));
    pool.close().unwrap();
    assert_eq!(device.memory_info().unwrap().free_bytes, 64 * MIB);
    assert_eq!(device.resident_bytes().unwrap(), 0);
}

#[test]
fn shutdown_works_in_any_order() {
    let (device, pool, _) = asleep();
    drop(device);
    drop(pool);
    let (device, pool, _) = asleep();
    drop(pool);
    assert_eq!(device.memory_info().unwrap().free_bytes, 64 * MIB);
    assert_eq!((device.resident_bytes().unwrap(), device.host_bytes()), (0, 0));
    let device = open(64 * MIB);
    let range = device.reserve(4 * MIB).unwrap();
    let backing = device.create(4 * MIB).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    let digests = device.digest(StreamId::DEFAULT, &[range]).unwrap();
    drop(device); // With everything still mapped and work in flight.
    digests.wait().unwrap();
}

/// Blocks of 512 bytes in each file of host devices that this process has open.
fn files() -> Vec<u64> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok).map(|entry| entry.path());
    let is_file = |link: &PathBuf| {
        std::fs::read_link(link)
            .is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:poorwill-host-device"))
    };
    links.filter(is_file).map(|link| std::fs::metadata(link).unwrap().blocks()).collect()
}

fn written(device: &HostDevice, seed: u64, bytes: u64) -> (DeviceRange, BackingId) {
    let range = device.reserve(bytes).unwrap();
    let backing = device.create(bytes).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let buffer = Arc::new(HostBuffer::from(pattern::bytes(seed, usize::try_from(bytes).unwrap())));
    device.copy_to_device(StreamId::DEFAULT, buffer, &parts).unwrap().wait().unwrap();
    (range, backing)
}

#[test]
fn devices_share_one_file_and_leave_nothing_there() {
    if !is_child() {
        let status = in_a_child();
        return assert!(status.success(), "{status}");
    }
    let devices = [(); 5].map(|()| open(8 * MIB));
    let ranges: Vec<_> = (1..).zip(&devices).map(|(seed, device)| written(device, seed, 4 * MIB)).collect();
    assert_eq!(files(), [5 * 4 * MIB / 512]);
    devices[1].take_off().unwrap();
    let [shared, aside] = files()[..] else { panic!("one has put its bytes beside it: {:?}", files()) };
    assert_eq!(shared + aside, 5 * 4 * MIB / 512, "and no longer has them there");
    devices[1].put_back().unwrap();
    for unmaps_first in [true, false] {
        let (range, backing) = written(&devices[0], 6, 2 * MIB);
        assert_eq!(files(), [(5 * 4 + 2) * MIB / 512]);
        if unmaps_first {
            devices[0].unmap(range).unwrap();
            devices[0].release(backing).unwrap();
        } else {
            devices[0].release(backing).unwrap();
            devices[0].unmap(range).unwrap();
        }
        assert_eq!(files(), [5 * 4 * MIB / 512], "unmapped before it was released: {unmaps_first}");
    }
    let [first, second, others @ ..] = devices;
    drop(others); // With all their memory.
    assert_eq!(files(), [2 * 4 * MIB / 512]);
    for (seed, device) in (1..).zip([first, second]) {
        assert_eq!(device.resident_bytes().unwrap(), 4 * MIB);
        let (range, _) = ranges[usize::try_from(seed).unwrap() - 1];
        assert_eq!(touch(range.addr + 5000), pattern::bytes(seed, 5001)[5000]);
    }
    assert!(files().is_empty(), "it has gone with the last");
}

#[test]
fn a_forked_child_can_open_a_device_of_its_own() {
    if !is_child() {
        let status = in_a_child();
        return assert!(status.success(), "{status}");
    }
    let device = open(8 * MIB);
    let latch = Arc::new(Latch::default());
    device.launch_host(StreamId::DEFAULT, Box::new(|| ())).unwrap().wait().unwrap();
    let (range, _) = written(&device, 1, 2 * MIB);
    latch::hold(&*device, StreamId::DEFAULT, &latch);
    let status = fork(|| {
        let own = open(8 * MIB);
        let (range, _) = written(&own, 2, 4 * MIB);
        let right = touch(range.addr + 5000) == pattern::bytes(2, 5001)[5000];
        drop(own);
        right && files() == [2 * MIB / 512] // The parent's.
    });
    latch.open();
    assert_eq!(status, 0, "the child's verdict");
    device.synchronize().unwrap();
    assert_eq!(touch(range.addr + 5000), pattern::bytes(1, 5001)[5000]);
}

#[test]
fn held_streams_delay_no_other() {
    watched(|| {
        let (device, latch) = (open(2 * MIB), Arc::new(Latch::default()));
        let streams = [(); 20].map(|()| device.stream_create().unwrap());
        streams.iter().for_each(|stream| latch::hold(&*device, *stream, &latch));
        device.launch_host(StreamId::DEFAULT, Box::new(|| ())).unwrap().wait().unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        for nth in 0..50 {
            let order = Arc::clone(&order);
            let work = Box::new(move || order.lock().unwrap().push(nth));
            drop(device.launch_host(streams[nth % 2], work).unwrap());
        }
        latch.open();
        device.synchronize().unwrap();
        let order = order.lock().unwrap();
        for parity in 0..2 {
            let of_stream: Vec<usize> = order.iter().copied().filter(|nth| nth % 2 == parity).collect();
            assert!(of_stream.len() == 25 && of_stream.is_sorted(), "{of_stream:?}");
        }
    });
}

/// Host memory that takes its time to go.
#[derive(Debug)]
struct SlowToGo {
    begins: Sender<()>,
    is_gone: Arc<AtomicBool>,
}

impl HostMemory for SlowToGo {
    fn as_slice(&self) -> &[u8] {
        &[]
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut []
    }
}

impl Drop for SlowToGo {
    fn drop(&mut self) {
        let _ = self.begins.send(()); // A test that failed has dropped the receiver.
        (0..10_000).for_each(|_| std::thread::yield_now());
        self.is_gone.store(true, Ordering::Release);
    }
}

#[test]
fn synchronizing_waits_for_results_that_work_drops() {
    watched(|| {
        let (device, latch, is_gone) = (open(2 * MIB), Arc::default(), Arc::new(AtomicBool::new(false)));
        let (begins, begun) = channel();
        let buffer = HostBuffer::new(SlowToGo { begins, is_gone: Arc::clone(&is_gone) });
        latch::hold(&*device, StreamId::DEFAULT, &latch);
        drop(device.copy_to_host(StreamId::DEFAULT, buffer, &[]).unwrap());
        latch.open();
        begun.recv().unwrap();
        device.synchronize().unwrap();
        assert!(is_gone.load(Ordering::Acquire), "the work still drops its buffer");
    });
}

/// Panics as it is dropped, also as what a panic carries.
struct PanicsAgain;

impl Drop for PanicsAgain {
    fn drop(&mut self) {
        panic!("on purpose");
    }
}

#[test]
fn work_that_panics_with_what_panics_again_leaves_an_idle_stream() {
    let device = open(2 * MIB);
    let work = Box::new(|| std::panic::panic_any(PanicsAgain));
    let error = device.launch_host(StreamId::DEFAULT, work).unwrap().wait().unwrap_err();
    assert!(error.to_string().contains("work panicked"), "{error}");
    assert!(device.is_idle());
}

/// Looks at a stream of the device as it is dropped.
struct Looks(Arc<HostDevice>);

impl Drop for Looks {
    fn drop(&mut self) {
        self.0.check_stream(StreamId::DEFAULT).unwrap();
    }
}

#[test]
fn work_that_gets_no_thread_may_use_the_device_as_it_is_dropped() {
    if !is_child() {
        let status = in_a_child();
        return assert!(status.success(), "{status}");
    }
    watched(|| {
        let device = open(2 * MIB);
        let [one, other] = [(); 2].map(|()| Looks(Arc::clone(&device)));
        // Addresses for small allocations, not for the stack of a thread.
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
        let before = getrlimit(Resource::As);
        let current = Some(pages * rustix::param::page_size() as u64 + MIB);
        setrlimit(Resource::As, Rlimit { current, ..before }).unwrap();
        let refused = [
            device.launch_host(StreamId::DEFAULT, Box::new(move || drop(one))).map(drop),
            device.launch(StreamId::DEFAULT, &[], move || drop(other)).map(drop),
        ];
        setrlimit(Resource::As, before).unwrap();
        for refused in refused {
            let error = refused.unwrap_err();
            assert!(error.to_string().contains("start a thread for a stream"), "{error}");
        }
        device.launch_host(StreamId::DEFAULT, Box::new(|| ())).unwrap().wait().unwrap();
    });
}
