//! Events.

use std::ffi::c_uint;
use std::sync::Arc;

use crate::abi::{CallResult, Code, Out};
use crate::current::{Current, current};
use crate::entry::entries;
use crate::handle::{Handle, HandleKind, new_handle};
use crate::queue::{Event, Point};

/// `CU_EVENT_*`: blocking sync, no timing, for other processes.
const FLAGS: c_uint = 1 | NO_TIMING | INTERPROCESS;
const NO_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;

entries! {
    call cuEventCreate(event: Out<Handle>, flags: c_uint) {
        event.check()?;
        let times_for_others = flags & INTERPROCESS != 0 && flags & NO_TIMING == 0;
        if flags & !FLAGS != 0 || times_for_others {
            return Err(Code::INVALID_VALUE);
        }
        let current = current()?;
        let handle = new_handle(HandleKind::Event);
        let made = Event { context: current.context, device: current.device.ordinal, recorded: None, captured: None };
        current.state.tables().events.insert(handle, made);
        event.set(handle)
    }

    call cuEventDestroy_v2(event: Handle) {
        let gone = current()?.state.tables().events.remove(&event);
        gone.map(drop).ok_or(Code::INVALID_HANDLE)
    }

    call cuEventRecord(event: Handle, stream: Handle) {
        let current = current()?;
        let captured = current.capture_number(stream)?;
        let stream = current.any_stream(stream)?;
        let mut tables = current.state.tables();
        let event = tables.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)?;
        if event.context != stream.context {
            return Err(Code::INVALID_HANDLE);
        }
        let device = &current.state.devices()[stream.device];
        (event.recorded, event.captured) = match captured {
            Some(_) => (None, captured),
            None => (Some(Arc::new(Point::record(device, &stream)?)), None),
        };
        Ok(())
    }

    look cuEventQuery(event: Handle) {
        let current = current()?;
        let Some(point) = recorded(&current, event)? else { return Ok(()) };
        if !point.has_passed()? {
            return Err(Code::NOT_READY);
        }
        current.device.check()
    }

    look cuEventSynchronize(event: Handle) {
        let current = current()?;
        let Some(point) = recorded(&current, event)? else { return Ok(()) };
        point.wait()?;
        current.device.check()
    }
}

/// The position of an event for a wait or a query; `None` if it was never recorded.
fn recorded(current: &Current, event: Handle) -> CallResult<Option<Arc<Point>>> {
    let mut tables = current.state.tables();
    tables.captures.check_may_wait()?;
    let event = tables.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
    let (recorded, captured) = (event.recorded.clone(), event.captured);
    captured.map_or(Ok(()), |number| tables.captures.check_captured_event(number))?;
    Ok(recorded)
}
