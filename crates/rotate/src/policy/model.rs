//! What the policy knows of one model.

use std::collections::VecDeque;

use super::rules::Rules;
use super::talk::{OpId, RequestId, Task};
use super::time::Time;

/// What a model is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nobody has looked yet, or not since it was left alone.
    Unknown,
    /// There is no engine: it has to be started.
    Cold,
    /// Asleep, by its word and by what was measured.
    Asleep,
    /// Awake, and tried: its requests are let through.
    Ready { since: Time },
    /// Its requests are coming to their end, and no more are let through.
    Draining { until: Time, was_aborted: bool, then: Leave },
    /// A step is being done, or is waiting to be done again.
    Step { step: Step, began: Time, again_at: Option<Time> },
    /// Left alone.
    Quarantined { until: Time },
}

/// What happens when it has drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    Sleep,
    Stop,
    Restart,
}

/// A step. What was measured before goes along, for each of the model's GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Look,
    /// Is there room?
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
    /// What is free now, and so what did it take, if it came?
    Learn {
        came: Option<Came>,
    },
    /// What is free before it sleeps?
    Before,
    Sleep {
        before: Vec<u64>,
    },
    /// Has it given back what it holds?
    After {
        before: Vec<u64>,
        last: Option<Vec<u64>>,
    },
    Stop(Then),
}

/// How a model comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Up {
    Wake,
    Start,
}

/// How it came, and what was free before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Came {
    pub(super) up: Up,
    pub(super) free: Vec<u64>,
}

/// What follows when it was stopped.
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

    /// Whether what fails in it fails on the way up.
    pub(super) fn is_up(&self) -> bool {
        match self {
            Self::Look | Self::Room(_) | Self::Wake { .. } | Self::Start { .. } => true,
            Self::Confirm { .. } | Self::Canary { .. } | Self::Learn { .. } => true,
            Self::Before | Self::Sleep { .. } | Self::After { .. } | Self::Stop(_) => false,
        }
    }
}

impl Stage {
    /// Its name, for people and metrics.
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

    /// Whether it is on its way out of the GPUs' memory.
    pub(super) fn is_leaving(&self) -> bool {
        match self {
            Self::Draining { .. } => true,
            Self::Step { step, .. } => !step.is_up(),
            _ => false,
        }
    }
}

/// A task that has not ended.
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
    /// Whether it was chosen to come, and whoever is in its way to leave.
    pub(super) is_coming: bool,
    /// The requests that wait, and since when, in their order.
    pub(super) queue: VecDeque<(RequestId, Time)>,
    pub(super) running: usize,
    pub(super) last_used: Time,
    /// Since when it was asked to wake without a request.
    pub(super) summoned: Option<Time>,
    pub(super) is_pinned: bool,
    /// The most that a sleep gave back, on each of its GPUs.
    pub(super) held: Option<Vec<u64>>,
    /// What a sleep has to give back, by what a wake took: a first sleep, and one behind much work, may give back what
    /// no wake takes again.
    pub(super) owed: Option<Vec<u64>>,
    /// What it takes when it is started.
    pub(super) cold: Option<Vec<u64>>,
    /// Whether somebody else's memory came or went while its own was measured.
    pub(super) is_doubtful: bool,
    /// Failures since it was last well.
    pub(super) failures: u32,
    pub(super) was_restarted: bool,
    /// How often the step it is in was tried.
    pub(super) tries: u32,
    /// Until when no room is looked for.
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

    /// Whether what it does now may change what its GPUs hold, or has to see them unchanged.
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

    /// Since when somebody waits for it to be awake.
    pub(super) fn waited_for_since(&self) -> Option<Time> {
        let oldest = self.queue.front().map(|(_, since)| *since);
        oldest.into_iter().chain(self.summoned).min()
    }

    /// How it comes, if it is somewhere that it can come from.
    pub(super) fn way_up(&self) -> Option<Up> {
        match self.stage {
            Stage::Asleep => Some(Up::Wake),
            Stage::Cold => Some(Up::Start),
            _ => None,
        }
    }

    /// What has to be free on each of its GPUs for it to come; nothing where that is not known.
    pub(super) fn need(&self, up: Up) -> Option<Vec<u64>> {
        let said = || self.rules.need_bytes.map(|bytes| vec![bytes; self.rules.gpus.len()]);
        match up {
            Up::Wake => self.held.clone().or_else(said),
            Up::Start => self.cold.clone().or_else(said),
        }
    }

    /// What it takes on each of its GPUs, or may take, as far as it is known; nothing where it has none.
    pub(super) fn promised(&self) -> Option<Vec<u64>> {
        let has_none = match &self.stage {
            Stage::Unknown | Stage::Cold | Stage::Asleep | Stage::Quarantined { .. } => true,
            Stage::Step { step, .. } => matches!(step, Step::Look | Step::Room(_)),
            _ => false,
        };
        if has_none { None } else { self.held.clone().or_else(|| self.need(Up::Start)) }
    }

    /// It woke, and took so much. The first wake since a first sleep says what every sleep has to give back from then
    /// on, whatever it gave back before. One that took less than half of that was not measured right: somebody else's
    /// memory went meanwhile.
    pub(super) fn woke(&mut self, taken: &[u64]) {
        let Some(held) = self.held.as_ref().filter(|_| self.owed.is_none()) else { return };
        if held.iter().zip(taken).all(|(held, taken)| *taken >= held / 2) {
            self.owed = Some(held.iter().zip(taken).map(|(held, taken)| *held.min(taken)).collect());
        }
    }

    /// What a sleep has to give back on each of its GPUs, as far as it is known.
    pub(super) fn owes(&self) -> Option<Vec<u64>> {
        let half = || Some(self.held.as_ref()?.iter().map(|bytes| bytes / 2).collect());
        self.owed.clone().or_else(half).or_else(|| self.gives())
    }

    /// What is free on each of its GPUs when it has left; nothing where that is not known.
    pub(super) fn gives(&self) -> Option<Vec<u64>> {
        let stopped = || self.cold.clone().filter(|_| !self.rules.can_sleep);
        stopped().or_else(|| self.held.clone()).or_else(|| {
            // A part of it stays when it sleeps.
            let likely = |bytes: &u64| bytes / 4 * 3;
            let all = self.need(Up::Start)?;
            Some(all.iter().map(likely).collect())
        })
    }

    /// What its GPUs have more of once its engine is gone, as far as it is known; nothing where it has no memory.
    pub(super) fn leaves(&self) -> Option<Vec<u64>> {
        self.promised()?;
        self.cold.clone().or_else(|| self.gives())
    }
}
