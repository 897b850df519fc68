//! What a model does: its stage with data, and the steps between.

use std::time::Duration;

use super::messages::{EngineState, OpId, Task};
use super::stage::StageName;
use super::time::Time;

/// As [`StageName`], with data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stage {
    Unknown,
    Cold,
    Asleep,
    Hibernating,
    Ready {
        since: Time,
    },
    Draining {
        until: Time,
        was_aborted: bool,
        then: Leave,
    },
    /// The step runs, or waits to be repeated.
    Step {
        step: Step,
        began: Time,
        retry_at: Option<Time>,
    },
    Quarantined {
        until: Time,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    Sleep,
    /// With the requests that run, which its engine keeps.
    Cut,
    Stop,
    Restart,
    /// It failed while it was ready, which is reported already.
    Failed,
}

/// With the free bytes measured before it, on each of the model's GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Probe,
    FindMemory(Activation),
    Wake(ControlCall),
    Start {
        free: Vec<u64>,
    },
    Confirm {
        activated: Option<Activated>,
    },
    Canary {
        activated: Option<Activated>,
    },
    /// Measures what the model took.
    Learn {
        activated: Option<Activated>,
    },
    Before,
    Sleep(ControlCall),
    /// Asks what the engine does after a call that failed or was not answered.
    Inquire(Inquiry),
    /// Measures whether the sleep released the model's memory.
    After {
        before: Vec<u64>,
        last: Option<Vec<u64>>,
    },
    /// As [`Step::Before`], of a sleeping model.
    BeforeHibernation,
    Hibernate {
        before: Vec<u64>,
    },
    /// Measures whether the hibernation released what it still held.
    AfterHibernation {
        before: Vec<u64>,
        last: Option<Vec<u64>>,
    },
    Resume {
        /// Otherwise it sleeps on.
        wakes: bool,
    },
    /// As [`Step::Before`], of one that is stopped.
    BeforeStop,
    Stop(Then),
    /// Measures what the stop released.
    AfterStop {
        before: Vec<u64>,
    },
}

/// The engine's own sleep or wake, which may be repeated once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ControlCall {
    /// The state that it leads to.
    pub(super) wanted: EngineState,
    /// Free bytes before it, with what stops beside a wake freed.
    pub(super) free: Vec<u64>,
    /// Whether these are counted.
    pub(super) counts_stops: bool,
    pub(super) until: Time,
    pub(super) is_repeated: bool,
    /// Whether the engine keeps its running requests in this sleep.
    pub(super) keeps: bool,
}

/// A call that failed, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Inquiry {
    pub(super) call: ControlCall,
    pub(super) reason: String,
    /// The engine does not say what it does, so its memory is measured.
    pub(super) by_memory: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activation {
    /// Memory for the wake after it has to be free as well.
    Resume,
    Wake,
    Start,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Move {
    Come(Activation),
    /// Its last requests end.
    Drain,
    Leave,
    Hibernate,
}

/// How long its moves take: the mean of the last one and what was known before it.
#[derive(Debug, Default)]
pub(super) struct Costs {
    pub(super) resume: Option<Duration>,
    pub(super) wake: Option<Duration>,
    pub(super) start: Option<Duration>,
    pub(super) drain: Option<Duration>,
    pub(super) leave: Option<Duration>,
    pub(super) hibernate: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Activated {
    pub(super) up: Activation,
    pub(super) free: Vec<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Then {
    Cold,
    /// With what was free before it.
    Measure {
        before: Vec<u64>,
    },
    Again,
    Quarantine,
}

impl ControlCall {
    pub(super) fn wakes(&self) -> bool {
        self.wanted == EngineState::Awake
    }
}

impl Step {
    /// Whether memory says what its engine does.
    pub(super) fn is_by_memory(&self) -> bool {
        matches!(self, Self::Inquire(inquiry) if inquiry.by_memory)
    }

    pub(super) fn task(&self) -> Task {
        match self {
            Self::Inquire(inquiry) if inquiry.by_memory => Task::Measure,
            Self::Probe | Self::Inquire(_) => Task::Probe,
            Self::FindMemory(_) | Self::Learn { .. } | Self::Before | Self::After { .. } => Task::Measure,
            Self::BeforeHibernation | Self::AfterHibernation { .. } => Task::Measure,
            Self::BeforeStop | Self::AfterStop { .. } => Task::Measure,
            Self::Hibernate { .. } => Task::Hibernate,
            Self::Resume { .. } => Task::Resume,
            Self::Wake(_) => Task::Wake,
            Self::Start { .. } => Task::Start,
            Self::Confirm { .. } => Task::Confirm,
            Self::Canary { .. } => Task::Canary,
            Self::Sleep(call) if call.keeps => Task::SleepKeeping,
            Self::Sleep(_) => Task::Sleep,
            Self::Stop(_) => Task::Stop,
        }
    }

    /// Whether a failure in this step is one of waking or starting.
    pub(super) fn is_activating(&self) -> bool {
        match self {
            Self::Probe | Self::FindMemory(_) | Self::Wake(_) | Self::Start { .. } => true,
            Self::Confirm { .. } | Self::Canary { .. } | Self::Learn { .. } => true,
            Self::Resume { wakes } => *wakes,
            Self::Inquire(inquiry) => inquiry.call.wakes(),
            Self::Before | Self::Sleep(_) | Self::After { .. } => false,
            Self::BeforeStop | Self::Stop(_) | Self::AfterStop { .. } => false,
            Self::BeforeHibernation | Self::Hibernate { .. } | Self::AfterHibernation { .. } => false,
        }
    }

    /// Whether a sleeping model's processes leave their GPUs, or come back without a wake.
    pub(super) fn is_of_sleeper(&self) -> bool {
        match self {
            Self::BeforeHibernation | Self::Hibernate { .. } | Self::AfterHibernation { .. } => true,
            Self::Resume { wakes } => !wakes,
            _ => false,
        }
    }
}

impl Stage {
    pub(super) fn name(&self) -> StageName {
        match self {
            Self::Unknown => StageName::Unknown,
            Self::Cold => StageName::Cold,
            Self::Asleep => StageName::Asleep,
            Self::Hibernating => StageName::Hibernating,
            Self::Ready { .. } => StageName::Ready,
            Self::Draining { .. } => StageName::Draining,
            Self::Quarantined { .. } => StageName::Quarantined,
            Self::Step { step, .. } => match step {
                Step::Probe => StageName::Probing,
                Step::FindMemory(_) => StageName::FindingMemory,
                Step::Wake(_) => StageName::Waking,
                Step::Inquire(inquiry) if inquiry.call.wakes() => StageName::Waking,
                Step::Start { .. } => StageName::Starting,
                Step::Confirm { .. } => StageName::Confirming,
                Step::Canary { .. } => StageName::Canary,
                Step::Learn { .. } => StageName::Measuring,
                Step::Before => StageName::MeasuringBeforeSleep,
                Step::Sleep(_) | Step::Inquire(_) => StageName::FallingAsleep,
                Step::After { .. } => StageName::ReleasingMemory,
                Step::BeforeHibernation | Step::Hibernate { .. } | Step::AfterHibernation { .. } => {
                    StageName::GoingIntoHibernation
                }
                Step::Resume { .. } => StageName::Resuming,
                Step::BeforeStop | Step::Stop(_) | Step::AfterStop { .. } => StageName::Stopping,
            },
        }
    }

    pub(super) fn is_leaving(&self) -> bool {
        match self {
            Self::Draining { .. } => true,
            Self::Step { step, .. } => !step.is_activating(),
            _ => false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Op {
    pub(super) id: OpId,
    pub(super) deadline: Time,
}
