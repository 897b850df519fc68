//! Limits and permissions of a model, set by its operator.

use std::time::Duration;

/// Three looks of two seconds, and the pauses between them, end well within 20 s of the trouble.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A GPU, by its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gpu(pub usize);

/// A model, by its position in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(pub usize);

/// The rules of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// The GPUs of its engine.
    pub gpus: Vec<Gpu>,
    /// The least that it needs of each GPU while awake. More is learnt.
    pub need_bytes: Option<u64>,
    /// Whether its engine can sleep. If not, it is stopped and started.
    pub can_sleep: bool,
    /// Whether its processes can be taken off their GPUs while it sleeps.
    pub can_hibernate: bool,
    /// How long it sleeps before that; `None` for as long as memory is free.
    pub hibernate_after: Option<Duration>,
    /// The most that sleeping engines may hold on a GPU together. Beyond it, the longest idle ones hibernate.
    pub residue_max_bytes: Option<u64>,
    /// Whether its engine can be stopped and started.
    pub can_restart: bool,
    /// Whether it stays awake while idle or while other models wait.
    pub is_pinned: bool,
    /// The name of a set: those of one set should be awake together. They leave last while one of them is in use, and
    /// come up with one another where memory is free.
    pub together: Option<String>,
    /// How much rather it stays when one has to leave.
    pub keep_weight: u32,
    /// Of its requests. A point counts like a second of waiting.
    pub priority: i32,
    /// Whether it wakes or starts with the service, and after others for which it left, where memory is free.
    pub preload: bool,
    /// How long it stays awake without requests.
    pub idle_max: Option<Duration>,
    /// How long it stays awake at least.
    pub residence_min: Duration,
    /// How long it stays awake at least while it has requests, in multiples of its measured swap with the end of its
    /// last requests. At most `turn_max`. 0: turns and evictions follow neither costs nor demand, but time alone.
    pub turn_per_swap: u32,
    /// While others wait, how long it may be idle, if its pauses are usually shorter.
    pub grace: Duration,
    /// How long other models wait while this one has requests.
    pub turn_max: Duration,
    /// How long a turn lasts at most while others wait, if the engine keeps its running requests in a sleep. `None`: it does
    /// not, and they end before it leaves.
    pub slice_max: Option<Duration>,
    /// Most waiting requests.
    pub queue_max: usize,
    /// How long a request may wait.
    pub wait_max: Duration,
    /// Most running requests.
    pub running_max: usize,
    /// Interval of health checks while it is ready.
    pub look_every: Duration,
    /// How many looks in sequence may fail before its engine is stopped; 0: none count.
    pub looks_max: u32,
    /// By how much a sleep may release less than expected, on each GPU.
    pub slack_bytes: u64,
    /// Timeouts of its steps.
    pub limits: Limits,
    /// The first quarantine, and the first pause after a failed hibernation. Doubles with each consecutive failure.
    pub pause_min: Duration,
    /// The longest quarantine.
    pub pause_max: Duration,
}

/// Timeouts of the steps of a swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Probing an engine.
    pub probe: Duration,
    /// Running requests, before they are aborted.
    pub drain: Duration,
    /// Aborted requests.
    pub abort: Duration,
    /// The engine's sleep, and its hibernation.
    pub sleep: Duration,
    /// Until memory is measured free after a sleep or a hibernation.
    pub release: Duration,
    /// Until memory is measured free for a wake or start.
    pub find_memory: Duration,
    /// The engine's wake, and its return from hibernation.
    pub wake: Duration,
    /// The engine's report that it is awake.
    pub confirm: Duration,
    /// The canary.
    pub canary: Duration,
    /// Starting an engine.
    pub start: Duration,
    /// Stopping an engine.
    pub stop: Duration,
    /// Interval between two measurements of the same memory.
    pub poll: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            probe: seconds(10),
            drain: seconds(60),
            abort: seconds(10),
            sleep: seconds(60),
            release: seconds(10),
            find_memory: seconds(10),
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
    /// Defaults for a model on these GPUs.
    #[must_use]
    pub fn on(gpus: Vec<Gpu>) -> Self {
        Self {
            gpus,
            need_bytes: None,
            can_sleep: true,
            can_hibernate: false,
            hibernate_after: None,
            residue_max_bytes: None,
            can_restart: false,
            is_pinned: false,
            together: None,
            keep_weight: 1,
            priority: 0,
            preload: false,
            idle_max: None,
            residence_min: Duration::ZERO,
            turn_per_swap: 3,
            grace: Duration::from_millis(500),
            turn_max: Duration::from_secs(10),
            slice_max: None,
            queue_max: 256,
            wait_max: Duration::from_secs(120),
            running_max: 256,
            look_every: Duration::from_secs(5),
            looks_max: 3,
            slack_bytes: 512 << 20,
            limits: Limits::default(),
            pause_min: Duration::from_secs(5),
            pause_max: Duration::from_secs(600),
        }
    }

    /// The quarantine after so many consecutive failures.
    #[must_use]
    pub fn pause(&self, failures: u32) -> Duration {
        let doubled = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.pause_min.saturating_mul(doubled).min(self.pause_max)
    }

    /// The pause after a failed look, which is shorter than between others.
    #[must_use]
    pub fn look_again(&self) -> Duration {
        self.look_every.min(LOOK_AGAIN)
    }

    pub(super) fn is_together_with(&self, other: &Self) -> bool {
        self.together.is_some() && self.together == other.together
    }

    pub(super) fn shares_with(&self, other: &Self) -> bool {
        self.gpus.iter().any(|gpu| other.gpus.contains(gpu))
    }
}
