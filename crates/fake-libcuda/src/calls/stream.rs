//! Streams, and functions of the host in their order.

use std::cell::Cell;
use std::ffi::{c_int, c_uint};
use std::ops::RangeInclusive;
use std::thread;

use poorwill_core::{Driver, StreamId};

use super::context::{PRIORITY_HIGHEST, PRIORITY_LOWEST};
use crate::abi::{Code, HostFn, InOut, Out, Outcome, UserData};
use crate::context::current;
use crate::entry::{as_host_function, entries};
use crate::queue::Stream;
use crate::world::{Handle, Kind};

/// `CU_STREAM_NON_BLOCKING`, the one flag.
const FLAGS: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_*`: global, of the thread, relaxed.
const CAPTURE_MODES: RangeInclusive<c_int> = 0..=2;

thread_local! {
    /// Kept for who asks: nothing is ever captured.
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

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
        let stream = current.world.any_stream(&current, stream)?;
        let device = &current.world.devices[stream.device];
        stream.wait(device)?;
        device.check()
    }

    call cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) {
        let current = current()?;
        let stream = current.stream(stream)?;
        let tables = current.world.tables();
        let event = tables.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
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
        let current = current()?;
        current.world.any_stream(&current, stream)?;
        status.set(0)
    }

    stack cuThreadExchangeStreamCaptureMode(mode: InOut<c_int>) {
        let wanted = mode.get()?;
        if !CAPTURE_MODES.contains(&wanted) {
            return Err(Code::INVALID_VALUE);
        }
        mode.set(CAPTURE_MODE.replace(wanted))
    }

    call cuLaunchHostFunc(stream: Handle, function: HostFn, data: UserData) {
        let current = current()?;
        let stream = current.stream(stream)?;
        let function = function.ok_or(Code::INVALID_VALUE)?;
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
