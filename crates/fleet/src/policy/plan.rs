//! What a controller should write, and why.

use std::fmt;

use super::time::Time;
use crate::name::{ModelName, NodeName};
use crate::records::{Goal, Placement, Rate};

/// What to write. It is empty if all is as it should be.
///
/// ```
/// use poorwill_fleet::policy::{Rules, Time, View, decide};
///
/// let plan = decide(&View::default(), &Rules::default(), Time(0));
/// assert!(plan.changes.is_empty() && plan.shortages.is_empty());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// At most one for each model and node, in the order of their names.
    pub changes: Vec<Change>,
    /// What could not be had, in the order of the models' names.
    pub shortages: Vec<Shortage>,
}

/// A placement to write or remove.
///
/// ```
/// use poorwill_fleet::policy::{Change, Why, Write};
/// use poorwill_fleet::records::Goal;
///
/// let (model, node) = ("qwen".parse()?, "gpu-17".parse()?);
/// let change = Change { model, node, write: Write::Goal(Goal::Hot), is_held: true, why: Why::Pinned };
/// assert_eq!(change.to_string(), "`qwen` on `gpu-17`: hot, since it is pinned");
/// # Ok::<(), poorwill_fleet::name::NameError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The model.
    pub model: ModelName,
    /// The node.
    pub node: NodeName,
    /// What to do with their placement.
    pub write: Write,
    /// Whether an operator's pin keeps it there.
    pub is_held: bool,
    /// The reason.
    pub why: Why,
}

impl Change {
    /// What a controller with this fence writes in place of what there is; `None` to remove it. A goal that stays keeps
    /// its age.
    ///
    /// ```
    /// use poorwill_fleet::policy::{Change, Time, Why, Write};
    /// use poorwill_fleet::records::{Goal, Placement};
    ///
    /// let (model, node) = ("qwen".parse()?, "gpu-17".parse()?);
    /// let change = Change { model, node, write: Write::Goal(Goal::Hot), is_held: true, why: Why::Pinned };
    /// let before = Placement::new(1, Goal::Hot, 5, "");
    /// let written = change.placement(2, Some(&before), Time(9)).map(|one| (one.changed_at_ms, one.pinned));
    /// assert_eq!(written, Some((5, Some(true))));
    /// # Ok::<(), poorwill_fleet::name::NameError>(())
    /// ```
    #[must_use]
    pub fn placement(&self, fence: u64, before: Option<&Placement>, now: Time) -> Option<Placement> {
        let Write::Goal(goal) = self.write else { return None };
        let since_ms =
            before.filter(|before| before.goal == goal).map_or(now.0, |before| before.changed_at_ms);
        let placement = Placement::new(fence, goal, since_ms, &self.why.to_string());
        Some(Placement { pinned: (goal == Goal::Hot).then_some(self.is_held), ..placement })
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, node, write, why, .. } = self;
        write!(f, "`{model}` on `{node}`: {write}, since {why}")
    }
}

/// What to do with a placement.
///
/// ```
/// use poorwill_fleet::policy::Write;
///
/// assert_eq!(Write::Remove.to_string(), "removed");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// Write it with this goal.
    Goal(Goal),
    /// Remove it: there is no such model on such a node.
    Remove,
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Goal(goal) => goal.fmt(f),
            Self::Remove => f.write_str("removed"),
        }
    }
}

/// Why a placement changes. Its text goes on after "since".
///
/// ```
/// use poorwill_fleet::policy::Why;
///
/// assert_eq!(Why::FewCopies { placed: 1, wanted: 2 }.to_string(), "it was placed on 1 of 2 nodes");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// An operator wants it hot.
    Pinned,
    /// It was held by a pin, and stays hot without that.
    NotPinned,
    /// The configuration of the node wants it hot.
    PinnedThere,
    /// Its hot copies carry less than its demand.
    Demand {
        /// Running and waiting requests.
        requests: u64,
        /// Requests per second.
        rate: Rate,
        /// How many hot copies that takes.
        copies: usize,
    },
    /// A hot copy was lost with its node, failed, or is on a node that drains.
    Replaces,
    /// Another model is worth more there.
    Displaced {
        /// That model.
        by: ModelName,
    },
    /// Fewer hot copies carry its demand.
    FewerSuffice {
        /// How many do.
        copies: usize,
    },
    /// Hot copies took more than a GPU may give.
    OverBudget,
    /// It had too few placements.
    FewCopies {
        /// How many it had.
        placed: usize,
        /// How many it should have.
        wanted: usize,
    },
    /// Its placements could fail together.
    Spread,
    /// It has enough placements without this one.
    Spare,
    /// The node drains, and it is ready elsewhere.
    Drained,
    /// The node drains, and its engine was not started there.
    DrainedCold,
    /// The node drains, and no other can have it.
    DrainedAlone,
    /// It failed there, and is ready elsewhere.
    FailedThere,
    /// The node is gone, and may be back.
    NodeGone,
    /// The node has been gone for long.
    NodeForgotten,
    /// The node does not have it configured any more.
    NotConfigured,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pinned => f.write_str("it is pinned"),
            Self::NotPinned => f.write_str("no pin keeps it any more"),
            Self::PinnedThere => f.write_str("the node's configuration pins it"),
            Self::Demand { requests, rate, copies } => {
                write!(f, "{requests} requests and {rate:?} take {copies} hot copies")
            }
            Self::Replaces => f.write_str("another hot copy is lost or leaves"),
            Self::Displaced { by } => write!(f, "`{by}` is worth more there"),
            Self::FewerSuffice { copies: 0 } => f.write_str("it has hardly any requests"),
            Self::FewerSuffice { copies } => write!(f, "hot copies suffice: {copies}"),
            Self::OverBudget => f.write_str("hot copies took more than a GPU's budget"),
            Self::FewCopies { placed, wanted } => write!(f, "it was placed on {placed} of {wanted} nodes"),
            Self::Spread => f.write_str("its other nodes could fail together"),
            Self::Spare => f.write_str("its other nodes suffice"),
            Self::Drained => f.write_str("the node drains, and it is ready elsewhere"),
            Self::DrainedCold => f.write_str("the node drains, and its engine was not started there"),
            Self::DrainedAlone => f.write_str("the node drains, and no other can have it"),
            Self::FailedThere => f.write_str("it failed there, and is ready elsewhere"),
            Self::NodeGone => f.write_str("the node went away"),
            Self::NodeForgotten => f.write_str("the node has been gone for long"),
            Self::NotConfigured => f.write_str("the node does not have it configured"),
        }
    }
}

/// What a model should have and does not get.
///
/// ```
/// use poorwill_fleet::policy::{Lack, Shortage};
///
/// let lack = Lack::Memory { hot: 1, wanted: 2 };
/// let shortage = Shortage { model: "qwen".parse()?, lack };
/// assert_eq!(shortage.to_string(), "`qwen`: 1 of 2 hot copies; no GPU has memory for another");
/// # Ok::<(), poorwill_fleet::name::NameError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortage {
    /// The model.
    pub model: ModelName,
    /// What it lacks.
    pub lack: Lack,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: {}", self.model, self.lack)
    }
}

/// What is lacking.
///
/// ```
/// use poorwill_fleet::policy::Lack;
///
/// assert_eq!(Lack::Nodes { placed: 1, wanted: 2 }.to_string(), "1 of 2 nodes; no other can have it");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lack {
    /// Hot copies for its demand: no GPU has the memory, or what is there is worth more.
    Memory {
        /// How many it has.
        hot: usize,
        /// How many it should have.
        wanted: usize,
    },
    /// A first hot copy: it would take longer than the wakes that it saves.
    Worth {
        /// How many hot copies would carry its demand.
        wanted: usize,
    },
    /// Hot copies that its pin asks for.
    Pin {
        /// How many it has.
        hot: usize,
        /// How many it should have.
        wanted: usize,
    },
    /// Nodes that can have it.
    Nodes {
        /// How many it has.
        placed: usize,
        /// How many it should have.
        wanted: usize,
    },
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory { hot, wanted } => {
                write!(f, "{hot} of {wanted} hot copies; no GPU has memory for another")
            }
            Self::Worth { wanted } => {
                write!(f, "0 of {wanted} hot copies; one would take longer than the wakes that it saves")
            }
            Self::Pin { hot, wanted } => {
                write!(f, "{hot} of {wanted} pinned copies; no GPU has memory for another")
            }
            Self::Nodes { placed, wanted } => write!(f, "{placed} of {wanted} nodes; no other can have it"),
        }
    }
}
