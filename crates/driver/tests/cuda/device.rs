//! What the CUDA driver promises beyond the contract. The caller's context and streams are left alone. Abandoned
//! work keeps its memory, nothing is leaked, and errors explain themselves.

use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use libloading::os::unix::Library;
use poorwill_core::{
    AllocRequest, CopyPart, DeviceRange, Driver, DriverErrorKind, HostBuffer, Level, Op, Pool, PoolConfig,
    SleepRequest, StreamId, Tag, WakeRequest,
};
use poorwill_driver::{CudaConfig, CudaDevice, cuda};
use poorwill_testkit::device::{DeviceKind, cuda_config};
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::pattern;

use crate::turn;

type CuResult = c_int;

fn open() -> CudaDevice {
    CudaDevice::open(&cuda_config()).unwrap()
}

/// The library beside our driver, for calls that our driver does not make.
fn library() -> Library {
    let path = cuda_config().library.unwrap_or_else(|| "libcuda.so.1".into());
    // SAFETY: it is loaded already, by the driver under test.
    unsafe { Library::new(path) }.unwrap()
}

macro_rules! call {
    ($library:expr, $name:literal, ($($arg:expr => $ty:ty),*)) => {{
        // SAFETY: the documented type of the symbol.
        let function = unsafe { $library.get::<unsafe extern "C" fn($($ty),*) -> CuResult>($name.as_bytes()) };
        let function = function.unwrap();
        // SAFETY: out-parameters are locals, handles are alive.
        unsafe { function($($arg),*) }
    }};
}

fn current(library: &Library) -> usize {
    let mut context = 0usize;
    assert_eq!(call!(library, "cuCtxGetCurrent", (&raw mut context => *mut usize)), 0);
    context
}

/// A use of most calls.
fn use_everything(device: &CudaDevice) {
    let granule = device.info().granule_bytes;
    let range = device.reserve(granule).unwrap();
    let backing = device.create(granule).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    device.zero(StreamId::DEFAULT, range).unwrap().wait().unwrap();
    device.digest(StreamId::DEFAULT, &[range]).unwrap().wait().unwrap();
    drop(device.host_alloc(4096).unwrap());
    device.memory_info().unwrap();
    device.synchronize().unwrap();
    let _ = device.create(1).unwrap_err();
    device.unmap(range).unwrap();
    device.release(backing).unwrap();
    device.unreserve(range).unwrap();
}

#[test]
fn the_callers_context_stays_current() {
    let _turn = turn();
    let device = open();
    let library = library();
    assert_eq!(current(&library), 0, "opening leaves nothing behind");
    use_everything(&device);
    assert_eq!(current(&library), 0);
    let mut foreign = 0usize;
    let created = call!(library, "cuCtxCreate_v2", (&raw mut foreign => *mut usize, 0 => c_uint, 0 => c_int));
    assert_eq!(created, 0);
    assert_eq!(current(&library), foreign);
    use_everything(&device);
    assert_eq!(current(&library), foreign, "on the thread that has a context of its own");
    thread::scope(|scope| {
        scope.spawn(|| {
            use_everything(&device);
            assert_eq!(current(&library), 0, "on a thread that has none");
        });
    });
    assert_eq!(call!(library, "cuCtxDestroy_v2", (foreign => usize)), 0);
}

#[test]
fn streams_of_the_callers_have_one_name_and_stay_theirs() {
    let _turn = turn();
    let device = open();
    let library = library();
    let mut primary = 0usize;
    let ordinal = c_int::try_from(device.gpu().ordinal).unwrap();
    assert_eq!(
        call!(library, "cuDevicePrimaryCtxRetain", (&raw mut primary => *mut usize, ordinal => c_int)),
        0
    );
    assert_eq!(call!(library, "cuCtxPushCurrent_v2", (primary => usize)), 0);
    let mut raw = 0usize;
    assert_eq!(call!(library, "cuStreamCreate", (&raw mut raw => *mut usize, 1 => c_uint)), 0);
    // SAFETY: the stream lives until the end of this test.
    let adopt = |raw| unsafe { device.adopt_stream(raw) };
    let stream = adopt(raw).unwrap();
    assert_eq!(adopt(raw).unwrap(), stream, "one stream, one name");
    assert_eq!(adopt(0).unwrap(), StreamId::DEFAULT);
    assert_eq!(device.raw_stream(stream).unwrap(), raw);
    let pool = Pool::new(Arc::new(open()), PoolConfig::default()).unwrap();
    drop(pool);
    device.launch_host(stream, Box::new(|| ())).unwrap().wait().unwrap();
    device.stream_destroy(stream).unwrap();
    assert!(matches!(
        device.stream_synchronize(stream).unwrap_err().kind,
        DriverErrorKind::UnknownHandle { .. }
    ));
    assert_eq!(call!(library, "cuStreamSynchronize", (raw => usize)), 0, "forgotten, not destroyed");
    let again = adopt(raw).unwrap();
    assert_ne!(again, stream, "a new name: nobody mistakes it for the old one");
    device.stream_destroy(again).unwrap();

    let mut foreign = 0usize;
    let created = call!(library, "cuCtxCreate_v2", (&raw mut foreign => *mut usize, 0 => c_uint, 0 => c_int));
    assert_eq!(created, 0);
    let mut other = 0usize;
    assert_eq!(call!(library, "cuStreamCreate", (&raw mut other => *mut usize, 1 => c_uint)), 0);
    let refused = adopt(other).unwrap_err();
    assert_eq!(refused.op, Op::AdoptStream);
    assert!(refused.to_string().contains("another context"), "{refused}");
    assert_eq!(call!(library, "cuCtxDestroy_v2", (foreign => usize)), 0);
    assert_eq!(call!(library, "cuStreamDestroy_v2", (raw => usize)), 0);
    let mut popped = 0usize;
    assert_eq!(call!(library, "cuCtxPopCurrent_v2", (&raw mut popped => *mut usize)), 0);
    assert_eq!(popped, primary);
    assert_eq!(call!(library, "cuDevicePrimaryCtxRelease_v2", (ordinal => c_int)), 0);
}

#[test]
fn abandoned_work_keeps_its_memory_until_it_is_done() {
    let _turn = turn();
    let device = open();
    let granule = device.info().granule_bytes;
    let range = device.reserve(granule).unwrap();
    let backing = device.create(granule).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    let bytes = usize::try_from(granule).unwrap();
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let stream = device.stream_create().unwrap();
    let latch = Arc::new(Latch::default());
    latch::hold(&device, stream, &latch);
    // From the driver: other memory would be copied in pieces, by the call.
    let sources: Vec<Arc<HostBuffer>> =
        (0..4).map(|seed| latch::source(&device, &pattern::bytes(seed, bytes))).collect();
    for source in &sources {
        drop(device.copy_to_device(stream, Arc::clone(source), &parts).unwrap());
    }
    let into = device.host_alloc(granule).unwrap();
    drop(device.copy_to_host(stream, into, &parts).unwrap());
    drop(device.digest(stream, &[range]).unwrap());
    assert!(sources.iter().all(|source| Arc::strong_count(source) == 2), "held while the stream is");
    latch.open();
    device.stream_synchronize(stream).unwrap();
    device.memory_info().unwrap(); // Any call drops what finished work kept.
    assert!(sources.iter().all(|source| Arc::strong_count(source) == 1), "and no longer");
    device.stream_destroy(stream).unwrap();
    device.unmap(range).unwrap();
    device.release(backing).unwrap();
    device.unreserve(range).unwrap();
}

/// Giving page-locked memory back waits for the whole GPU, so it must not happen where a buffer is dropped.
#[test]
fn dropping_host_memory_waits_for_nothing() {
    let _turn = turn();
    let device = open();
    let stream = device.stream_create().unwrap();
    let mut buffer = device.host_alloc(3 << 20).unwrap();
    let first = buffer.as_ptr();
    buffer.fill(1);
    let latch = Arc::new(Latch::default());
    latch::hold(&device, stream, &latch);
    drop(buffer);
    let event = device.event_record(stream).unwrap();
    assert!(!device.event_query(event).unwrap(), "the stream is still held: nobody has waited for it");
    let again = device.host_alloc(3 << 20).unwrap();
    assert_eq!(again.as_ptr(), first, "page-locked memory is used again");
    drop(again);
    latch.open();
    device.synchronize().unwrap();
    device.event_destroy(event).unwrap();
    device.stream_destroy(stream).unwrap();
}

#[test]
fn unused_host_memory_goes_with_its_device() {
    let _turn = turn();
    let device = open();
    let before = resident_bytes();
    for nth in 0..16 {
        drop(device.host_alloc((12 << 20) + nth * 4096).unwrap());
    }
    let kept = resident_bytes() - before;
    assert!(kept > 128 << 20, "{kept} bytes of 192 MiB are kept for later");
    drop(device);
    assert!(resident_bytes() < before + (64 << 20), "all of it has gone with the device");
}

/// What the system says that this process has in memory.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

#[test]
fn a_closing_device_releases_what_is_left() {
    let _turn = turn();
    let witness = open(); // Keeps the context, so that only the device's own things come and go.
    let granule = witness.info().granule_bytes;
    let before = witness.memory_info().unwrap();
    let device = open();
    let ranges: Vec<DeviceRange> =
        (1..5).map(|granules| device.reserve(granules * granule).unwrap()).collect();
    for range in &ranges[..3] {
        let backing = device.create(range.bytes).unwrap();
        device.map(*range, backing).unwrap();
        device.set_access(*range).unwrap();
    }
    let _ = device.create(7 * granule).unwrap();
    let released = device.create(granule).unwrap();
    device.map(DeviceRange::new(ranges[3].addr, granule), released).unwrap();
    device.release(released).unwrap();
    let stream = device.stream_create().unwrap();
    drop(device.zero(stream, ranges[2]).unwrap());
    let mut buffer = device.host_alloc(1 << 20).unwrap();
    buffer.fill(0);
    buffer[5] = 7;
    let event = device.event_record(stream).unwrap();
    assert_ne!(witness.memory_info().unwrap(), before);
    drop(device);
    assert_eq!(witness.memory_info().unwrap().free_bytes, before.free_bytes);
    assert_eq!(buffer.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 7, "host memory outlives the device");
    let _ = (event, stream);
}

#[test]
fn two_devices_are_one_gpu() {
    let _turn = turn();
    let (first, second) = (open(), open());
    let granule = first.info().granule_bytes;
    let before = second.memory_info().unwrap().free_bytes;
    let backing = first.create(4 * granule).unwrap();
    assert_eq!(second.memory_info().unwrap().free_bytes, before - 4 * granule);
    let foreign = second.release(backing).unwrap_err();
    assert!(matches!(foreign.kind, DriverErrorKind::UnknownHandle { .. }), "{foreign}");
    first.release(backing).unwrap();
    drop(first);
    use_everything(&second);
}

#[test]
fn a_device_that_is_opened_while_the_last_one_closes_works() {
    let _turn = turn();
    let rounds = DeviceKind::of_this_run().cases(100);
    for round in 0..rounds {
        let last = open();
        let both = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                both.wait();
                drop(last);
            });
            both.wait();
            // From at once to when the other has gone, whatever the machine: it is only to be at all times.
            thread::sleep(Duration::from_micros(u64::from(2000 * round / rounds)));
            use_everything(&open());
        });
    }
}

#[test]
fn what_cannot_be_opened_says_why() {
    let _turn = turn();
    let config = cuda_config().numbered(99);
    let error = CudaDevice::open(&config).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::InvalidArgument { .. }));
    assert!(error.to_string().contains("no GPU 99") && error.to_string().contains("cuda:0"), "{error}");
    let missing = CudaConfig::default().through(Some("/nonexistent/libcuda.so.1".into()));
    let error = CudaDevice::open(&missing).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::Unsupported { .. }), "{error}");
    let known = cuda::gpus(cuda_config().library.as_deref()).unwrap();
    let known: Vec<cuda::GpuInfo> = known.into_iter().map(Result::unwrap).collect();
    assert!(!known.is_empty() && known.iter().zip(0..).all(|(gpu, ordinal)| gpu.ordinal == ordinal));
    let device = open();
    assert_eq!(device.gpu(), &known[usize::try_from(device.gpu().ordinal).unwrap()]);
    assert_eq!(device.info().id, format!("cuda:{}", device.gpu().ordinal));
}

#[test]
fn a_forked_child_can_do_no_harm() {
    let _turn = turn();
    let device = Arc::new(open());
    let pool = Pool::new(Arc::clone(&device) as Arc<dyn Driver>, PoolConfig::default()).unwrap();
    let block = pool.alloc(&AllocRequest::new(100_000, Tag::weights())).unwrap();
    pattern::fill(&pool, block.id, 3, 100_000).unwrap();
    let buffer = device.host_alloc(4096).unwrap();
    // SAFETY: the child calls our driver, which must not call the library there, and ends without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = |kind: DriverErrorKind| matches!(kind, DriverErrorKind::WrongProcess { .. });
        let granule = device.info().granule_bytes;
        let all = refused(device.memory_info().unwrap_err().kind)
            && refused(device.create(granule).unwrap_err().kind)
            && refused(device.host_alloc(1).unwrap_err().kind)
            && refused(device.synchronize().unwrap_err().kind)
            && pool.alloc(&AllocRequest::new(1, Tag::weights())).is_err();
        drop(buffer);
        drop(pool);
        drop(device);
        // SAFETY: ends the child at once, with no destructor of the test harness.
        unsafe { libc::_exit(c_int::from(!all)) };
    }
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child was refused everything and ended quietly");
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    assert_eq!(pattern::read(&pool, block.id, 100_000).unwrap(), pattern::bytes(3, 100_000));
    drop(buffer);
}
