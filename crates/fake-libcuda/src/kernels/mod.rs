//! The kernels that can be launched: functions of the host that stand in for what PTX says.
//!
//! A kernel is two steps. At the launch, [`Prepare`] reads its parameters, as CUDA copies them then, and names
//! the device memory that the kernel will touch. Later the [`Prepared::work`] runs on the stream, and until it
//! has returned that memory counts as in flight.

mod copy;
mod digest;
mod fill;

use poorwill_core::DeviceRange;

use crate::abi::{Outcome, Params};

/// How a kernel is launched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

/// A kernel whose parameters have been read.
pub(crate) struct Prepared {
    /// The device memory that it touches: mapped with access when it is launched, or the launch fails.
    pub(crate) ranges: Vec<DeviceRange>,
    pub(crate) work: Box<dyn FnOnce() + Send>,
}

/// Reads the parameters of a kernel.
pub(crate) type Prepare = fn(&Params, &Launch) -> Outcome<Prepared>;

/// Every kernel by the name of its entry.
const TABLE: &[(&str, Prepare)] = &[
    ("poorwill_test_fill", fill::prepare),
    ("poorwill_copy", copy::prepare),
    ("poorwill_digest", digest::prepare),
    ("poorwill_digest_host", digest::prepare_host),
];

/// The function for a kernel's name.
pub(crate) fn by_name(name: &str) -> Option<Prepare> {
    TABLE.iter().find(|(known, _)| *known == name).map(|(_, prepare)| *prepare)
}
