//! Contexts, and a stack of current ones per thread, as in CUDA.
//!
//! A destroyed context stays on the stacks of threads, and their calls are refused. Its streams, events,
//! modules and registered host memory are destroyed with it. Backings, mappings and reservations stay.

use std::cell::RefCell;
use std::ffi::c_int;

use poorwill_core::Driver;

use crate::abi::{CallResult, Code};
use crate::device::Device;
use crate::handle::{Handle, HandleKind, new_handle};
use crate::state::{self, Context, SimulatorState, Tables};

thread_local! {
    static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// The top of this thread's stack, even if it no longer exists.
pub(crate) fn top() -> Option<Handle> {
    STACK.with_borrow(|stack| stack.last().copied())
}

pub(crate) fn push(context: Handle) -> CallResult {
    exists(context)?;
    STACK.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

pub(crate) fn pop() -> CallResult<Handle> {
    STACK.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)
}

/// Replaces the top of this thread's stack; 0 removes it.
pub(crate) fn set(context: Handle) -> CallResult {
    if context != 0 {
        exists(context)?;
    }
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
    Ok(())
}

fn exists(context: Handle) -> CallResult {
    let known = state::get()?.tables().contexts.contains_key(&context);
    if known { Ok(()) } else { Err(Code::INVALID_CONTEXT) }
}

pub(crate) fn device_of(context: Handle) -> CallResult<&'static Device> {
    let state = state::get()?;
    let device = state.tables().contexts.get(&context).map(|found| found.device);
    device.and_then(|device| state.devices().get(device)).ok_or(Code::INVALID_CONTEXT)
}

pub(crate) fn create(ordinal: c_int) -> CallResult<Handle> {
    let state = state::get()?;
    let device = state.device(ordinal)?.ordinal;
    let mut tables = state.tables();
    let context = new_handle(HandleKind::Context);
    tables.contexts.insert(context, Context { device, retained: 1, primary: false });
    drop(tables);
    push(context)?;
    Ok(context)
}

/// Destroys a context of [`create`], and pops it if it is on top of this thread's stack.
pub(crate) fn destroy(context: Handle) -> CallResult {
    let state = state::get()?;
    let device = {
        let tables = state.tables();
        let found = tables.contexts.get(&context).filter(|found| !found.primary);
        found.map(|found| found.device).ok_or(Code::INVALID_CONTEXT)?
    };
    if top() == Some(context) {
        pop()?;
    }
    end(state, &state.devices()[device], context, |tables| match tables.contexts.contains_key(&context) {
        true => Ok(false),
        false => Err(Code::INVALID_CONTEXT),
    })
}

pub(crate) fn retain(ordinal: c_int) -> CallResult<Handle> {
    let state = state::get()?;
    let device = state.device(ordinal)?;
    let mut tables = state.tables();
    let fresh = Context { device: device.ordinal, retained: 0, primary: true };
    tables.contexts.entry(device.primary).or_insert(fresh).retained += 1;
    Ok(device.primary)
}

/// Decrements the retain count; at 0 the context is destroyed. Atomic, as in CUDA: a context that is retained
/// again during the wait stays.
pub(crate) fn release(ordinal: c_int) -> CallResult {
    let state = state::get()?;
    let device = state.device(ordinal)?;
    let is_kept = |tables: &mut Tables| -> CallResult<bool> {
        let context = tables.contexts.get_mut(&device.primary).ok_or(Code::INVALID_CONTEXT)?;
        let is_kept = context.retained > 1;
        if is_kept {
            context.retained -= 1;
        }
        Ok(is_kept)
    };
    if is_kept(&mut state.tables())? {
        return Ok(());
    }
    end(state, device, device.primary, is_kept)
}

pub(crate) fn is_active(ordinal: c_int) -> CallResult<bool> {
    let state = state::get()?;
    let primary = state.device(ordinal)?.primary;
    Ok(state.tables().contexts.contains_key(&primary))
}

/// Waits for the device, then removes the context and its objects unless it `is_kept`.
fn end(
    state: &'static SimulatorState,
    device: &'static Device,
    context: Handle,
    is_kept: impl FnOnce(&mut Tables) -> CallResult<bool>,
) -> CallResult {
    device.wait()?;
    let mut tables = state.tables();
    if is_kept(&mut tables)? {
        return Ok(());
    }
    tables.contexts.remove(&context);
    let streams: Vec<_> = tables.streams.extract_if(|_, stream| stream.context == context).collect();
    streams.iter().for_each(|(gone, _)| tables.captures.forget(*gone));
    tables.graphs.retain(|_, graph| graph.context != context);
    let events: Vec<_> = tables.events.extract_if(|_, event| event.context == context).collect();
    tables.functions.retain(|_, function| function.context != context);
    tables.modules.retain(|_, module| module.context != context);
    tables.memory.unregister_all(context);
    if tables.contexts.values().all(|other| other.device != device.ordinal) {
        device.clear_failure();
    }
    drop(tables);
    drop(events);
    streams.into_iter().try_for_each(|(_, stream)| Ok(device.host.stream_destroy(stream.id)?))
}
