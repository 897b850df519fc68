//! Captures of streams into graphs.
//!
//! Work on a captured stream is checked and counted, and does not run. A graph cannot be launched. Whatever
//! invalidates a capture in CUDA does so here: waiting for the device or the stream, and querying an event
//! recorded in it. From a thread whose mode forbids it, unrelated waits and queries do so, too.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::ops::RangeInclusive;
use std::thread::{self, ThreadId};

use crate::abi::{CallResult, Code};
use crate::handle::{Handle, HandleKind, new_handle};

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

/// The captures under way, by stream.
#[derive(Debug, Default)]
pub(crate) struct Captures(HashMap<Handle, Capture>);

#[derive(Debug)]
struct Capture {
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

impl Captures {
    /// How many there are on a device.
    pub(crate) fn count(&self, device: usize) -> u64 {
        self.0.values().map(|capture| u64::from(capture.device == device)).sum()
    }

    /// For calls that may be unsafe during any capture: invalidates those for which this thread's mode
    /// forbids them.
    pub(crate) fn check_may_wait(&mut self) -> CallResult {
        let (here, mode) = (thread::current().id(), MODE.get());
        let forbids = |capture: &Capture| {
            let ours = capture.thread == here && capture.mode != RELAXED;
            mode != RELAXED && (ours || (mode == GLOBAL && capture.mode == GLOBAL))
        };
        self.invalidate(forbids)
    }

    /// Invalidates the captures that match; fails if there are any.
    fn invalidate(&mut self, hit: impl Fn(&Capture) -> bool) -> CallResult {
        let mut invalidated = Ok(());
        for capture in self.0.values_mut().filter(|capture| hit(capture)) {
            capture.is_valid = false;
            invalidated = Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        invalidated
    }

    pub(crate) fn invalidate_stream(&mut self, handle: Handle) {
        self.0.entry(handle).and_modify(|capture| capture.is_valid = false);
    }

    /// Invalidates all in a context.
    pub(crate) fn invalidate_context(&mut self, context: Handle) {
        // Whether there are any does not matter.
        let _ = self.invalidate(|capture| capture.context == context);
    }

    /// For calls that wait for a stream, or destroy it: invalidates its capture.
    pub(crate) fn check_runs(&mut self, handle: Handle) -> CallResult {
        let number = self.0.get(&handle).map(|capture| capture.number);
        self.invalidate(|capture| Some(capture.number) == number)
    }

    /// For calls that wait for a device: invalidates every capture on it.
    pub(crate) fn check_device_runs(&mut self, device: usize) -> CallResult {
        self.invalidate(|capture| capture.device == device)
    }

    /// For a query of an event recorded in this capture.
    pub(crate) fn check_captured_event(&mut self, number: u64) -> CallResult {
        let invalidated = self.invalidate(|capture| capture.number == number);
        Err(if invalidated.is_err() { Code::CAPTURED_EVENT } else { Code::INVALID_VALUE })
    }

    /// Begins one of a stream, which lies in this context of this device.
    pub(crate) fn begin(
        &mut self,
        handle: Handle,
        (context, device): (Handle, usize),
        mode: c_int,
    ) -> CallResult {
        if !MODES.contains(&mode) {
            return Err(Code::INVALID_VALUE);
        }
        if handle <= 1 {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED); // The default stream.
        }
        if self.0.contains_key(&handle) {
            return Err(Code::ILLEGAL_STATE);
        }
        let (number, thread) = (new_handle(HandleKind::Graph), thread::current().id());
        let capture = Capture { number, context, device, mode, thread, is_valid: true, nodes: 0 };
        self.0.insert(handle, capture);
        Ok(())
    }

    /// Returns the graph, unless the capture was invalidated.
    pub(crate) fn end(&mut self, handle: Handle) -> CallResult<Graph> {
        let capture = self.0.get(&handle).ok_or(Code::ILLEGAL_STATE)?;
        if capture.mode != RELAXED && capture.thread != thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        match self.0.remove(&handle) {
            Some(Capture { context, device, is_valid: true, nodes, .. }) => {
                Ok(Graph { context, device, nodes })
            }
            _ => Err(Code::STREAM_CAPTURE_INVALIDATED),
        }
    }

    pub(crate) fn status(&self, handle: Handle) -> c_int {
        match self.0.get(&handle) {
            None => NONE,
            Some(capture) if capture.is_valid => ACTIVE,
            Some(_) => INVALIDATED,
        }
    }

    /// The captured streams of a context.
    pub(crate) fn streams(&self, context: Handle) -> impl Iterator<Item = Handle> {
        let ours = self.0.iter().filter(move |(_, capture)| capture.context == context);
        ours.map(|(stream, _)| *stream)
    }

    pub(crate) fn add_node(&mut self, handle: Handle) {
        self.0.entry(handle).and_modify(|capture| capture.nodes += 1);
    }

    /// The number of a stream's capture, which must be valid.
    pub(crate) fn number(&self, handle: Handle) -> CallResult<Option<u64>> {
        match self.0.get(&handle) {
            Some(capture) if !capture.is_valid => Err(Code::STREAM_CAPTURE_INVALIDATED),
            capture => Ok(capture.map(|capture| capture.number)),
        }
    }

    /// For a stream that is gone.
    pub(crate) fn forget(&mut self, stream: Handle) {
        self.0.remove(&stream);
    }
}
