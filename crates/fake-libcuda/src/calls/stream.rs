//! Streams, and functions of the host in their order.

use std::ffi::{c_int, c_uint};
use std::thread;

use poorwill_core::{Driver, StreamId};

use super::context::{PRIORITY_HIGHEST, PRIORITY_LOWEST};
use crate::abi::{Code, HostFn, InOut, Out, Outcome, Unused, UserData};
use crate::capture;
use crate::context::current;
use crate::entry::{as_host_function, entries};
use crate::queue::Stream;
use crate::world::{Handle, Kind};

/// `CU_STREAM_NON_BLOCKING`, the one flag.
const FLAGS: c_uint = 1;

entries! {
    call cuStreamCreate(stream: Out<Handle>, flags: c_uint) {
        create(&stream, flags)
    }

    call cuStreamCreateWithPriority(stream: Out<Handle>, flags: c_uint, priority: c_int) {
        // CUDA takes the nearest that there is; whoever has not asked for the range is found out here.
        if !(PRIORITY_HIGHEST..=PRIORITY_LOWEST).contains(&priority) {
            return Err(Code::INVALID_VALUE);
        }
        create(&stream, flags)
    }

    call cuStreamDestroy_v2(stream: Handle) {
        let current = current()?;
        current.check_runs(stream)?;
        let gone = current.world.tables().streams.remove(&stream).ok_or(Code::INVALID_HANDLE)?;
        let device = &current.world.devices[gone.device];
        if gone.is_idle(device)? {
            return Ok(device.host.stream_destroy(gone.id)?);
        }
        // As with CUDA the caller does not wait for what is queued, and the stream goes when that is done.
        let last = move || {
            if gone.wait(device).is_ok() {
                // Nobody else knows it any more.
                let _ = device.host.stream_destroy(gone.id);
            }
        };
        thread::Builder::new().name("fake-libcuda-last".into()).spawn(last).map_err(|_| Code::OPERATING_SYSTEM)?;
        Ok(())
    }

    call cuStreamSynchronize(stream: Handle) {
        let current = current()?;
        current.check_runs(stream)?;
        current.world.check_may_wait()?;
        let stream = current.world.any_stream(&current, stream)?;
        let device = &current.world.devices[stream.device];
        stream.wait(device)?;
        device.check()
    }

    call cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) {
        let current = current()?;
        let captured = current.capture_number(stream)?;
        let (handle, stream) = (stream, current.stream(stream)?);
        let mut tables = current.world.tables();
        let event = tables.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        match (captured, event.captured) {
            (None, None) => {}
            (Some(_), there) if captured == there => return Ok(()),
            (Some(_), _) => {
                // The graph would depend on what is not in it.
                tables.spoil_stream(handle);
                return Err(Code::STREAM_CAPTURE_ISOLATION);
            }
            (None, Some(_)) => return Err(Code::NOT_SUPPORTED),
        }
        match &event.recorded {
            None => Ok(()),
            Some(_) if event.device != stream.device => Err(Code::NOT_SUPPORTED),
            Some(point) => Ok(current.device.host.stream_wait_event(stream.id, point.id)?),
        }
    }

    call cuStreamGetCtx(stream: Handle, context: Out<Handle>) {
        let current = current()?;
        context.set(current.world.any_stream(&current, stream)?.context)
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
        let tables = current.world.tables();
        count.set(tables.graphs.get(&graph).ok_or(Code::INVALID_VALUE)?.pieces)
    }

    call cuGraphDestroy(graph: Handle) {
        let gone = current()?.world.tables().graphs.remove(&graph);
        gone.map(drop).ok_or(Code::INVALID_VALUE)
    }

    call cuLaunchHostFunc(handle: Handle, function: HostFn, data: UserData) {
        let current = current()?;
        let stream = current.stream(handle)?;
        let function = function.ok_or(Code::INVALID_VALUE)?;
        if current.captures(handle)? {
            return Ok(());
        }
        let work = move || as_host_function(|| call(function, data));
        let id: StreamId = stream.id;
        stream.keep(current.device, current.device.host.launch_host(id, Box::new(work)))
    }
}

/// All streams are alike here.
fn create(stream: &Out<Handle>, flags: c_uint) -> Outcome {
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
        flights: std::sync::Arc::default(),
    };
    let mut tables = current.world.tables();
    let handle = tables.new_handle(Kind::Stream);
    tables.streams.insert(handle, made);
    stream.set(handle)
}

/// Takes the data as a whole along, and not its pointer alone.
fn call(function: extern "C" fn(UserData), data: UserData) {
    function(data);
}
