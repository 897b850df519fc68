//! Streams, and host functions in stream order.

use std::ffi::{c_int, c_uint};
use std::thread;

use poorwill_core::{Driver, StreamId};

use super::context::{PRIORITY_HIGHEST, PRIORITY_LOWEST};
use crate::abi::{CallResult, Code, HostFn, InOut, Out, Unused, UserData};
use crate::capture;
use crate::current::current;
use crate::entry::{entries, run_host_function};
use crate::handle::{Handle, HandleKind, new_handle};
use crate::peer;
use crate::queue::Stream;

/// `CU_STREAM_NON_BLOCKING`, the only flag.
const FLAGS: c_uint = 1;

entries! {
    call cuStreamCreate(stream: Out<Handle>, flags: c_uint) {
        create(&stream, flags)
    }

    call cuStreamCreateWithPriority(stream: Out<Handle>, flags: c_uint, priority: c_int) {
        // CUDA clamps the priority; this detects callers that did not query the range.
        if !(PRIORITY_HIGHEST..=PRIORITY_LOWEST).contains(&priority) {
            return Err(Code::INVALID_VALUE);
        }
        create(&stream, flags)
    }

    call cuStreamDestroy_v2(stream: Handle) {
        let current = current()?;
        current.state.tables().captures.check_runs(stream)?;
        let gone = current.state.tables().streams.remove(&stream).ok_or(Code::INVALID_HANDLE)?;
        let device = &current.state.devices()[gone.device];
        if gone.is_idle(device)? {
            return Ok(device.host.stream_destroy(gone.id)?);
        }
        // As in CUDA, the caller does not wait for queued work, and the stream ends after it.
        let last = move || {
            if gone.wait(device).is_ok() {
                let _ = device.host.stream_destroy(gone.id);
            }
        };
        thread::Builder::new().name("fake-libcuda-last".into()).spawn(last).map_err(|_| Code::OPERATING_SYSTEM)?;
        Ok(())
    }

    look cuStreamSynchronize(stream: Handle) {
        let current = current()?;
        current.state.tables().captures.check_runs(stream)?;
        current.state.tables().captures.check_may_wait()?;
        let stream = current.any_stream(stream)?;
        let device = &current.state.devices()[stream.device];
        stream.wait(device)?;
        device.check()
    }

    call cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) {
        let current = current()?;
        let captured = current.capture_number(stream)?;
        let (handle, stream) = (stream, current.stream(stream)?);
        let mut tables = current.state.tables();
        let event = tables.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        match (captured, event.captured) {
            (None, None) => {}
            (Some(_), there) if captured == there => return Ok(()),
            (Some(_), _) => {
                // The graph would depend on work outside it.
                tables.captures.invalidate_stream(handle);
                return Err(Code::STREAM_CAPTURE_ISOLATION);
            }
            (None, Some(_)) => return Err(Code::NOT_SUPPORTED),
        }
        let (point, device) = (event.recorded.clone(), event.device);
        drop(tables);
        match point {
            None => Ok(()),
            Some(point) if device != stream.device => {
                stream.track(current.device, peer::queue(current.device, stream.id, move || point.pass()))
            }
            Some(point) => Ok(current.device.host.stream_wait_event(stream.id, point.id)?),
        }
    }

    call cuStreamGetCtx(stream: Handle, context: Out<Handle>) {
        let current = current()?;
        context.set(current.any_stream(stream)?.context)
    }

    call cuStreamIsCapturing(stream: Handle, status: Out<c_int>) {
        status.set(current()?.capture_status(stream)?)
    }

    stack cuThreadExchangeStreamCaptureMode(mode: InOut<c_int>) {
        mode.set(capture::exchange_mode(mode.get()?)?)
    }

    call cuStreamBeginCapture_v2(stream: Handle, mode: c_int) {
        current()?.begin_capture(stream, mode)
    }

    call cuStreamEndCapture(stream: Handle, graph: Out<Handle>) {
        graph.check()?;
        let ended = current()?.end_capture(stream);
        graph.set(ended.unwrap_or(0))?;
        ended.map(drop)
    }

    call cuGraphGetNodes(graph: Handle, nodes: Unused, count: Out<usize>) {
        let current = current()?;
        if !nodes.is_null() {
            return Err(Code::NOT_SUPPORTED);
        }
        let tables = current.state.tables();
        count.set(tables.graphs.get(&graph).ok_or(Code::INVALID_VALUE)?.nodes)
    }

    call cuGraphDestroy(graph: Handle) {
        let gone = current()?.state.tables().graphs.remove(&graph);
        gone.map(drop).ok_or(Code::INVALID_VALUE)
    }

    call cuLaunchHostFunc(handle: Handle, function: HostFn, data: UserData) {
        let current = current()?;
        let stream = current.stream(handle)?;
        let function = function.ok_or(Code::INVALID_VALUE)?;
        if current.captures(handle)? {
            return Ok(());
        }
        let work = move || run_host_function(|| call(function, data));
        let id: StreamId = stream.id;
        stream.track(current.device, current.device.host.launch_host(id, Box::new(work)))
    }
}

/// All streams are alike here.
fn create(stream: &Out<Handle>, flags: c_uint) -> CallResult {
    stream.check()?;
    if flags & !FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let current = current()?;
    let id = current.device.host.stream_create()?;
    let made = Stream {
        context: current.context,
        device: current.device.ordinal,
        id,
        is_blocking: flags & FLAGS == 0,
        in_flight: std::sync::Arc::default(),
    };
    let mut tables = current.state.tables();
    let handle = new_handle(HandleKind::Stream);
    tables.streams.insert(handle, made);
    stream.set(handle)
}

/// Moves the data as a whole into the closure, not only its pointer.
fn call(function: extern "C" fn(UserData), data: UserData) {
    function(data);
}
