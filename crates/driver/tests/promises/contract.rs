//! The driver contract on a share of the device of this run, which is exact whatever others do on it.

use poorwill_testkit::contract::GRANULES_MIN;
use poorwill_testkit::device::TestDevice;

poorwill_testkit::driver_contract!(|| TestDevice::linked(GRANULES_MIN).driver());
