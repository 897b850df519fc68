//! The devices, and the tables of handles.
//!
//! A handle is a number that is never an address, so the tables recognise a stale or invented one. One lock
//! guards the tables; no call waits for a device while holding it.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use poorwill_core::{DeviceRange, Driver};
use poorwill_driver::HostDevice;

use crate::abi::{CallResult, Census, Code};
use crate::capture::{Capture, Graph};
use crate::context::Context;
use crate::memory::{Backing, Mapping, Registered, Reservation};
use crate::module::{Function, Module};
use crate::queue::{Event, InFlight, Stream};
use crate::simulation::{MemoryUse, Simulation};
use crate::{faults, process};

/// In place of a pointer; 0 is none.
pub(crate) type Handle = u64;

/// In a handle's upper byte, so that it is never an address.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HandleKind {
    Context = 1,
    Stream,
    Event,
    Module,
    Function,
    Backing,
    Graph,
}

#[derive(Debug)]
pub(crate) struct SimulatorState {
    pub(crate) devices: Vec<Device>,
    tables: Mutex<Tables>,
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) host: HostDevice,
    pub(crate) simulation: Simulation,
    pub(crate) primary: Handle,
    /// Work on the default stream.
    pub(crate) in_flight: Arc<InFlight>,
    /// Calls waiting for all of its work.
    waiting: AtomicU64,
    /// The first failure, which every later call returns; 0 without.
    failure: AtomicI32,
}

impl Device {
    pub(crate) fn granule(&self) -> u64 {
        self.host.info().granule_bytes
    }

    pub(crate) fn reaches(&self, other: &Self) -> bool {
        self.ordinal != other.ordinal
            && self.simulation.reaches(other.ordinal)
            && other.simulation.mig.is_none()
    }

    /// Its memory without the simulation.
    pub(crate) fn memory(&self) -> CallResult<MemoryUse> {
        let memory = self.host.memory_info()?;
        Ok(MemoryUse {
            capacity_bytes: memory.total_bytes,
            held_bytes: memory.total_bytes.saturating_sub(memory.free_bytes),
        })
    }

    /// Whether all that was taken off fits beside what others use.
    pub(crate) fn has_space_to_return(&self, others_bytes: u64) -> bool {
        let capacity_bytes = self.host.info().total_bytes;
        let free_bytes =
            self.simulation.available_bytes(MemoryUse { capacity_bytes, held_bytes: others_bytes });
        self.host.taken_off_bytes() <= free_bytes
    }

    pub(crate) fn wait(&self) -> CallResult {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let waited = self.host.synchronize();
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        Ok(waited?)
    }

    pub(crate) fn check(&self) -> CallResult {
        match self.failure.load(Ordering::Relaxed) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Records a failure; the first one stays.
    pub(crate) fn record_failure(&self, code: Code) {
        let _ = self.failure.compare_exchange(0, code.0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Clears the failure, when the last context is destroyed.
    pub(crate) fn clear_failure(&self) {
        self.failure.store(0, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Tables {
    created: u64,
    pub(crate) contexts: HashMap<Handle, Context>,
    pub(crate) streams: HashMap<Handle, Stream>,
    pub(crate) events: HashMap<Handle, Event>,
    /// By stream.
    pub(crate) captures: HashMap<Handle, Capture>,
    pub(crate) graphs: HashMap<Handle, Graph>,
    pub(crate) modules: HashMap<Handle, Module>,
    pub(crate) functions: HashMap<Handle, Function>,
    pub(crate) backings: HashMap<Handle, Backing>,
    pub(crate) reservations: BTreeMap<u64, Reservation>,
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    pub(crate) registered: BTreeMap<usize, Registered>,
}

impl Tables {
    pub(crate) fn new_handle(&mut self, kind: HandleKind) -> Handle {
        self.created += 1;
        (kind as u64) << 56 | self.created << 4
    }
}

static STATE: OnceLock<&'static SimulatorState> = OnceLock::new();
static OPENING: Mutex<()> = Mutex::new(());

/// The state, after `cuInit`.
pub(crate) fn get() -> CallResult<&'static SimulatorState> {
    STATE.get().copied().ok_or(Code::NOT_INITIALIZED)
}

/// Opens the devices, once.
pub(crate) fn open() -> CallResult {
    let _one_at_a_time = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if STATE.get().is_some() {
        return Ok(());
    }
    let mut tables = Tables::default();
    let config = faults::config()?;
    let devices =
        config.devices.iter().zip(&config.simulations).enumerate().map(|(ordinal, (config, simulation))| {
            let host = HostDevice::open(config).map_err(|error| {
                eprintln!("fake libcuda: device {ordinal} of POORWILL_FAKE_CUDA_DEVICES: {error}");
                Code::INVALID_VALUE
            })?;
            let primary = tables.new_handle(HandleKind::Context);
            Ok(Device {
                ordinal,
                host,
                simulation: simulation.clone(),
                primary,
                in_flight: Arc::default(),
                waiting: AtomicU64::new(0),
                failure: AtomicI32::new(0),
            })
        });
    let devices = devices.collect::<CallResult<Vec<Device>>>()?;
    if devices.is_empty() {
        return Err(Code::NO_DEVICE);
    }
    let state = Box::leak(Box::new(SimulatorState { devices, tables: Mutex::new(tables) }));
    process::register(state)?;
    STATE.get_or_init(|| state);
    Ok(())
}

impl SimulatorState {
    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn device(&self, ordinal: c_int) -> CallResult<&Device> {
        usize::try_from(ordinal).ok().and_then(|at| self.devices.get(at)).ok_or(Code::INVALID_DEVICE)
    }

    pub(crate) fn census(&self, ordinal: c_int) -> CallResult<Census> {
        let device = self.device(ordinal)?;
        let memory = device.memory()?;
        let tables = self.tables();
        let ours = |of: usize| u64::from(of == device.ordinal);
        Ok(Census {
            reservations: tables.reservations.values().map(|r| ours(r.device)).sum(),
            backings: tables.backings.values().map(|b| ours(b.device)).sum(),
            mappings: tables.mappings.values().map(|m| ours(m.device)).sum(),
            streams: tables.streams.values().map(|s| ours(s.device)).sum(),
            events: tables.events.values().map(|e| ours(e.device)).sum(),
            captures: tables.captures.values().map(|c| ours(c.device())).sum(),
            graphs: tables.graphs.values().map(|g| ours(g.device)).sum(),
            registered_host_ranges: tables.registered.values().map(|r| ours(r.device)).sum(),
            contexts_retained: tables.contexts.values().map(|c| ours(c.device) * c.retained).sum(),
            held_bytes: memory.held_bytes,
            calls_that_wait: device.waiting.load(Ordering::Acquire),
        })
    }
}

pub(crate) fn range(addr: u64, bytes: usize) -> CallResult<DeviceRange> {
    let bytes = bytes as u64;
    addr.checked_add(bytes).map(|_| DeviceRange::new(addr, bytes)).ok_or(Code::INVALID_VALUE)
}
