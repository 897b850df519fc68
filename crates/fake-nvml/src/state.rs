//! The devices, from the first `nvmlInit` to the last `nvmlShutdown`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::abi::{CallResult, Code, Handle};
use crate::config;
use crate::device::Device;

/// A handle is an index, counted from 1.
#[derive(Debug)]
pub(crate) struct SimulatorState(Vec<Device>);

/// The devices while the library is initialized, and how often it was.
#[derive(Debug)]
struct Open {
    state: Arc<SimulatorState>,
    users: u64,
}

static OPEN: Mutex<Option<Open>> = Mutex::new(None);

/// Fails unless initialized.
pub(crate) fn get() -> CallResult<Arc<SimulatorState>> {
    lock().as_ref().map(|open| Arc::clone(&open.state)).ok_or(Code::UNINITIALIZED)
}

/// Reads the settings, unless initialized.
pub(crate) fn open() -> CallResult {
    let mut held = lock();
    if let Some(open) = &mut *held {
        open.users += 1;
        return Ok(());
    }
    let devices = config::from_environment().map_err(|problem| {
        eprintln!("fake NVML: {problem}");
        Code::INVALID_ARGUMENT
    })?;
    *held = Some(Open { state: Arc::new(SimulatorState(devices)), users: 1 });
    Ok(())
}

/// Undoes one [`open`].
pub(crate) fn close() -> CallResult {
    let mut held = lock();
    let open = held.as_mut().ok_or(Code::UNINITIALIZED)?;
    open.users -= 1;
    if open.users == 0 {
        *held = None;
    }
    Ok(())
}

fn lock() -> MutexGuard<'static, Option<Open>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimulatorState {
    pub(crate) fn device(&self, handle: Handle) -> CallResult<&Device> {
        handle.0.checked_sub(1).and_then(|at| self.0.get(at)).ok_or(Code::INVALID_ARGUMENT)
    }

    pub(crate) fn by_uuid(&self, uuid: &str) -> Option<Handle> {
        self.handles(|device| device.uuid.eq_ignore_ascii_case(uuid)).next()
    }

    /// All that are not instances, by index.
    pub(crate) fn cards(&self) -> impl Iterator<Item = Handle> {
        self.handles(|device| !device.is_instance())
    }

    pub(crate) fn instances(&self, card: Handle) -> CallResult<impl Iterator<Item = Handle>> {
        let uuid = &self.device(card)?.uuid;
        let is_of_it = |parent: &String| parent.eq_ignore_ascii_case(uuid);
        Ok(self.handles(move |device| device.parent.as_ref().is_some_and(is_of_it)))
    }

    /// Whether a card is divided, if it can be.
    pub(crate) fn is_divided(&self, card: Handle) -> CallResult<bool> {
        let has_instances = self.instances(card)?.next().is_some();
        self.device(card)?.is_divided.or(has_instances.then_some(true)).ok_or(Code::NOT_SUPPORTED)
    }

    pub(crate) fn name(&self, handle: Handle) -> CallResult<String> {
        let device = self.device(handle)?;
        let number = self.cards().position(|card| card == handle);
        let by_default = number.map_or_else(
            || "Poorwill fake MIG instance".to_owned(),
            |number| format!("Poorwill fake GPU {number}"),
        );
        Ok(device.name.clone().unwrap_or(by_default))
    }

    fn handles(&self, wanted: impl Fn(&Device) -> bool) -> impl Iterator<Item = Handle> {
        self.0.iter().zip(1..).filter(move |(device, _)| wanted(device)).map(|(_, number)| Handle(number))
    }
}
