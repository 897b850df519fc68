//! The service's status and events. JSON uses the same names.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::config::CanaryKind;
use crate::lending::LentTotals;
use poorwill_front::requests::Recent;
use poorwill_rotation_policy::{Refusal, StageName};

/// The status at a moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Snapshot {
    /// Seconds since the service began.
    pub uptime_s: f64,
    /// Whether the service is ending.
    pub is_ending: bool,
    /// The chosen profile.
    pub profile: Option<String>,
    /// In the order of the configuration.
    pub models: Vec<ModelNow>,
    /// The GPUs of these models.
    pub gpus: Vec<GpuNow>,
    /// What the broker of lent memory has done; `None` without `[lend]`, or without an answer of the broker.
    pub lending: Option<LentTotals>,
    /// The last swaps, newest first.
    pub swaps: Vec<Swap>,
}

/// A model's status.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelNow {
    /// Its name in requests.
    pub name: String,
    /// Other names in requests.
    pub aliases: Vec<String>,
    /// Names of its adapters in requests.
    pub adapters: Vec<String>,
    /// `vllm`, `sglang` or `http`.
    pub engine: &'static str,
    /// Its engine's URL.
    pub url: String,
    /// Positions of its GPUs.
    pub gpus: Vec<usize>,
    /// Its stage.
    pub stage: StageName,
    /// Seconds in that stage.
    pub stage_s: f64,
    /// Whether requests are admitted.
    pub is_ready: bool,
    /// Whether its engine is being started, until its first right answer.
    pub is_starting: bool,
    /// Whether it is kept awake.
    pub is_pinned: bool,
    /// Whether the service starts and stops its engine.
    pub is_supervised: bool,
    /// Waiting requests.
    pub queued: usize,
    /// Running requests.
    pub running: usize,
    /// Those of them that its engine keeps in its sleep.
    pub kept: usize,
    /// Requests admitted since the service began.
    pub admitted: u64,
    /// Requests refused since the service began.
    pub refused: u64,
    /// What a sleep releases on each of its GPUs, once measured.
    pub held_bytes: Option<Vec<u64>>,
    /// What a hibernation releases on each of its GPUs beyond that, once measured.
    pub residue_bytes: Option<Vec<u64>>,
    /// Whether its engine can hibernate, as far as known.
    pub can_hibernate: bool,
    /// Why it cannot, where that was found out.
    pub cannot_hibernate: Option<String>,
    /// Host memory that its hibernation takes; 0 while it does not hibernate.
    pub host_bytes: u64,
    /// The configured need on each GPU.
    pub need_bytes: Option<u64>,
    /// The known need on each of its GPUs: the larger of the configured one and the most that was seen. `None` if unknown.
    pub known_need_bytes: Option<Vec<u64>>,
    /// Consecutive failures.
    pub failures: u32,
    /// The last failure since it was ready.
    pub last_failure: Option<String>,
    /// Starts of its engine since the service began.
    pub starts: u64,
    /// Seconds that its oldest request or command waits; `None` if none does.
    pub oldest_wait_s: Option<f64>,
    /// Seconds of a wake, until its first request; `None` until measured.
    pub wake_s: Option<f64>,
    /// Seconds of a start, likewise.
    pub start_s: Option<f64>,
    /// Seconds from its last request until it sleeps or has stopped; `None` until measured.
    pub leave_s: Option<f64>,
    /// Seconds of a hibernation; `None` until measured.
    pub hibernate_s: Option<f64>,
    /// Seconds until it is back on its GPUs, before the wake; `None` until measured.
    pub resume_s: Option<f64>,
    /// Its answers of the last minute. The service knows none of them: control adds what the front counted.
    pub recent: Recent,
    /// The kind by which its canary was answered; `None` until that is known.
    pub canary_kind: Option<CanaryKind>,
    /// How often its record or its first answer could not be written, as on a full disk.
    pub state_writes_failed: u64,
}

impl ModelNow {
    /// Why a command can do nothing, whatever the model does.
    #[must_use]
    pub fn refusal(&self, command: ModelCommand) -> Option<String> {
        match command {
            ModelCommand::Hibernate if !self.can_hibernate => Some(match &self.cannot_hibernate {
                Some(why) => format!("it cannot hibernate until its next start, or a reload: {why}"),
                None if !self.is_supervised => {
                    "it cannot hibernate: it has no command, and only processes that the service started are known to it"
                        .to_owned()
                }
                None => "it cannot hibernate here: that needs [hibernate], and an engine that sleeps".to_owned(),
            }),
            ModelCommand::Restart if !self.is_supervised => {
                Some("it cannot be restarted here: it has no command".to_owned())
            }
            _ => None,
        }
    }

    /// Whether requests and commands mean it by this name.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        self.name == name || self.aliases.iter().chain(&self.adapters).any(|other| other == name)
    }
}

/// A GPU's status.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuNow {
    /// Its position.
    pub gpu: usize,
    /// Whether its memory is measured; otherwise its size and the models' needs are only declared.
    pub is_measured: bool,
    /// All of its bytes, once measured.
    pub total_bytes: Option<u64>,
    /// Free bytes at the last measurement.
    pub free_bytes: Option<u64>,
    /// Bytes that sleeping engines lent then, and give up when asked.
    pub reclaimable_bytes: Option<u64>,
    /// The known need of the awake models on it.
    pub promised_bytes: u64,
    /// That need by model, where it is known.
    pub models: Vec<PromiseNow>,
    /// The time in which it swapped models.
    pub swapping: Swapping,
    /// What to change where that is most of the time.
    pub advice: Option<String>,
}

/// The time in which a GPU swapped models: at least one of its models came up or left.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Swapping {
    /// The share of the recent window, from 0 to 1.
    pub recent_share: f64,
    /// The length of that window: the last ten minutes, or since the service began.
    pub recent_window_s: f64,
    /// The share since the service began.
    pub share: f64,
    /// All of it since the service began.
    pub total_s: f64,
}

/// What an awake model is known to need on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PromiseNow {
    /// The model.
    pub model: String,
    /// Its need.
    pub bytes: u64,
}

/// A completed swap.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Swap {
    /// When it completed, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// The model.
    pub model: String,
    /// How the model became ready.
    pub path: SwapPath,
    /// From the first step of the model until requests were admitted, without the models that left for it.
    pub total_s: f64,
    /// From the first step of all, with the models that left for it.
    pub whole_s: f64,
    /// From the oldest waiting request or command; `None` if nothing waited.
    pub waited_s: Option<f64>,
    /// The stages in order, with seconds.
    pub phases: Vec<(StageName, f64)>,
    /// The models that left for it. One that left for several counts for the first.
    pub left: Vec<LeftModel>,
}

/// A model that left for another one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LeftModel {
    /// The model.
    pub model: String,
    /// The stages of leaving in order, with seconds.
    pub phases: Vec<(StageName, f64)>,
}

/// How a model became ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SwapPath {
    /// It woke with its weights.
    Hot,
    /// It woke and read its weights again.
    Warm,
    /// Its engine was started.
    Cold,
    /// It was awake when the service began.
    Found,
}

impl SwapPath {
    /// Its text in JSON and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Warm => "warm",
            Self::Cold => "cold",
            Self::Found => "found",
        }
    }
}

impl fmt::Display for SwapPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// An event.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServiceEvent {
    /// Increases by one with each event.
    pub seq: u64,
    /// Milliseconds since 1970.
    pub at_unix_ms: u64,
    /// The model.
    pub model: String,
    /// What happened.
    #[serde(flatten)]
    pub what: EventKind,
}

/// What happened to a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum EventKind {
    /// It entered a stage.
    Stage {
        /// The old stage.
        before: StageName,
        /// Seconds in the old stage.
        before_s: f64,
        /// The new stage.
        stage: StageName,
    },
    /// Requests are admitted.
    Ready {
        /// The completed swap.
        swap: Swap,
    },
    /// A step failed.
    Failed {
        /// The stage at the failure.
        stage: StageName,
        /// The cause.
        reason: String,
    },
    /// A sleep or a hibernation released too little.
    Shortfall {
        /// The GPU's position.
        gpu: usize,
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
    /// It was seen to need more than was known.
    Grew {
        /// The known need before, for each of its GPUs.
        before_bytes: Vec<u64>,
        /// The known need now.
        need_bytes: Vec<u64>,
    },
    /// Its turn ends, and its engine keeps what runs.
    Kept {
        /// How many requests.
        requests: usize,
    },
    /// Its canary beside requests was right.
    Tested,
    /// It hibernates.
    Hibernated {
        /// What left each of its GPUs.
        residue_bytes: Vec<u64>,
    },
    /// It is quarantined.
    Quarantined {
        /// The duration in seconds.
        for_s: f64,
        /// Consecutive failures.
        failures: u32,
    },
    /// A look at it failed, and counts.
    LookFailed {
        /// The cause.
        reason: String,
        /// How many have failed in sequence.
        failed: u32,
    },
}

/// A refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// The cause.
    pub refusal: Refusal,
    /// When to retry, if known.
    pub retry_after: Option<Duration>,
}

/// An operator's command to a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelCommand {
    /// Wake it without a request.
    Wake,
    /// Start a cold engine that can sleep, and let it sleep, if no model in use has to leave for it.
    Prepare,
    /// Put it to sleep.
    Sleep,
    /// The same, and take it off its GPUs.
    Hibernate,
    /// Stop its engine, and start it again if it was awake.
    Restart,
    /// Pin or unpin it.
    Pin(bool),
    /// Keep it awake unless a request needs its memory, or no longer.
    Hot(bool),
    /// Whether it gives way to nothing while that is ordered, like a pinned one.
    Hold(bool),
}
