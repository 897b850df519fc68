//! What looks at a model have found since it became ready.

use super::time::Time;

#[derive(Debug, Default)]
pub(super) struct Looks {
    /// In sequence.
    pub(super) failed: u32,
    pub(super) counted_at: Option<Time>,
    /// The last sign that it works.
    pub(super) sign_at: Time,
}

impl Looks {
    pub(super) fn from(now: Time) -> Self {
        Self { failed: 0, counted_at: None, sign_at: now }
    }
}
