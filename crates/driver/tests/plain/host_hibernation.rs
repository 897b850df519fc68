//! The contract of checkpointers on the host device.

use poorwill_testkit::hibernation::{HostSetup, targets};

poorwill_testkit::hibernation_contract!(|| Some(HostSetup::open()), targets::host);
