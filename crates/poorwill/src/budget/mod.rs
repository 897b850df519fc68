//! Budgets of real devices, by all sources of memory figures; [`poorwill_core::budget`] decides.
//!
//! ```
//! use poorwill::{Cap, Device, Tag};
//!
//! let device = Device::open(&"host:4GiB".parse()?)?;
//! let (budget, envelope) = device.envelope(Some("0.75".parse()?))?;
//! assert_eq!(budget.budget_bytes, Some(3 << 30));
//! let weights = envelope.claim(Tag::weights(), 2 << 30)?;
//! let refused = envelope.claim(Tag::kv_cache(), 2 << 30).unwrap_err();
//! println!("{refused}"); // Names the other claims, and a budget that would do.
//! # drop(weights);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod caps;
#[cfg(target_os = "linux")]
mod cuda;
mod device;
mod slice;
mod watch;

pub use poorwill_core::budget::*;

pub use self::caps::{Caps, InvalidCaps};
#[cfg(target_os = "linux")]
pub(crate) use self::cuda::GpuMemoryFacts;
pub use self::slice::Slice;
pub use self::watch::Watch;
pub use crate::unknown_budget::{UnknownBudget, envelope};

/// Claims what this process (its context included) or others use already. `None` if that is nothing, or
/// unknown.
#[must_use]
pub fn claim_in_use(budget: &Budget, envelope: &Envelope) -> Option<Claim> {
    let in_use_bytes = budget.budget_bytes?.saturating_sub(budget.headroom_bytes?);
    unless_empty(envelope.claim_in_use(InUse::AllProcesses, in_use_bytes))
}

/// Claims what this process uses, its context included: unlike others' memory, it stays in use. `None` if
/// that is nothing, or unknown.
#[must_use]
pub fn claim_own(budget: &Budget, envelope: &Envelope) -> Option<Claim> {
    unless_empty(envelope.claim_in_use(InUse::Own, budget.process_used_bytes?))
}

fn unless_empty(claim: Claim) -> Option<Claim> {
    (claim.bytes() > 0).then_some(claim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_budget_names_the_sources() {
        let facts = [
            Reading::none(SourceName::CudaTotal, "CUDA_ERROR_UNKNOWN"),
            Reading::bytes(SourceName::DeviceProperties, 0),
            Reading::none(SourceName::CudaFree, "no"),
        ];
        let error = envelope("cuda:3", Budget::decide(&facts, None, None)).unwrap_err().to_string();
        for words in ["cuda:3", "cuda_total: CUDA_ERROR_UNKNOWN", "0 is no total", "--budget 20GiB"] {
            assert!(error.contains(words) && !error.contains("cuda_free"), "`{words}`: {error}");
        }
        let by_hand = Budget::decide(&facts, None, Some(Cap::Bytes(7)));
        assert_eq!(envelope("cuda:3", by_hand).unwrap().1.budget_bytes(), 7);
        let error = envelope("cuda:3", Budget::decide(&[], None, None)).unwrap_err().to_string();
        assert!(error.contains("no source reports it"), "{error}");
    }
}
