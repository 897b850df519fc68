//! The budget of an open device.

#[cfg(target_os = "linux")]
use poorwill_core::Driver;
#[cfg(target_os = "linux")]
use poorwill_core::budget::SourceName;
use poorwill_core::budget::{Budget, Cap, Envelope, Reading};

#[cfg(target_os = "linux")]
use crate::lend::Lending;
use crate::open::{Backend, Device};
use crate::unknown_budget::{UnknownBudget, envelope};

impl Device {
    /// What each source reports about its memory now.
    #[must_use]
    pub fn facts(&self) -> Vec<Reading> {
        match self.backend() {
            #[cfg(target_os = "linux")]
            Backend::Host(device) => vec![
                Reading::bytes(SourceName::Capacity, device.info().total_bytes),
                match device.memory_info() {
                    Ok(memory) => capacity_free(memory.free_bytes),
                    Err(error) => Reading::none(SourceName::CapacityFree, error.to_string()),
                },
            ],
            #[cfg(target_os = "linux")]
            Backend::Cuda(device) => super::cuda::facts_of(device),
            #[cfg(not(target_os = "linux"))]
            _ => unreachable!("no device opens here"),
        }
    }

    /// Bytes that this process uses, where known.
    #[must_use]
    pub fn process_used_bytes(&self) -> Option<u64> {
        match self.backend() {
            #[cfg(target_os = "linux")]
            Backend::Host(device) => Some(device.memory_info().ok()?.process?.used_bytes),
            #[cfg(target_os = "linux")]
            Backend::Cuda(device) => device.process_used_bytes(),
            #[cfg(not(target_os = "linux"))]
            _ => unreachable!("no device opens here"),
        }
    }

    /// What a broker has of its memory: in use, and given up to pools that lend. `None` without a broker, or where memory
    /// cannot be lent. A broker that does not answer is as none after the time of [`Lending::timeout`], 1 s by default.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn reclaimable_bytes(&self, lending: &Lending) -> Option<u64> {
        let memory_name = self.driver().info().memory_name.clone()?;
        // It is called twice: for its greeting, and for this.
        let lending = lending.clone().within(lending.call_timeout() / 2);
        Some(lending.status().ok()??.reclaimable_bytes(&memory_name))
    }

    /// How much this process may use now, by all sources and `cap`. No broker is asked for what is reclaimable.
    #[must_use]
    pub fn budget(&self, cap: Option<Cap>) -> Budget {
        Budget::decide(&self.facts(), self.process_used_bytes(), cap)
    }

    /// The budget, and its envelope, which grants claims.
    ///
    /// # Errors
    /// [`UnknownBudget`] when no source reports the memory size: give a cap in bytes.
    pub fn envelope(&self, cap: Option<Cap>) -> Result<(Budget, Envelope), UnknownBudget> {
        envelope(&self.spec().id(), self.budget(cap))
    }
}

/// Free capacity of the host device, which may exceed the computer's available memory.
#[cfg(target_os = "linux")]
fn capacity_free(bytes: u64) -> Reading {
    let fact = Reading::bytes(SourceName::CapacityFree, bytes);
    match poorwill_driver::system::System::here().available_bytes() {
        Some(available) if available < bytes => {
            let available = poorwill_core::ByteSize(available);
            fact.with_note(format!(
                "only what is written takes memory; the computer has {available} available"
            ))
        }
        _ => fact,
    }
}
