//! The contract of checkpointers on the host device.

use poorwill_testkit::checkpoint::{HostSetup, targets};

poorwill_testkit::checkpoint_contract!(|| Some(HostSetup::open()), targets::host);
