//! Prometheus metrics, as OpenMetrics text.
//!
//! What the service knows is read at each scrape, so that it agrees with the status. Only what events alone report is
//! counted here. A removed model's counters are [forgotten](Removed) later.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use poorwill_front::operators::{Number, Removed, Seconds};
use poorwill_front::requests::{Forget, ModelLabel, OfModel, Requests, SECONDS, Series};
use poorwill_rotation_policy::StageName;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::fleet::Membership;
use crate::lending::LentTotals;
use crate::service::{EventKind, LEAVING, ModelNow, ServiceEvent, Snapshot};

const PREFIX: &str = "poorwill_rotate";
type Swaps = Family<OfSwap, Histogram, fn() -> Histogram>;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct OfStage {
    model: String,
    stage: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfSwap {
    phase: &'static str,
    path: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfStep {
    model: String,
    step: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfGpu {
    gpu: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfPlace {
    model: String,
    gpu: u64,
}

impl ModelLabel for OfStage {
    fn model(&self) -> &str {
        &self.model
    }
}

/// Since the service began.
pub(super) struct Metrics {
    registry: Registry,
    swaps: Swaps,
    failures: Series<OfStage, Counter>,
    canary_failures: Series<OfModel, Counter>,
    shortfalls: Series<OfModel, Counter>,
    quarantines: Series<OfModel, Counter>,
    hibernations: Series<OfModel, Counter>,
    cuts: Series<OfModel, Counter>,
    looks_failed: Series<OfModel, Counter>,
    lost: Counter,
    removed: Removed,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    pub(super) fn new(requests: Arc<Requests>) -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let swaps = Swaps::new_with_constructor(|| Histogram::new(SECONDS));
        let help =
            "Seconds until models were ready, by phase and path; path `away` has the phases of leaving";
        registry.register_with_unit("swap", help, Unit::Seconds, swaps.clone());
        let failures = Series::default();
        registry.register("failures", "Failed steps, by the stage of the failure", Series::clone(&failures));
        let mut by_model = |name: &str, help: &str| {
            let series = Series::<OfModel, Counter>::default();
            registry.register(name, help, series.clone());
            series
        };
        let canary_failures = by_model("canary_failures", "Canaries that were wrong or not answered");
        let shortfalls =
            by_model("shortfalls", "GPUs on which a sleep or a hibernation released less than expected");
        let quarantines = by_model("quarantines", "Quarantines after failures");
        let hibernations = by_model("hibernations", "Times that the engine was taken off its GPUs");
        let cuts = by_model(
            "cuts",
            "Turns that were cut in the middle of answers, whether or not the engine kept them",
        );
        let looks_failed = by_model("looks_failed", "Looks at a ready engine that failed, and count");
        let lost = Counter::default();
        registry.register("events_lost", "Events that were lost before they could be counted", lost.clone());
        requests.register(&mut registry);
        let mut by_model: Vec<Box<dyn Forget>> = vec![Box::new(failures.clone())];
        for series in [&canary_failures, &shortfalls, &quarantines, &hibernations, &cuts, &looks_failed] {
            by_model.push(Box::new(series.clone()));
        }
        let removed = Removed::new(requests, by_model);
        Self {
            registry,
            swaps,
            failures,
            canary_failures,
            shortfalls,
            quarantines,
            hibernations,
            cuts,
            looks_failed,
            lost,
            removed,
        }
    }

    pub(super) fn count(&self, event: &ServiceEvent) {
        let model = || OfModel { model: event.model.clone() };
        match &event.what {
            EventKind::Ready { swap } => {
                let of = |phase| OfSwap { phase, path: swap.path.as_str() };
                for (phase, seconds) in &swap.phases {
                    self.swaps.get_or_create(&of(phase.as_str())).observe(*seconds);
                }
                self.swaps.get_or_create(&of("total")).observe(swap.total_s);
                self.swaps.get_or_create(&of("whole")).observe(swap.whole_s);
            }
            EventKind::Failed { stage, .. } => {
                self.failures.of(OfStage { model: event.model.clone(), stage: stage.as_str() }).inc();
                if *stage == StageName::Canary {
                    self.canary_failures.of(model()).inc();
                }
            }
            EventKind::Shortfall { .. } => {
                self.shortfalls.of(model()).inc();
            }
            EventKind::Quarantined { .. } => {
                self.quarantines.of(model()).inc();
            }
            EventKind::Stage { before, before_s, .. } if LEAVING.contains(before) => {
                self.swaps.get_or_create(&OfSwap { phase: before.as_str(), path: "away" }).observe(*before_s);
            }
            EventKind::Hibernated { .. } => {
                self.hibernations.of(model()).inc();
            }
            EventKind::Kept { .. } => {
                self.cuts.of(model()).inc();
            }
            EventKind::LookFailed { .. } => {
                self.looks_failed.of(model()).inc();
            }
            EventKind::Stage { .. }
            | EventKind::Tested
            | EventKind::Learnt { .. }
            | EventKind::Grew { .. } => {}
        }
    }

    /// Counts events that were lost before they could be counted.
    pub(super) fn lost(&self, lost: u64) {
        self.lost.inc_by(lost);
    }

    pub(super) fn text(&self, now: &Snapshot, fleet: Option<&Membership>) -> Result<String, fmt::Error> {
        self.removed.forget(|model| now.models.iter().any(|known| known.name == model));
        for model in &now.models {
            // A counter has to exist at 0 before alerts can see it rise.
            let counters = [&self.canary_failures, &self.shortfalls, &self.quarantines, &self.hibernations];
            for series in counters.into_iter().chain([&self.cuts, &self.looks_failed]) {
                drop(series.of(OfModel { model: model.name.clone() }));
            }
        }
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &of_models(now))?;
        encode_registry(&mut text, &of_gpus(now))?;
        if let Some(totals) = &now.lending {
            encode_registry(&mut text, &of_lending(totals))?;
        }
        if let Some(fleet) = fleet {
            encode_registry(&mut text, &of_fleet(fleet))?;
        }
        encode_eof(&mut text)?;
        Ok(text)
    }
}

fn of_models(now: &Snapshot) -> Registry {
    let mut registry = Registry::with_prefix(PREFIX);
    let series = ModelSeries::register(&mut registry);
    register_sums(&mut registry, now);
    for model in &now.models {
        series.set(model);
    }
    registry
}

struct ModelSeries {
    oldest: Family<OfModel, Seconds>,
    costs: Family<OfStep, Seconds>,
    queue: Family<OfModel, Number>,
    running: Family<OfModel, Number>,
    ready: Family<OfModel, Number>,
    admitted: Family<OfModel, Counter>,
    refused: Family<OfModel, Counter>,
    starts: Family<OfModel, Counter>,
    state_writes_failed: Family<OfModel, Counter>,
    residue: Family<OfPlace, Number>,
    held: Family<OfModel, Number>,
}

impl ModelSeries {
    fn register(registry: &mut Registry) -> Self {
        let oldest = Family::<OfModel, Seconds>::default();
        let help = "Seconds that the model's oldest request or command waits; 0 if none does";
        registry.register_with_unit("oldest_wait", help, Unit::Seconds, oldest.clone());
        let costs = Family::<OfStep, Seconds>::default();
        let help = "Seconds that a step of a swap usually takes, as measured";
        registry.register_with_unit("swap_cost", help, Unit::Seconds, costs.clone());
        let mut gauge = |name: &str, help: &str| {
            let family = Family::<OfModel, Number>::default();
            registry.register(name, help, family.clone());
            family
        };
        let queue = gauge("queue", "Requests that wait for the model");
        let running = gauge("running", "Requests of the model that run");
        let ready = gauge("ready", "Whether requests of the model are admitted");
        let mut counter = |name: &str, help: &str| {
            let family = Family::<OfModel, Counter>::default();
            registry.register(name, help, family.clone());
            family
        };
        let admitted = counter("admitted", "Requests that were admitted");
        let refused = counter("refused", "Requests that were refused");
        let starts = counter("engine_starts", "Starts of the engine");
        let help = "Records and first answers of the model that could not be written, as on a full disk";
        let state_writes_failed = counter("state_writes_failed", help);
        let residue = Family::<OfPlace, Number>::default();
        let help = "Memory that a hibernation releases on the GPU, as last measured";
        registry.register_with_unit("residue", help, Unit::Bytes, residue.clone());
        let held = Family::<OfModel, Number>::default();
        let help = "Host memory that the model's hibernating engine takes";
        registry.register_with_unit("hibernation_host", help, Unit::Bytes, held.clone());
        Self {
            oldest,
            costs,
            queue,
            running,
            ready,
            admitted,
            refused,
            starts,
            state_writes_failed,
            residue,
            held,
        }
    }

    fn set(&self, model: &ModelNow) {
        let of = OfModel { model: model.name.clone() };
        self.held.get_or_create(&of).set(model.host_bytes);
        for (gpu, bytes) in model.gpus.iter().zip(model.residue_bytes.iter().flatten()) {
            let place = OfPlace { model: model.name.clone(), gpu: wide(*gpu) };
            self.residue.get_or_create(&place).set(*bytes);
        }
        self.queue.get_or_create(&of).set(wide(model.queued));
        self.running.get_or_create(&of).set(wide(model.running));
        self.ready.get_or_create(&of).set(u64::from(model.is_ready));
        self.admitted.get_or_create(&of).inc_by(model.admitted);
        self.refused.get_or_create(&of).inc_by(model.refused);
        self.starts.get_or_create(&of).inc_by(model.starts);
        self.state_writes_failed.get_or_create(&of).inc_by(model.state_writes_failed);
        self.oldest.get_or_create(&of).set(model.oldest_wait_s.unwrap_or(0.0));
        let costs_of = [
            ("resume", model.resume_s),
            ("wake", model.wake_s),
            ("start", model.start_s),
            ("leave", model.leave_s),
            ("hibernate", model.hibernate_s),
        ];
        for (step, seconds) in costs_of {
            if let Some(seconds) = seconds {
                self.costs.get_or_create(&OfStep { model: model.name.clone(), step }).set(seconds);
            }
        }
    }
}

/// Without a label: endpoint pickers read one number from each server.
fn register_sums(registry: &mut Registry, now: &Snapshot) {
    let mut of_all = |name: &str, help: &str, count: fn(&ModelNow) -> usize| {
        let gauge = Number::default();
        gauge.set(wide(now.models.iter().map(count).sum()));
        registry.register(name, help, gauge);
    };
    of_all("requests_waiting", "Requests that wait, of all models", |model| model.queued);
    of_all("requests_running", "Requests that run, of all models", |model| model.running);
}

fn of_gpus(now: &Snapshot) -> Registry {
    let mut registry = Registry::with_prefix(PREFIX);
    let residents = Family::<OfGpu, Number>::default();
    registry.register("residents", "Models on the GPU that are ready or draining", residents.clone());
    let swapping = Family::<OfGpu, Counter<f64, AtomicU64>>::default();
    let help = "Time in which a model of the GPU came up or left";
    registry.register_with_unit("gpu_swapping", help, Unit::Seconds, swapping.clone());
    let mut bytes = |name: &str, help: &str| {
        let family = Family::<OfGpu, Number>::default();
        registry.register_with_unit(name, help, Unit::Bytes, family.clone());
        family
    };
    let free = bytes("gpu_free", "Memory of the GPU that was free at the last measurement");
    let help = "Memory of the GPU that sleeping engines lent at the last measurement, and give up when asked";
    let reclaimable = bytes("gpu_reclaimable", help);
    let total = bytes("gpu_total", "All memory of the GPU");
    let promised = bytes("gpu_promised", "Memory of the GPU that its awake models are known to need");
    for gpu in &now.gpus {
        let of = OfGpu { gpu: wide(gpu.gpu) };
        let is_up = |stage: StageName, is_ready: bool| is_ready || stage == StageName::Draining;
        let up = now
            .models
            .iter()
            .filter(|model| model.gpus.contains(&gpu.gpu) && is_up(model.stage, model.is_ready))
            .count();
        residents.get_or_create(&of).set(wide(up));
        swapping.get_or_create(&of).inc_by(gpu.swapping.total_s);
        let measured =
            [(&free, gpu.free_bytes), (&reclaimable, gpu.reclaimable_bytes), (&total, gpu.total_bytes)];
        for (family, bytes) in measured {
            if let Some(bytes) = bytes {
                family.get_or_create(&of).set(bytes);
            }
        }
        promised.get_or_create(&of).set(gpu.promised_bytes);
    }
    registry
}

/// As the broker counts: they begin again with it.
fn of_lending(totals: &LentTotals) -> Registry {
    let mut registry = Registry::with_prefix(PREFIX);
    let mut bytes = |name: &str, help: &str, bytes: u64| {
        let counter = Counter::<u64, AtomicU64>::default();
        counter.inc_by(bytes);
        registry.register_with_unit(name, help, Unit::Bytes, counter);
    };
    bytes("lent", "Memory that sleeping engines lent, since the broker began", totals.lent_bytes);
    let help = "Lent memory that was freed for those who asked";
    bytes("lent_taken", help, totals.taken_bytes);
    let help = "Lent memory that its lenders took back";
    bytes("lent_brought_back", help, totals.brought_back_bytes);
    let help = "Memory that owners gave up when the broker asked";
    bytes("lent_given_up", help, totals.given_up_bytes);
    registry
}

fn of_fleet(fleet: &Membership) -> Registry {
    let mut registry = Registry::with_prefix(PREFIX);
    let ready = Number::default();
    ready.set(fleet.ready.is_ok().into());
    registry.register("fleet_ready", "Whether routers of its fleet may send it requests", ready);
    let refused = Number::default();
    refused.set(wide(fleet.refused));
    registry.register("fleet_placements_refused", "Placements that the node cannot follow", refused);
    registry
}

fn wide(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
