//! Where a command should take a model, and when it is known that it will not get there.

use poorwill_rotation_policy::StageName;
use serde_json::Value;

/// Stages in which a model has left its GPUs.
const SLEEPS: [StageName; 4] =
    [StageName::Asleep, StageName::GoingIntoHibernation, StageName::Hibernating, StageName::Cold];
/// Stages in which nothing is done unless something waits.
const RESTS: [StageName; 3] = [StageName::Asleep, StageName::Hibernating, StageName::Cold];

/// The stages that a command leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageGoal {
    name: StageName,
    stages: &'static [StageName],
    /// Its engine was started more often than this.
    starts_above: Option<u64>,
}

impl StageGoal {
    /// Requests are admitted.
    pub const READY: Self = Self { name: StageName::Ready, stages: &[StageName::Ready], starts_above: None };
    /// It sleeps, hibernates, or has stopped.
    pub const ASLEEP: Self = Self { name: StageName::Asleep, stages: &SLEEPS, starts_above: None };
    /// It hibernates.
    pub const HIBERNATING: Self =
        Self { name: StageName::Hibernating, stages: &[StageName::Hibernating], starts_above: None };
    /// Its engine has stopped.
    const COLD: Self = Self { name: StageName::Cold, stages: &[StageName::Cold], starts_above: None };

    /// Of a restart, by the model's status before it: an engine that was not awake only stops. `None` in a stage that has
    /// to end before.
    #[must_use]
    pub fn restarted(before: &Value) -> Option<Self> {
        match before["stage"].as_str()? {
            "ready" | "draining" => Some(Self { starts_above: before["starts"].as_u64(), ..Self::READY }),
            "asleep" | "hibernating" | "quarantined" | "cold" => Some(Self::COLD),
            _ => None,
        }
    }

    /// The stage that it is named by.
    #[must_use]
    pub fn name(&self) -> StageName {
        self.name
    }

    /// By the model's status.
    #[must_use]
    pub fn is_reached(&self, now: &Value) -> bool {
        let is_new = self.starts_above.is_none_or(|starts| now["starts"].as_u64() > Some(starts));
        is_new && self.stages.iter().any(|stage| now["stage"] == stage.as_str())
    }

    /// Why nothing leads there any more, by the model's status.
    pub(super) fn lost(&self, now: &Value) -> Option<String> {
        let is = |stage: &StageName| now["stage"] == stage.as_str();
        if is(&StageName::Quarantined) {
            return Some("it is quarantined, and tried again later".to_owned());
        }
        if self.name == StageName::Hibernating && now["can_hibernate"] == false {
            let why = now["cannot_hibernate"].as_str().unwrap_or("its configuration does not let it");
            return Some(format!("it cannot hibernate: {why}"));
        }
        if self.name != StageName::Ready {
            // A command takes it out of that stage at once.
            let is_back = self.name != StageName::Cold && is(&StageName::Ready);
            return is_back.then(|| "it is ready: its sleep failed, or something woke it again".to_owned());
        }
        if !RESTS.iter().any(is) {
            return None;
        }
        if is(&StageName::Cold) && now["is_supervised"] == false {
            let url = now["url"].as_str().unwrap_or("its address");
            return Some(format!("no engine answers at {url}, and it has no command to be started with"));
        }
        now["oldest_wait_s"].is_null().then(|| "nothing wakes it any more".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn now(stage: &str, is_supervised: bool, waits: bool) -> Value {
        let oldest_wait_s = waits.then_some(1.5);
        json!({
            "stage": stage, "is_supervised": is_supervised, "oldest_wait_s": oldest_wait_s, "url": "http://h:1",
            "can_hibernate": is_supervised, "starts": 3,
        })
    }

    #[test]
    fn a_goal_is_reached_lost_or_ahead() {
        const AHEAD: Option<&str> = None;
        for (goal, now, lost) in [
            (StageGoal::READY, now("waking", true, true), AHEAD),
            (StageGoal::READY, now("cold", true, true), AHEAD),
            (StageGoal::READY, now("draining", true, false), AHEAD),
            (StageGoal::READY, now("cold", true, false), Some("nothing wakes it")),
            (StageGoal::READY, now("asleep", true, false), Some("nothing wakes it")),
            (StageGoal::READY, now("cold", false, true), Some("no engine answers at http://h:1")),
            (StageGoal::READY, now("quarantined", true, true), Some("quarantined")),
            (StageGoal::ASLEEP, now("draining", true, false), AHEAD),
            (StageGoal::ASLEEP, now("ready", true, false), Some("its sleep failed")),
            (StageGoal::ASLEEP, now("quarantined", false, false), Some("quarantined")),
            (StageGoal::HIBERNATING, now("asleep", true, false), AHEAD),
            (StageGoal::HIBERNATING, now("asleep", false, false), Some("cannot hibernate")),
        ] {
            assert!(!goal.is_reached(&now), "{goal:?} {now}");
            let found = goal.lost(&now);
            let is_right = match lost {
                None => found.is_none(),
                Some(words) => found.as_ref().is_some_and(|found| found.contains(words)),
            };
            assert!(is_right, "{goal:?} {now}: {found:?}");
        }
        for stage in ["asleep", "hibernating", "cold"] {
            assert!(StageGoal::ASLEEP.is_reached(&now(stage, true, false)));
        }
    }

    #[test]
    fn a_restart_is_over_at_the_next_start_or_the_stop() {
        let awake = StageGoal::restarted(&now("ready", true, false)).unwrap();
        assert!(!awake.is_reached(&now("ready", true, false)));
        let mut after = now("ready", true, false);
        after["starts"] = json!(4);
        assert!(awake.is_reached(&after));
        let asleep = StageGoal::restarted(&now("asleep", true, false)).unwrap();
        assert!(asleep.is_reached(&now("cold", true, false)));
        assert_eq!(StageGoal::restarted(&now("waking", true, true)), None);
    }
}
