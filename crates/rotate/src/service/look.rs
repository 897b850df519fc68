//! A look at an engine that should be awake.
//!
//! Promises: a look ends within [`LOOK_MAX`]. One that is late says whether the engine is at work all the same.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::timeout;

use super::directory::Entry;
use poorwill_rotation_policy::{EngineState, Look};

/// Three looks that are late, the pauses between them and one before them take 13 s with usual rules.
pub(super) const LOOK_MAX: Duration = Duration::from_secs(2);

/// An engine computes that uses this part of a core.
const CORE_PART: u32 = 10;

/// How many parts of answers came from its engine.
pub(super) fn answered(entry: &Entry) -> u64 {
    entry.answered.load(Ordering::Relaxed)
}

/// What the engine says, or why that counts against it. `answered` is the count of answers' parts at the last look.
pub(super) async fn look(entry: &Entry, answered_before: u64) -> Result<EngineState, Look> {
    let half = LOOK_MAX / 2;
    let mut asked = entry.handle.engine().probe();
    let found = match timeout(half, asked.as_mut()).await {
        Ok(found) => found,
        Err(_) => {
            let used = entry.handle.cpu_time().await;
            match timeout(half, asked).await {
                Ok(found) => found,
                Err(_) if answered(entry) != answered_before => return Err(Look::Flowing),
                Err(_) => {
                    let is_computing = match (used, entry.handle.cpu_time().await) {
                        (Some(used), Some(now)) => now.saturating_sub(used) >= half / CORE_PART,
                        _ => false,
                    };
                    return Err(if is_computing { Look::Computing } else { Look::Late });
                }
            }
        }
    };
    found.map_err(|error| Look::Unwell(error.to_string()))
}
