//! The kernels that can be launched: host functions in place of their PTX.
//!
//! At the launch, [`Prepare`] copies a kernel's parameters, as CUDA does, and names the device memory that it
//! will touch. [`Prepared::work`] runs on the stream later; until it returns, that memory is in flight.

mod codec;
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

pub(crate) struct Prepared {
    /// The launch fails unless this memory is mapped with access.
    pub(crate) ranges: Vec<DeviceRange>,
    pub(crate) work: Box<dyn FnOnce() + Send>,
}

pub(crate) type Prepare = fn(&Params, &Launch) -> Outcome<Prepared>;

/// Every kernel, by the name of its entry.
const TABLE: &[(&str, Prepare)] = &[
    ("poorwill_test_fill", fill::prepare),
    ("poorwill_copy", copy::prepare),
    ("poorwill_decode", codec::prepare_decode),
    ("poorwill_decode_host", codec::prepare_decode),
    ("poorwill_digest", digest::prepare),
    ("poorwill_digest_host", digest::prepare_host),
    ("poorwill_encode", codec::prepare_encode),
];

pub(crate) fn by_name(name: &str) -> Option<Prepare> {
    TABLE.iter().find(|(known, _)| *known == name).map(|(_, prepare)| *prepare)
}
