//! What a node says of itself.

use serde::{Deserialize, Serialize};

use super::reading::{FORMAT, Record};
use crate::name::{FleetName, NodeName};

/// A node, as long as its lease lives.
///
/// ```
/// use poorwill_fleet::records::{GpuRecord, NodeRecord, Record};
///
/// let gpu = GpuRecord { total_bytes: 80 << 30, budget_bytes: 76 << 30 };
/// let node = NodeRecord { gpus: vec![gpu; 8], domain: "rack-3".to_owned(), ..NodeRecord::new("5f0c") };
/// assert_eq!(node.problem(), None);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// The oldest format whose readers understand it.
    pub format: u32,
    /// A random id of the process: another one means that it was restarted.
    pub instance: String,
    /// Where routers send requests.
    #[serde(default)]
    pub front_url: String,
    /// Where operators look and command.
    #[serde(default)]
    pub control_url: String,
    /// What fails together: nodes with the same text, such as a rack.
    #[serde(default)]
    pub domain: String,
    /// Its GPUs, by position.
    #[serde(default)]
    pub gpus: Vec<GpuRecord>,
    /// Host memory that more sleeping models may take.
    #[serde(default)]
    pub host_free_bytes: u64,
    /// Whether it was asked, on the machine itself, to let its models go.
    #[serde(default)]
    pub is_draining: bool,
    /// The version of Poorwill.
    #[serde(default)]
    pub version: String,
    /// What it cannot do as it should, such as placements that it does not follow.
    #[serde(default)]
    pub problems: Vec<String>,
    /// Of its [`signed_text`](Self::signed_text), one by each key of its front. Routers with a key send it to no other.
    #[serde(default)]
    pub signatures: Vec<String>,
}

/// A GPU of a node.
///
/// ```
/// use poorwill_fleet::records::GpuRecord;
///
/// let gpu: GpuRecord = serde_json::from_str(r#"{"total_bytes": 100, "budget_bytes": 90}"#)?;
/// assert_eq!(gpu.budget_bytes, 90);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuRecord {
    /// All of its memory.
    pub total_bytes: u64,
    /// What awake models may take together.
    pub budget_bytes: u64,
}

impl NodeRecord {
    /// A node without GPUs, of a process with this random id.
    #[must_use]
    pub fn new(instance: &str) -> Self {
        Self {
            format: FORMAT,
            instance: instance.to_owned(),
            front_url: String::new(),
            control_url: String::new(),
            domain: String::new(),
            gpus: Vec::new(),
            host_free_bytes: 0,
            is_draining: false,
            version: String::new(),
            problems: Vec::new(),
            signatures: Vec::new(),
        }
    }

    /// What a node signs: that it is reached there while this lease lives. Parts are in lines of their own, which none of
    /// them can have.
    #[must_use]
    pub fn signed_text(&self, fleet: &FleetName, node: &NodeName, lease: i64) -> String {
        format!("poorwill node\n{fleet}\n{node}\n{lease}\n{}\n{}", self.instance, self.front_url)
    }
}

impl Record for NodeRecord {
    fn problem(&self) -> Option<String> {
        let over = self.gpus.iter().enumerate().find(|(_, gpu)| gpu.budget_bytes > gpu.total_bytes);
        let over = over.map(|(index, gpu)| {
            format!("GPU {index} has a budget of {} of {} bytes", gpu.budget_bytes, gpu.total_bytes)
        });
        over.or_else(|| self.instance.is_empty().then(|| "instance is empty".to_owned()))
    }
}
