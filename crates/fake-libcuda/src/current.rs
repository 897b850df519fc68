//! What calls without a context of their own are about: the calling thread's context, and its device.
//!
//! A stream of another context is refused here, and so is what a capture forbids.

use std::ffi::c_int;
use std::sync::Arc;

use poorwill_core::StreamId;

use crate::abi::{CallResult, Code};
use crate::context;
use crate::device::Device;
use crate::handle::{Handle, HandleKind, new_handle};
use crate::in_flight::InFlight;
use crate::queue::Stream;
use crate::state::{self, SimulatorState};

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, which are not handles.
const LEGACY: Handle = 1;
const PER_THREAD: Handle = 2;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Current {
    pub(crate) state: &'static SimulatorState,
    pub(crate) context: Handle,
    pub(crate) device: &'static Device,
}

pub(crate) fn current() -> CallResult<Current> {
    let current = current_even_if_failed()?;
    current.device.check()?;
    Ok(current)
}

pub(crate) fn current_even_if_failed() -> CallResult<Current> {
    let state = state::get()?;
    let context = context::top().ok_or(Code::INVALID_CONTEXT)?;
    let at = state.tables().contexts.get(&context).map(|found| found.device);
    let device = at.and_then(|at| state.devices().get(at)).ok_or(Code::CONTEXT_IS_DESTROYED)?;
    Ok(Current { state, context, device })
}

impl Current {
    /// The stream of a handle, in any context.
    pub(crate) fn any_stream(&self, handle: Handle) -> CallResult<Stream> {
        match handle {
            0 | LEGACY => Ok(Stream {
                context: self.context,
                device: self.device.ordinal,
                id: StreamId::DEFAULT,
                is_blocking: false,
                in_flight: Arc::clone(&self.device.in_flight),
            }),
            PER_THREAD => Err(Code::NOT_SUPPORTED),
            _ => self.state.tables().streams.get(&handle).cloned().ok_or(Code::INVALID_HANDLE),
        }
    }

    /// The stream of a handle, which must be of this context.
    pub(crate) fn stream(&self, handle: Handle) -> CallResult<Stream> {
        let stream = self.any_stream(handle)?;
        if stream.context == self.context { Ok(stream) } else { Err(Code::INVALID_HANDLE) }
    }

    pub(crate) fn wait_for_device(&self) -> CallResult {
        let of_device = |stream: &&Stream| stream.device == self.device.ordinal;
        let mut in_flight: Vec<Arc<InFlight>> = self
            .state
            .tables()
            .streams
            .values()
            .filter(of_device)
            .map(|s| Arc::clone(&s.in_flight))
            .collect();
        in_flight.push(Arc::clone(&self.device.in_flight));
        let queued: Vec<u64> = in_flight.iter().map(|in_flight| in_flight.queued()).collect();
        self.device.wait()?;
        in_flight
            .iter()
            .zip(queued)
            .for_each(|(in_flight, upto)| self.device.record_outcomes(in_flight, upto));
        self.device.check()
    }

    pub(crate) fn begin_capture(&self, handle: Handle, mode: c_int) -> CallResult {
        let stream = self.stream(handle)?;
        self.state.tables().captures.begin(handle, (stream.context, stream.device), mode)
    }

    /// Returns the graph, unless the capture was invalidated.
    pub(crate) fn end_capture(&self, handle: Handle) -> CallResult<Handle> {
        self.stream(handle)?;
        let mut tables = self.state.tables();
        let ended = tables.captures.end(handle)?;
        let graph = new_handle(HandleKind::Graph);
        tables.graphs.insert(graph, ended);
        Ok(graph)
    }

    pub(crate) fn capture_status(&self, handle: Handle) -> CallResult<c_int> {
        self.any_stream(handle)?;
        if self.is_implicitly_captured(handle) {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(self.state.tables().captures.status(handle))
    }

    /// Whether this is the default stream, and a stream that it synchronizes with is being captured.
    fn is_implicitly_captured(&self, handle: Handle) -> bool {
        let tables = self.state.tables();
        let blocks = |stream: &Handle| tables.streams.get(stream).is_some_and(|stream| stream.is_blocking);
        handle <= 1 && tables.captures.streams(self.context).any(|stream| blocks(&stream))
    }

    /// Counts work on a stream as a node if the stream is being captured, and returns whether it is.
    pub(crate) fn captures(&self, handle: Handle) -> CallResult<bool> {
        let is_captured = self.capture_number(handle)?.is_some();
        self.state.tables().captures.add_node(handle);
        Ok(is_captured)
    }

    /// The number of a stream's capture, for calls that add no node.
    pub(crate) fn capture_number(&self, handle: Handle) -> CallResult<Option<u64>> {
        if self.is_implicitly_captured(handle) {
            // The streams that it would wait for are invalidated, too.
            self.state.tables().captures.invalidate_context(self.context);
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        self.state.tables().captures.number(handle)
    }
}
