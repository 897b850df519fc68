//! Events, stage durations, and past swaps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::broadcast;
use tokio::time::Instant;

use super::talk::{Swap, Told, What};
use crate::policy::{Event, Time};

/// Most kept swaps.
const SWAPS_KEPT: usize = 50;

/// How many events a listener may lag behind.
const BEHIND_MAX: usize = 1024;

/// Stages outside of a swap.
const RESTS: [&str; 5] = ["unknown", "cold", "asleep", "ready", "quarantined"];

#[derive(Debug)]
pub(super) struct History {
    began: Instant,
    seq: u64,
    swaps: VecDeque<Swap>,
    listeners: broadcast::Sender<Arc<Told>>,
}

/// The history of one model.
#[derive(Debug)]
pub(super) struct Past {
    pub(super) stage: &'static str,
    pub(super) since: Instant,
    /// The path of its swaps by waking.
    waking: &'static str,
    /// The stages of the current swap, with seconds.
    phases: Vec<(&'static str, f64)>,
    pub(super) last_failure: Option<String>,
    pub(super) starts: u64,
    pub(super) admitted: u64,
    pub(super) refused: u64,
}

impl Past {
    /// For a new model with this sleep level.
    pub(super) fn new(level: u8) -> Self {
        Self {
            stage: "unknown",
            since: Instant::now(),
            waking: if level < 2 { "hot" } else { "warm" },
            phases: Vec::new(),
            last_failure: None,
            starts: 0,
            admitted: 0,
            refused: 0,
        }
    }

    /// Seconds in the current stage.
    pub(super) fn stage_s(&self) -> f64 {
        self.since.elapsed().as_secs_f64()
    }
}

impl History {
    pub(super) fn new(began: Instant) -> Self {
        Self { began, seq: 0, swaps: VecDeque::new(), listeners: broadcast::channel(BEHIND_MAX).0 }
    }

    pub(super) fn listen(&self) -> broadcast::Sender<Arc<Told>> {
        self.listeners.clone()
    }

    /// The last swaps, newest first.
    pub(super) fn swaps(&self) -> Vec<Swap> {
        self.swaps.iter().rev().cloned().collect()
    }

    /// Records an event of the policy and sends it to listeners.
    pub(super) fn tell(&mut self, model: &str, past: &mut Past, event: Event) {
        let what = match event {
            Event::Stage(stage) => return self.enter(model, past, stage),
            Event::Failed { stage, reason } => {
                past.last_failure = Some(format!("{stage}: {reason}"));
                What::Failed { stage, reason }
            }
            Event::Shortfall { gpu, expected_bytes, freed_bytes } => {
                What::Shortfall { gpu: gpu.0, expected_bytes, freed_bytes }
            }
            Event::Learnt { held_bytes } => What::Learnt { held_bytes },
            Event::Quarantined { until, failures } => {
                What::Quarantined { for_s: self.until(until).as_secs_f64(), failures }
            }
        };
        self.send(model, what);
    }

    fn enter(&mut self, model: &str, past: &mut Past, stage: &'static str) {
        let (before, before_s) = (past.stage, past.stage_s());
        (past.stage, past.since) = (stage, Instant::now());
        if RESTS.contains(&before) {
            past.phases.clear();
        } else {
            past.phases.push((before, before_s));
        }
        if stage == "starting" {
            past.starts += 1;
        }
        tracing::info!(model, before, stage, "stage");
        self.send(model, What::Stage { before, before_s, stage });
        if stage == "ready" {
            past.last_failure = None;
            let phases = std::mem::take(&mut past.phases);
            self.came(model, past.waking, phases);
        }
    }

    /// Records a completed swap. `waking` is the path of a wake.
    fn came(&mut self, model: &str, waking: &'static str, phases: Vec<(&'static str, f64)>) {
        let has = |stage: &str| phases.iter().any(|(name, _)| *name == stage);
        let path = match (has("starting"), has("waking")) {
            (true, _) => "cold",
            (false, true) => waking,
            (false, false) => "found", // It was awake when the service began.
        };
        let total_s = phases.iter().map(|(_, seconds)| seconds).sum();
        let swap = Swap { at_unix_ms: unix_ms(), model: model.to_owned(), path, total_s, phases };
        if self.swaps.len() == SWAPS_KEPT {
            self.swaps.pop_front();
        }
        self.swaps.push_back(swap.clone());
        self.send(model, What::Ready { swap });
    }

    fn send(&mut self, model: &str, what: What) {
        match &what {
            What::Failed { stage, reason } => tracing::warn!(model, stage, reason, "failed"),
            What::Shortfall { gpu, expected_bytes, freed_bytes } => {
                tracing::warn!(model, gpu, expected_bytes, freed_bytes, "shortfall");
            }
            What::Quarantined { for_s, failures } => tracing::warn!(model, for_s, failures, "quarantined"),
            _ => {}
        }
        self.seq += 1;
        let told = Told { seq: self.seq, at_unix_ms: unix_ms(), model: model.to_owned(), what };
        let _nobody_listens = self.listeners.send(Arc::new(told));
    }

    /// The time until then.
    pub(super) fn until(&self, time: Time) -> Duration {
        time.since_start().saturating_sub(self.began.elapsed())
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
