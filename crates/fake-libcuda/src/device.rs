//! A device: a host device, what it simulates, and how it is.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use poorwill_core::{Driver, DriverError, DriverErrorKind};
use poorwill_driver::{HostConfig, HostDevice};

use crate::abi::{CallResult, Code};
use crate::handle::{Handle, HandleKind, new_handle};
use crate::in_flight::InFlight;
use crate::simulation::{MemoryUse, Simulation};

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) host: HostDevice,
    pub(crate) simulation: Simulation,
    pub(crate) primary: Handle,
    /// Work on the default stream.
    pub(crate) in_flight: Arc<InFlight>,
    condition: Condition,
}

/// What becomes of a device.
#[derive(Debug, Default)]
struct Condition {
    /// Calls waiting for all of its work.
    waiting: AtomicU64,
    /// The first failure, which every later call returns; 0 without.
    failure: AtomicI32,
}

impl Device {
    pub(crate) fn open(ordinal: usize, config: &HostConfig, simulation: &Simulation) -> CallResult<Self> {
        let host = HostDevice::open(config).map_err(|error| {
            eprintln!("fake libcuda: device {ordinal} of POORWILL_FAKE_CUDA_DEVICES: {error}");
            Code::INVALID_VALUE
        })?;
        Ok(Self {
            ordinal,
            host,
            simulation: simulation.clone(),
            primary: new_handle(HandleKind::Context),
            in_flight: Arc::default(),
            condition: Condition::default(),
        })
    }

    pub(crate) fn granule(&self) -> u64 {
        self.host.info().granule_bytes
    }

    pub(crate) fn reaches(&self, other: &Self) -> bool {
        self.ordinal != other.ordinal
            && self.simulation.reaches(other.ordinal)
            && other.simulation.mig().is_none()
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
        self.condition.waiting.fetch_add(1, Ordering::AcqRel);
        let waited = self.host.synchronize();
        self.condition.waiting.fetch_sub(1, Ordering::AcqRel);
        Ok(waited?)
    }

    /// How many calls wait for all of its work.
    pub(crate) fn calls_that_wait(&self) -> u64 {
        self.condition.waiting.load(Ordering::Acquire)
    }

    /// Records the outcomes of the first `upto` operations of its own that are in flight, which are complete.
    pub(crate) fn record_outcomes(&self, in_flight: &InFlight, upto: u64) {
        in_flight.end(upto, |error| {
            eprintln!("fake libcuda: work on device {} failed: {error}", self.ordinal);
            self.record_failure(failed(error));
        });
    }

    pub(crate) fn check(&self) -> CallResult {
        match self.condition.failure.load(Ordering::Relaxed) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Records a failure; the first one stays.
    fn record_failure(&self, code: Code) {
        let _ = self.condition.failure.compare_exchange(0, code.0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Clears the failure, when the last context is destroyed.
    pub(crate) fn clear_failure(&self) {
        self.condition.failure.store(0, Ordering::Relaxed);
    }
}

fn failed(error: DriverError) -> Code {
    match error.kind {
        DriverErrorKind::Device { code: 0, .. } => Code::LAUNCH_FAILED,
        _ => error.into(),
    }
}

/// The device of this number.
pub(crate) fn at(devices: &[Device], ordinal: c_int) -> CallResult<&Device> {
    usize::try_from(ordinal).ok().and_then(|at| devices.get(at)).ok_or(Code::INVALID_DEVICE)
}
