//! When the next request of a model is expected, from the pauses between its requests.

use std::time::Duration;

use super::time::Time;

/// No pause counts as shorter, so that the mean can grow again.
const LEAST: Duration = Duration::from_millis(1);

/// Pauses are measured from the end of a model's last request to its next one, also while it sleeps.
#[derive(Debug, Default)]
pub(super) struct Demand {
    idle_since: Option<Time>,
    pause: Option<Duration>,
}

impl Demand {
    pub(super) fn arrived(&mut self, now: Time) {
        let Some(since) = self.idle_since.take() else { return };
        let took = now.since(since).max(LEAST);
        self.pause = Some(self.pause.map_or(took, |before| geometric_mean(before, took)));
    }

    pub(super) fn became_idle(&mut self, now: Time) {
        self.idle_since.get_or_insert(now);
    }

    /// Whether a pause is usually over in this time. True until one was measured.
    pub(super) fn is_usually_within(&self, time: Duration) -> bool {
        self.pause.is_none_or(|pause| pause <= time)
    }

    /// The same, and false until one was measured.
    pub(super) fn is_known_within(&self, time: Duration) -> bool {
        self.pause.is_some_and(|pause| pause <= time)
    }

    /// How long until the next request: as long as a usual pause, or as this one has lasted. Until a pause was
    /// measured, as long as the policy has run.
    pub(super) fn next_in(&self, now: Time) -> Duration {
        let idle = self.idle_since.map_or(Duration::ZERO, |since| now.since(since));
        self.pause.unwrap_or(now.since_start()).max(idle).max(LEAST)
    }
}

/// One long pause among many short ones changes it little.
fn geometric_mean(one: Duration, other: Duration) -> Duration {
    let micros = (one.as_micros() * other.as_micros()).isqrt();
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}
