//! What the controller wants of a node.

use serde::{Deserialize, Serialize};

use super::reading::{FORMAT, Record};

/// What a node should do with a model.
///
/// ```
/// use poorwill_fleet::records::Goal;
///
/// assert_eq!(serde_json::to_string(&Goal::Hot)?, r#""hot""#);
/// assert_eq!(Goal::Warm.to_string(), "warm");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// Let it go once its requests end. A placement that is absent orders nothing.
    None,
    /// Take its requests, and have it ready to wake: asleep, hibernating or on disk.
    Warm,
    /// Take its requests, and keep it awake. Of idle models, it leaves last.
    Hot,
}

impl std::fmt::Display for Goal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Warm => "warm",
            Self::Hot => "hot",
        })
    }
}

/// A goal for a model on a node.
///
/// Promise: one with a smaller `fence` is never written over one with a greater, by etcd's transactions.
///
/// ```
/// use poorwill_fleet::records::{Goal, Placement};
///
/// let placement = Placement::new(41, Goal::Warm, 1_700_000_000_000, "1 of 2 copies is left");
/// assert_eq!((placement.fence, placement.goal, placement.is_held()), (41, Goal::Warm, false));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The oldest format whose readers understand it.
    pub format: u32,
    /// The revision of the election that its controller won.
    pub fence: u64,
    /// What is wanted.
    pub goal: Goal,
    /// When the goal became this one: milliseconds since 1970, by the controller's clock.
    pub changed_at_ms: u64,
    /// The reason, for people.
    #[serde(default)]
    pub why: String,
    /// Whether a hot copy is kept by an operator's pin. `None` of controllers that do not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<bool>,
}

impl Placement {
    /// As a controller with this fence writes it, without a word of pins.
    #[must_use]
    pub fn new(fence: u64, goal: Goal, changed_at_ms: u64, why: &str) -> Self {
        Self { format: FORMAT, fence, goal, changed_at_ms, why: why.to_owned(), pinned: None }
    }

    /// Whether it gives way to nothing: a hot copy that is pinned, or of which that is not known.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.goal == Goal::Hot && self.pinned.unwrap_or(true)
    }
}

impl Record for Placement {
    fn problem(&self) -> Option<String> {
        (self.fence == 0).then(|| "fence is 0, which is no revision of an election".to_owned())
    }
}
