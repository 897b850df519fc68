//! Real captures into graphs, over the fake libcuda or on a GPU: the driver and a pool at work leave them valid.
//!
//! The streams are the device's own, captured through the driver's library as an engine does it, in the strictest
//! mode.

use std::ffi::c_int;
use std::sync::{Arc, MutexGuard};
use std::thread;

use libloading::os::unix::{Library, Symbol};
use poorwill_core::{
    AllocRequest, Block, BlockKind, Driver, Level, Pool, PoolConfig, PoolError, SleepRequest, StreamId, Tag,
    TagState, Verify, WakeRequest,
};
use poorwill_driver::CudaDevice;
use poorwill_testkit::contract::{Capturer, a_capture_is_reported_and_stays_valid};
use poorwill_testkit::device::cuda_config;
use poorwill_testkit::pattern;
use poorwill_testkit::watchdog::eventually;

use crate::turn;

/// `CU_STREAM_CAPTURE_MODE_GLOBAL` and `_THREAD_LOCAL`.
const GLOBAL: c_int = 0;
const OF_THE_THREAD: c_int = 1;

/// The library, as an engine calls it. A context is current on the thread that made this.
struct Engine {
    begin: Symbol<extern "C" fn(usize, c_int) -> c_int>,
    end: Symbol<unsafe extern "C" fn(usize, *mut usize) -> c_int>,
    destroy_graph: Symbol<extern "C" fn(usize) -> c_int>,
    exchange_mode: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int>,
}

impl Engine {
    fn load() -> Self {
        let config = cuda_config();
        // SAFETY: C1, the library that the driver loads as well.
        let library =
            unsafe { Library::new(config.library.unwrap_or_else(|| "libcuda.so.1".into())) }.unwrap();
        // SAFETY: C1, the type that the symbol has there.
        let init: Symbol<extern "C" fn(u32) -> c_int> = unsafe { library.get(b"cuInit") }.unwrap();
        // SAFETY: C1, likewise.
        let retain: Symbol<unsafe extern "C" fn(*mut usize, c_int) -> c_int> =
            unsafe { library.get(b"cuDevicePrimaryCtxRetain") }.unwrap();
        // SAFETY: C1, likewise.
        let set: Symbol<extern "C" fn(usize) -> c_int> = unsafe { library.get(b"cuCtxSetCurrent") }.unwrap();
        // SAFETY: C1, likewise.
        let begin = unsafe { library.get(b"cuStreamBeginCapture_v2") }.unwrap();
        // SAFETY: C1, likewise.
        let end = unsafe { library.get(b"cuStreamEndCapture") }.unwrap();
        // SAFETY: C1, likewise.
        let destroy_graph = unsafe { library.get(b"cuGraphDestroy") }.unwrap();
        // SAFETY: C1, likewise.
        let exchange_mode = unsafe { library.get(b"cuThreadExchangeStreamCaptureMode") }.unwrap();
        std::mem::forget(library);
        let (mut context, ordinal) = (0, c_int::try_from(config.ordinal).unwrap());
        assert_eq!(init(0), 0);
        // SAFETY: C2. It stays retained: the thread of the test has it current until it ends.
        assert_eq!(unsafe { retain(&raw mut context, ordinal) }, 0);
        assert_eq!(set(context), 0);
        Self { begin, end, destroy_graph, exchange_mode }
    }

    fn begin(&self, stream: usize) {
        assert_eq!((self.begin)(stream, GLOBAL), 0);
    }

    /// Whether the capture was valid to its end.
    fn end(&self, stream: usize) -> bool {
        let mut graph = 0;
        // SAFETY: C2.
        let ended = unsafe { (self.end)(stream, &raw mut graph) };
        if ended == 0 {
            assert_eq!((self.destroy_graph)(graph), 0);
        }
        ended == 0
    }

    /// Sets the thread's mode of captures; gives the one it had.
    fn exchange_mode(&self, mut mode: c_int) -> c_int {
        // SAFETY: C2.
        assert_eq!(unsafe { (self.exchange_mode)(&raw mut mode) }, 0);
        mode
    }
}

/// A device, and streams of it to capture. The tests take turns: a capture is of the whole process.
struct Machine {
    engine: Engine,
    device: Arc<CudaDevice>,
    _turn: MutexGuard<'static, ()>,
}

impl Machine {
    fn open() -> Self {
        let turn = turn();
        let engine = Engine::load();
        Self { engine, device: Arc::new(CudaDevice::open(&cuda_config()).unwrap()), _turn: turn }
    }

    fn pool(&self, limit_granules: u64) -> Pool {
        let limit_bytes = Some(limit_granules * self.granule());
        let config = PoolConfig::default().limited_to(limit_bytes).in_chunks_of(4).in_segments_of(8);
        Pool::new(Arc::clone(&self.device) as Arc<dyn Driver>, config).unwrap()
    }

    fn granule(&self) -> u64 {
        self.device.info().granule_bytes
    }

    fn alloc(&self, pool: &Pool, granules: u64, stream: StreamId) -> Result<Block, PoolError> {
        pool.alloc(&AllocRequest::new(granules * self.granule(), Tag::weights()).on(stream))
    }
}

impl Capturer for Machine {
    fn begin(&self, stream: StreamId) {
        self.engine.begin(self.device.raw_stream(stream).unwrap());
    }

    fn end(&self, stream: StreamId) -> bool {
        self.engine.end(self.device.raw_stream(stream).unwrap())
    }
}

#[test]
fn a_capture_is_reported_and_left_valid_by_the_driver() {
    let machine = Machine::open();
    a_capture_is_reported_and_stays_valid(&*machine.device, &machine);
}

#[test]
fn a_thread_has_its_own_mode_of_captures_again_after_a_call() {
    let machine = Machine::open();
    machine.engine.exchange_mode(OF_THE_THREAD);
    machine.device.synchronize().unwrap();
    assert!(machine.device.unreserve(poorwill_core::DeviceRange::new(0, 0)).is_err());
    assert_eq!(machine.engine.exchange_mode(GLOBAL), OF_THE_THREAD);
}

#[test]
fn a_pool_at_work_leaves_a_capture_valid_and_catches_up_with_what_was_freed() {
    let machine = Machine::open();
    let device = &machine.device;
    let pool = machine.pool(128);
    let [captured, other] = [0, 1].map(|_| device.stream_create().unwrap());
    let (used, freed) =
        (machine.alloc(&pool, 4, captured).unwrap(), machine.alloc(&pool, 4, captured).unwrap());
    pool.record_use(used.id, other).unwrap();
    pool.free(freed.id).unwrap();
    machine.begin(captured);
    pool.free(used.id).unwrap();
    pool.set_cached_max_bytes(Some(0)).unwrap(); // The reaper works from now on.
    thread::scope(|scope| {
        for stream in [captured, other, StreamId::DEFAULT] {
            let (pool, machine) = (&pool, &machine);
            scope.spawn(move || {
                for round in 0..20 {
                    let block = machine.alloc(pool, 1 + round % 5, stream).unwrap();
                    let rest =
                        pool.free_part(block.id, poorwill_core::DeviceRange::new(block.range.addr, 512));
                    drop((pool.stats().unwrap(), pool.snapshot().unwrap()));
                    rest.unwrap().iter().for_each(|block| pool.free(block.id).unwrap());
                }
            });
        }
    });
    pool.trim().unwrap();
    assert_eq!(device.capturing(), Ok(Some(captured)));
    let waiting = |pool: &Pool| {
        let segments = pool.snapshot().unwrap().segments;
        segments.iter().flat_map(|segment| &segment.blocks).any(|block| block.kind == BlockKind::Waiting)
    };
    assert!(waiting(&pool), "nobody has looked whether its streams have passed");
    assert!(machine.end(captured), "the capture was spoiled");
    eventually("all is given back", || pool.stats().unwrap().mapped_bytes == 0);
    assert!(!waiting(&pool));
    pool.close().unwrap();
    [captured, other].into_iter().for_each(|stream| device.stream_destroy(stream).unwrap());
}

#[test]
fn a_sleep_is_refused_and_a_wake_is_done_during_a_capture() {
    let machine = Machine::open();
    let pool = machine.pool(32);
    let stream = machine.device.stream_create().unwrap();
    let block = machine.alloc(&pool, 13, StreamId::DEFAULT).unwrap();
    let len = usize::try_from(block.requested_bytes).unwrap();
    pattern::fill(&pool, block.id, 1, len).unwrap();
    let all = SleepRequest::all(Level::One);
    machine.begin(stream);
    for refused in [pool.sleep(&all).map(drop), pool.discard(&[Tag::weights()]).map(drop), pool.close()] {
        assert!(matches!(refused, Err(PoolError::Capturing { .. })), "{refused:?}");
    }
    let late = pool.write(stream, block.id, 0, Arc::new(vec![1].into()), 0, 1).map(drop).unwrap_err();
    assert!(poorwill_core::chain(&late).contains("is being captured"), "{late}");
    let prepared = pool.prepare_sleep(&all).unwrap().wait().unwrap();
    assert_eq!(prepared.tags, [Tag::weights()]);
    assert!(machine.end(stream), "the capture was spoiled");
    assert!(pattern::read(&pool, block.id, len).unwrap() == pattern::bytes(1, len));
    pool.sleep(&all).unwrap();
    machine.begin(stream);
    pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
    assert!(machine.end(stream), "the capture was spoiled");
    assert_eq!(pool.tag_state(&Tag::weights()).unwrap(), TagState::Awake);
    assert!(pattern::read(&pool, block.id, len).unwrap() == pattern::bytes(1, len));
    pool.close().unwrap();
    machine.device.stream_destroy(stream).unwrap();
}

#[test]
fn a_request_that_only_freed_memory_could_serve_is_refused_at_once() {
    let machine = Machine::open();
    let pool = machine.pool(16);
    let [captured, other] = [0, 1].map(|_| machine.device.stream_create().unwrap());
    let freed = machine.alloc(&pool, 12, captured).unwrap();
    machine.begin(captured);
    pool.free(freed.id).unwrap();
    let refused = machine.alloc(&pool, 8, other).unwrap_err();
    assert!(matches!(refused, PoolError::HeldByCapture { stream, .. } if stream == captured), "{refused}");
    assert_eq!(machine.alloc(&pool, 12, captured).unwrap().range, freed.range, "its own stream has it");
    assert!(machine.end(captured), "the capture was spoiled");
    assert!(machine.alloc(&pool, 4, other).is_ok());
    pool.close().unwrap();
    [captured, other].into_iter().for_each(|stream| machine.device.stream_destroy(stream).unwrap());
}

/// The engine's stream, which outlives pool and device.
#[test]
fn a_pool_and_a_device_that_end_during_a_capture_leave_it_valid() {
    let machine = Machine::open();
    let stream = machine.device.stream_create().unwrap();
    let raw = machine.device.raw_stream(stream).unwrap();
    let second = Arc::new(CudaDevice::open(&cuda_config()).unwrap());
    // SAFETY: the first device's, which outlives this one.
    let adopted = unsafe { second.adopt_stream(raw) }.unwrap();
    let config = PoolConfig::default().limited_to(8 * machine.granule());
    let pool = Pool::new(Arc::clone(&second) as Arc<dyn Driver>, config).unwrap();
    let block = machine.alloc(&pool, 1, adopted).unwrap();
    machine.begin(stream);
    assert_eq!(second.capturing(), Ok(Some(adopted)));
    pool.free(block.id).unwrap();
    drop(pool);
    drop(second);
    assert!(machine.end(stream), "the capture was spoiled");
    machine.device.stream_destroy(stream).unwrap();
}
