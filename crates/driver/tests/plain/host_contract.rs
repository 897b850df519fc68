//! The driver contract on the host device, at the granule that GPUs have; with small ones it is a promise of every device.

use poorwill_driver::{HostConfig, HostDevice};
use poorwill_testkit::contract::GRANULES_MIN;

poorwill_testkit::driver_contract!(|| {
    std::sync::Arc::new(
        HostDevice::open(&HostConfig::with_capacity(GRANULES_MIN << 21).linking_over(2)).unwrap(),
    )
});
