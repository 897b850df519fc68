//! Inputs and effects of the policy.

use std::time::Duration;

use super::rules::{Gpu, ModelId};
use super::stage::StageName;
use super::time::Time;

/// A request, by the service's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A task, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub(super) u64);

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A request with a new number.
    Arrived {
        /// Its number.
        request: RequestId,
        /// Its model.
        model: ModelId,
        /// Added to that of its model.
        priority: i32,
    },
    /// A request ended, for any reason.
    Left(RequestId),
    /// A task ended.
    Ended {
        /// Its number.
        op: OpId,
        /// Its result.
        outcome: TaskOutcome,
    },
    /// What an engine's processes hold on each of its GPUs.
    Holds {
        /// Its model.
        model: ModelId,
        /// Its bytes.
        bytes: Vec<u64>,
    },
    /// An engine died, or answers no more.
    Lost(ModelId),
    /// A ready engine sleeps, without a command from here.
    Slept(ModelId),
    /// A look at an engine that should be awake, and what it found.
    Looked {
        /// Its model.
        model: ModelId,
        /// What was found.
        look: Look,
    },
    /// Wake a model without a request.
    Wake(ModelId),
    /// Start a cold engine that can sleep, and let it sleep, if no model in use has to leave for it. Otherwise nothing
    /// happens.
    Prepare(ModelId),
    /// Put a model to sleep, even if pinned.
    Sleep(ModelId),
    /// The same, and take its processes off their GPUs.
    Hibernate(ModelId),
    /// Whether a model hibernates is to be asked again.
    Recheck(ModelId),
    /// Stop an engine, and start it again if it was awake.
    Restart(ModelId),
    /// Pin or unpin a model.
    Pin(ModelId, bool),
    /// Keep a model awake unless a request needs its memory, or no longer. This alone wakes it where memory is free.
    Hot(ModelId, bool),
    /// Whether a hot model gives way to nothing, like a pinned one. That ends with its order to be hot.
    Hold(ModelId, bool),
    /// Only time has passed.
    Tick,
    /// Admit no more requests, and begin nothing.
    Shutdown,
}

/// The memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Unused bytes.
    pub free_bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
}

/// What a look at an engine found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Look {
    /// It says that it is awake.
    Awake,
    /// No answer came in time, but its answers to clients flow.
    Flowing,
    /// No answer came in time, but its processes compute.
    Computing,
    /// No answer came in time.
    Late,
    /// It says that it is not well, or answers what is not understood.
    Unwell(String),
}

/// The result of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskOutcome {
    /// Of [`Task::Start`], [`Task::Stop`], [`Task::Sleep`], [`Task::SleepKeeping`], [`Task::Hibernate`], [`Task::Resume`] and [`Task::Wake`].
    Done,
    /// Of [`Task::Probe`].
    Probed(EngineState),
    /// Of [`Task::Measure`]: the memory of each of the model's GPUs.
    Measured(Vec<GpuMemory>),
    /// Of [`Task::Confirm`]: whether the engine reports that it is awake.
    Awake(bool),
    /// Of [`Task::Canary`] and [`Task::CanaryBeside`]: whether the answer was right, or how it differed.
    Canary(Result<(), String>),
    /// Of [`Task::Probe`] and [`Task::Resume`]: not now, with the cause. Nothing has changed. Of [`Task::Hibernate`]: a
    /// failure that is not the engine's.
    Later(String),
    /// Of [`Task::Resume`]: it needs more memory than was measured as its need, with the cause. Nothing has changed.
    NeedsMore(String),
    /// Failure or timeout, with the cause.
    Failed(String),
    /// Of [`Task::Start`]: a failure that another start cannot mend, with the cause. Of [`Task::Hibernate`]: this engine
    /// cannot hibernate, and nothing has changed. Of [`Task::SleepKeeping`]: this engine cannot keep requests, and they go
    /// on.
    Unsupported(String),
}

/// The state that an engine reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineState {
    /// No engine runs.
    Gone,
    /// It runs, awake.
    Awake,
    /// It runs, asleep.
    Asleep,
    /// It runs, asleep, and its processes are off their GPUs.
    Hibernating,
    /// It began to sleep or to wake, and does not say whether it did. Its memory may.
    Moving,
}

/// Work for an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Task {
    /// Find its [`EngineState`].
    Probe,
    /// Start it, and wait until it answers.
    Start,
    /// Stop all of its processes, with force if necessary.
    Stop,
    /// Put it to sleep.
    Sleep,
    /// The same with its running requests, which go on after its next wake.
    SleepKeeping,
    /// Take its processes off their GPUs while it sleeps.
    Hibernate,
    /// Put its processes back. It sleeps on.
    Resume,
    /// Wake it.
    Wake,
    /// Ask whether it is awake.
    Confirm,
    /// Generate the canary's answer and compare it. Records a model's first answer.
    Canary,
    /// The same beside the requests of a ready model.
    CanaryBeside,
    /// Measure free memory on its GPUs.
    Measure,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Let a request through to its engine.
    Admit {
        /// Its number.
        request: RequestId,
        /// Its model.
        model: ModelId,
    },
    /// Refuse a request.
    Refuse {
        /// Its number.
        request: RequestId,
        /// Its model.
        model: ModelId,
        /// The cause.
        refusal: Refusal,
    },
    /// Hold back what the running requests of a model are answered, until [`Effect::Tested`].
    Kept(ModelId),
    /// Its canary is over. What its requests were answered is as good as that.
    Tested {
        /// Its model.
        model: ModelId,
        /// Whether it was right.
        is_right: bool,
    },
    /// Abort the running requests of a model. Each still has to report [`Input::Left`].
    Abort(ModelId),
    /// Run a task, and report [`Input::Ended`].
    Run {
        /// Its number.
        op: OpId,
        /// Its model.
        model: ModelId,
        /// The task.
        task: Task,
        /// Its timeout.
        limit: Duration,
    },
    /// Abandon a task. Its report is optional.
    Cancel(OpId),
    /// Report an event.
    Report {
        /// Its model.
        model: ModelId,
        /// The event.
        event: Event,
    },
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Too many requests wait.
    QueueFull,
    /// It waited for `wait_max`.
    WaitedTooLong,
    /// The model is quarantined.
    Quarantined {
        /// The end of the quarantine.
        until: Time,
    },
    /// The model has not enough free memory.
    NoMemory {
        /// When memory is searched again.
        until: Time,
    },
    /// The model needs more than its GPU has.
    TooLarge {
        /// Its known need.
        need_bytes: u64,
        /// All of the GPU.
        total_bytes: u64,
        /// When memory is searched again.
        until: Time,
    },
    /// The service is ending.
    ShuttingDown,
}

/// An event of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Its new stage.
    Stage(StageName),
    /// A step failed.
    Failed {
        /// The stage at the failure.
        stage: StageName,
        /// The cause.
        reason: String,
    },
    /// A sleep or a hibernation released too little.
    Shortfall {
        /// The GPU.
        gpu: Gpu,
        /// Expected bytes.
        expected_bytes: u64,
        /// Released bytes.
        freed_bytes: u64,
    },
    /// What it takes and releases was measured.
    Learnt {
        /// For each of its GPUs.
        held_bytes: Vec<u64>,
    },
    /// Its turn ends, and its engine keeps what runs.
    Kept {
        /// How many requests.
        requests: usize,
    },
    /// Its canary beside requests was right.
    Tested,
    /// It was seen to need more than was known.
    Grew {
        /// The known need before, on each of its GPUs.
        before_bytes: Vec<u64>,
        /// The known need now.
        need_bytes: Vec<u64>,
    },
    /// It hibernates.
    Hibernated {
        /// What left each of its GPUs.
        residue_bytes: Vec<u64>,
    },
    /// A look at it failed, and counts.
    LookFailed {
        /// The cause.
        reason: String,
        /// How many have failed in sequence.
        failed: u32,
    },
    /// It is quarantined.
    Quarantined {
        /// The end of the quarantine.
        until: Time,
        /// Consecutive failures.
        failures: u32,
    },
}
