//! What to give an inference engine.

use poorwill_core::Tag;
use poorwill_core::budget::{Budget, Claimed, Share};
use serde::Serialize;

use crate::budget::{Envelope, claim_in_use};

const SLACK_BYTES: u64 = 1 << 20;

/// What to give an engine. `None` where total or free memory is unknown.
///
/// ```
/// use poorwill::doctor::{Plan, examine};
/// use poorwill::{DeviceSpec, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = "host:8GiB".parse::<DeviceSpec>()?;
/// let report = examine(&Plan::default().on(device).claiming([(Tag::weights(), 5 << 30)]))?;
/// assert_eq!(report.devices[0].engine.kv_cache_bytes, Some(3 << 30));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EngineAdvice {
    /// The share of `cuMemGetInfo`'s total to give an engine, such as vLLM's `--gpu-memory-utilization`.
    /// Excludes the context, so it may be 0.01 below the budget's share. `None` also on the host device.
    pub gpu_memory_utilization: Option<f64>,
    /// Bytes an engine may use: the budget without memory in use.
    pub memory_bytes: Option<u64>,
    /// Claims on the budget, memory in use first.
    pub claims: Vec<Claimed>,
    /// Bytes left after the claims; `None` also after a refused one.
    pub kv_cache_bytes: Option<u64>,
    /// Why a claim is refused, and what to change.
    pub refused: Option<String>,
}

impl EngineAdvice {
    /// `engine_total_bytes` is what an engine's share refers to.
    pub(super) fn of(memory: &Budget, engine_total_bytes: Option<u64>, claims: &[(Tag, u64)]) -> Self {
        let mut advice = Self {
            gpu_memory_utilization: None,
            memory_bytes: None,
            claims: Vec::new(),
            kv_cache_bytes: None,
            refused: None,
        };
        let Some(envelope) = Envelope::of(memory) else { return advice };
        let in_use = claim_in_use(memory, &envelope);
        let memory_bytes = envelope.unclaimed_bytes();
        // Unknown free memory promises nothing.
        let is_known = memory.headroom_bytes.is_some();
        advice.memory_bytes = is_known.then_some(memory_bytes);
        advice.gpu_memory_utilization = engine_total_bytes.filter(|_| is_known).and_then(|total_bytes| {
            let share =
                Share::within(memory_bytes.saturating_add(SLACK_BYTES).min(total_bytes), total_bytes)?;
            share.to_string().parse().ok()
        });
        let mut held = Vec::new();
        for (name, bytes) in claims {
            match envelope.claim(name.clone(), *bytes) {
                Ok(claim) => held.push(claim),
                Err(error) => {
                    advice.refused = Some(error.to_string());
                    break;
                }
            }
        }
        advice.claims = envelope.claims();
        let is_granted = is_known && advice.refused.is_none();
        advice.kv_cache_bytes = is_granted.then(|| envelope.unclaimed_bytes());
        drop((in_use, held));
        advice
    }
}

#[cfg(test)]
mod tests {
    use poorwill_core::budget::{Reading, SourceName};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn advice(free_bytes: u64, cap: &str, claims: &[(&str, u64)]) -> EngineAdvice {
        let facts = [
            Reading::bytes(SourceName::CudaTotal, 23 * GIB),
            Reading::bytes(SourceName::CudaFree, free_bytes),
        ];
        let cap = (!cap.is_empty()).then(|| cap.parse().unwrap());
        let claims: Vec<_> = claims.iter().map(|(name, bytes)| (name.parse().unwrap(), *bytes)).collect();
        EngineAdvice::of(&Budget::decide(&facts, Some(0), cap), Some(23 * GIB), &claims)
    }

    #[test]
    fn an_engine_gets_what_can_be_had() {
        let all = advice(23 * GIB, "", &[]);
        assert_eq!((all.gpu_memory_utilization, all.kv_cache_bytes), (Some(1.0), Some(23 * GIB)));
        for cap in ["0.95", "0.92", "0.88"] {
            let advice = advice(23 * GIB, cap, &[]);
            assert_eq!(advice.gpu_memory_utilization, cap.parse().ok(), "what the user says comes back");
        }
        let shared = advice(10 * GIB, "0.9", &[("weights", 8 * GIB)]);
        assert_eq!((shared.memory_bytes, shared.kv_cache_bytes), (Some(10 * GIB), Some(2 * GIB)));
        assert_eq!(shared.gpu_memory_utilization, Some(0.43));
        let names: Vec<_> = shared.claims.iter().map(|claimed| claimed.name.to_string()).collect();
        assert_eq!(names, ["in_use", "weights"]);
    }

    #[test]
    fn a_claim_that_does_not_fit_ends_it() {
        let advice = advice(23 * GIB, "0.5", &[("weights", 8 * GIB), ("activations", 4 * GIB), ("more", 1)]);
        assert_eq!((advice.kv_cache_bytes, advice.claims.len()), (None, 1));
        let refused = advice.refused.unwrap();
        assert!(refused.contains("`activations`") && refused.contains("a share of 0.53"), "{refused}");
    }

    #[test]
    fn what_is_not_known_is_none() {
        let advice = EngineAdvice::of(&Budget::decide(&[], None, None), None, &[(Tag::weights(), 1)]);
        assert_eq!((advice.memory_bytes, advice.kv_cache_bytes, advice.refused), (None, None, None));
        let facts = [Reading::bytes(SourceName::CudaTotal, 23 * GIB)];
        let claims = [(Tag::weights(), 24 * GIB)];
        let advice = EngineAdvice::of(&Budget::decide(&facts, None, None), Some(23 * GIB), &claims);
        assert_eq!((advice.memory_bytes, advice.gpu_memory_utilization), (None, None));
        assert!(advice.refused.unwrap().contains("there are 23 GiB in all, by cuda_total"));
    }
}
