//! Events, stage durations, and past swaps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::broadcast;
use tokio::time::Instant;

use super::snapshot::{EventKind, LeftModel, ServiceEvent, Swap, SwapPath, Swapping};
use super::swapping::{RESTS, SwapTimes};
use crate::config;
use poorwill_rotation_policy::{Event, Gpu, StageName, Time};

const SWAPS_KEPT: usize = 50;

/// How many events a listener may lag behind.
const BEHIND_MAX: usize = 1024;

/// Stages of a model that leaves.
pub(crate) const LEAVING: [StageName; 6] = [
    StageName::Draining,
    StageName::MeasuringBeforeSleep,
    StageName::FallingAsleep,
    StageName::ReleasingMemory,
    StageName::GoingIntoHibernation,
    StageName::Stopping,
];

fn is_leaving((stage, _): &(StageName, f64)) -> bool {
    LEAVING.contains(stage)
}

fn is_hibernation(left: &LeftModel) -> bool {
    left.phases.first().is_some_and(|(stage, _)| *stage == StageName::GoingIntoHibernation)
}

#[derive(Debug)]
pub(super) struct History {
    began: Instant,
    seq: u64,
    swaps: VecDeque<Swap>,
    /// Models that left, until another one becomes ready in their place. At most a sleep and a hibernation of each.
    departures: Vec<Departure>,
    times: SwapTimes,
    listeners: broadcast::Sender<Arc<ServiceEvent>>,
}

#[derive(Debug)]
struct Departure {
    gpus: Vec<Gpu>,
    began: Instant,
    ended: Instant,
    left: LeftModel,
}

#[derive(Debug)]
pub(super) struct ModelHistory {
    gpus: Vec<Gpu>,
    /// Since when a request or command waits for it.
    pub(super) waits_since: Option<Time>,
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
    pub(super) fn new(model: &config::Model) -> Self {
        Self {
            gpus: model.rules.gpus.clone(),
            waits_since: None,
            stage: StageName::Unknown,
            since: Instant::now(),
            waking: if model.level < 2 { SwapPath::Hot } else { SwapPath::Warm },
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
        Self {
            began,
            seq: 0,
            swaps: VecDeque::new(),
            departures: Vec::new(),
            times: SwapTimes::new(began),
            listeners: broadcast::channel(BEHIND_MAX).0,
        }
    }

    pub(super) fn listen(&self) -> broadcast::Sender<Arc<ServiceEvent>> {
        self.listeners.clone()
    }

    /// Newest first.
    pub(super) fn swaps(&self) -> Vec<Swap> {
        self.swaps.iter().rev().cloned().collect()
    }

    pub(super) fn swapping(&self, gpu: Gpu) -> Swapping {
        self.times.of(gpu)
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
            Event::Grew { before_bytes, need_bytes } => EventKind::Grew { before_bytes, need_bytes },
            Event::Tested => EventKind::Tested,
            Event::Kept { requests } => EventKind::Kept { requests },
            Event::Hibernated { residue_bytes } => EventKind::Hibernated { residue_bytes },
            Event::LookFailed { reason, failed } => EventKind::LookFailed { reason, failed },
            Event::Quarantined { until, failures } => {
                EventKind::Quarantined { for_s: self.until(until).as_secs_f64(), failures }
            }
        };
        self.send(model, what);
    }

    fn enter(&mut self, model: &str, history: &mut ModelHistory, stage: StageName) {
        let (before, before_s) = (history.stage, history.stage_s());
        (history.stage, history.since) = (stage, Instant::now());
        self.times.changed(&history.gpus, before, stage);
        if RESTS.contains(&before) {
            history.phases.clear();
        } else {
            history.phases.push((before, before_s));
        }
        if stage == StageName::Starting {
            history.starts += 1;
        }
        tracing::info!(model, %before, %stage, "a model changed its stage");
        self.send(model, EventKind::Stage { before, before_s, stage });
        if stage == StageName::Ready {
            history.last_failure = None;
            self.came(model, history);
        } else if RESTS.contains(&stage) && history.phases.first().is_some_and(is_leaving) {
            self.departed(model, history);
        }
    }

    fn departed(&mut self, model: &str, history: &ModelHistory) {
        let ended = Instant::now();
        // A swap that fails behind it is no part of it.
        let phases = history.phases.iter().copied().take_while(is_leaving).collect();
        let left = LeftModel { model: model.to_owned(), phases };
        let began = before(ended, sum(&left.phases));
        // A hibernation goes on where a sleep has ended.
        let goes_on = is_hibernation(&left);
        let stays = |before: &LeftModel| before.model != model || goes_on && !is_hibernation(before);
        self.departures.retain(|departure| stays(&departure.left));
        self.departures.push(Departure { gpus: history.gpus.clone(), began, ended, left });
    }

    /// Those that left for this swap: in its place, while it was waited for or had begun.
    fn left_for(&mut self, model: &str, gpus: &[Gpu], since: Instant) -> Vec<Departure> {
        let in_place = |departure: &mut Departure| departure.gpus.iter().any(|gpu| gpus.contains(gpu));
        let mut left: Vec<Departure> = self.departures.extract_if(.., in_place).collect();
        left.retain(|departure| departure.left.model != model && departure.ended >= since);
        let mut whole: Vec<Departure> = Vec::new();
        for departure in left {
            match whole.iter_mut().find(|before| before.left.model == departure.left.model) {
                Some(before) => before.left.phases.extend(departure.left.phases),
                None => whole.push(departure),
            }
        }
        whole
    }

    fn came(&mut self, model: &str, history: &mut ModelHistory) {
        let phases = std::mem::take(&mut history.phases);
        let has = |stage| phases.iter().any(|(name, _)| *name == stage);
        let path = match (has(StageName::Starting), has(StageName::Waking)) {
            (true, _) => SwapPath::Cold,
            (false, true) => history.waking,
            (false, false) => SwapPath::Found,
        };
        let (now, total_s) = (Instant::now(), sum(&phases));
        let began = before(now, total_s);
        let waited = history.waits_since.map(|since| self.began + since.since_start());
        let left = self.left_for(model, &history.gpus, waited.map_or(began, |since| since.min(began)));
        let first = left.iter().map(|departure| departure.began).fold(began, Instant::min);
        let swap = Swap {
            at_unix_ms: unix_ms(),
            model: model.to_owned(),
            path,
            total_s,
            whole_s: now.duration_since(first).as_secs_f64(),
            waited_s: waited.map(|since| now.duration_since(since).as_secs_f64()),
            phases,
            left: left.into_iter().map(|departure| departure.left).collect(),
        };
        if self.swaps.len() == SWAPS_KEPT {
            self.swaps.pop_front();
        }
        self.swaps.push_back(swap.clone());
        self.send(model, EventKind::Ready { swap });
    }

    fn send(&mut self, model: &str, what: EventKind) {
        match &what {
            EventKind::Failed { stage, reason } => tracing::warn!(model, %stage, reason, "a model failed"),
            EventKind::Shortfall { gpu, expected_bytes, freed_bytes } => {
                tracing::warn!(model, gpu, expected_bytes, freed_bytes, "a model freed too little memory");
            }
            EventKind::Grew { before_bytes, need_bytes } => {
                tracing::warn!(model, ?before_bytes, ?need_bytes, "a model needs more than was known");
            }
            EventKind::LookFailed { reason, failed } => {
                tracing::warn!(model, reason, failed, "a look at a model failed");
            }
            EventKind::Quarantined { for_s, failures } => {
                tracing::warn!(model, for_s, failures, "quarantined a model");
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

fn sum(phases: &[(StageName, f64)]) -> f64 {
    phases.iter().map(|(_, seconds)| seconds).sum()
}

fn before(moment: Instant, seconds: f64) -> Instant {
    let passed = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    moment.checked_sub(passed).unwrap_or(moment)
}

pub(super) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn stages(history: &mut History, model: &mut ModelHistory, name: &str, stages: &[StageName]) {
        for stage in stages {
            history.record(name, model, Event::Stage(*stage));
        }
    }

    #[test]
    fn only_others_that_were_awake_have_left_for_a_swap() {
        use StageName::{
            Asleep, Cold, Draining, FallingAsleep, FindingMemory, Ready, Starting, Stopping, Waking,
        };
        let file = "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"";
        let config = Config::parse(file, &|_| Ok(String::new())).unwrap();
        let mut history = History::new(Instant::now());
        let (mut one, mut two) = (ModelHistory::new(&config.models[0]), ModelHistory::new(&config.models[0]));
        let failed = [Asleep, FindingMemory, Waking, Stopping, Cold];
        stages(&mut history, &mut two, "two", &failed);
        stages(&mut history, &mut one, "one", &failed);
        stages(&mut history, &mut one, "one", &[Starting, Ready]);
        assert_eq!(history.swaps()[0].left, [], "neither was awake");
        two.waits_since = Some(Time::ZERO);
        stages(&mut history, &mut one, "one", &[Draining, FallingAsleep, Asleep]);
        stages(&mut history, &mut two, "two", &[Starting, Ready]);
        let swaps = history.swaps();
        let [left] = &swaps[0].left[..] else { panic!("{swaps:#?}") };
        let phases: Vec<StageName> = left.phases.iter().map(|(stage, _)| *stage).collect();
        assert_eq!((left.model.as_str(), phases), ("one", vec![Draining, FallingAsleep]));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_sleeps_and_hibernates_for_a_swap_has_left_once_with_all_of_it() {
        use StageName::{
            Asleep, Draining, FallingAsleep, GoingIntoHibernation, Hibernating, Ready, Resuming, Waking,
        };
        let file = "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"";
        let config = Config::parse(file, &|_| Ok(String::new())).unwrap();
        for (asleep_s, phases, whole_s) in [
            (1, &[(Draining, 1.0), (FallingAsleep, 1.0), (GoingIntoHibernation, 1.0)][..], 6.0),
            // It slept long before the other was waited for.
            (3600, &[(GoingIntoHibernation, 1.0)], 3.0),
        ] {
            let mut history = History::new(Instant::now());
            let [mut one, mut two] = [0, 0].map(|nth| ModelHistory::new(&config.models[nth]));
            stages(&mut history, &mut one, "one", &[Ready]);
            let leaves = [
                (Draining, 1),
                (FallingAsleep, 1),
                (Asleep, asleep_s),
                (GoingIntoHibernation, 1),
                (Hibernating, 1),
            ];
            two.waits_since = Some(Time::ZERO.after(Duration::from_secs(asleep_s - 1)));
            for (stage, seconds) in leaves {
                stages(&mut history, &mut one, "one", &[stage]);
                tokio::time::advance(Duration::from_secs(seconds)).await;
            }
            stages(&mut history, &mut two, "two", &[Resuming]);
            tokio::time::advance(Duration::from_secs(1)).await;
            stages(&mut history, &mut two, "two", &[Waking, Ready]);
            let swaps = history.swaps();
            let [left] = &swaps[0].left[..] else { panic!("{swaps:#?}") };
            assert_eq!((left.model.as_str(), &left.phases[..]), ("one", phases));
            assert_eq!((swaps[0].total_s, swaps[0].whole_s), (1.0, whole_s));
        }
    }
}
