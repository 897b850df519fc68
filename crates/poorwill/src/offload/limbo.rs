//! What is to be given back when the device's work has ended.

use std::any::Any;
use std::fmt;
use std::mem;
use std::sync::{Mutex, PoisonError};

use crate::open::Device;

/// Something that the device may still read or write.
type Kept = Box<dyn Any + Send + Sync>;

/// Holds what could not be waited for, as where a device is in a state in which nothing is done any more.
#[derive(Default)]
pub(crate) struct Limbo(Mutex<Vec<Kept>>);

impl fmt::Debug for Limbo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limbo").field("kept", &self.len()).finish()
    }
}

impl Limbo {
    /// How many are held.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Lets go of something when the device's work of now has ended: before this returns, if that can be waited for,
    /// else with a later one.
    pub(crate) fn give_back(&self, device: &Device, kept: Kept) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
        self.clear(device);
    }

    /// Lets go of what is held, if the device's work can be waited for now.
    pub(crate) fn clear(&self, device: &Device) {
        // What comes in while the device is waited for may be in use by work that comes later.
        let held = mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        if held.is_empty() {
            return;
        }
        if device.wait_for_all_work().is_err() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(held);
        }
    }
}
