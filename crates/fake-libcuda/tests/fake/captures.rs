//! Captures of streams into graphs: what a capture accepts and what invalidates it, as measured on a GPU.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use crate::api::{INVALID_VALUE, Mapped, Turn, turn};

const ILLEGAL_STATE: c_int = 401;
const UNSUPPORTED: c_int = 900;
const INVALIDATED: c_int = 901;
const ISOLATION: c_int = 905;
const IMPLICIT: c_int = 906;
const CAPTURED_EVENT: c_int = 907;
const WRONG_THREAD: c_int = 908;

const GLOBAL: c_int = 0;
const OF_THE_THREAD: c_int = 1;
const RELAXED: c_int = 2;

/// A captured stream, another one, and an event that was recorded on each before.
struct Scene<'t> {
    cuda: &'t Turn,
    captured: u64,
    other: u64,
    events: [u64; 2],
}

impl<'t> Scene<'t> {
    fn new(cuda: &'t Turn) -> Self {
        let streams = [0, 1].map(|_| {
            let mut stream = 0;
            assert_eq!(cuda.cuStreamCreate(&raw mut stream, 1), 0);
            stream
        });
        let events = streams.map(|stream| {
            let mut event = 0;
            assert_eq!(cuda.cuEventCreate(&raw mut event, 2), 0);
            assert_eq!(cuda.cuEventRecord(event, stream), 0);
            event
        });
        Self { cuda, captured: streams[0], other: streams[1], events }
    }

    fn status(&self, stream: u64) -> c_int {
        let mut status = 9;
        assert_eq!(self.cuda.cuStreamIsCapturing(stream, &raw mut status), 0);
        status
    }

    /// Makes the calls during a capture, in this thread mode. Returns their code and that of the capture's end.
    fn during(&self, mode: c_int, calls: impl FnOnce() -> c_int) -> (c_int, c_int) {
        assert_eq!(self.cuda.cuStreamBeginCapture_v2(self.captured, GLOBAL), 0);
        let mut exchanged = mode;
        assert_eq!(self.cuda.cuThreadExchangeStreamCaptureMode(&raw mut exchanged), 0);
        let said = calls();
        assert_eq!(self.cuda.cuThreadExchangeStreamCaptureMode(&raw mut exchanged), 0);
        assert_eq!(exchanged, mode, "the thread's own is back");
        let mut graph = 0;
        let ended = self.cuda.cuStreamEndCapture(self.captured, &raw mut graph);
        assert_eq!(ended == 0, graph != 0);
        if graph != 0 {
            assert_eq!(self.cuda.cuGraphDestroy(graph), 0);
        }
        (said, ended)
    }

    fn end(self) {
        for event in self.events {
            assert_eq!(self.cuda.cuEventDestroy_v2(event), 0);
        }
        for stream in [self.captured, self.other] {
            assert_eq!(self.cuda.cuStreamDestroy_v2(stream), 0);
        }
    }
}

#[test]
fn captured_work_is_counted_and_does_not_run() {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    extern "C" fn runs(_: *mut c_void) {
        RUNS.fetch_add(1, Ordering::Relaxed);
    }
    let cuda = turn();
    let (scene, mapped) = (Scene::new(&cuda), Mapped::new(&cuda, 1));
    assert_eq!(cuda.cuMemsetD8Async(mapped.addr, 7, 64, 0), 0);
    assert_eq!(scene.status(scene.captured), 0);
    assert_eq!(cuda.cuStreamBeginCapture_v2(scene.captured, GLOBAL), 0);
    assert_eq!((scene.status(scene.captured), scene.status(scene.other), scene.status(0)), (1, 0, 0));
    assert_eq!(cuda.cuMemsetD8Async(mapped.addr, 0, 64, scene.captured), 0);
    let bytes = [9u8; 64];
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(mapped.addr, bytes.as_ptr().cast(), 64, scene.captured), 0);
    assert_eq!(cuda.cuLaunchHostFunc(scene.captured, Some(runs), ptr::null_mut()), 0);
    assert_eq!(cuda.cuMemsetD8Async(1, 0, 64, scene.other), INVALID_VALUE, "others run, and fail, as ever");
    let (mut graph, mut nodes) = (0, 0);
    assert_eq!(cuda.cuStreamEndCapture(scene.captured, &raw mut graph), 0);
    assert_eq!(cuda.cuGraphGetNodes(graph, ptr::null_mut(), &raw mut nodes), 0);
    assert_eq!((nodes, scene.status(scene.captured)), (3, 0));
    assert_eq!(cuda.cuStreamSynchronize(scene.captured), 0);
    assert_eq!((mapped.read(0, 64), RUNS.load(Ordering::Relaxed)), (vec![7; 64], 0));
    assert_eq!(cuda.cuGraphDestroy(graph), 0);
    assert_eq!(cuda.cuGraphDestroy(graph), INVALID_VALUE);
    mapped.end();
    scene.end();
}

#[test]
fn calls_that_might_wait_invalidate_a_capture_unless_the_mode_is_relaxed() {
    let cuda = turn();
    let scene = Scene::new(&cuda);
    let [before, elsewhere] = scene.events;
    let calls: [&dyn Fn() -> c_int; 5] = [
        &|| cuda.cuEventQuery(elsewhere),
        &|| cuda.cuEventSynchronize(elsewhere),
        &|| cuda.cuStreamSynchronize(scene.other),
        &|| cuda.cuEventQuery(before),
        &|| cuda.cuEventSynchronize(before),
    ];
    for (nth, call) in calls.iter().enumerate() {
        assert_eq!(scene.during(GLOBAL, call), (UNSUPPORTED, INVALIDATED), "call {nth}");
        assert_eq!(scene.during(OF_THE_THREAD, call), (UNSUPPORTED, INVALIDATED), "call {nth}");
        assert_eq!(scene.during(RELAXED, call), (0, 0), "call {nth}");
    }
    scene.end();
}

#[test]
fn calls_on_the_capture_itself_invalidate_it_in_every_mode() {
    let cuda = turn();
    let scene = Scene::new(&cuda);
    let [event, elsewhere] = scene.events;
    for mode in [GLOBAL, RELAXED] {
        assert_eq!(scene.during(mode, || cuda.cuCtxSynchronize()), (UNSUPPORTED, INVALIDATED));
        assert_eq!(
            scene.during(mode, || cuda.cuStreamSynchronize(scene.captured)),
            (UNSUPPORTED, INVALIDATED)
        );
        assert_eq!(
            scene.during(mode, || cuda.cuStreamDestroy_v2(scene.captured)),
            (UNSUPPORTED, INVALIDATED)
        );
        let wait = || cuda.cuStreamWaitEvent(scene.captured, elsewhere, 0);
        assert_eq!(scene.during(mode, wait), (ISOLATION, INVALIDATED));
    }
    let record = || cuda.cuEventRecord(event, scene.captured);
    assert_eq!(scene.during(RELAXED, || record() + cuda.cuEventQuery(event)), (CAPTURED_EVENT, INVALIDATED));
    assert_eq!(scene.during(RELAXED, record), (0, 0), "recording alone does no harm");
    assert_eq!(cuda.cuEventQuery(event), INVALID_VALUE, "it says nothing when the capture is over");
    let twice = || record() + cuda.cuStreamWaitEvent(scene.captured, event, 0);
    assert_eq!(scene.during(RELAXED, twice), (0, 0));
    assert_eq!([cuda.cuEventRecord(event, scene.captured), cuda.cuEventSynchronize(event)], [0; 2]);
    scene.end();
}

#[test]
fn memory_moves_during_a_capture() {
    let cuda = turn();
    let scene = Scene::new(&cuda);
    let outcome = scene.during(GLOBAL, || {
        let (mut free, mut total) = (0, 0);
        assert_eq!(cuda.cuMemGetInfo_v2(&raw mut free, &raw mut total), 0);
        let mapped = Mapped::new(&cuda, 1);
        assert_eq!(cuda.cuMemUnmap(mapped.addr, mapped.bytes), 0);
        assert_eq!(cuda.cuMemRelease(mapped.handle), 0);
        assert_eq!(cuda.cuMemAddressFree(mapped.addr, mapped.bytes), 0);
        cuda.cuEventRecord(scene.events[1], scene.other)
    });
    assert_eq!(outcome, (0, 0));
    scene.end();
}

#[test]
fn captures_begin_and_end_where_allowed() {
    let cuda = turn();
    let scene = Scene::new(&cuda);
    let mut graph = 7;
    assert_eq!(cuda.cuStreamEndCapture(scene.captured, &raw mut graph), ILLEGAL_STATE);
    assert_eq!(cuda.cuStreamBeginCapture_v2(0, GLOBAL), UNSUPPORTED);
    assert_eq!(cuda.cuStreamBeginCapture_v2(scene.captured, 3), INVALID_VALUE);
    assert_eq!(cuda.cuStreamBeginCapture_v2(scene.captured, GLOBAL), 0);
    assert_eq!(cuda.cuStreamBeginCapture_v2(scene.captured, GLOBAL), ILLEGAL_STATE);
    assert_eq!(cuda.cuStreamBeginCapture_v2(scene.other, RELAXED), 0, "several at once");
    let mut context = 0;
    assert_eq!(cuda.cuCtxGetCurrent(&raw mut context), 0);
    let (captured, other) = (scene.captured, scene.other);
    let shared = crate::api::Cuda::loaded();
    let elsewhere = thread::spawn(move || {
        assert_eq!(shared.cuCtxSetCurrent(context), 0);
        let mut graph = 0;
        let wrong = shared.cuStreamEndCapture(captured, &raw mut graph);
        let right = shared.cuStreamEndCapture(other, &raw mut graph);
        (wrong, right, graph)
    });
    let (wrong, right, second) = elsewhere.join().unwrap();
    assert_eq!((wrong, right), (WRONG_THREAD, 0));
    assert_eq!(cuda.cuStreamEndCapture(scene.captured, &raw mut graph), 0);
    assert_eq!([cuda.cuGraphDestroy(graph), cuda.cuGraphDestroy(second)], [0; 2]);
    scene.end();
    // A stream that the default stream waits for.
    let (mut blocking, mut status) = (0, 0);
    assert_eq!(cuda.cuStreamCreate(&raw mut blocking, 0), 0);
    assert_eq!(cuda.cuStreamBeginCapture_v2(blocking, GLOBAL), 0);
    assert_eq!(cuda.cuStreamIsCapturing(0, &raw mut status), IMPLICIT);
    assert_eq!(cuda.cuStreamEndCapture(blocking, &raw mut graph), 0, "asking does no harm");
    assert_eq!([cuda.cuGraphDestroy(graph), cuda.cuStreamDestroy_v2(blocking)], [0; 2]);
}
