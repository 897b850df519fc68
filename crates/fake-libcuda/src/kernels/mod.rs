//! The kernels that can be launched: host functions in place of their PTX.
//!
//! At the launch, [`Prepare`] copies a kernel's parameters, as CUDA does, and names the device memory that it
//! will touch. [`Prepared::work`] runs on the stream later; until it returns, that memory is in flight.

mod codec;
mod copy;
mod digest;
mod fill;
mod launch;

pub(crate) use self::launch::{Launch, Prepared};
use crate::abi::{CallResult, Params};

pub(crate) type Prepare = fn(&Params, &Launch) -> CallResult<Prepared>;

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
