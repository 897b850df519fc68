//! Streams, events and host functions, and their order.

use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use crate::api::{Cuda, ILLEGAL_ADDRESS, INVALID_VALUE, Mapped, NOT_PERMITTED, NOT_READY, Turn, turn};

/// Opens once; held streams wait for it.
#[derive(Default)]
struct Latch(AtomicBool);

impl Latch {
    fn hold(&'static self, cuda: &Turn, stream: u64) {
        assert_eq!(cuda.cuLaunchHostFunc(stream, Some(wait), ptr::from_ref(self).cast_mut().cast()), 0);
    }

    fn open(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn new() -> &'static Self {
        Box::leak(Box::default())
    }
}

extern "C" fn wait(latch: *mut c_void) {
    // SAFETY: the tests pass a latch that is never freed.
    let latch = unsafe { &*latch.cast::<Latch>() };
    while !latch.0.load(Ordering::Acquire) {
        thread::sleep(Duration::from_micros(50));
    }
}

#[test]
fn a_stream_keeps_its_order() {
    static RAN: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    extern "C" fn record(what: *mut c_void) {
        RAN.lock().unwrap().push(what.addr());
    }
    let cuda = turn();
    let (mut stream, latch) = (0, Latch::new());
    assert_eq!(cuda.cuStreamCreate(&raw mut stream, 1), 0);
    latch.hold(&cuda, stream);
    for number in 0..100 {
        assert_eq!(cuda.cuLaunchHostFunc(stream, Some(record), ptr::without_provenance_mut(number)), 0);
    }
    assert_eq!(*RAN.lock().unwrap(), []);
    latch.open();
    assert_eq!(cuda.cuStreamSynchronize(stream), 0);
    assert_eq!(*RAN.lock().unwrap(), (0..100).collect::<Vec<usize>>());
    assert_eq!(cuda.cuStreamDestroy_v2(stream), 0);
}

#[test]
fn events_pass_after_earlier_work() {
    let cuda = turn();
    let (mut stream, mut event, latch, second) = (0, 0, Latch::new(), Latch::new());
    assert_eq!(cuda.cuStreamCreate(&raw mut stream, 1), 0);
    assert_eq!(cuda.cuEventCreate(&raw mut event, 2), 0);
    assert_eq!(cuda.cuEventQuery(event), 0, "never recorded");
    latch.hold(&cuda, stream);
    assert_eq!(cuda.cuEventRecord(event, stream), 0);
    assert_eq!(cuda.cuEventQuery(event), NOT_READY);
    second.hold(&cuda, stream);
    latch.open();
    assert_eq!(cuda.cuEventSynchronize(event), 0);
    assert_eq!(cuda.cuEventQuery(event), 0);
    assert_eq!(cuda.cuEventRecord(event, stream), 0);
    assert_eq!(cuda.cuEventQuery(event), NOT_READY, "recorded anew");
    let mut capturing = 9;
    assert_eq!((cuda.cuStreamIsCapturing(stream, &raw mut capturing), capturing), (0, 0));
    second.open();
    assert_eq!(cuda.cuCtxSynchronize(), 0);
    assert_eq!(cuda.cuEventQuery(event), 0);
    assert_eq!([cuda.cuEventDestroy_v2(event), cuda.cuStreamDestroy_v2(stream)], [0, 0]);
}

#[test]
fn streams_wait_for_events() {
    let cuda = turn();
    let (mut first, mut second, mut event, latch) = (0, 0, 0, Latch::new());
    let mapped = Mapped::new(&cuda, 1);
    assert_eq!(cuda.cuStreamCreate(&raw mut first, 1), 0);
    assert_eq!(cuda.cuStreamCreate(&raw mut second, 1), 0);
    assert_eq!(cuda.cuEventCreate(&raw mut event, 2), 0);
    assert_eq!(cuda.cuStreamWaitEvent(second, event, 0), 0, "never recorded: nothing to wait for");
    latch.hold(&cuda, first);
    assert_eq!(cuda.cuMemsetD8Async(mapped.addr, 1, 64, first), 0);
    assert_eq!(cuda.cuEventRecord(event, first), 0);
    assert_eq!(cuda.cuStreamWaitEvent(second, event, 1), INVALID_VALUE);
    assert_eq!(cuda.cuStreamWaitEvent(second, event, 0), 0);
    assert_eq!(cuda.cuMemsetD8Async(mapped.addr, 2, 32, second), 0);
    assert_eq!(cuda.cuEventDestroy_v2(event), 0, "the other stream goes on waiting");
    latch.open();
    assert_eq!(cuda.cuStreamSynchronize(second), 0);
    assert_eq!(mapped.read(0, 64), [[2; 32], [1; 32]].concat());
    mapped.end();
    assert_eq!([cuda.cuStreamDestroy_v2(first), cuda.cuStreamDestroy_v2(second)], [0, 0]);
}

#[test]
fn destroying_a_busy_stream_does_not_wait() {
    let cuda = turn();
    let (mut stream, latch) = (0, Latch::new());
    let mapped = Mapped::new(&cuda, 1);
    assert_eq!(cuda.cuStreamCreate(&raw mut stream, 1), 0);
    latch.hold(&cuda, stream);
    assert_eq!(cuda.cuMemsetD8Async(mapped.addr, 3, 16, stream), 0);
    assert_eq!(cuda.cuStreamDestroy_v2(stream), 0);
    assert_eq!(cuda.census(0).streams, 0);
    latch.open();
    assert_eq!(cuda.cuCtxSynchronize(), 0);
    assert_eq!(mapped.read(0, 16), [3; 16], "queued work is done");
    mapped.end();
}

#[test]
fn memory_in_flight_cannot_be_unmapped() {
    let cuda = turn();
    let (mut stream, latch) = (0, Latch::new());
    let mapped = Mapped::new(&cuda, 1);
    assert_eq!(cuda.cuStreamCreate(&raw mut stream, 1), 0);
    latch.hold(&cuda, stream);
    let mut read = vec![0u8; 100];
    assert_eq!(cuda.cuMemcpyDtoHAsync_v2(read.as_mut_ptr().cast(), mapped.addr, 100, stream), 0);
    assert_eq!(cuda.cuMemUnmap(mapped.addr, mapped.bytes), ILLEGAL_ADDRESS);
    latch.open();
    assert_eq!(cuda.cuStreamSynchronize(stream), 0);
    mapped.end();
    assert_eq!(cuda.cuStreamDestroy_v2(stream), 0);
}

#[test]
fn copies_read_the_callers_memory_when_they_run() {
    let cuda = turn();
    let (mut stream, latch) = (0, Latch::new());
    let mapped = Mapped::new(&cuda, 1);
    assert_eq!(cuda.cuStreamCreate(&raw mut stream, 1), 0);
    let source: &'static [AtomicI32; 4] = Box::leak(Box::default());
    latch.hold(&cuda, stream);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(mapped.addr, source.as_ptr().cast(), 16, stream), 0);
    source[2].store(0x0707_0707, Ordering::Release);
    latch.open();
    assert_eq!(cuda.cuStreamSynchronize(stream), 0);
    assert_eq!(mapped.read(8, 4), [7; 4]);
    mapped.end();
    assert_eq!(cuda.cuStreamDestroy_v2(stream), 0);
}

#[test]
fn host_functions_must_not_call_cuda() {
    static GOT: AtomicI32 = AtomicI32::new(-1);
    extern "C" fn calls(_: *mut c_void) {
        GOT.store(Cuda::loaded().cuCtxSynchronize(), Ordering::Release);
    }
    let cuda = turn();
    assert_eq!(cuda.cuLaunchHostFunc(0, None, ptr::null_mut()), INVALID_VALUE);
    assert_eq!(cuda.cuLaunchHostFunc(0, Some(calls), ptr::null_mut()), 0);
    assert_eq!(cuda.cuStreamSynchronize(0), 0);
    assert_eq!(GOT.load(Ordering::Acquire), NOT_PERMITTED);
}

#[test]
fn outcomes_of_thousands_of_copies_do_not_pile_up() {
    let cuda = turn();
    let mapped = Mapped::new(&cuda, 1);
    for _ in 0..5000 {
        assert_eq!(cuda.cuMemsetD8Async(mapped.addr, 0, 4096, 0), 0);
    }
    assert_eq!(cuda.cuStreamSynchronize(0), 0);
    mapped.end();
}

#[test]
fn each_thread_has_a_capture_mode() {
    let cuda = turn();
    let exchange = |mut mode| (cuda.cuThreadExchangeStreamCaptureMode(&raw mut mode), mode);
    assert_eq!([2, 1, 1, 0].map(exchange), [(0, 0), (0, 2), (0, 1), (0, 1)]);
    for wrong in [-1, 3] {
        assert_eq!(exchange(wrong), (INVALID_VALUE, wrong));
    }
    assert_eq!(cuda.cuThreadExchangeStreamCaptureMode(ptr::null_mut()), INVALID_VALUE);
    assert_eq!(exchange(2), (0, 0), "what was refused has changed nothing");
    let there = thread::scope(|scope| scope.spawn(|| exchange(0)).join().unwrap());
    assert_eq!((there, exchange(0)), ((0, 0), (0, 2)));
}

#[test]
fn priorities_are_those_of_the_range() {
    let cuda = turn();
    let (mut lowest, mut highest, mut stream) = (7, 7, 0);
    assert_eq!(cuda.cuCtxGetStreamPriorityRange(&raw mut lowest, &raw mut highest), 0);
    assert_eq!(cuda.cuCtxGetStreamPriorityRange(ptr::null_mut(), ptr::null_mut()), 0);
    assert!(highest < lowest && lowest == 0, "{highest}, {lowest}");
    for priority in [lowest, highest] {
        assert_eq!(cuda.cuStreamCreateWithPriority(&raw mut stream, 1, priority), 0);
        assert_eq!(cuda.cuStreamDestroy_v2(stream), 0);
    }
    for (flags, priority) in [(2, lowest), (1, lowest + 1), (1, highest - 1)] {
        assert_eq!(cuda.cuStreamCreateWithPriority(&raw mut stream, flags, priority), INVALID_VALUE);
    }
}
