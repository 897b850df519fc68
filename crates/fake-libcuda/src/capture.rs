//! Captures of streams into graphs.
//!
//! What is queued on a stream that is being captured is checked like any other work and counted, and does not run;
//! the graph is a number of pieces of work and cannot be launched. What would spoil a capture of CUDA's spoils it here:
//! waiting for the device or for the stream, asking for an event that was recorded in it, and, from a thread whose
//! mode does not allow it, waits and queries that have nothing to do with it.

use std::cell::Cell;
use std::ffi::c_int;
use std::ops::RangeInclusive;
use std::thread::{self, ThreadId};

use crate::abi::{Code, Outcome};
use crate::context::Current;
use crate::world::{Handle, Kind, Tables, World};

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

/// A stream's capture.
#[derive(Debug)]
pub(crate) struct Capture {
    /// No two have the same.
    number: u64,
    context: Handle,
    device: usize,
    mode: c_int,
    thread: ThreadId,
    is_valid: bool,
    /// Pieces of work so far.
    pieces: usize,
}

impl Capture {
    pub(crate) fn device(&self) -> usize {
        self.device
    }
}

/// What a capture has given.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) context: Handle,
    pub(crate) device: usize,
    /// Pieces of work in it.
    pub(crate) pieces: usize,
}

/// Sets the calling thread's mode, and gives the one it had.
pub(crate) fn exchange_mode(mode: c_int) -> Outcome<c_int> {
    if MODES.contains(&mode) { Ok(MODE.replace(mode)) } else { Err(Code::INVALID_VALUE) }
}

impl World {
    /// For calls that may be unsafe during a capture, whatever they are about: spoils those captures for which this
    /// thread's mode forbids it.
    pub(crate) fn check_may_wait(&self) -> Outcome {
        let (here, mode) = (thread::current().id(), MODE.get());
        let forbids = |capture: &Capture| {
            let ours = capture.thread == here && capture.mode != RELAXED;
            mode != RELAXED && (ours || (mode == GLOBAL && capture.mode == GLOBAL))
        };
        self.tables().spoil(forbids)
    }
}

impl Tables {
    /// Spoils the captures that are `hit`; fails if there are any.
    fn spoil(&mut self, hit: impl Fn(&Capture) -> bool) -> Outcome {
        let mut spoiled = Ok(());
        for capture in self.captures.values_mut().filter(|capture| hit(capture)) {
            capture.is_valid = false;
            spoiled = Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        spoiled
    }

    /// Spoils the capture of a stream.
    pub(crate) fn spoil_stream(&mut self, handle: Handle) {
        self.captures.entry(handle).and_modify(|capture| capture.is_valid = false);
    }

    /// For an event that was recorded in this capture and is asked for.
    pub(crate) fn check_captured_event(&mut self, number: u64) -> Outcome {
        let spoiled = self.spoil(|capture| capture.number == number);
        Err(if spoiled.is_err() { Code::CAPTURED_EVENT } else { Code::INVALID_VALUE })
    }
}

impl Current {
    /// Begins to capture a stream of this context.
    pub(crate) fn begin_capture(&self, handle: Handle, mode: c_int) -> Outcome {
        let stream = self.stream(handle)?;
        if !MODES.contains(&mode) {
            return Err(Code::INVALID_VALUE);
        }
        if handle <= 1 {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED); // The default stream.
        }
        let mut tables = self.world.tables();
        if tables.captures.contains_key(&handle) {
            return Err(Code::ILLEGAL_STATE);
        }
        let number = tables.new_handle(Kind::Graph);
        let capture = Capture {
            number,
            context: stream.context,
            device: stream.device,
            mode,
            thread: thread::current().id(),
            is_valid: true,
            pieces: 0,
        };
        tables.captures.insert(handle, capture);
        Ok(())
    }

    /// Ends the capture of a stream; gives its graph, unless it was spoiled.
    pub(crate) fn end_capture(&self, handle: Handle) -> Outcome<Handle> {
        self.stream(handle)?;
        let mut tables = self.world.tables();
        let capture = tables.captures.get(&handle).ok_or(Code::ILLEGAL_STATE)?;
        if capture.mode != RELAXED && capture.thread != thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let Some(Capture { context, device, is_valid: true, pieces, .. }) = tables.captures.remove(&handle)
        else {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        };
        let graph = tables.new_handle(Kind::Graph);
        tables.graphs.insert(graph, Graph { context, device, pieces });
        Ok(graph)
    }

    /// `CU_STREAM_CAPTURE_STATUS_*` of a stream.
    pub(crate) fn capture_status(&self, handle: Handle) -> Outcome<c_int> {
        self.world.any_stream(self, handle)?;
        if self.is_implicitly_captured(handle) {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(match self.world.tables().captures.get(&handle) {
            None => NONE,
            Some(capture) if capture.is_valid => ACTIVE,
            Some(_) => INVALIDATED,
        })
    }

    /// Whether this is the default stream, and one that it waits for is being captured.
    fn is_implicitly_captured(&self, handle: Handle) -> bool {
        let tables = self.world.tables();
        let blocks = |stream: &Handle| tables.streams.get(stream).is_some_and(|stream| stream.is_blocking);
        let mut captures = tables.captures.iter();
        handle <= 1 && captures.any(|(stream, capture)| capture.context == self.context && blocks(stream))
    }

    /// For a piece of work on a stream: whether it goes into a graph instead of being run.
    pub(crate) fn captures(&self, handle: Handle) -> Outcome<bool> {
        let is_captured = self.capture_number(handle)?.is_some();
        self.world.tables().captures.entry(handle).and_modify(|capture| capture.pieces += 1);
        Ok(is_captured)
    }

    /// The number of a stream's capture, for what is no work of its own.
    pub(crate) fn capture_number(&self, handle: Handle) -> Outcome<Option<u64>> {
        if self.is_implicitly_captured(handle) {
            // What it would wait for cannot be captured any more.
            let _ = self.world.tables().spoil(|capture| capture.context == self.context);
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        let tables = self.world.tables();
        let Some(capture) = tables.captures.get(&handle) else { return Ok(None) };
        if !capture.is_valid {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        Ok(Some(capture.number))
    }

    /// For who waits for a stream, or ends it: spoils its capture.
    pub(crate) fn check_runs(&self, handle: Handle) -> Outcome {
        let mut tables = self.world.tables();
        let number = tables.captures.get(&handle).map(|capture| capture.number);
        tables.spoil(|capture| Some(capture.number) == number)
    }

    /// For who waits for the device: spoils every capture on it.
    pub(crate) fn check_device_runs(&self) -> Outcome {
        self.world.tables().spoil(|capture| capture.device == self.device.ordinal)
    }
}
