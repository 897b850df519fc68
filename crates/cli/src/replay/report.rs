//! What was replayed.

use poorwill_replay::answer::Answer;
use serde::Serialize;

/// What was replayed.
#[derive(Debug, Serialize)]
pub(crate) struct ReplayReport {
    pub(crate) traces: Vec<Replayed>,
    #[serde(skip)]
    pub(super) mismatch: Option<String>,
}

/// One trace on one card.
#[derive(Debug, Serialize)]
pub(crate) struct Replayed {
    pub(crate) name: String,
    pub(crate) steps: usize,
    pub(crate) total_bytes: u64,
    pub(crate) taken_bytes: u64,
    pub(crate) budget_bytes: Option<u64>,
    pub(crate) usable_bytes: u64,
    #[serde(flatten)]
    pub(crate) answer: Answer,
}
