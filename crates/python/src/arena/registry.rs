//! The arenas that are open in this process, by device and name.
//!
//! All arenas of a device share one [`Device`], which is opened with the first of them and let go of with the last.
//! Who wants nothing but host memory of a device shares theirs, or has one opened, which an arena takes over if it is
//! as the arena wants it.
//! An arena stays open until it is closed, whoever holds it; what is still open when the process ends goes with it.
//!
//! Two locks. That of the registry is held by threads that hold Python's lock and keep it meanwhile, so a fork by
//! Python never finds it taken. A device's is held while arenas are opened and closed, which takes a while, by threads
//! that do not hold Python's. In a forked child the registry begins anew, and nothing of the old one is touched.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{mem, process};

use poorwill::budget::{Envelope, claim_own};
use poorwill::{
    Budget, Cap, Claim, Device, DeviceOptions, DeviceSpec, HostMemoryUse, OpenError, Peers, PoolConfig,
    PoolError, Tag,
};
use pyo3::prelude::*;

use super::preparation::Begun;
use crate::errors::{closed, failed, not_opened, refused};
use crate::process::Owned;

const CLOSE: &str = "close the arena";

/// An arena that was opened. Whoever uses its memory holds this: it ends when the last has let go.
#[derive(Debug)]
pub(crate) struct Opened {
    /// Its name.
    pub(crate) name: String,
    /// The device.
    pub(crate) device: Device,
    /// The arena. Closed for good when this is dropped.
    pub(crate) arena: Owned<poorwill::Arena>,
    is_closed: AtomicBool,
    /// What its limit was decided by.
    pub(super) budget: Budget,
    /// What is prepared on it, and some that has ended.
    preparations: Mutex<Vec<Arc<Begun>>>,
    /// What the process had of the device when this was opened.
    _in_use: Owned<Option<Claim>>,
}

impl Opened {
    /// Whether it has been closed: nothing new is to be taken from it.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Keeps an eye on a preparation.
    pub(super) fn watch(&self, begun: &Arc<Begun>) {
        let mut preparations = locked(&self.preparations);
        preparations.retain(|begun| !begun.is_ended());
        preparations.push(Arc::clone(begun));
    }

    /// Cancels what is prepared, and waits until nothing is at work.
    pub(super) fn end_preparations(&self) {
        let preparations = mem::take(&mut *locked(&self.preparations));
        preparations.iter().for_each(|begun| begun.cancel());
        preparations.iter().for_each(|begun| begun.end());
    }
}

fn closed_words(name: &str, device: &DeviceSpec) -> String {
    format!(
        "the arena `{name}` on {device} has been closed, and what was in it is gone; open one again with \
         poorwill.arena(\"{device}\", \"{name}\")"
    )
}

/// What an arena is asked to be. What is left open is as it is, or as it is by default.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) device: DeviceSpec,
    /// Whether the device was named without a size.
    pub(super) any_size: bool,
    pub(super) name: String,
    pub(super) limit: Option<Cap>,
    pub(super) host_memory: HostMemoryUse,
    /// Numbers of GPUs.
    pub(super) peers: Option<Vec<u32>>,
    /// Whether backups stay after a wake.
    pub(super) keep_backups: Option<bool>,
}

impl Wanted {
    /// How the device is opened for it.
    fn options(&self) -> DeviceOptions {
        let peers = match self.peers.as_deref() {
            None => Peers::Reachable,
            Some([]) => Peers::None,
            Some(peers) => Peers::Only(peers.to_vec()),
        };
        DeviceOptions::default().backing_up_in(self.host_memory).open_to(peers)
    }

    fn keeps_backups(&self) -> bool {
        self.keep_backups.unwrap_or(PoolConfig::default().keep_backups)
    }
}

/// A place in the registry: an arena, until it is closed.
#[derive(Debug)]
pub(super) struct Entry {
    name: String,
    device: DeviceSpec,
    limit: Option<Cap>,
    keep_backups: bool,
    /// Held for no longer than it takes to look.
    opened: Mutex<Option<Arc<Opened>>>,
    /// Whose it is.
    slot: Arc<Slot>,
}

/// The arenas of one device.
#[derive(Debug, Default)]
pub(super) struct Slot(Mutex<OnDevice>);

#[derive(Debug, Default)]
struct OnDevice {
    device: Option<(Device, DeviceOptions)>,
    /// Opened for host memory, as devices are by default, while no arena was open.
    for_host_memory: Option<Device>,
    arenas: BTreeMap<String, Arc<Entry>>,
}

#[derive(Debug)]
struct Registry {
    process: u32,
    slots: BTreeMap<String, Arc<Slot>>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { process: 0, slots: BTreeMap::new() });

/// Finds the arena that is wanted, or opens it.
pub(super) fn open(py: Python<'_>, wanted: &Wanted) -> PyResult<Arc<Entry>> {
    let id = wanted.device.id();
    let slot = with_slots(py, |slots| Arc::clone(slots.entry(id).or_default()));
    py.detach(|| slot.open(wanted)).map_err(|error| match error {
        NotOpened::Contradiction(words) => refused(words),
        NotOpened::Refused(error) => not_opened(&error),
    })
}

/// A device for host memory of its: the one of its arenas, or one that is kept.
pub(crate) fn device(py: Python<'_>, spec: &DeviceSpec, any_size: bool) -> PyResult<Device> {
    let slot = with_slots(py, |slots| Arc::clone(slots.entry(spec.id()).or_default()));
    py.detach(|| slot.lock().device_for_host_memory(spec, any_size)).map_err(|error| not_opened(&error))
}

/// The open arena of this device and name.
pub(super) fn find(py: Python<'_>, device: &DeviceSpec, name: &str) -> Option<Arc<Entry>> {
    let slot = with_slots(py, |slots| slots.get(&device.id()).cloned())?;
    py.detach(|| slot.lock().arenas.get(name).cloned())
}

/// All that are open.
pub(super) fn all(py: Python<'_>) -> Vec<Arc<Entry>> {
    let slots: Vec<Arc<Slot>> = with_slots(py, |slots| slots.values().cloned().collect());
    let arenas = |slot: &Arc<Slot>| slot.lock().arenas.values().cloned().collect::<Vec<_>>();
    py.detach(|| slots.iter().flat_map(arenas).collect())
}

/// Does something with the devices of this process. Whoever calls this holds Python's lock, and `act` keeps it.
fn with_slots<T>(_held: Python<'_>, act: impl FnOnce(&mut BTreeMap<String, Arc<Slot>>) -> T) -> T {
    let mut registry = locked(&REGISTRY);
    if registry.process != process::id() {
        // What is there is the parent's.
        mem::forget(mem::take(&mut registry.slots));
        registry.process = process::id();
    }
    act(&mut registry.slots)
}

/// Nothing that is done under these locks leaves anything half changed.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why there is no such arena.
enum NotOpened {
    Contradiction(String),
    Refused(OpenError),
}

impl From<OpenError> for NotOpened {
    fn from(error: OpenError) -> Self {
        Self::Refused(error)
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, OnDevice> {
        locked(&self.0)
    }

    fn open(self: &Arc<Self>, wanted: &Wanted) -> Result<Arc<Entry>, NotOpened> {
        let mut here = self.lock();
        let device = here.device(wanted)?;
        if let Some(entry) = here.arenas.get(&wanted.name) {
            entry.check(wanted)?;
            return Ok(Arc::clone(entry));
        }
        let opened = Arc::new(Opened::open(&device, wanted)?);
        let entry = Arc::new(Entry {
            name: wanted.name.clone(),
            device: device.spec().clone(),
            limit: wanted.limit,
            keep_backups: wanted.keeps_backups(),
            opened: Mutex::new(Some(opened)),
            slot: Arc::clone(self),
        });
        here.device.get_or_insert_with(|| (device, wanted.options()));
        here.arenas.insert(wanted.name.clone(), Arc::clone(&entry));
        Ok(entry)
    }
}

impl OnDevice {
    /// A device for host memory. How large the device is has nothing to do with that.
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

    /// The device, as it is open or newly opened.
    fn device(&self, wanted: &Wanted) -> Result<Device, NotOpened> {
        let Some((device, options)) = &self.device else {
            let fits = |device: &&Device| {
                wanted.options() == DeviceOptions::default()
                    && (wanted.any_size || *device.spec() == wanted.device)
            };
            return match self.for_host_memory.as_ref().filter(fits) {
                Some(device) => Ok(device.clone()),
                None => Ok(Device::open_with(&wanted.device, wanted.options())?),
            };
        };
        let HostMemoryUse { limit_bytes, pageable, .. } = wanted.host_memory;
        let differs = if !wanted.any_size && wanted.device != *device.spec() {
            format!("not as {}", wanted.device)
        } else if limit_bytes.is_some_and(|_| limit_bytes != options.host_memory.limit_bytes) {
            "with another host_limit".to_owned()
        } else if pageable && !options.host_memory.pageable {
            "without pageable".to_owned()
        } else if wanted.peers.is_some() && wanted.options().peers != options.peers {
            "with other peers".to_owned()
        } else {
            return Ok(device.clone());
        };
        let names = self.arenas.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        Err(NotOpened::Contradiction(format!(
            "cannot open the arena `{}`: {} is open {differs}, for {names}; all arenas of a device share it, so \
             ask for it as it is, or close them first",
            wanted.name,
            device.spec()
        )))
    }
}

impl Opened {
    fn open(device: &Device, wanted: &Wanted) -> Result<Self, OpenError> {
        let (budget, envelope, in_use) = match (device.envelope(None), wanted.limit) {
            // Nobody tells, so the user's word is all there is, and it is about this arena alone.
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
        let limit_bytes = wanted.limit.map(|limit| limited(limit, &envelope));
        let keep_backups = wanted.keeps_backups();
        let pool = PoolConfig::default().limited_to(limit_bytes).keeping_backups(keep_backups);
        Ok(Self {
            name: wanted.name.clone(),
            device: device.clone(),
            arena: Owned::new(poorwill::Arena::open_within(device, &envelope, pool)?),
            is_closed: AtomicBool::new(false),
            budget,
            preparations: Mutex::default(),
            _in_use: Owned::new(in_use),
        })
    }

    /// Refuses what is new, and gives the memory back. While blocks are in somebody's hands their addresses stay
    /// reserved, without memory; with the last of them they go, too.
    fn close(self: Arc<Self>) -> Result<(), PoolError> {
        self.is_closed.store(true, Ordering::Release);
        match Arc::try_unwrap(self) {
            Ok(alone) => alone.arena.close(),
            Err(shared) => shared.clear(),
        }
    }

    /// Takes the memory from all that is there.
    fn clear(&self) -> Result<(), PoolError> {
        let tags: Vec<Tag> = self.arena.stats()?.tags.into_iter().map(|stats| stats.tag).collect();
        self.arena.discard(&tags)?;
        self.arena.trim().map(drop)
    }

    /// Does something with it, unless it has been closed. What overlaps with its being closed counts as done after
    /// that: it fails, and what it has taken is given back.
    pub(crate) fn with<T>(
        &self,
        act: impl FnOnce(&poorwill::Arena) -> Result<T, PoolError>,
    ) -> Result<T, Failed> {
        let done = act(&self.arena);
        if !self.is_closed() {
            return done.map_err(Failed::Pool);
        }
        drop(done);
        // Who closes it does the same, and tells what is the matter.
        let _ = self.clear();
        Err(Failed::Closed(closed_words(&self.name, self.device.spec())))
    }
}

/// Why something could not be done with an arena.
#[derive(Debug)]
pub(crate) enum Failed {
    /// It has been closed, in these words.
    Closed(String),
    Pool(PoolError),
}

impl Failed {
    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Closed(words) => closed(words),
            Self::Pool(error) => failed(py, error),
        }
    }
}

/// A share is one of the budget, and at most what is left of it.
fn limited(limit: Cap, envelope: &Envelope) -> u64 {
    match limit {
        Cap::Bytes(bytes) => bytes,
        Cap::Share(share) => share.of(envelope.budget_bytes()).min(envelope.unclaimed_bytes()),
    }
}

impl Entry {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn device(&self) -> &DeviceSpec {
        &self.device
    }

    pub(super) fn is_open(&self) -> bool {
        locked(&self.opened).is_some()
    }

    /// The arena, unless it has been closed.
    pub(super) fn opened(&self) -> PyResult<Arc<Opened>> {
        let opened = locked(&self.opened).clone();
        opened.ok_or_else(|| closed(closed_words(&self.name, &self.device)))
    }

    /// Closes it. Doing so again does nothing. While a stream is being captured or a tag is held it is refused, and the
    /// arena stays open.
    pub(super) fn close(self: &Arc<Self>) -> Result<(), PoolError> {
        let mut here = self.slot.lock();
        let opened = {
            let mut place = locked(&self.opened);
            let Some(opened) = place.as_ref() else { return Ok(()) };
            // A driver that cannot even say this is no reason to keep the arena.
            if let Ok(Some(stream)) = opened.arena.driver().capturing() {
                return Err(PoolError::Capturing { op: CLOSE, stream });
            }
            // It would lose its memory for good, which who has it registered would go on using.
            if let Some(held) = opened.arena.held()?.into_iter().next() {
                let (tag, holders) = (held.tag, held.holders.join(", "));
                return Err(PoolError::Held { op: CLOSE, tag, holders });
            }
            place.take()
        };
        let Some(opened) = opened else { return Ok(()) };
        here.arenas.retain(|_, entry| !Arc::ptr_eq(entry, self));
        let device = if here.arenas.is_empty() { here.device.take() } else { None };
        drop(here);
        let closed = opened.close();
        drop(device);
        closed
    }

    fn check(&self, wanted: &Wanted) -> Result<(), NotOpened> {
        if let Some(asked) = wanted.keep_backups.filter(|asked| *asked != self.keep_backups) {
            let (name, device) = (&self.name, &self.device);
            let [was, asked] = [self.keep_backups, asked].map(|keeps| if keeps { "True" } else { "False" });
            return Err(NotOpened::Contradiction(format!(
                "the arena `{name}` on {device} is open with keep_backups={was}, and keep_backups={asked} is asked \
                 for; leave it away, close the arena first, or open another under another name"
            )));
        }
        let Some(limit) = wanted.limit.filter(|limit| Some(*limit) != self.limit) else { return Ok(()) };
        let (name, device) = (&self.name, &self.device);
        let was =
            self.limit.map_or_else(|| "without a limit".to_owned(), |was| format!("with a limit of {was}"));
        Err(NotOpened::Contradiction(format!(
            "the arena `{name}` on {device} is open {was}, and a limit of {limit} is asked for; leave the limit \
             away, close it first, or open another under another name"
        )))
    }
}
