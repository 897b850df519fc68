//! What this node publishes of itself, by a snapshot of its service.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use poorwill_fleet::etcd::LeaseId;
use poorwill_fleet::name::ModelName;
use poorwill_fleet::records::{Costs, GpuRecord, ModelRecord, NodeRecord, Rate, Requests, Stage};

use poorwill_front::settings::Key;

use super::pace::Pace;
use crate::config::{Config, Fleet};
use crate::service::{ModelNow, Snapshot};
use poorwill_rotation_policy::StageName;

/// Rates decay by a factor of e in this time.
const DECAY: Duration = Duration::from_secs(1800);
/// Sizes come in steps of so many bytes, so that a little more or less is no change.
const STEP_BYTES: u64 = 64 << 20;
/// A rate is published again when it has changed by one part in so many.
const RATE_PARTS: u64 = 5;
/// A lower rate is nothing.
const RATE_MIN_MICROS: u64 = 100;

/// The node and its models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Published {
    pub(super) node: NodeRecord,
    pub(super) models: BTreeMap<ModelName, ModelRecord>,
}

impl Published {
    /// With what the node cannot do as it should.
    pub(super) fn with_problems(mut self, problems: &[String]) -> Self {
        self.node.problems = problems.to_vec();
        self
    }

    /// Of models whose records are not known. All of them are written again, or removed.
    pub(super) fn unknown_of(models: impl IntoIterator<Item = ModelName>) -> Self {
        let unknown = || ModelRecord::new(Stage::Unknown, Vec::new());
        let models = models.into_iter().map(|model| (model, unknown())).collect();
        Self { node: NodeRecord::new(""), models }
    }

    /// The same models, of which nothing is known.
    pub(super) fn unknown(self) -> Self {
        Self::unknown_of(self.models.into_keys())
    }

    /// What is as it was, where it is not known whether the rest of `now` was written.
    pub(super) fn certain_beside(self, now: &Self) -> Self {
        let is_certain = |model: &ModelName, record: &ModelRecord| now.models.get(model) == Some(record);
        let unknown = Self::unknown_of(self.models.keys().chain(now.models.keys()).cloned());
        let mut certain = unknown;
        certain.models.extend(self.models.into_iter().filter(|(model, record)| is_certain(model, record)));
        if self.node == now.node {
            certain.node = self.node;
        }
        certain
    }

    /// With a signature by each key of its front.
    pub(super) fn signed(mut self, fleet: &Fleet, keys: &[Key], lease: LeaseId) -> Self {
        let text = self.node.signed_text(&fleet.name, &fleet.node, lease.as_i64());
        self.node.signatures = keys.iter().map(|key| key.signature(&text)).collect();
        self
    }
}

/// Counts requests to models, and knows what was published of them.
#[derive(Debug, Default)]
pub(super) struct Rates {
    by_model: BTreeMap<String, RequestRate>,
    pace: Pace,
}

#[derive(Debug)]
struct RequestRate {
    total: u64,
    per_second: f64,
    at: Instant,
    reported: Rate,
}

impl Rates {
    /// The rate of a model that had so many requests in all.
    fn of(&mut self, model: &str, total: u64, now: Instant) -> Rate {
        let new = || RequestRate { total, per_second: 0.0, at: now, reported: Rate::default() };
        let counted = self.by_model.entry(model.to_owned()).or_insert_with(new);
        let passed = now.saturating_duration_since(counted.at).as_secs_f64() / DECAY.as_secs_f64();
        #[allow(clippy::cast_precision_loss, reason = "a few requests more or less")]
        let more = total.saturating_sub(counted.total) as f64 / DECAY.as_secs_f64();
        counted.per_second = counted.per_second * (-passed).exp() + more;
        (counted.total, counted.at) = (total, now);
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is small, and not negative"
        )]
        let micros = (counted.per_second * 1e6) as u64;
        let (reported, micros) =
            (counted.reported.as_micros(), if micros < RATE_MIN_MICROS { 0 } else { micros });
        if micros.abs_diff(reported) > reported / RATE_PARTS || micros == 0 {
            counted.reported = Rate::from_micros(micros);
        }
        counted.reported
    }
}

/// As of this snapshot.
pub(super) fn published(
    snapshot: &Snapshot,
    config: &Config,
    fleet: &Fleet,
    instance: &str,
    rates: &mut Rates,
    now: Instant,
) -> Published {
    let gpus = snapshot.gpus.iter().map(|gpu| gpu.gpu + 1).max().unwrap_or_default();
    let mut node = NodeRecord {
        front_url: fleet.front_url.clone(),
        control_url: fleet.control_url.clone(),
        domain: fleet.domain.clone(),
        gpus: vec![GpuRecord { total_bytes: 0, budget_bytes: 0 }; gpus],
        host_free_bytes: available_bytes(),
        is_draining: snapshot.is_ending,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..NodeRecord::new(instance)
    };
    for gpu in &snapshot.gpus {
        let (Some(total_bytes), Some(free_bytes)) = (gpu.total_bytes, gpu.free_bytes) else { continue };
        // What awake models have is theirs to give, and what is lent as well; what else is taken, others have.
        let available_bytes = free_bytes.saturating_add(gpu.reclaimable_bytes.unwrap_or_default());
        let budget_bytes = rounded(available_bytes.saturating_add(gpu.promised_bytes)).min(total_bytes);
        node.gpus[gpu.gpu] = GpuRecord { total_bytes, budget_bytes };
    }
    let mut models = BTreeMap::new();
    for model in &snapshot.models {
        let Ok(name) = model.name.parse::<ModelName>() else { continue };
        let configured = config.models.iter().find(|one| one.name == model.name);
        let is_pinned = configured.is_some_and(|one| one.rules.is_pinned);
        let can_sleep = configured.is_some_and(|one| one.rules.can_sleep);
        let rate = rates.of(&model.name, model.admitted, now);
        let record = ModelRecord { pinned: is_pinned, ..record(model, stage(model, can_sleep), rate) };
        models.insert(name, record);
    }
    let (node, models) = rates.pace.settle(node, models, now);
    Published { node, models }
}

fn record(model: &ModelNow, stage: Stage, rate: Rate) -> ModelRecord {
    let configured = model.need_bytes.map(|bytes| vec![bytes; model.gpus.len()]);
    let need_bytes =
        model.held_bytes.clone().or(configured).map(|need| need.into_iter().map(rounded).collect());
    let ms = |seconds: Option<f64>| {
        seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).map(rounded_ms)
    };
    let resume_s = model.resume_s.map(|resume_s| resume_s + model.wake_s.unwrap_or_default());
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    ModelRecord {
        need_bytes,
        host_bytes: rounded(model.host_bytes),
        requests: Requests { running: count(model.running), queued: count(model.queued) },
        rate,
        costs: Costs {
            wake_ms: ms(model.wake_s),
            sleep_ms: ms(model.leave_s),
            resume_ms: ms(resume_s),
            reload_ms: None,
            start_ms: ms(model.start_s),
        },
        names: model.aliases.iter().chain(&model.adapters).cloned().collect(),
        ..ModelRecord::new(stage, model.gpus.clone())
    }
}

/// To two digits, so that each measurement is not news.
fn rounded_ms(time: Duration) -> u64 {
    let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let step = 10_u64.pow(ms.checked_ilog10().unwrap_or_default().saturating_sub(1));
    ms / step * step
}

/// Only what is certain to answer after a wake counts as such.
fn stage(model: &ModelNow, can_sleep: bool) -> Stage {
    match model.stage {
        _ if model.is_starting => Stage::Starting,
        StageName::Ready => Stage::Awake,
        StageName::Asleep => Stage::Asleep,
        StageName::Hibernating => Stage::Hibernating,
        StageName::Starting => Stage::Starting,
        StageName::FindingMemory
        | StageName::Resuming
        | StageName::Waking
        | StageName::Confirming
        | StageName::Canary
        | StageName::Measuring => Stage::Waking,
        StageName::Draining
        | StageName::MeasuringBeforeSleep
        | StageName::FallingAsleep
        | StageName::ReleasingMemory
        | StageName::GoingIntoHibernation => {
            if can_sleep {
                Stage::Sleeping
            } else {
                Stage::Stopped
            }
        }
        StageName::Quarantined => Stage::Failed,
        // An engine that is not started here has to be there by itself.
        StageName::Cold if !model.is_supervised => Stage::Failed,
        StageName::Unknown | StageName::Cold | StageName::Probing | StageName::Stopping => Stage::Stopped,
    }
}

fn rounded(bytes: u64) -> u64 {
    if bytes < STEP_BYTES { bytes } else { bytes / STEP_BYTES * STEP_BYTES }
}

/// Memory that programs may still take, as the system says; 0 if it does not.
pub(super) fn host_free_bytes() -> u64 {
    // In steps of a GiB: it changes all the time.
    available_bytes() >> 30 << 30
}

fn available_bytes() -> u64 {
    poorwill::proc::available_bytes().unwrap_or_default()
}

#[test]
fn rates_decay_and_small_changes_are_no_news() {
    let (mut rates, began) = (Rates::default(), Instant::now());
    assert_eq!(rates.of("a", 7, began), Rate::default());
    let after = |seconds| began + Duration::from_secs(seconds);
    let busy = rates.of("a", 7 + 1800, after(1));
    assert!(busy.as_micros().abs_diff(1_000_000) < 1000, "{busy:?}");
    assert_eq!(rates.of("a", 7 + 1800, after(60)), busy);
    let later = rates.of("a", 7 + 1800, after(1801));
    assert!(later.as_micros().abs_diff(367_879) < 1000, "{later:?}");
    assert_eq!(rates.of("a", 7 + 1800, after(1_000_000)), Rate::default());
}

#[test]
fn times_have_two_digits() {
    let rounded = |ms| rounded_ms(Duration::from_millis(ms));
    assert_eq!([0, 7, 99, 104, 1999, 123_456].map(rounded), [0, 7, 99, 100, 1900, 120_000]);
}

#[test]
fn what_is_lent_is_a_part_of_the_budget() {
    use crate::service::{GpuNow, Swapping};

    let text = "[fleet]\nname = \"f\"\nnode = \"n\"\netcd = [\"http://127.0.0.1:2379\"]\n\
                [[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"\n";
    let config = Config::parse(text, &|_| Ok(String::new())).unwrap();
    let gpu = |reclaimable_bytes| GpuNow {
        gpu: 0,
        is_measured: true,
        total_bytes: Some(80 << 30),
        free_bytes: Some(10 << 30),
        reclaimable_bytes,
        promised_bytes: 20 << 30,
        models: Vec::new(),
        swapping: Swapping::default(),
        advice: None,
    };
    for (reclaimable_bytes, budget_bytes) in
        [(None, 30 << 30), (Some(5 << 30), 35 << 30), (Some(60 << 30), 80 << 30)]
    {
        let snapshot = Snapshot {
            uptime_s: 0.0,
            is_ending: false,
            profile: None,
            models: Vec::new(),
            gpus: vec![gpu(reclaimable_bytes)],
            lending: None,
            swaps: Vec::new(),
        };
        let fleet = config.fleet.as_ref().unwrap();
        let now = published(&snapshot, &config, fleet, "i", &mut Rates::default(), Instant::now());
        assert_eq!(now.node.gpus[0].budget_bytes, budget_bytes);
    }
}
