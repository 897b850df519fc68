//! What was seen of a model's need, by differences of measurements.

#[derive(Debug, Default)]
pub(super) struct Need {
    /// The most on each of its GPUs, of all of its engines.
    pub(super) most: Option<Vec<u64>>,
    /// Whether an engine failed with it. Until one comes up it is known only where the operator says it.
    pub(super) is_doubted: bool,
    /// What the last sleep or stop released.
    pub(super) released: Option<Vec<u64>>,
    /// Whether looks see what its processes hold.
    pub(super) is_by_process: bool,
    /// The known need at its last event.
    pub(super) reported: Option<Vec<u64>>,
}

/// What is in the first beyond the second, on each GPU.
pub(super) fn less(before: &[u64], after: &[u64]) -> Vec<u64> {
    before.iter().zip(after).map(|(before, after)| before.saturating_sub(*after)).collect()
}

pub(super) fn larger(some: &[u64], others: &[u64]) -> Vec<u64> {
    some.iter().zip(others).map(|(some, other)| *some.max(other)).collect()
}

pub(super) fn smaller(some: &[u64], others: &[u64]) -> Vec<u64> {
    some.iter().zip(others).map(|(some, other)| *some.min(other)).collect()
}
