//! Contexts, and which of them is current: a stack per thread, as in CUDA.
//!
//! A context that is gone stays on the stacks of the threads where it was current; what they ask of it is
//! refused. What was made in a context (streams, events, modules, registered host memory) goes with it;
//! backings, mappings and reservations stay.

use std::cell::RefCell;
use std::ffi::c_int;

use poorwill_core::Driver;

use crate::abi::{Code, Outcome};
use crate::world::{self, Device, Handle, Kind, Tables, World};

/// A context that exists.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    /// How often a primary context is retained; 1 for others.
    pub(crate) retained: u64,
    pub(crate) primary: bool,
}

thread_local! {
    static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// The context that calls of this thread concern.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Current {
    pub(crate) world: &'static World,
    pub(crate) context: Handle,
    pub(crate) device: &'static Device,
}

/// This thread's context, which must exist and be free of failed work.
pub(crate) fn current() -> Outcome<Current> {
    let current = current_even_if_broken()?;
    current.device.check()?;
    Ok(current)
}

/// This thread's context, which must exist.
pub(crate) fn current_even_if_broken() -> Outcome<Current> {
    let world = world::get()?;
    let context = top().ok_or(Code::INVALID_CONTEXT)?;
    let at = world.tables().contexts.get(&context).map(|found| found.device);
    let device = at.and_then(|at| world.devices.get(at)).ok_or(Code::CONTEXT_IS_DESTROYED)?;
    Ok(Current { world, context, device })
}

/// The top of this thread's stack, whether it exists or not.
pub(crate) fn top() -> Option<Handle> {
    STACK.with_borrow(|stack| stack.last().copied())
}

/// Puts a context that exists on top of this thread's stack.
pub(crate) fn push(context: Handle) -> Outcome {
    exists(context)?;
    STACK.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

pub(crate) fn pop() -> Outcome<Handle> {
    STACK.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)
}

/// Replaces the top of this thread's stack; 0 takes it away.
pub(crate) fn set(context: Handle) -> Outcome {
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

fn exists(context: Handle) -> Outcome {
    let known = world::get()?.tables().contexts.contains_key(&context);
    if known { Ok(()) } else { Err(Code::INVALID_CONTEXT) }
}

/// The device of a context that exists.
pub(crate) fn device_of(context: Handle) -> Outcome<&'static Device> {
    let world = world::get()?;
    let device = world.tables().contexts.get(&context).map(|found| found.device);
    device.and_then(|device| world.devices.get(device)).ok_or(Code::INVALID_CONTEXT)
}

/// Makes a context and puts it on this thread's stack.
pub(crate) fn create(ordinal: c_int) -> Outcome<Handle> {
    let world = world::get()?;
    let device = world.device(ordinal)?.ordinal;
    let mut tables = world.tables();
    let context = tables.new_handle(Kind::Context);
    tables.contexts.insert(context, Context { device, retained: 1, primary: false });
    drop(tables);
    push(context)?;
    Ok(context)
}

/// Ends a context that [`create`] made; if it is on top of this thread's stack, it leaves it.
pub(crate) fn destroy(context: Handle) -> Outcome {
    let world = world::get()?;
    let device = {
        let tables = world.tables();
        let found = tables.contexts.get(&context).filter(|found| !found.primary);
        found.map(|found| found.device).ok_or(Code::INVALID_CONTEXT)?
    };
    if top() == Some(context) {
        pop()?;
    }
    end(world, &world.devices[device], context, |tables| match tables.contexts.contains_key(&context) {
        true => Ok(false),
        false => Err(Code::INVALID_CONTEXT),
    })
}

/// Counts one more user of a device's primary context.
pub(crate) fn retain(ordinal: c_int) -> Outcome<Handle> {
    let world = world::get()?;
    let device = world.device(ordinal)?;
    let mut tables = world.tables();
    let fresh = Context { device: device.ordinal, retained: 0, primary: true };
    tables.contexts.entry(device.primary).or_insert(fresh).retained += 1;
    Ok(device.primary)
}

/// Counts one less; the last ends the context. Atomic, as in CUDA: a context that somebody retains while this waits
/// for the device stays.
pub(crate) fn release(ordinal: c_int) -> Outcome {
    let world = world::get()?;
    let device = world.device(ordinal)?;
    let is_kept = |tables: &mut Tables| -> Outcome<bool> {
        let context = tables.contexts.get_mut(&device.primary).ok_or(Code::INVALID_CONTEXT)?;
        let is_kept = context.retained > 1;
        if is_kept {
            context.retained -= 1;
        }
        Ok(is_kept)
    };
    if is_kept(&mut world.tables())? {
        return Ok(());
    }
    end(world, device, device.primary, is_kept)
}

/// Whether a device's primary context exists.
pub(crate) fn is_active(ordinal: c_int) -> Outcome<bool> {
    let world = world::get()?;
    let primary = world.device(ordinal)?.primary;
    Ok(world.tables().contexts.contains_key(&primary))
}

/// Waits for the device, then forgets the context and what was made in it, unless it `is_kept` by then.
fn end(
    world: &'static World,
    device: &'static Device,
    context: Handle,
    is_kept: impl FnOnce(&mut Tables) -> Outcome<bool>,
) -> Outcome {
    device.wait()?;
    let mut tables = world.tables();
    if is_kept(&mut tables)? {
        return Ok(());
    }
    tables.contexts.remove(&context);
    let streams: Vec<_> = tables.streams.extract_if(|_, stream| stream.context == context).collect();
    tables.captures.retain(|stream, _| streams.iter().all(|(gone, _)| gone != stream));
    tables.graphs.retain(|_, graph| graph.context != context);
    let events: Vec<_> = tables.events.extract_if(|_, event| event.context == context).collect();
    tables.functions.retain(|_, function| function.context != context);
    tables.modules.retain(|_, module| module.context != context);
    tables.registered.retain(|_, registered| registered.context != context);
    if tables.contexts.values().all(|other| other.device != device.ordinal) {
        device.mend();
    }
    drop(tables);
    drop(events);
    streams.into_iter().try_for_each(|(_, stream)| Ok(device.host.stream_destroy(stream.id)?))
}
