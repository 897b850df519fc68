//! What the front asks of a router.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use http::HeaderValue;
use poorwill_fleet::name::ModelName;
use poorwill_front::settings::{Card, Front, Key, Parameters};
use poorwill_net::tls::ClientTls;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::choose::choose;
use super::config::RouterConfig;
use super::table::{Copy, RouteTable};
use poorwill_front::backend::{
    Admission, Backend, InFlight, Listed, ModelNumber, NameKind, NotOwned, Refused, Route,
};
use poorwill_front::requests::{OfModel, Requests, Series};

/// How long a node comes last that could not be reached or refused a request.
const AVOID: Duration = Duration::from_secs(2);

/// The address of a model that no node may serve now. Nothing is sent there.
const NOWHERE: &str = "http://nowhere.invalid";

/// What became of requests, by model.
#[derive(Debug, Default)]
pub(super) struct RouteCounts {
    /// Times that one went on to another node.
    pub(super) retries: Series<OfModel, Counter>,
    /// Requests for which no node, or no other one, was left.
    pub(super) refused: Series<OfModel, Counter>,
}

/// Routes by the table.
#[derive(Debug)]
pub(super) struct RouterBackend {
    table: watch::Receiver<Arc<RouteTable>>,
    front: Arc<Front>,
    node_key: Option<HeaderValue>,
    node_tls: Option<ClientTls>,
    requests: Arc<Requests>,
    counts: Arc<RouteCounts>,
    /// A number for each model, for as long as this process runs.
    ids: RwLock<BTreeMap<ModelName, usize>>,
    /// This router's requests to each model at each node.
    in_flight: Mutex<HashMap<(ModelName, String), Arc<AtomicUsize>>>,
    /// When a node, by its address, could not be reached, or refused a model.
    failed: Mutex<HashMap<FailedAt, Instant>>,
}

/// What failed: a node, or a model at a node.
type FailedAt = (String, Option<ModelName>);

impl RouterBackend {
    pub(super) fn new(
        config: &RouterConfig,
        node_tls: Option<ClientTls>,
        table: watch::Receiver<Arc<RouteTable>>,
        requests: Arc<Requests>,
        counts: Arc<RouteCounts>,
    ) -> Self {
        Self {
            table,
            front: Arc::clone(&config.front),
            node_key: config.node_key.as_ref().map(Key::header_value),
            node_tls,
            requests,
            counts,
            ids: RwLock::default(),
            in_flight: Mutex::default(),
            failed: Mutex::default(),
        }
    }

    fn id(&self, model: &ModelName) -> ModelNumber {
        if let Some(id) = self.ids.read().unwrap_or_else(PoisonError::into_inner).get(model) {
            return ModelNumber(*id);
        }
        let mut ids = self.ids.write().unwrap_or_else(PoisonError::into_inner);
        let next = ids.len();
        ModelNumber(*ids.entry(model.clone()).or_insert(next))
    }

    fn counter(&self, model: &ModelName, url: &str) -> Arc<AtomicUsize> {
        let mut counters = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (model.clone(), url.to_owned());
        if !counters.contains_key(&key) {
            // Nodes come and go, and their addresses with them.
            counters.retain(|_, counter| Arc::strong_count(counter) > 1);
        }
        Arc::clone(counters.entry(key).or_default())
    }

    /// The best copy of those that were not tried.
    fn to(&self, model: &ModelName, served_as: &str, tried: &[String]) -> Option<Route> {
        let table = Arc::clone(&self.table.borrow());
        // A name that only some nodes know is not asked of others.
        let has_name = |copy: &&Copy| copy.is_named(model, served_as) && !tried.contains(&copy.url);
        let left = table.copies(model).iter().filter(has_name);
        let is_reached = |copy: &&Copy| !self.has_failed(&(copy.url.clone(), None));
        let (good, bad): (Vec<&Copy>, Vec<&Copy>) = left.partition(is_reached);
        let in_flight = |copy: &Copy| {
            // Of two awake ones the other is taken. But none that sleeps is woken for it.
            if self.has_failed(&(copy.url.clone(), Some(model.clone()))) {
                return u64::MAX;
            }
            u64::try_from(self.counter(model, &copy.url).load(Ordering::Acquire)).unwrap_or(u64::MAX)
        };
        let chosen = |copies: &[&Copy]| choose(copies, in_flight, |below| fastrand::usize(..below)).cloned();
        let copy = chosen(&good).or_else(|| chosen(&bad))?;
        Some(Route {
            model: self.id(model),
            name: model.to_string(),
            in_flight: Some(Arc::new(InFlight::new(&self.counter(model, &copy.url)))),
            url: copy.url,
            served_as: served_as.to_owned(),
            parameters: Arc::new(Parameters::default()),
            first_byte_max: None,
        })
    }

    /// For a model that no node may serve now.
    fn nowhere(&self, model: &str, served_as: &str) -> Route {
        Route {
            // Clients may invent names as they like, so these get no number.
            model: ModelNumber(usize::MAX),
            name: model.to_owned(),
            url: NOWHERE.to_owned(),
            served_as: served_as.to_owned(),
            parameters: Arc::new(Parameters::default()),
            in_flight: None,
            first_byte_max: None,
        }
    }

    /// Whether this router has sent requests for a model of this name.
    fn was_known(&self, name: &str) -> bool {
        let ids = self.ids.read().unwrap_or_else(PoisonError::into_inner);
        name.parse::<ModelName>().is_ok_and(|model| ids.contains_key(&model))
    }

    fn has_failed(&self, what: &FailedAt) -> bool {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get(what).is_some_and(|at| at.elapsed() < AVOID)
    }
}

/// How far a model is, of all its copies, in the words of a node.
fn stage(copies: &[Copy]) -> &'static str {
    use poorwill_fleet::records::Stage;
    let name = |copy: &Copy| match copy.record.stage {
        Stage::Awake => (0, "ready"),
        Stage::Waking => (1, "waking"),
        Stage::Asleep | Stage::OnDisk => (2, "asleep"),
        Stage::Hibernating => (3, "hibernating"),
        Stage::Sleeping => (4, "falling asleep"),
        Stage::Starting => (5, "starting"),
        Stage::Stopped => (6, "cold"),
        Stage::Failed => (7, "quarantined"),
        Stage::Unknown => (8, "unknown"),
    };
    copies.iter().map(name).min_by_key(|(order, _)| *order).map_or("unknown", |(_, stage)| stage)
}

impl Backend for RouterBackend {
    fn route(&self, name: &str) -> Option<Route> {
        let table = Arc::clone(&self.table.borrow());
        let Some(model) = table.model(name) else {
            // Its nodes may be gone for now, or none was heard of yet.
            return (table.is_empty() || self.was_known(name)).then(|| self.nowhere(name, name));
        };
        self.to(model, name, &[]).or_else(|| Some(self.nowhere(model.as_str(), name)))
    }

    fn route_of_model(&self, name: &str) -> Option<Route> {
        self.route(name)
    }

    fn listed(&self) -> Vec<Listed> {
        let table = Arc::clone(&self.table.borrow());
        let listed = |name: String, kind: NameKind, copies: &[Copy]| {
            let stage = stage(copies);
            Listed { name, kind, is_ready: stage == "ready", stage, card: Card::default() }
        };
        let own = table.models().map(|(model, copies)| listed(model.to_string(), NameKind::Model, copies));
        let others = table.names().filter(|(name, model)| *name != model.as_str());
        let others = others.map(|(name, model)| {
            listed(name.to_owned(), NameKind::Alias { model: model.to_string() }, table.copies(model))
        });
        own.chain(others).collect()
    }

    fn admit(
        &self,
        _model: ModelNumber,
        _priority: i32,
    ) -> Pin<Box<dyn Future<Output = Result<Admission, Refused>> + Send + '_>> {
        // Nodes have queues.
        Box::pin(async { Ok(Admission::new(CancellationToken::new(), Box::new(()))) })
    }

    fn suspect(&self, _model: ModelNumber) {}

    fn requests(&self) -> Arc<Requests> {
        Arc::clone(&self.requests)
    }

    fn front(&self) -> Arc<Front> {
        Arc::clone(&self.front)
    }

    fn check(&self, route: &Route) -> Result<(), NotOwned> {
        if route.url != NOWHERE {
            return Ok(());
        }
        let known = if self.was_known(&route.name) { route.name.clone() } else { String::new() };
        self.counts.refused.of(OfModel { model: known }).inc();
        Err(NotOwned::Nowhere)
    }

    fn is_router(&self) -> bool {
        true
    }

    fn elsewhere(&self, route: &Route, tried: &[String]) -> Option<Route> {
        let model = route.name.parse::<ModelName>().ok()?;
        let other = self.to(&model, &route.served_as, tried);
        let count = if other.is_some() { &self.counts.retries } else { &self.counts.refused };
        count.of(OfModel { model: route.name.clone() }).inc();
        other
    }

    fn fails(&self, route: &Route, is_unreachable: bool) {
        let model = route.name.parse::<ModelName>().ok().filter(|_| !is_unreachable);
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.retain(|_, at| at.elapsed() < AVOID);
        failed.insert((route.url.clone(), model), Instant::now());
    }

    fn gone(&self, route: &Route) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let mut table = self.table.clone();
        let at = route.name.parse::<ModelName>().ok().and_then(|model| {
            let of_table = table.borrow();
            let copy = of_table.copies(&model).iter().find(|copy| copy.url == route.url)?;
            Some((copy.node.clone(), copy.lease))
        });
        Box::pin(async move {
            let Some((node, lease)) = at else { return std::future::pending().await };
            let gone = table.wait_for(|table| !table.is_there(&node, lease)).await.map(drop);
            if gone.is_err() {
                // The router ends, and its requests with it.
                std::future::pending::<()>().await;
            }
        })
    }

    fn upstream_key(&self) -> Option<HeaderValue> {
        self.node_key.clone()
    }

    fn upstream_tls(&self) -> Option<ClientTls> {
        self.node_tls.clone()
    }
}
