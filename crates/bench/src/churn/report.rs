//! What a load took.

use serde::{Serialize, Serializer};

use super::load::Load;

/// What a load took, in bytes and seconds. One shape in Rust and JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Which.
    #[serde(serialize_with = "by_name")]
    pub load: Load,
    /// Its seed.
    pub seed: u64,
    /// How many times it was to run.
    pub rounds: u32,
    /// Most the arena may map, in bytes.
    pub limit_bytes: u64,
    /// Why an allocation failed, if one did; the load ended there.
    pub failed: Option<String>,
    /// Most bytes live at any time, as the load itself counts them.
    pub peak_live_bytes: u64,
    /// Most bytes mapped at any time.
    pub peak_mapped_bytes: u64,
    /// Mapped over live, each at its peak. None where nothing was live.
    pub peak_ratio: Option<f64>,
    /// Bytes live at the end of the last round.
    pub live_bytes: u64,
    /// Bytes still mapped then, after a trim.
    pub held_bytes: u64,
    /// Held over live at the end. None where nothing was live.
    pub held_ratio: Option<f64>,
    /// Memory that each round created; what a round finds mapped it need not create.
    pub created_bytes: Vec<u64>,
    /// All rounds together, freeing between them included; not the trim.
    pub seconds: f64,
}

fn by_name<S: Serializer>(load: &Load, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(load.name())
}
