//! What is known of requests that an engine keeps over a sleep.

use std::time::Duration;

use super::queue::Claim;
use super::time::Time;

#[derive(Debug, Default)]
pub(super) struct Kept {
    claim: Option<Claim>,
    is_held: bool,
    is_impossible: bool,
    is_forbidden: bool,
    stalled: Duration,
}

impl Kept {
    /// Since when they wait.
    pub(super) fn since(&self) -> Option<Time> {
        self.claim.map(|claim| claim.since)
    }

    /// What they wait with.
    pub(super) fn claim(&self) -> Option<Claim> {
        self.claim
    }

    /// Whether this engine said that it cannot keep any, or its canary cannot be judged beside them.
    pub(super) fn is_impossible(&self) -> bool {
        self.is_impossible || self.is_forbidden
    }

    pub(super) fn set_forbidden(&mut self, is_forbidden: bool) {
        self.is_forbidden = is_forbidden;
    }

    /// For how long nothing was said of running requests, in turns alone.
    pub(super) fn stalled(&self) -> Duration {
        self.stalled
    }

    pub(super) fn set_stalled(&mut self, stalled: Duration) {
        self.stalled = stalled;
    }

    pub(super) fn set_impossible(&mut self) {
        self.is_impossible = true;
    }

    /// Another engine may.
    pub(super) fn forget(&mut self) {
        self.is_impossible = false;
    }

    /// Its sleep begins with some, and what they are answered is held back.
    pub(super) fn begin(&mut self, claim: Claim) {
        (self.claim, self.is_held) = (Some(claim), true);
    }

    /// They wait no more.
    pub(super) fn end(&mut self) {
        self.claim = None;
    }

    /// Whether what they are answered was held back.
    pub(super) fn release(&mut self) -> bool {
        std::mem::take(&mut self.is_held)
    }
}
