//! Everything there is: the devices, and the tables behind the handles.
//!
//! A handle is a number that was never an address; the tables say what it stands for, so a stale or invented
//! one is recognised. One lock guards the tables; nothing waits for work of a device while it is held.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use poorwill_core::{DeviceRange, Driver};
use poorwill_driver::HostDevice;

use crate::abi::{Census, Code, Outcome};
use crate::capture::{Capture, Graph};
use crate::context::Context;
use crate::faults;
use crate::memory::{Backing, Mapping, Registered, Reservation};
use crate::module::{Function, Module};
use crate::play::{Held, Play};
use crate::queue::{Event, Flights, Stream};

/// What callers hold in place of pointers. 0 is none.
pub(crate) type Handle = u64;

/// What a handle stands for; its upper byte says it, which makes a handle no address.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Context = 1,
    Stream,
    Event,
    Module,
    Function,
    Backing,
    Graph,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) devices: Vec<Device>,
    tables: Mutex<Tables>,
}

/// One device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) host: HostDevice,
    pub(crate) play: Play,
    /// Its primary context's handle, the same each time.
    pub(crate) primary: Handle,
    /// Work on the default stream.
    pub(crate) flights: Arc<Flights>,
    /// Calls that wait for all of its work now.
    waiting: AtomicU64,
    /// The first failure of its work, which every later call repeats; 0 without.
    broken: AtomicI32,
}

impl Device {
    pub(crate) fn granule(&self) -> u64 {
        self.host.info().granule_bytes
    }

    /// Whether it can be given access to memory of another device.
    pub(crate) fn reaches(&self, other: &Self) -> bool {
        self.ordinal != other.ordinal && self.play.reaches(other.ordinal) && other.play.mig.is_none()
    }

    /// Its memory as it is behind what it plays.
    pub(crate) fn memory(&self) -> Outcome<Held> {
        let memory = self.host.memory_info()?;
        Ok(Held {
            capacity_bytes: memory.total_bytes,
            held_bytes: memory.total_bytes.saturating_sub(memory.free_bytes),
        })
    }

    /// Waits for all of its work.
    pub(crate) fn wait(&self) -> Outcome {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let waited = self.host.synchronize();
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        Ok(waited?)
    }

    /// Fails when work of the device has failed before.
    pub(crate) fn check(&self) -> Outcome {
        match self.broken.load(Ordering::Relaxed) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Work has failed: the first failure stays.
    pub(crate) fn broke(&self, code: Code) {
        // Whether it was the first makes no difference here.
        let _ = self.broken.compare_exchange(0, code.0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Its last context is gone, and the failure with it.
    pub(crate) fn mend(&self) {
        self.broken.store(0, Ordering::Relaxed);
    }
}

/// What handles and addresses stand for.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    made: u64,
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
    /// A handle that was never given out before.
    pub(crate) fn new_handle(&mut self, kind: Kind) -> Handle {
        self.made += 1;
        (kind as u64) << 56 | self.made << 4
    }
}

static WORLD: OnceLock<World> = OnceLock::new();
static OPENING: Mutex<()> = Mutex::new(());

/// What `cuInit` opened.
pub(crate) fn get() -> Outcome<&'static World> {
    WORLD.get().ok_or(Code::NOT_INITIALIZED)
}

/// Opens the devices that the settings ask for, once.
pub(crate) fn open() -> Outcome {
    let _one_at_a_time = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if WORLD.get().is_some() {
        return Ok(());
    }
    let mut tables = Tables::default();
    let config = faults::config()?;
    let devices = config.devices.iter().zip(&config.plays).enumerate().map(|(ordinal, (config, play))| {
        let host = HostDevice::open(config).map_err(|error| {
            eprintln!("fake libcuda: device {ordinal} of POORWILL_FAKE_CUDA_DEVICES: {error}");
            Code::INVALID_VALUE
        })?;
        let primary = tables.new_handle(Kind::Context);
        Ok(Device {
            ordinal,
            host,
            play: play.clone(),
            primary,
            flights: Arc::default(),
            waiting: AtomicU64::new(0),
            broken: AtomicI32::new(0),
        })
    });
    let devices = devices.collect::<Outcome<Vec<Device>>>()?;
    if devices.is_empty() {
        return Err(Code::NO_DEVICE);
    }
    WORLD.get_or_init(|| World { devices, tables: Mutex::new(tables) });
    Ok(())
}

impl World {
    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device of this number.
    pub(crate) fn device(&self, ordinal: c_int) -> Outcome<&Device> {
        usize::try_from(ordinal).ok().and_then(|at| self.devices.get(at)).ok_or(Code::INVALID_DEVICE)
    }

    /// What there is on one device.
    pub(crate) fn census(&self, ordinal: c_int) -> Outcome<Census> {
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

/// A range of device addresses as a caller gives it.
pub(crate) fn range(addr: u64, bytes: usize) -> Outcome<DeviceRange> {
    let bytes = bytes as u64;
    addr.checked_add(bytes).map(|_| DeviceRange::new(addr, bytes)).ok_or(Code::INVALID_VALUE)
}
