//! The driver contract on the whole device.

use std::ops::Deref;
use std::sync::MutexGuard;

use poorwill_core::Driver;
use poorwill_driver::{CudaDevice, cuda};
use poorwill_testkit::device::cuda_config;

use crate::turn;

/// A device whose figures no other test in this process changes meanwhile.
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
    let turn = turn();
    Alone {
        device: CudaDevice::open(&cuda_config().linking_over(cuda::Links::Reachable)).unwrap(),
        _turn: turn,
    }
}

poorwill_testkit::driver_contract!(open);
