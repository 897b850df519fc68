//! What operators want.

use serde::{Deserialize, Serialize};

use super::reading::{FORMAT, Record};
use crate::name::NodeName;

/// A wish that a node's models go elsewhere.
///
/// ```
/// use poorwill_fleet::records::{Drain, Record};
///
/// assert_eq!(Drain::new("new memory").problem(), None);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// The oldest format whose readers understand it.
    pub format: u32,
    /// The reason, for people.
    #[serde(default)]
    pub why: String,
}

/// A wish that a model is awake. As many of its hot copies as it asks for give way to no request.
///
/// ```
/// use poorwill_fleet::records::{Pin, Record};
///
/// assert_eq!(Pin::new(2).problem(), None);
/// assert!(Pin::new(0).problem().is_some());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// The oldest format whose readers understand it.
    pub format: u32,
    /// How many hot copies it has at least.
    #[serde(default = "one")]
    pub copies: u32,
    /// The only nodes for them; empty for any.
    #[serde(default)]
    pub nodes: Vec<NodeName>,
}

fn one() -> u32 {
    1
}

impl Drain {
    /// For this reason.
    #[must_use]
    pub fn new(why: &str) -> Self {
        Self { format: FORMAT, why: why.to_owned() }
    }
}

impl Pin {
    /// So many hot copies, on any nodes.
    #[must_use]
    pub fn new(copies: u32) -> Self {
        Self { format: FORMAT, copies, nodes: Vec::new() }
    }
}

impl Record for Drain {
    fn problem(&self) -> Option<String> {
        None
    }
}

impl Record for Pin {
    fn problem(&self) -> Option<String> {
        (self.copies == 0).then(|| "copies is 0; remove the pin instead".to_owned())
    }
}
