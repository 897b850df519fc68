//! What is to be given back when the device's work has ended.

use std::any::Any;
use std::fmt;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::open::Device;

/// Something that the device may still read or write.
type Kept = Box<dyn Any + Send + Sync>;

/// Holds what could not be waited for, as where a device is in a state in which nothing is done any more. What is there
/// at its own end stays where it is for ever.
#[derive(Default)]
pub(crate) struct DeferredFree(Mutex<Vec<Kept>>);

impl fmt::Debug for DeferredFree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredFree").field("kept", &self.lock().len()).finish()
    }
}

impl DeferredFree {
    fn lock(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of something when the device's work of now has ended: before this returns, if that can be waited for,
    /// else with a later one.
    pub(crate) fn free(&self, device: &Device, kept: Kept) {
        // In nobody else's hands meanwhile, who would still be waiting when this returns.
        let mut held = mem::take(&mut *self.lock());
        held.push(kept);
        self.free_all(device, held);
    }

    /// Lets go of what is held, if the device's work can be waited for now.
    pub(crate) fn free_deferred(&self, device: &Device) {
        let held = mem::take(&mut *self.lock());
        if !held.is_empty() {
            self.free_all(device, held);
        }
    }

    /// What comes in meanwhile may be in use by work that comes later.
    fn free_all(&self, device: &Device, held: Vec<Kept>) {
        if device.wait_for_all_work().is_err() {
            self.lock().extend(held);
        }
    }
}

impl Drop for DeferredFree {
    fn drop(&mut self) {
        // The device may be at work on it, and there is nobody left to ask. In a forked child it may be half changed.
        mem::forget(mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner)));
    }
}
