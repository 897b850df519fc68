//! Limits of a fleet's placement, set by its operator.

use crate::records::{Costs, Rate};

/// The rules of a fleet.
///
/// ```
/// use poorwill_fleet::policy::Rules;
///
/// let rules = Rules { copies_min: 1, ..Rules::default() };
/// assert!(rules.pay_back_ms > 60_000);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Nodes that have a model placed, awake or not, as far as enough are configured for it.
    pub copies_min: usize,
    /// Most hot copies of a model. A pin may ask for more.
    pub copies_max: usize,
    /// Running and waiting requests that a hot copy carries.
    pub requests_per_copy: u32,
    /// Requests per second that a hot copy carries.
    pub rate_per_copy: Rate,
    /// A model with fewer requests per second has no hot copy.
    pub hot_rate_min: Rate,
    /// A first hot copy is had if, in this time, the wakes that it saves take as long as it does.
    pub pay_back_ms: u64,
    /// How long a hot copy stays at least, unless a node is lost or drained, or a pin needs its memory.
    pub keep_min_ms: u64,
    /// How long a copy stays placed that is not needed any more.
    pub spare_keep_ms: u64,
    /// How long a node may be gone until its placements are removed.
    pub forget_node_ms: u64,
    /// Costs until a node has measured its own.
    pub usual_costs: Costs,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            copies_min: 2,
            copies_max: 8,
            requests_per_copy: 32,
            rate_per_copy: Rate::from_micros(8_000_000),
            hot_rate_min: Rate::from_micros(1_000_000 / 600),
            pay_back_ms: 3_600_000,
            keep_min_ms: 120_000,
            spare_keep_ms: 1_800_000,
            forget_node_ms: 600_000,
            usual_costs: Costs {
                wake_ms: Some(2_000),
                sleep_ms: Some(1_000),
                resume_ms: Some(5_000),
                reload_ms: Some(15_000),
                start_ms: Some(90_000),
            },
        }
    }
}
