//! What the service says of itself: events as they come, and all that there is now. JSON has the same names.

use std::time::Duration;

use serde::Serialize;

use crate::policy::Refusal;

/// All that there is to know at a moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Snapshot {
    /// Since when the service runs, in seconds.
    pub uptime_s: f64,
    /// Whether it is ending.
    pub is_ending: bool,
    /// The models, in the order of the configuration.
    pub models: Vec<ModelNow>,
    /// The GPUs that there are models for.
    pub gpus: Vec<GpuNow>,
    /// The last swaps, the newest first.
    pub swaps: Vec<Swap>,
}

/// A model now.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelNow {
    /// What clients ask for.
    pub name: String,
    /// What they may ask for as well.
    pub aliases: Vec<String>,
    /// `vllm` or `sglang`.
    pub engine: &'static str,
    /// Where it is.
    pub url: String,
    /// The positions of its GPUs.
    pub gpus: Vec<usize>,
    /// Its stage, in a word or two.
    pub stage: &'static str,
    /// For how long it has been in that stage, in seconds.
    pub stage_s: f64,
    /// Whether its requests are let through.
    pub is_ready: bool,
    /// Whether it is kept awake.
    pub is_pinned: bool,
    /// Whether the service started its engine, or would.
    pub is_supervised: bool,
    /// How many requests wait for it.
    pub queued: usize,
    /// How many of its requests run.
    pub running: usize,
    /// How many were let through since the service began.
    pub admitted: u64,
    /// How many were refused since the service began.
    pub refused: u64,
    /// What a sleep of it gives back on each of its GPUs, once that was measured.
    pub held_bytes: Option<Vec<u64>>,
    /// What its operator says that it takes of each.
    pub need_bytes: Option<u64>,
    /// Failures in a row.
    pub failures: u32,
    /// What failed last, if something did since it was ready.
    pub last_failure: Option<String>,
    /// How often its engine was started since the service began.
    pub starts: u64,
}

/// A GPU now.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuNow {
    /// Its position.
    pub gpu: usize,
    /// All of its memory, once it was measured.
    pub total_bytes: Option<u64>,
    /// What of it was free when it was measured last.
    pub free_bytes: Option<u64>,
    /// What the models that are up are known to need of it.
    pub promised_bytes: u64,
}

/// How a model came up: from a swap's beginning until its requests were let through.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Swap {
    /// Milliseconds since 1970 when it was ready.
    pub at_unix_ms: u64,
    /// Which.
    pub model: String,
    /// `hot` for one that woke with its weights, `warm` for one that read them again when it woke, `cold` for one whose
    /// engine was started, and `found` for one that was awake already.
    pub path: &'static str,
    /// From the first step of it until it was ready, in seconds.
    pub total_s: f64,
    /// How long each of its stages took, in their order: the name, and seconds.
    pub phases: Vec<(&'static str, f64)>,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Told {
    /// One more than that of the event before.
    pub seq: u64,
    /// Milliseconds since 1970.
    pub at_unix_ms: u64,
    /// Of which model.
    pub model: String,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

/// What happened to a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum What {
    /// It is in another stage.
    Stage {
        /// Which it was in before.
        before: &'static str,
        /// For how long, in seconds.
        before_s: f64,
        /// Which it is in now.
        stage: &'static str,
    },
    /// It is ready: its requests are let through.
    Ready {
        /// How it got there.
        swap: Swap,
    },
    /// A step failed.
    Failed {
        /// The stage it was in.
        stage: &'static str,
        /// Why.
        reason: String,
    },
    /// It did not give back what it holds.
    Shortfall {
        /// On which GPU.
        gpu: usize,
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
    /// It is left alone for a while.
    Quarantined {
        /// For how long, in seconds.
        for_s: f64,
        /// After how many failures in a row.
        failures: u32,
    },
}

/// A request that is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// Why.
    pub refusal: Refusal,
    /// When it may be worth asking again, if that is known.
    pub retry_after: Option<Duration>,
}

/// What an operator may want of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Wake it, though nobody asks for it.
    Wake,
    /// Put it to sleep, though nobody needs its room.
    Sleep,
    /// Stop its engine, and start it again if it was up.
    Restart,
    /// Keep it awake, or let it go.
    Pin(bool),
}
