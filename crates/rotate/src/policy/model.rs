//! The policy's data about one model.

use std::collections::VecDeque;

use super::rules::Rules;
use super::talk::{OpId, RequestId, Task};
use super::time::Time;

/// What a model is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not probed yet, or not since its quarantine.
    Unknown,
    /// No engine runs.
    Cold,
    /// Asleep, by its own report and by measurement.
    Asleep,
    /// Awake and verified: requests are admitted.
    Ready { since: Time },
    /// Running requests end, and no more are admitted.
    Draining { until: Time, was_aborted: bool, then: Leave },
    /// A step runs, or waits to be repeated.
    Step { step: Step, began: Time, again_at: Option<Time> },
    /// Ignored after failures.
    Quarantined { until: Time },
}

/// What follows a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    Sleep,
    Stop,
    Restart,
}

/// A step, with the free bytes measured before it on each of the model's GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Look,
    /// Waits for free memory.
    Room(Up),
    Wake {
        free: Vec<u64>,
    },
    Start {
        free: Vec<u64>,
    },
    Confirm {
        came: Option<Came>,
    },
    Canary {
        came: Option<Came>,
    },
    /// Measures what is free now, and so what the model took.
    Learn {
        came: Option<Came>,
    },
    /// Measures what is free before the sleep.
    Before,
    Sleep {
        before: Vec<u64>,
    },
    /// Measures whether the sleep released the model's memory.
    After {
        before: Vec<u64>,
        last: Option<Vec<u64>>,
    },
    Stop(Then),
}

/// How a model becomes ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Up {
    Wake,
    Start,
}

/// How it became ready, and what was free before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Came {
    pub(super) up: Up,
    pub(super) free: Vec<u64>,
}

/// What follows a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    Cold,
    Again,
    Quarantine,
}

impl Step {
    pub(super) fn task(&self) -> Task {
        match self {
            Self::Look => Task::Look,
            Self::Room(_) | Self::Learn { .. } | Self::Before | Self::After { .. } => Task::Weigh,
            Self::Wake { .. } => Task::Wake,
            Self::Start { .. } => Task::Start,
            Self::Confirm { .. } => Task::Confirm,
            Self::Canary { .. } => Task::Canary,
            Self::Sleep { .. } => Task::Sleep,
            Self::Stop(_) => Task::Stop,
        }
    }

    /// Whether a failure in this step is one of waking or starting.
    pub(super) fn is_up(&self) -> bool {
        match self {
            Self::Look | Self::Room(_) | Self::Wake { .. } | Self::Start { .. } => true,
            Self::Confirm { .. } | Self::Canary { .. } | Self::Learn { .. } => true,
            Self::Before | Self::Sleep { .. } | Self::After { .. } | Self::Stop(_) => false,
        }
    }
}

impl Stage {
    /// Its name.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Cold => "cold",
            Self::Asleep => "asleep",
            Self::Ready { .. } => "ready",
            Self::Draining { .. } => "draining",
            Self::Quarantined { .. } => "quarantined",
            Self::Step { step, .. } => match step {
                Step::Look => "looking",
                Step::Room(_) => "finding room",
                Step::Wake { .. } => "waking",
                Step::Start { .. } => "starting",
                Step::Confirm { .. } => "confirming",
                Step::Canary { .. } => "canary",
                Step::Learn { .. } => "weighing",
                Step::Before => "weighing before sleep",
                Step::Sleep { .. } => "falling asleep",
                Step::After { .. } => "giving back",
                Step::Stop(_) => "stopping",
            },
        }
    }

    /// Whether it is leaving the GPUs' memory.
    pub(super) fn is_leaving(&self) -> bool {
        match self {
            Self::Draining { .. } => true,
            Self::Step { step, .. } => !step.is_up(),
            _ => false,
        }
    }
}

/// A running task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Op {
    pub(super) id: OpId,
    pub(super) deadline: Time,
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) rules: Rules,
    pub(super) stage: Stage,
    pub(super) op: Option<Op>,
    /// Whether it was selected to come, and models in its way to leave.
    pub(super) is_coming: bool,
    /// Waiting requests and their arrival, oldest first.
    pub(super) queue: VecDeque<(RequestId, Time)>,
    pub(super) running: usize,
    pub(super) last_used: Time,
    /// When it was asked to wake without a request.
    pub(super) summoned: Option<Time>,
    pub(super) is_pinned: bool,
    /// The most that a sleep released, on each of its GPUs.
    pub(super) held: Option<Vec<u64>>,
    /// What a sleep has to release, by what a wake took. A first sleep, or one after much work, may release memory that
    /// no wake takes again.
    pub(super) owed: Option<Vec<u64>>,
    /// What a start takes.
    pub(super) cold: Option<Vec<u64>>,
    /// Whether other memory changed during its measurement.
    pub(super) is_doubtful: bool,
    /// Consecutive failures.
    pub(super) failures: u32,
    pub(super) was_restarted: bool,
    /// Attempts of the current step.
    pub(super) tries: u32,
    /// No memory is searched before this time.
    pub(super) short_until: Option<Time>,
}

impl Model {
    pub(super) fn new(rules: Rules) -> Self {
        let is_pinned = rules.is_pinned;
        Self {
            rules,
            stage: Stage::Unknown,
            op: None,
            is_coming: false,
            queue: VecDeque::new(),
            running: 0,
            last_used: Time::ZERO,
            summoned: None,
            is_pinned,
            held: None,
            owed: None,
            cold: None,
            is_doubtful: false,
            failures: 0,
            was_restarted: false,
            tries: 0,
            short_until: None,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Ready { .. })
    }

    /// Whether its task may change its GPUs' memory, or needs it unchanged.
    pub(super) fn is_moving(&self) -> bool {
        match &self.stage {
            Stage::Step { step: Step::Look, .. } => false,
            Stage::Step { again_at, .. } => self.op.is_some() || again_at.is_some(),
            _ => false,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running == 0 && self.queue.is_empty()
    }

    /// Since when a request or command waits for it.
    pub(super) fn waited_for_since(&self) -> Option<Time> {
        let oldest = self.queue.front().map(|(_, since)| *since);
        oldest.into_iter().chain(self.summoned).min()
    }

    /// How it can become ready from its stage.
    pub(super) fn way_up(&self) -> Option<Up> {
        match self.stage {
            Stage::Asleep => Some(Up::Wake),
            Stage::Cold => Some(Up::Start),
            _ => None,
        }
    }

    /// What has to be free on each of its GPUs; `None` if unknown.
    pub(super) fn need(&self, up: Up) -> Option<Vec<u64>> {
        let said = || self.rules.need_bytes.map(|bytes| vec![bytes; self.rules.gpus.len()]);
        match up {
            Up::Wake => self.held.clone().or_else(said),
            Up::Start => self.cold.clone().or_else(said),
        }
    }

    /// What it takes, or may take, on each of its GPUs; `None` if unknown, or if it has no memory.
    pub(super) fn promised(&self) -> Option<Vec<u64>> {
        let has_none = match &self.stage {
            Stage::Unknown | Stage::Cold | Stage::Asleep | Stage::Quarantined { .. } => true,
            Stage::Step { step, .. } => matches!(step, Step::Look | Step::Room(_)),
            _ => false,
        };
        if has_none { None } else { self.held.clone().or_else(|| self.need(Up::Start)) }
    }

    /// Records what a wake took. The first wake after a first sleep defines what every later sleep has to release. A
    /// wake that took less than half was measured beside other changes, and does not count.
    pub(super) fn woke(&mut self, taken: &[u64]) {
        let Some(held) = self.held.as_ref().filter(|_| self.owed.is_none()) else { return };
        if held.iter().zip(taken).all(|(held, taken)| *taken >= held / 2) {
            self.owed = Some(held.iter().zip(taken).map(|(held, taken)| *held.min(taken)).collect());
        }
    }

    /// What a sleep has to release on each of its GPUs, as far as known.
    pub(super) fn owes(&self) -> Option<Vec<u64>> {
        let half = || Some(self.held.as_ref()?.iter().map(|bytes| bytes / 2).collect());
        self.owed.clone().or_else(half).or_else(|| self.gives())
    }

    /// What leaving frees on each of its GPUs; `None` if unknown.
    pub(super) fn gives(&self) -> Option<Vec<u64>> {
        let stopped = || self.cold.clone().filter(|_| !self.rules.can_sleep);
        stopped().or_else(|| self.held.clone()).or_else(|| {
            // A sleeping engine keeps a part.
            let likely = |bytes: &u64| bytes / 4 * 3;
            let all = self.need(Up::Start)?;
            Some(all.iter().map(likely).collect())
        })
    }

    /// What the end of its engine frees on each of its GPUs; `None` if unknown, or if it has no memory.
    pub(super) fn leaves(&self) -> Option<Vec<u64>> {
        self.promised()?;
        self.cold.clone().or_else(|| self.gives())
    }
}
