//! What goes into the policy and what comes out of it.

use std::time::Duration;

use super::rules::{Gpu, ModelId};
use super::time::Time;

/// A request, by a number of the front's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A task that was given out, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub(super) u64);

/// Something that has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A request came, with a number that none had before.
    Arrived {
        /// The request.
        request: RequestId,
        /// Whom it is for.
        model: ModelId,
    },
    /// A request is over, however: answered, failed, or nobody waits for it any more.
    Left(RequestId),
    /// A task has ended.
    Ended {
        /// Which.
        op: OpId,
        /// How.
        outcome: Outcome,
    },
    /// An engine has died, or does not answer any more.
    Lost(ModelId),
    /// An engine that is ready says that it sleeps, and nobody here has told it to.
    Slept(ModelId),
    /// Wake a model, though nobody asks for it.
    Wake(ModelId),
    /// Put a model to sleep, though nobody needs its room; pinned or not.
    Sleep(ModelId),
    /// Stop an engine, and start it again if it was up.
    Restart(ModelId),
    /// Pin a model, or let it go.
    Pin(ModelId, bool),
    /// Nothing but that time has passed.
    Tick,
    /// No more requests are let in, and nothing is begun any more.
    Shutdown,
}

/// How a task ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It was done: of [`Task::Start`], [`Task::Stop`], [`Task::Sleep`] and [`Task::Wake`].
    Done,
    /// What an engine was found to be: of [`Task::Look`].
    Found(Found),
    /// How many bytes are free on each of the model's GPUs, in their order: of [`Task::Weigh`].
    Free(Vec<u64>),
    /// The engine's own word, whether it is awake: of [`Task::Confirm`].
    Awake(bool),
    /// What came of a canary: of [`Task::Canary`]. An error is what was wrong with its answer.
    Canary(Result<(), String>),
    /// It could not be done, or took too long, and why.
    Failed(String),
}

/// What an engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Not there.
    Gone,
    /// There, and awake by its own word.
    Awake,
    /// There, and asleep by its own word.
    Asleep,
}

/// What is to be done with an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Task {
    /// Find out whether it is there, and whether it is awake.
    Look,
    /// Start it, and wait until it answers.
    Start,
    /// Stop it, with everything that it has started, by force in the end.
    Stop,
    /// Have it sleep.
    Sleep,
    /// Have it wake.
    Wake,
    /// Ask it whether it is awake.
    Confirm,
    /// Have it generate what is known, and compare. The first one of a model is recorded.
    Canary,
    /// Measure how much of its GPUs is free.
    Weigh,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Let a request through to its engine.
    Admit {
        /// The request.
        request: RequestId,
        /// Whose.
        model: ModelId,
    },
    /// Answer a request that it will not be served.
    Refuse {
        /// The request.
        request: RequestId,
        /// Whose.
        model: ModelId,
        /// Why.
        refusal: Refusal,
    },
    /// End the requests of a model that are running. Each is still to be reported with [`Input::Left`].
    Abort(ModelId),
    /// Do something with an engine, and report with [`Input::Ended`].
    Run {
        /// The number of the task.
        op: OpId,
        /// Which engine.
        model: ModelId,
        /// What.
        task: Task,
        /// How long it may take. Behind that it is given up.
        limit: Duration,
    },
    /// Nobody waits for a task any more. It may be reported or not.
    Cancel(OpId),
    /// Something worth telling.
    Tell {
        /// Of which model.
        model: ModelId,
        /// What.
        event: Event,
    },
}

/// Why a request is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// As many wait already as may.
    QueueFull,
    /// It has waited as long as it may.
    WaitedTooLong,
    /// The model is left alone for a while.
    Quarantined {
        /// Until when.
        until: Time,
    },
    /// There is no room for the model now.
    NoRoom {
        /// When it will be looked for again.
        until: Time,
    },
    /// The service ends.
    ShuttingDown,
}

/// What is worth telling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It is in another stage.
    Stage(&'static str),
    /// A step failed, and why.
    Failed {
        /// The stage it was in.
        stage: &'static str,
        /// Why.
        reason: String,
    },
    /// It did not give back what it holds.
    Shortfall {
        /// On which GPU.
        gpu: Gpu,
        /// How much it was to give back.
        expected_bytes: u64,
        /// How much came.
        freed_bytes: u64,
    },
    /// What it takes and gives back was measured.
    Learnt {
        /// For each of its GPUs.
        held_bytes: Vec<u64>,
    },
    /// It is left alone until then.
    Quarantined {
        /// Until when.
        until: Time,
        /// After how many failures in a row.
        failures: u32,
    },
}
