//! Events, stage durations, and past swaps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::broadcast;
use tokio::time::Instant;

use super::snapshot::{EventKind, ServiceEvent, Swap, SwapPath};
use crate::policy::{Event, StageName, Time};

const SWAPS_KEPT: usize = 50;

/// How many events a listener may lag behind.
const BEHIND_MAX: usize = 1024;

/// Stages outside of a swap.
const RESTS: [StageName; 5] =
    [StageName::Unknown, StageName::Cold, StageName::Asleep, StageName::Ready, StageName::Quarantined];

#[derive(Debug)]
pub(super) struct History {
    began: Instant,
    seq: u64,
    swaps: VecDeque<Swap>,
    listeners: broadcast::Sender<Arc<ServiceEvent>>,
}

#[derive(Debug)]
pub(super) struct ModelHistory {
    pub(super) stage: StageName,
    pub(super) since: Instant,
    /// The path of its swaps by waking.
    waking: SwapPath,
    /// Of the current swap, with seconds.
    phases: Vec<(StageName, f64)>,
    pub(super) last_failure: Option<String>,
    pub(super) starts: u64,
    pub(super) admitted: u64,
    pub(super) refused: u64,
}

impl ModelHistory {
    /// For a model with this sleep level.
    pub(super) fn new(level: u8) -> Self {
        Self {
            stage: StageName::Unknown,
            since: Instant::now(),
            waking: if level < 2 { SwapPath::Hot } else { SwapPath::Warm },
            phases: Vec::new(),
            last_failure: None,
            starts: 0,
            admitted: 0,
            refused: 0,
        }
    }

    pub(super) fn stage_s(&self) -> f64 {
        self.since.elapsed().as_secs_f64()
    }
}

impl History {
    pub(super) fn new(began: Instant) -> Self {
        Self { began, seq: 0, swaps: VecDeque::new(), listeners: broadcast::channel(BEHIND_MAX).0 }
    }

    pub(super) fn listen(&self) -> broadcast::Sender<Arc<ServiceEvent>> {
        self.listeners.clone()
    }

    /// Newest first.
    pub(super) fn swaps(&self) -> Vec<Swap> {
        self.swaps.iter().rev().cloned().collect()
    }

    pub(super) fn record(&mut self, model: &str, history: &mut ModelHistory, event: Event) {
        let what = match event {
            Event::Stage(stage) => return self.enter(model, history, stage),
            Event::Failed { stage, reason } => {
                history.last_failure = Some(format!("{stage}: {reason}"));
                EventKind::Failed { stage, reason }
            }
            Event::Shortfall { gpu, expected_bytes, freed_bytes } => {
                EventKind::Shortfall { gpu: gpu.0, expected_bytes, freed_bytes }
            }
            Event::Learnt { held_bytes } => EventKind::Learnt { held_bytes },
            Event::Quarantined { until, failures } => {
                EventKind::Quarantined { for_s: self.until(until).as_secs_f64(), failures }
            }
        };
        self.send(model, what);
    }

    fn enter(&mut self, model: &str, history: &mut ModelHistory, stage: StageName) {
        let (before, before_s) = (history.stage, history.stage_s());
        (history.stage, history.since) = (stage, Instant::now());
        if RESTS.contains(&before) {
            history.phases.clear();
        } else {
            history.phases.push((before, before_s));
        }
        if stage == StageName::Starting {
            history.starts += 1;
        }
        tracing::info!(model, %before, %stage, "stage");
        self.send(model, EventKind::Stage { before, before_s, stage });
        if stage == StageName::Ready {
            history.last_failure = None;
            let phases = std::mem::take(&mut history.phases);
            self.came(model, history.waking, phases);
        }
    }

    /// `waking` is the path of a wake.
    fn came(&mut self, model: &str, waking: SwapPath, phases: Vec<(StageName, f64)>) {
        let has = |stage| phases.iter().any(|(name, _)| *name == stage);
        let path = match (has(StageName::Starting), has(StageName::Waking)) {
            (true, _) => SwapPath::Cold,
            (false, true) => waking,
            (false, false) => SwapPath::Found,
        };
        let total_s = phases.iter().map(|(_, seconds)| seconds).sum();
        let swap = Swap { at_unix_ms: unix_ms(), model: model.to_owned(), path, total_s, phases };
        if self.swaps.len() == SWAPS_KEPT {
            self.swaps.pop_front();
        }
        self.swaps.push_back(swap.clone());
        self.send(model, EventKind::Ready { swap });
    }

    fn send(&mut self, model: &str, what: EventKind) {
        match &what {
            EventKind::Failed { stage, reason } => tracing::warn!(model, %stage, reason, "failed"),
            EventKind::Shortfall { gpu, expected_bytes, freed_bytes } => {
                tracing::warn!(model, gpu, expected_bytes, freed_bytes, "shortfall");
            }
            EventKind::Quarantined { for_s, failures } => {
                tracing::warn!(model, for_s, failures, "quarantined");
            }
            _ => {}
        }
        self.seq += 1;
        let event = ServiceEvent { seq: self.seq, at_unix_ms: unix_ms(), model: model.to_owned(), what };
        let _no_listener = self.listeners.send(Arc::new(event));
    }

    pub(super) fn until(&self, time: Time) -> Duration {
        time.since_start().saturating_sub(self.began.elapsed())
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
