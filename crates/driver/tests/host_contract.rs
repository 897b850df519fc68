//! The driver contract on the host device, at two granules.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use poorwill_core::Driver;
use poorwill_driver::{HostConfig, HostDevice};
use poorwill_testkit::contract::GRANULES_MIN;

fn open(config: &HostConfig) -> Arc<dyn Driver> {
    Arc::new(HostDevice::open(config).unwrap())
}

mod pages {
    poorwill_testkit::driver_contract!(|| super::open(&super::HostConfig::of_pages(super::GRANULES_MIN)));
}

mod huge {
    poorwill_testkit::driver_contract!(|| super::open(&super::HostConfig::with_capacity(
        super::GRANULES_MIN << 21
    )));
}
