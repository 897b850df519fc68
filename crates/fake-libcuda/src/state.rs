//! The devices, and the tables of handles.
//!
//! One lock guards the tables; no call waits for a device while holding it.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use poorwill_core::DeviceRange;

use crate::abi::{CallResult, Census, Code};
use crate::capture::{Captures, Graph};
use crate::device::{self, Device};
use crate::faults;
use crate::handle::Handle;
use crate::memory::Memory;
use crate::module::{Function, Module};
use crate::queue::{Event, Stream};

#[derive(Debug)]
pub(crate) struct SimulatorState {
    devices: Vec<Device>,
    tables: Mutex<Tables>,
}

#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    /// The retain count of a primary context; 1 for others.
    pub(crate) retained: u64,
    pub(crate) primary: bool,
}

/// What callers have made. Each table holds to the rules of its own module.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) contexts: HashMap<Handle, Context>,
    pub(crate) streams: HashMap<Handle, Stream>,
    pub(crate) events: HashMap<Handle, Event>,
    pub(crate) captures: Captures,
    pub(crate) graphs: HashMap<Handle, Graph>,
    pub(crate) modules: HashMap<Handle, Module>,
    pub(crate) functions: HashMap<Handle, Function>,
    pub(crate) memory: Memory,
}

static STATE: OnceLock<&'static SimulatorState> = OnceLock::new();
static OPENING: Mutex<()> = Mutex::new(());

/// The state, after `cuInit`.
pub(crate) fn get() -> CallResult<&'static SimulatorState> {
    STATE.get().copied().ok_or(Code::NOT_INITIALIZED)
}

/// Opens the devices, once, and has them registered.
pub(crate) fn open(register: impl FnOnce(&'static SimulatorState) -> CallResult) -> CallResult {
    let _one_at_a_time = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if STATE.get().is_some() {
        return Ok(());
    }
    let config = faults::config()?;
    let devices = config
        .devices
        .iter()
        .zip(&config.simulations)
        .enumerate()
        .map(|(ordinal, (config, simulation))| Device::open(ordinal, config, simulation));
    let devices = devices.collect::<CallResult<Vec<Device>>>()?;
    if devices.is_empty() {
        return Err(Code::NO_DEVICE);
    }
    let state = Box::leak(Box::new(SimulatorState { devices, tables: Mutex::default() }));
    register(state)?;
    STATE.get_or_init(|| state);
    Ok(())
}

impl SimulatorState {
    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn device(&self, ordinal: c_int) -> CallResult<&Device> {
        device::at(&self.devices, ordinal)
    }

    /// The device that owns a range, if all of it is mapped with access for `user`.
    pub(crate) fn owner_of(&self, user: &Device, range: DeviceRange) -> CallResult<&Device> {
        self.tables().memory.owner_of(&self.devices, user, range)
    }

    /// The host address behind a kernel's address, if all of it is registered.
    pub(crate) fn host_address(&self, addr: u64, bytes: usize) -> CallResult<usize> {
        self.tables().memory.host_address(addr, bytes)
    }

    pub(crate) fn census(&self, ordinal: c_int) -> CallResult<Census> {
        let device = self.device(ordinal)?;
        let memory = device.memory()?;
        let tables = self.tables();
        let ours = |of: usize| u64::from(of == device.ordinal);
        let objects = tables.memory.count(device.ordinal);
        Ok(Census {
            reservations: objects.reservations,
            backings: objects.backings,
            mappings: objects.mappings,
            streams: tables.streams.values().map(|s| ours(s.device)).sum(),
            events: tables.events.values().map(|e| ours(e.device)).sum(),
            captures: tables.captures.count(device.ordinal),
            graphs: tables.graphs.values().map(|g| ours(g.device)).sum(),
            registered_host_ranges: objects.registered,
            contexts_retained: tables.contexts.values().map(|c| ours(c.device) * c.retained).sum(),
            held_bytes: memory.held_bytes,
            calls_that_wait: device.calls_that_wait(),
        })
    }
}
