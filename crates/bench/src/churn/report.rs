//! Result of a load.

use serde::{Serialize, Serializer};

use super::load::Load;

/// Result of a load, in bytes and seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChurnReport {
    /// The load.
    #[serde(serialize_with = "by_name")]
    pub load: Load,
    /// Its seed.
    pub seed: u64,
    /// Planned rounds.
    pub rounds: u32,
    /// Most that the arena may map.
    pub limit_bytes: u64,
    /// The failed allocation that ended the load.
    pub failed: Option<String>,
    /// Peak of live bytes, as the load counts them.
    pub peak_live_bytes: u64,
    /// Peak of mapped bytes.
    pub peak_mapped_bytes: u64,
    /// Peak mapped over peak live; `None` if nothing was live.
    pub peak_ratio: Option<f64>,
    /// Bytes live at the end of the last round.
    pub live_bytes: u64,
    /// Still mapped then, after a trim.
    pub held_bytes: u64,
    /// Held over live at the end; `None` if nothing was live.
    pub held_ratio: Option<f64>,
    /// Created by each round; mapped memory is reused.
    pub created_bytes: Vec<u64>,
    /// All rounds, without the trim.
    pub seconds: f64,
}

fn by_name<S: Serializer>(load: &Load, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(load.name())
}
