//! The driver contract on a GPU: over the fake libcuda, or on the real one that `POORWILL_TEST_DEVICE` names.
#![allow(clippy::unwrap_used)]

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use poorwill_core::Driver;
use poorwill_driver::CudaDevice;
use poorwill_testkit::contract::GRANULES_MIN;
use poorwill_testkit::device::{TestDevice, cuda_config};

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
    Alone { device: CudaDevice::open(&cuda_config()).unwrap(), _turn: turn }
}

mod whole {
    poorwill_testkit::driver_contract!(super::open);
}

/// A share of the device of this run, which is exact whatever others do on it.
mod slice {
    poorwill_testkit::driver_contract!(|| super::TestDevice::open(super::GRANULES_MIN).driver());
}
