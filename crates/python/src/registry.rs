//! The open arenas of this process, by device and name.
//!
//! A device's arenas and host buffers share one [`Device`], closed with the last arena. One that host buffers
//! opened is taken over by an arena whose options agree.
//!
//! Lock order: the registry, then a device. The registry's lock is held only with Python's lock, so a fork by
//! Python never finds it taken. A device's lock is held for long, without Python's lock. A forked child
//! starts with an empty registry and leaves the parent's alone.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{mem, process};

use poorwill::backup::Compress;
use poorwill::budget::{Envelope, claim_own};
use poorwill::disk::DiskConfig;
use poorwill::lend::{Lending, PeerCopies};
use poorwill::{
    Budget, ByteSize, Cap, Claim, Device, DeviceOptions, DeviceSpec, HostMemoryUse, Links, OpenError, Peers,
    PoolConfig, PoolError, Tag, chain,
};
use pyo3::prelude::*;

use crate::errors::{closed, failed, not_opened, refused};
use crate::process::ProcessOwned;
use crate::running::RunningPreparation;

const CLOSE: &str = "close the arena";

/// An open arena, kept by everything that uses its memory.
#[derive(Debug)]
pub(crate) struct Opened {
    name: String,
    device: Device,
    /// Closed when this is dropped.
    arena: ProcessOwned<poorwill::Arena>,
    is_closed: AtomicBool,
    /// What PyTorch's requests have to leave free on the device.
    margin_bytes: AtomicU64,
    budget: Budget,
    preparations: Mutex<Vec<Arc<RunningPreparation>>>,
    /// Claims what the process used before.
    _in_use: ProcessOwned<Option<Claim>>,
}

impl Opened {
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn arena(&self) -> &poorwill::Arena {
        &self.arena
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    pub(crate) fn set_margin_bytes(&self, margin_bytes: u64) {
        self.margin_bytes.store(margin_bytes, Ordering::Relaxed);
    }

    /// Refuses a request that would leave less free than the margin.
    pub(crate) fn check_margin(&self, bytes: u64) -> Result<(), String> {
        let margin_bytes = self.margin_bytes.load(Ordering::Relaxed);
        if margin_bytes == 0 {
            return Ok(());
        }
        let info = self.arena.driver().memory_info().map_err(|error| chain(&error))?;
        if info.free_bytes >= bytes.saturating_add(margin_bytes) {
            return Ok(());
        }
        Err(format!(
            "{bytes} bytes would leave less than the margin of {margin_bytes} bytes free on {}, where {} are free: lower \
             memory_margin_bytes, or release memory",
            self.device.spec(),
            info.free_bytes
        ))
    }

    pub(crate) fn add_preparation(&self, begun: &Arc<RunningPreparation>) {
        let mut preparations = locked(&self.preparations);
        preparations.retain(|begun| !begun.is_ended());
        preparations.push(Arc::clone(begun));
    }

    pub(crate) fn end_preparations(&self) {
        let preparations = mem::take(&mut *locked(&self.preparations));
        preparations.iter().for_each(|begun| begun.cancel());
        preparations.iter().for_each(|begun| begun.wait_until_ended());
    }
}

fn closed_message(name: &str, device: &DeviceSpec) -> String {
    format!(
        "the arena `{name}` on {device} has been closed, and what was in it is gone; open one again with \
         poorwill.arena(\"{device}\", \"{name}\")"
    )
}

/// Requested options; None is the current or default one.
#[derive(Debug)]
pub(crate) struct ArenaOptions {
    pub(crate) device: DeviceSpec,
    /// Whether the device was named without a size.
    pub(crate) any_size: bool,
    pub(crate) name: String,
    pub(crate) limit: Option<Cap>,
    pub(crate) cache_limit_bytes: Option<u64>,
    pub(crate) host_memory: HostMemoryUse,
    pub(crate) peers: Option<Vec<u32>>,
    pub(crate) keep_backups: Option<bool>,
    pub(crate) compress: Option<Compress>,
    pub(crate) links: Option<Links>,
    pub(crate) disk: Option<DiskConfig>,
    /// `Some(None)`: not to lend.
    pub(crate) lending: Option<Option<Lending>>,
    pub(crate) peer_copies: Option<PeerCopies>,
}

impl ArenaOptions {
    fn device_options(&self) -> DeviceOptions {
        let peers = match self.peers.as_deref() {
            None => Peers::Reachable,
            Some([]) => Peers::None,
            Some(peers) => Peers::Only(peers.to_vec()),
        };
        let links = self.links.clone().unwrap_or_default();
        let options = DeviceOptions::default().backing_up_in(self.host_memory).open_to(peers);
        options.linking_over(links).spilling_to(self.disk.clone())
    }

    fn keeps_backups_on(&self, device: &Device) -> bool {
        PoolConfig::default().keeping_backups(self.keep_backups).keeps_backups_on(device.driver().info())
    }

    fn compresses(&self) -> Compress {
        self.compress.unwrap_or(PoolConfig::default().compress)
    }
}

#[derive(Debug)]
pub(crate) struct Entry {
    name: String,
    device: DeviceSpec,
    limit: Option<Cap>,
    cache_limit_bytes: Option<u64>,
    keep_backups: bool,
    compress: Compress,
    lending: Option<Lending>,
    peer_copies: PeerCopies,
    /// Whether a broker has refused a sleep's memory before.
    has_been_refused: AtomicBool,
    opened: Mutex<Option<Arc<Opened>>>,
    slot: Arc<DeviceSlot>,
}

#[derive(Debug, Default)]
pub(crate) struct DeviceSlot(Mutex<DeviceArenas>);

#[derive(Debug, Default)]
struct DeviceArenas {
    device: Option<(Device, DeviceOptions)>,
    /// Opened with default options for host buffers, before any arena.
    for_host_memory: Option<Device>,
    arenas: BTreeMap<String, Arc<Entry>>,
}

#[derive(Debug)]
struct Registry {
    process: u32,
    slots: BTreeMap<String, Arc<DeviceSlot>>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { process: 0, slots: BTreeMap::new() });

pub(crate) fn open(py: Python<'_>, options: &ArenaOptions) -> PyResult<Arc<Entry>> {
    let id = options.device.id();
    let slot = with_slots(py, |slots| Arc::clone(slots.entry(id).or_default()));
    py.detach(|| slot.open(options)).map_err(|error| match error {
        OpenFailure::Conflict(words) => refused(words),
        OpenFailure::Refused(error) => not_opened(&error),
    })
}

/// The device for host buffers: that of its arenas, or one opened for this.
pub(crate) fn device(py: Python<'_>, spec: &DeviceSpec, any_size: bool) -> PyResult<Device> {
    let slot = with_slots(py, |slots| Arc::clone(slots.entry(spec.id()).or_default()));
    py.detach(|| slot.lock().device_for_host_memory(spec, any_size)).map_err(|error| not_opened(&error))
}

pub(crate) fn find(py: Python<'_>, device: &DeviceSpec, name: &str) -> Option<Arc<Entry>> {
    let slot = with_slots(py, |slots| slots.get(&device.id()).cloned())?;
    py.detach(|| slot.lock().arenas.get(name).cloned())
}

pub(crate) fn all(py: Python<'_>) -> Vec<Arc<Entry>> {
    let slots: Vec<Arc<DeviceSlot>> = with_slots(py, |slots| slots.values().cloned().collect());
    let arenas = |slot: &Arc<DeviceSlot>| slot.lock().arenas.values().cloned().collect::<Vec<_>>();
    py.detach(|| slots.iter().flat_map(arenas).collect())
}

/// Runs `act`, which must not release Python's lock.
fn with_slots<T>(_held: Python<'_>, act: impl FnOnce(&mut BTreeMap<String, Arc<DeviceSlot>>) -> T) -> T {
    let mut registry = locked(&REGISTRY);
    if registry.process != process::id() {
        // Forked: these are the parent's.
        mem::forget(mem::take(&mut registry.slots));
        registry.process = process::id();
    }
    act(&mut registry.slots)
}

/// A panic leaves nothing half changed under these locks.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

enum OpenFailure {
    Conflict(String),
    Refused(OpenError),
}

impl From<OpenError> for OpenFailure {
    fn from(error: OpenError) -> Self {
        Self::Refused(error)
    }
}

impl DeviceSlot {
    fn lock(&self) -> MutexGuard<'_, DeviceArenas> {
        locked(&self.0)
    }

    fn open(self: &Arc<Self>, options: &ArenaOptions) -> Result<Arc<Entry>, OpenFailure> {
        let mut on_device = self.lock();
        let device = on_device.device(options)?;
        if let Some(entry) = on_device.arenas.get(&options.name) {
            entry.check(options)?;
            return Ok(Arc::clone(entry));
        }
        let opened = Arc::new(Opened::open(&device, options)?);
        let entry = Arc::new(Entry {
            name: options.name.clone(),
            device: device.spec().clone(),
            limit: options.limit,
            cache_limit_bytes: options.cache_limit_bytes,
            keep_backups: options.keeps_backups_on(&device),
            compress: options.compresses(),
            lending: options.lending.clone().flatten(),
            peer_copies: options.peer_copies.clone().unwrap_or_default(),
            has_been_refused: AtomicBool::new(false),
            opened: Mutex::new(Some(opened)),
            slot: Arc::clone(self),
        });
        on_device.device.get_or_insert_with(|| (device, options.device_options()));
        on_device.arenas.insert(options.name.clone(), Arc::clone(&entry));
        Ok(entry)
    }
}

impl DeviceArenas {
    fn device_for_host_memory(&mut self, spec: &DeviceSpec, any_size: bool) -> Result<Device, OpenError> {
        if let Some((device, _)) = &self.device {
            return Ok(device.clone());
        }
        if let Some(device) = self.for_host_memory.as_ref().filter(|device| any_size || device.spec() == spec)
        {
            return Ok(device.clone());
        }
        let device = Device::open(spec)?;
        self.for_host_memory = Some(device.clone());
        Ok(device)
    }

    fn device(&self, options: &ArenaOptions) -> Result<Device, OpenFailure> {
        let Some((device, open_options)) = &self.device else {
            let fits = |device: &&Device| {
                options.device_options() == DeviceOptions::default()
                    && (options.any_size || *device.spec() == options.device)
            };
            return match self.for_host_memory.as_ref().filter(fits) {
                Some(device) => Ok(device.clone()),
                None => Ok(Device::open_with(&options.device, options.device_options())?),
            };
        };
        let HostMemoryUse { limit_bytes, pageable, .. } = options.host_memory;
        let differs = if !options.any_size && options.device != *device.spec() {
            format!("not as {}", options.device)
        } else if limit_bytes.is_some_and(|_| limit_bytes != open_options.host_memory.limit_bytes) {
            "with another host_limit".to_owned()
        } else if pageable && !open_options.host_memory.pageable {
            "without pageable".to_owned()
        } else if options.peers.is_some() && options.device_options().peers != open_options.peers {
            "with other peers".to_owned()
        } else if options.links.is_some() && options.device_options().links != open_options.links {
            "with other links".to_owned()
        } else if options.disk.is_some() && options.disk != open_options.disk {
            "with another disk".to_owned()
        } else {
            return Ok(device.clone());
        };
        let names = self.arenas.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        Err(OpenFailure::Conflict(format!(
            "cannot open the arena `{}`: {} is open {differs}, for {names}; all arenas of a device share it, so \
             ask for it as it is, or close them first",
            options.name,
            device.spec()
        )))
    }
}

impl Opened {
    fn open(device: &Device, options: &ArenaOptions) -> Result<Self, OpenError> {
        let (budget, envelope, in_use) = match (device.envelope(None), options.limit) {
            // No source knows the device's memory, so the user's limit stands sole.
            (Err(_), Some(Cap::Bytes(bytes))) => {
                let (budget, envelope) = device.envelope(Some(Cap::Bytes(bytes)))?;
                (budget, envelope, None)
            }
            (known, _) => {
                let (budget, envelope) = known?;
                let in_use = claim_own(&budget, &envelope);
                (budget, envelope, in_use)
            }
        };
        let limit_bytes = options.limit.map(|limit| limited(limit, &envelope));
        let pool = PoolConfig::default()
            .limited_to(limit_bytes)
            .caching_at_most(options.cache_limit_bytes)
            .keeping_backups(options.keep_backups)
            .compressing(options.compresses());
        let copies = options.peer_copies.as_ref().unwrap_or(&PeerCopies::None);
        if *copies != PeerCopies::None && !matches!(options.lending, Some(Some(_))) {
            let reason = "peer_copies need a broker that gives them up: open the arena with lend=True";
            return Err(PoolError::InvalidConfig { reason: reason.into() }.into());
        }
        let arena = poorwill::Arena::open_within(device, &envelope, pool)?;
        if let Some(Some(lending)) = &options.lending {
            arena.lend_through(lending)?;
            arena.copy_to(device, copies, lending)?;
        }
        Ok(Self {
            name: options.name.clone(),
            device: device.clone(),
            arena: ProcessOwned::new(arena),
            is_closed: AtomicBool::new(false),
            margin_bytes: AtomicU64::new(0),
            budget,
            preparations: Mutex::default(),
            _in_use: ProcessOwned::new(in_use),
        })
    }

    /// Refuses new calls and releases the memory. Addresses of live blocks stay reserved until the last is
    /// freed.
    fn close(self: Arc<Self>) -> Result<(), PoolError> {
        self.is_closed.store(true, Ordering::Release);
        match Arc::try_unwrap(self) {
            Ok(sole) => sole.arena.close(),
            Err(shared) => shared.clear(),
        }
    }

    fn clear(&self) -> Result<(), PoolError> {
        let tags: Vec<Tag> = self.arena.stats()?.tags.into_iter().map(|stats| stats.tag).collect();
        self.arena.discard(&tags)?;
        self.arena.trim().map(drop)
    }

    /// Runs `act` unless the arena was closed. A close meanwhile makes it fail and releases what it took.
    pub(crate) fn with<T>(
        &self,
        act: impl FnOnce(&poorwill::Arena) -> Result<T, PoolError>,
    ) -> Result<T, ArenaError> {
        let done = act(&self.arena);
        if !self.is_closed() {
            return done.map_err(ArenaError::Pool);
        }
        drop(done);
        // `close` does the same, and reports the error.
        let _ = self.clear();
        Err(ArenaError::Closed(closed_message(&self.name, self.device.spec())))
    }
}

#[derive(Debug)]
pub(crate) enum ArenaError {
    Closed(String),
    Pool(PoolError),
}

impl ArenaError {
    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Closed(words) => closed(words),
            Self::Pool(error) => failed(py, error),
        }
    }
}

/// A share is bounded by what is unclaimed.
fn limited(limit: Cap, envelope: &Envelope) -> u64 {
    match limit {
        Cap::Bytes(bytes) => bytes,
        Cap::Share(share) => share.of(envelope.budget_bytes()).min(envelope.unclaimed_bytes()),
    }
}

impl Entry {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn device(&self) -> &DeviceSpec {
        &self.device
    }

    pub(crate) fn cache_limit_bytes(&self) -> Option<u64> {
        self.cache_limit_bytes
    }

    pub(crate) fn lending(&self) -> Option<&Lending> {
        self.lending.as_ref()
    }

    /// Whether no broker has refused before. Says so once.
    pub(crate) fn is_first_refusal(&self) -> bool {
        !self.has_been_refused.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn is_open(&self) -> bool {
        locked(&self.opened).is_some()
    }

    /// Fails if it was closed.
    pub(crate) fn opened(&self) -> PyResult<Arc<Opened>> {
        let opened = locked(&self.opened).clone();
        opened.ok_or_else(|| closed(closed_message(&self.name, &self.device)))
    }

    /// Refused, with nothing changed, during a stream capture or while a tag is held.
    pub(crate) fn close(self: &Arc<Self>) -> Result<(), PoolError> {
        let mut on_device = self.slot.lock();
        let opened = {
            let mut entry = locked(&self.opened);
            let Some(opened) = entry.as_ref() else { return Ok(()) };
            // A driver that cannot report this is no reason to keep the arena.
            if let Ok(Some(stream)) = opened.arena.driver().capturing() {
                return Err(PoolError::Capturing { op: CLOSE, stream });
            }
            // Its holder would go on using memory that is gone.
            if let Some(held) = opened.arena.held()?.into_iter().next() {
                let (tag, holders) = (held.tag, held.holders.join(", "));
                return Err(PoolError::Held { op: CLOSE, tag, holders });
            }
            entry.take()
        };
        let Some(opened) = opened else { return Ok(()) };
        on_device.arenas.retain(|_, entry| !Arc::ptr_eq(entry, self));
        let device = if on_device.arenas.is_empty() { on_device.device.take() } else { None };
        drop(on_device);
        let closed = opened.close();
        drop(device);
        closed
    }

    fn check(&self, options: &ArenaOptions) -> Result<(), OpenFailure> {
        let (name, device) = (&self.name, &self.device);
        let conflict = |was: String, requested: String| {
            Err(OpenFailure::Conflict(format!(
                "the arena `{name}` on {device} is open with {was}, and {requested} is requested; leave it away, \
                 close the arena first, or open another under another name"
            )))
        };
        if let Some(requested) = options.keep_backups.filter(|requested| *requested != self.keep_backups) {
            let option = |keeps| format!("keep_backups={}", if keeps { "True" } else { "False" });
            return conflict(option(self.keep_backups), option(requested));
        }
        if let Some(requested) = options.compress.filter(|requested| *requested != self.compress) {
            let option = |compress| format!("compress=\"{compress}\"");
            return conflict(option(self.compress), option(requested));
        }
        if let Some(requested) = &options.lending {
            let socket = |lending: &Option<Lending>| lending.as_ref().map(Lending::path);
            let [was, requested] = [&self.lending, requested].map(socket);
            let option = |socket: &Option<PathBuf>| match socket {
                None => "lend=False".to_owned(),
                Some(socket) => format!("lend=\"{}\"", socket.display()),
            };
            if was != requested {
                return conflict(option(&was), option(&requested));
            }
        }
        if options.peer_copies.as_ref().is_some_and(|requested| *requested != self.peer_copies) {
            return conflict("its peer_copies".to_owned(), "other peer_copies".to_owned());
        }
        if let Some(requested) =
            options.cache_limit_bytes.filter(|limit| Some(*limit) != self.cache_limit_bytes)
        {
            let was =
                self.cache_limit_bytes.map_or_else(|| "None".to_owned(), |bytes| ByteSize(bytes).to_string());
            let option = |limit: &str| format!("cache_limit={limit}");
            return conflict(option(&was), option(&ByteSize(requested).to_string()));
        }
        let Some(limit) = options.limit.filter(|limit| Some(*limit) != self.limit) else { return Ok(()) };
        let was =
            self.limit.map_or_else(|| "without a limit".to_owned(), |was| format!("with a limit of {was}"));
        Err(OpenFailure::Conflict(format!(
            "the arena `{name}` on {device} is open {was}, and a limit of {limit} is requested; leave the limit \
             away, close it first, or open another under another name"
        )))
    }
}
