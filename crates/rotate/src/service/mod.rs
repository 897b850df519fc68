//! The service: drives the policy with a clock, engines and requests.

mod talk;

pub use self::talk::{GpuNow, ModelNow, Order, Refused, Snapshot, Swap, Told, What};
