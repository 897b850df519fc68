//! What a model may have and has to do, as its operator has it.

use std::time::Duration;

/// A GPU of this machine, by its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gpu(pub usize);

/// A model, by its position in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(pub usize);

/// The rules of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// The GPUs that its engine is on.
    pub gpus: Vec<Gpu>,
    /// What it takes of each while it is awake, until that was measured.
    pub need_bytes: Option<u64>,
    /// Whether its engine can sleep; one that cannot is stopped instead, and started again.
    pub can_sleep: bool,
    /// Whether its engine can be stopped and started.
    pub can_restart: bool,
    /// Whether nobody else's request makes it leave, nor idling.
    pub is_pinned: bool,
    /// How long it stays awake with nothing to do.
    pub idle_max: Option<Duration>,
    /// How long it stays at least, once it is awake.
    pub residence_min: Duration,
    /// How long others wait at most, while this one has requests, before it has to leave.
    pub turn_max: Duration,
    /// How many requests may wait for it.
    pub queue_max: usize,
    /// How long a request waits for it at most.
    pub wait_max: Duration,
    /// How many of its requests may run at a time.
    pub running_max: usize,
    /// How often it is asked, while it is ready, whether it is still awake.
    pub look_every: Duration,
    /// By how much what is given back may fall short of what it is known to hold, on each GPU.
    pub slack_bytes: u64,
    /// How long each step may take.
    pub limits: Limits,
    /// How long it is left alone after its first failure in a row; twice as long after each other one.
    pub pause_min: Duration,
    /// How long it is left alone at most.
    pub pause_max: Duration,
}

/// How long each step of a swap may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Finding out what an engine is doing.
    pub look: Duration,
    /// Running requests coming to their end by themselves, before they are ended.
    pub drain: Duration,
    /// Requests that were ended leaving.
    pub abort: Duration,
    /// The engine's own sleep.
    pub sleep: Duration,
    /// The memory coming back.
    pub release: Duration,
    /// There being room, once nobody is in the way.
    pub room: Duration,
    /// The engine's own wake.
    pub wake: Duration,
    /// The engine's word that it is awake.
    pub confirm: Duration,
    /// The canary.
    pub canary: Duration,
    /// An engine starting.
    pub start: Duration,
    /// An engine stopping.
    pub stop: Duration,
    /// Between two looks at the same memory.
    pub poll: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            look: seconds(10),
            drain: seconds(60),
            abort: seconds(10),
            sleep: seconds(60),
            release: seconds(10),
            room: seconds(10),
            wake: seconds(60),
            confirm: seconds(10),
            canary: seconds(30),
            start: seconds(900),
            stop: seconds(30),
            poll: Duration::from_millis(20),
        }
    }
}

impl Rules {
    /// Those of a model on some GPUs, of which nothing else was said.
    #[must_use]
    pub fn on(gpus: Vec<Gpu>) -> Self {
        Self {
            gpus,
            need_bytes: None,
            can_sleep: true,
            can_restart: false,
            is_pinned: false,
            idle_max: None,
            residence_min: Duration::from_secs(2),
            turn_max: Duration::from_secs(10),
            queue_max: 256,
            wait_max: Duration::from_secs(120),
            running_max: 256,
            look_every: Duration::from_secs(5),
            slack_bytes: 512 << 20,
            limits: Limits::default(),
            pause_min: Duration::from_secs(5),
            pause_max: Duration::from_secs(600),
        }
    }

    /// How long it is left alone after so many failures in a row.
    #[must_use]
    pub fn pause(&self, failures: u32) -> Duration {
        let doubled = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.pause_min.saturating_mul(doubled).min(self.pause_max)
    }

    pub(super) fn shares_with(&self, other: &Self) -> bool {
        self.gpus.iter().any(|gpu| other.gpus.contains(gpu))
    }
}
