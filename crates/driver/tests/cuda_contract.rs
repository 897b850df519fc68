//! The driver contract on a GPU: over the fake libcuda, or on the real one that `POORWILL_TEST_DEVICE` names.
#![allow(clippy::unwrap_used)]

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use poorwill_core::Driver;
use poorwill_driver::{CudaConfig, CudaDevice};

/// A device whose figures nobody else in this process moves meanwhile.
struct Alone {
    device: CudaDevice,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Alone {
    type Target = dyn Driver;
    fn deref(&self) -> &Self::Target {
        &self.device
    }
}

fn open() -> Alone {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Alone { device: CudaDevice::open(&CudaConfig::gpu(0)).unwrap(), _turn: turn }
}

poorwill_testkit::driver_contract!(open);
