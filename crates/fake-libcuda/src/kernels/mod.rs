//! The kernels that can be launched: host functions in place of their PTX.
//!
//! A kernel has two steps. At the launch, [`Prepare`] copies its parameters, as CUDA does, and names the device
//! memory that it will touch. [`Prepared::work`] runs on the stream later; until it returns, that memory is in
//! flight.

mod copy;
mod digest;
mod fill;

use poorwill_core::DeviceRange;

use crate::abi::{Outcome, Params};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

/// A kernel whose parameters have been read.
pub(crate) struct Prepared {
    /// The device memory that it touches. The launch fails unless it is mapped with access.
    pub(crate) ranges: Vec<DeviceRange>,
    pub(crate) work: Box<dyn FnOnce() + Send>,
}

/// Reads the parameters of a kernel.
pub(crate) type Prepare = fn(&Params, &Launch) -> Outcome<Prepared>;

/// Every kernel, by the name of its entry.
const TABLE: &[(&str, Prepare)] = &[
    ("poorwill_test_fill", fill::prepare),
    ("poorwill_copy", copy::prepare),
    ("poorwill_digest", digest::prepare),
    ("poorwill_digest_host", digest::prepare_host),
];

/// Finds a kernel by name.
pub(crate) fn by_name(name: &str) -> Option<Prepare> {
    TABLE.iter().find(|(known, _)| *known == name).map(|(_, prepare)| *prepare)
}
