//! Captures of streams into graphs.
//!
//! Work on a captured stream is checked and counted, and does not run. A graph cannot be launched. Whatever
//! invalidates a capture in CUDA does so here: waiting for the device or the stream, and querying an event
//! recorded in it. From a thread whose mode forbids it, unrelated waits and queries do so, too.

use std::cell::Cell;
use std::ffi::c_int;
use std::ops::RangeInclusive;
use std::thread::{self, ThreadId};

use crate::abi::{CallResult, Code};
use crate::context::Current;
use crate::state::{Handle, HandleKind, SimulatorState, Tables};

/// `CU_STREAM_CAPTURE_MODE_*`.
const GLOBAL: c_int = 0;
const RELAXED: c_int = 2;
const MODES: RangeInclusive<c_int> = GLOBAL..=RELAXED;

/// `CU_STREAM_CAPTURE_STATUS_*`.
const NONE: c_int = 0;
const ACTIVE: c_int = 1;
const INVALIDATED: c_int = 2;

thread_local! {
    static MODE: Cell<c_int> = const { Cell::new(GLOBAL) };
}

#[derive(Debug)]
pub(crate) struct Capture {
    /// Unique.
    number: u64,
    context: Handle,
    device: usize,
    mode: c_int,
    thread: ThreadId,
    is_valid: bool,
    /// Nodes so far.
    nodes: usize,
}

impl Capture {
    pub(crate) fn device(&self) -> usize {
        self.device
    }
}

#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) context: Handle,
    pub(crate) device: usize,
    pub(crate) nodes: usize,
}

/// Sets the calling thread's mode, and returns the old one.
pub(crate) fn exchange_mode(mode: c_int) -> CallResult<c_int> {
    if MODES.contains(&mode) { Ok(MODE.replace(mode)) } else { Err(Code::INVALID_VALUE) }
}

impl SimulatorState {
    /// For calls that may be unsafe during any capture: invalidates those for which this thread's mode
    /// forbids them.
    pub(crate) fn check_may_wait(&self) -> CallResult {
        let (here, mode) = (thread::current().id(), MODE.get());
        let forbids = |capture: &Capture| {
            let ours = capture.thread == here && capture.mode != RELAXED;
            mode != RELAXED && (ours || (mode == GLOBAL && capture.mode == GLOBAL))
        };
        self.tables().invalidate(forbids)
    }
}

impl Tables {
    /// Invalidates the captures that match; fails if there are any.
    fn invalidate(&mut self, hit: impl Fn(&Capture) -> bool) -> CallResult {
        let mut invalidated = Ok(());
        for capture in self.captures.values_mut().filter(|capture| hit(capture)) {
            capture.is_valid = false;
            invalidated = Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        invalidated
    }

    pub(crate) fn invalidate_stream(&mut self, handle: Handle) {
        self.captures.entry(handle).and_modify(|capture| capture.is_valid = false);
    }

    /// For a query of an event recorded in this capture.
    pub(crate) fn check_captured_event(&mut self, number: u64) -> CallResult {
        let invalidated = self.invalidate(|capture| capture.number == number);
        Err(if invalidated.is_err() { Code::CAPTURED_EVENT } else { Code::INVALID_VALUE })
    }
}

impl Current {
    pub(crate) fn begin_capture(&self, handle: Handle, mode: c_int) -> CallResult {
        let stream = self.stream(handle)?;
        if !MODES.contains(&mode) {
            return Err(Code::INVALID_VALUE);
        }
        if handle <= 1 {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED); // The default stream.
        }
        let mut tables = self.state.tables();
        if tables.captures.contains_key(&handle) {
            return Err(Code::ILLEGAL_STATE);
        }
        let number = tables.new_handle(HandleKind::Graph);
        let capture = Capture {
            number,
            context: stream.context,
            device: stream.device,
            mode,
            thread: thread::current().id(),
            is_valid: true,
            nodes: 0,
        };
        tables.captures.insert(handle, capture);
        Ok(())
    }

    /// Returns the graph, unless the capture was invalidated.
    pub(crate) fn end_capture(&self, handle: Handle) -> CallResult<Handle> {
        self.stream(handle)?;
        let mut tables = self.state.tables();
        let capture = tables.captures.get(&handle).ok_or(Code::ILLEGAL_STATE)?;
        if capture.mode != RELAXED && capture.thread != thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let Some(Capture { context, device, is_valid: true, nodes, .. }) = tables.captures.remove(&handle)
        else {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        };
        let graph = tables.new_handle(HandleKind::Graph);
        tables.graphs.insert(graph, Graph { context, device, nodes });
        Ok(graph)
    }

    pub(crate) fn capture_status(&self, handle: Handle) -> CallResult<c_int> {
        self.state.any_stream(self, handle)?;
        if self.is_implicitly_captured(handle) {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(match self.state.tables().captures.get(&handle) {
            None => NONE,
            Some(capture) if capture.is_valid => ACTIVE,
            Some(_) => INVALIDATED,
        })
    }

    /// Whether this is the default stream, and a stream that it synchronizes with is being captured.
    fn is_implicitly_captured(&self, handle: Handle) -> bool {
        let tables = self.state.tables();
        let blocks = |stream: &Handle| tables.streams.get(stream).is_some_and(|stream| stream.is_blocking);
        let mut captures = tables.captures.iter();
        handle <= 1 && captures.any(|(stream, capture)| capture.context == self.context && blocks(stream))
    }

    /// Counts work on a stream as a node if the stream is being captured, and returns whether it is.
    pub(crate) fn captures(&self, handle: Handle) -> CallResult<bool> {
        let is_captured = self.capture_number(handle)?.is_some();
        self.state.tables().captures.entry(handle).and_modify(|capture| capture.nodes += 1);
        Ok(is_captured)
    }

    /// The number of a stream's capture, for calls that add no node.
    pub(crate) fn capture_number(&self, handle: Handle) -> CallResult<Option<u64>> {
        if self.is_implicitly_captured(handle) {
            // The streams that it would wait for are invalidated, too.
            let _ = self.state.tables().invalidate(|capture| capture.context == self.context);
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        let tables = self.state.tables();
        let Some(capture) = tables.captures.get(&handle) else { return Ok(None) };
        if !capture.is_valid {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        Ok(Some(capture.number))
    }

    /// For calls that wait for a stream, or destroy it: invalidates its capture.
    pub(crate) fn check_runs(&self, handle: Handle) -> CallResult {
        let mut tables = self.state.tables();
        let number = tables.captures.get(&handle).map(|capture| capture.number);
        tables.invalidate(|capture| Some(capture.number) == number)
    }

    /// For calls that wait for the device: invalidates every capture on it.
    pub(crate) fn check_device_runs(&self) -> CallResult {
        self.state.tables().invalidate(|capture| capture.device == self.device.ordinal)
    }
}
