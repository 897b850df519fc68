//! The waiting requests of a model, by priority and age.

use std::collections::VecDeque;
use std::time::Duration;

use super::messages::RequestId;
use super::time::Time;

/// What waits for a model, and with which priority. A point of priority counts like a second of waiting, so a lower
/// priority waits for longer, but never for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) since: Time,
    pub(super) priority: i32,
}

impl Claim {
    /// The smallest is served first.
    pub(super) fn rank(self) -> i128 {
        let micros = i128::try_from(self.since.since_start().as_micros()).unwrap_or(i128::MAX / 2);
        micros - i128::from(self.priority) * 1_000_000
    }

    /// How much longer it counts as waiting than a request with another priority.
    pub(super) fn lead_over(self, priority: i32) -> Duration {
        let points = i64::from(self.priority) - i64::from(priority);
        Duration::from_secs(u64::try_from(points).unwrap_or_default())
    }
}

/// In the order in which they are served.
#[derive(Debug, Default)]
pub(super) struct Queue(VecDeque<(RequestId, Claim)>);

impl Queue {
    pub(super) fn push(&mut self, request: RequestId, claim: Claim) {
        let before = self.0.iter().rposition(|(_, other)| other.rank() <= claim.rank());
        self.0.insert(before.map_or(0, |before| before + 1), (request, claim));
    }

    pub(super) fn pop(&mut self) -> Option<RequestId> {
        self.0.pop_front().map(|(request, _)| request)
    }

    pub(super) fn remove(&mut self, request: RequestId) {
        self.0.retain(|(other, _)| *other != request);
    }

    /// Removes one that has waited for this long.
    pub(super) fn pop_late(&mut self, now: Time, wait_max: Duration) -> Option<RequestId> {
        let at = self.0.iter().position(|(_, claim)| now >= claim.since.after(wait_max))?;
        self.0.remove(at).map(|(request, _)| request)
    }

    pub(super) fn first(&self) -> Option<Claim> {
        self.0.front().map(|(_, claim)| *claim)
    }

    pub(super) fn oldest(&self) -> Option<Time> {
        self.0.iter().map(|(_, claim)| claim.since).min()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
