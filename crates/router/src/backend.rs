//! What the front asks of a router.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use http::HeaderValue;
use poorwill_fleet::name::ModelName;
use poorwill_front::settings::{Card, Front, Key, Parameters};
use poorwill_net::tls::ClientTls;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::choose::{FAILED, choose};
use super::config::RouterConfig;
use super::loads::Loads;
use super::queue::{Sent, stand_still};
use super::table::{Copy, RouteTable};
use poorwill_front::affinity::{Affinity, hash, pair};
use poorwill_front::backend::{Admission, Backend, Listed, ModelNumber, NameKind, NotOwned, Refused, Route};
use poorwill_front::requests::{OfModel, Requests, Series};

/// How long a node comes last that could not be reached or refused a request.
const AVOID: Duration = Duration::from_secs(2);

/// A node that is the only one with a model may be away for so long before its requests end.
const GONE_GRACE: Duration = Duration::from_secs(5);

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
    loads: Loads,
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
            loads: Loads::default(),
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

    /// The best copy of those that were not tried.
    fn to(&self, model: &ModelName, served_as: &str, tried: &[String], affinity: Affinity) -> Option<Route> {
        let (table, now) = (Arc::clone(&self.table.borrow()), Instant::now());
        // A name that only some nodes know is not asked of others.
        let has_name = |copy: &&Copy| copy.is_named(model, served_as) && !tried.contains(&copy.url);
        let left = table.copies(model).iter().filter(has_name);
        let is_reached = |copy: &&Copy| !self.has_failed(&(copy.url.clone(), None));
        let (good, bad): (Vec<&Copy>, Vec<&Copy>) = left.partition(is_reached);
        let load = |copy: &Copy| {
            // Of two awake ones the other is taken. But none that sleeps is woken for it.
            if self.has_failed(&(copy.url.clone(), Some(model.clone()))) {
                return FAILED;
            }
            self.loads.of(model, &copy.url, copy.record.requests.all(), now)
        };
        // Each model has an order of its own.
        let key = affinity.key.map(|key| pair(key, hash(model.as_str().as_bytes())));
        let of_model = Affinity { key, ..affinity };
        let chance = |below| fastrand::usize(..below);
        let chosen = |copies: &[&Copy]| choose(copies, of_model, load, chance).cloned();
        let copy = chosen(&good).or_else(|| chosen(&bad))?;
        Some(Route {
            model: self.id(model),
            name: model.to_string(),
            in_flight: Some(Arc::new(self.loads.begin(model, &copy.url, now))),
            url: copy.url,
            served_as: served_as.to_owned(),
            parameters: Arc::new(Parameters::default()),
            first_byte_max: None,
            affinity,
        })
    }

    /// Whether the request goes on from what was made there. Others say that there is no such response.
    fn is_maker(&self, model: &ModelName, route: &Route) -> bool {
        let table = self.table.borrow();
        let mut copies = table.copies(model).iter();
        route.affinity.place == Some(hash(route.url.as_bytes()))
            && copies.any(|copy| copy.url == route.url && copy.record.stage.is_ready())
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
            affinity: Affinity::default(),
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
    fn route(&self, name: &str, affinity: Affinity) -> Option<Route> {
        let table = Arc::clone(&self.table.borrow());
        let Some(model) = table.model(name) else {
            // Its nodes may be gone for now, or none was heard of yet.
            return (table.is_empty() || self.was_known(name)).then(|| self.nowhere(name, name));
        };
        self.to(model, name, &[], affinity).or_else(|| Some(self.nowhere(model.as_str(), name)))
    }

    fn route_of_model(&self, name: &str, affinity: Affinity) -> Option<Route> {
        self.route(name, affinity)
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
        let other = match self.is_maker(&model, route) {
            true => None,
            false => self.to(&model, &route.served_as, tried, route.affinity),
        };
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

    fn note_load(&self, route: &Route, requests: u64) {
        if let Ok(model) = route.name.parse::<ModelName>() {
            self.loads.hear(&model, &route.url, requests, Instant::now());
        }
    }

    fn gone(&self, route: &Route) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let (mut table, url) = (self.table.clone(), route.url.clone());
        let (model, mut there) = (route.name.parse::<ModelName>().ok(), table.borrow().instances_at(&url));
        Box::pin(async move {
            loop {
                let is_gone = |table: &Arc<RouteTable>| table.instances_at(&url).is_disjoint(&there);
                if table.wait_for(is_gone).await.is_err() {
                    // The router ends, and its requests with it.
                    return std::future::pending().await;
                }
                let has_other = |model| table.borrow().copies(model).iter().any(|copy| copy.url != url);
                if model.as_ref().is_some_and(has_other) {
                    return;
                }
                // It may only be cut off from etcd, or etcd has lost what it knew.
                sleep(GONE_GRACE).await;
                there = table.borrow().instances_at(&url);
                if there.is_empty() {
                    return;
                }
            }
        })
    }

    fn stands_still(&self, route: &Route, tried: &[String]) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        // What goes on from a response goes where that was made.
        let model = route.name.parse::<ModelName>().ok().filter(|_| route.affinity.place.is_none());
        let Some(model) = model else { return Box::pin(std::future::pending()) };
        let (served_as, url, tried) = (route.served_as.clone(), route.url.clone(), tried.to_vec());
        Box::pin(stand_still(self.table.clone(), Sent { model, served_as, url, tried }))
    }

    fn upstream_key(&self) -> Option<HeaderValue> {
        self.node_key.clone()
    }

    fn upstream_tls(&self) -> Option<ClientTls> {
        self.node_tls.clone()
    }
}
