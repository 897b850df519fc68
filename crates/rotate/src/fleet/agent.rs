//! Publishes the node under its lease, and carries out its placements.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use poorwill_fleet::etcd::{Entry, Etcd, EtcdError, LeaseId, Limits, Txn, Version};
use poorwill_fleet::keys::{self, Key};
use poorwill_fleet::mirror::{Contents, Mirror};
use poorwill_fleet::name::ModelName;
use poorwill_fleet::records::{Goal, ModelRecord, NodeRecord, Placement, Reading, RecordError, read, write};
use poorwill_fleet::session::Session;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::orders::{Orders, OrdersError};
use super::owned::{Owned, Standing};
use super::preparations::Preparations;
use super::published::{Published, Rates, host_free_bytes, published};
use crate::config::{Config, Fleet};
use crate::service::{ModelCommand, ModelNow, Service, Snapshot};

/// How often the node looks whether it has changed.
const PUBLISH_EVERY: Duration = Duration::from_millis(500);
/// How often the node makes sure that its name is still under its lease.
const VERIFY_EVERY: Duration = Duration::from_secs(2);
/// Longer than a call that was given up may stay with a member.
const REWRITE_AFTER: Duration = Duration::from_secs(30);
/// Writes of one transaction; etcd takes 128 operations.
const WRITES_MAX: usize = 100;

/// Why a node cannot take part in its fleet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// etcd cannot be used.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// What was kept in the state folder cannot be read.
    #[error(transparent)]
    State(#[from] OrdersError),
}

/// The agent. Dropping it has the node leave its fleet when its lease ends; [`end`](Self::end), at once.
#[derive(Debug)]
pub struct Agent {
    owned: Owned,
    session: Session,
    ending: CancellationToken,
    task: JoinHandle<()>,
}

impl Agent {
    /// Joins the fleet. etcd need not be there yet.
    ///
    /// # Errors
    /// See [`FleetError`].
    pub fn start(service: Service, fleet: Fleet, state: Option<&Path>) -> Result<Self, FleetError> {
        let etcd = Etcd::open(&fleet.etcd, Limits::for_lease(fleet.lease))?;
        let instance = format!("{:016x}", fastrand::u64(..));
        let orders = Orders::read(state, &instance)?;
        let session = Session::start(etcd.clone(), fleet.lease);
        let owned = Owned::new(orders.goals().clone());
        let placements = format!("{}placements/", keys::prefix(&fleet.name));
        let mirror = Mirror::start(etcd.clone(), &placements);
        let (ending, config) = (CancellationToken::new(), service.config());
        let worker = Worker {
            service,
            fleet,
            etcd,
            instance,
            owned: owned.clone(),
            orders,
            refused: Vec::new(),
            held: BTreeSet::new(),
            rates: Rates::default(),
            preparations: Preparations::default(),
            lease: None,
            sent: None,
            verified_at: Instant::now(),
            rewrite_at: None,
            version: Version::default(),
            placed: BTreeSet::new(),
            config,
            was_followed: false,
            last_problem: None,
        };
        let (lease, until) = (session.lease(), ending.clone());
        let task = tokio::spawn(async move { worker.run(lease, &mirror, &until).await });
        Ok(Self { owned, session, ending, task })
    }

    /// What this node may serve.
    #[must_use]
    pub fn owned(&self) -> Owned {
        self.owned.clone()
    }

    /// Leaves the fleet: routers send no more, and what is being answered may end.
    pub async fn end(self) {
        self.ending.cancel();
        let _ended = self.task.await;
        self.owned.set_standing(Standing::Left);
        self.session.end().await;
    }
}

struct Worker {
    service: Service,
    fleet: Fleet,
    etcd: Etcd,
    instance: String,
    owned: Owned,
    orders: Orders,
    /// Placements that cannot be followed, each with the reason.
    refused: Vec<String>,
    /// Models that were ordered to give way to nothing.
    held: BTreeSet<String>,
    rates: Rates,
    preparations: Preparations,
    /// Under which the records are that were sent.
    lease: Option<LeaseId>,
    /// What etcd has, under that lease.
    sent: Option<Published>,
    /// When that was made sure of.
    verified_at: Instant,
    /// When all is written again, since a call failed and may be carried out late.
    rewrite_at: Option<Instant>,
    /// Of the placements.
    version: Version,
    /// Models whose placements are in etcd.
    placed: BTreeSet<String>,
    /// Whose models have their goals.
    config: Arc<Config>,
    /// Whether placements were read since the start.
    was_followed: bool,
    last_problem: Option<String>,
}

/// What came of an attempt to publish.
struct Attempt {
    snapshot: Snapshot,
    /// Whether etcd answered.
    is_confirmed: bool,
}

/// Who has the node's name.
enum Name {
    /// This process has taken it, and published this.
    Own(Published),
    /// There was this record.
    Others(Entry),
}

/// Why the node is not published.
#[derive(Debug, thiserror::Error)]
enum PublishError {
    #[error(
        "node `{node}` is there already, as process {instance} at {url}; give this node another name, or wait until the \
         other's lease has ended"
    )]
    Taken { node: String, instance: String, url: String },
    #[error("its records are not under its lease any more")]
    Lost,
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl Worker {
    async fn run(
        mut self,
        mut lease: watch::Receiver<Option<LeaseId>>,
        mirror: &Mirror,
        until: &CancellationToken,
    ) {
        // Before the name is taken: a later process has to know this one.
        self.orders.keep().await;
        let mut placements = mirror.contents();
        let mut ticks = interval(PUBLISH_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = until.cancelled() => return,
                changed = lease.changed() => if changed.is_err() { return },
                changed = placements.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let goals = self.read_goals(&placements.borrow_and_update());
                    self.follow(goals).await;
                    continue;
                }
                _ = ticks.tick() => {}
            }
            let config = self.service.config();
            if !Arc::ptr_eq(&config, &self.config) {
                // A reload may have brought models.
                (self.config, self.was_followed) = (config, false);
                let goals = self.read_goals(&placements.borrow());
                self.follow(goals).await;
            }
            let current = *lease.borrow_and_update();
            let outcome = tokio::select! {
                () = until.cancelled() => return,
                outcome = self.publish(current) => outcome,
            };
            match outcome {
                Ok(Some(Attempt { snapshot, is_confirmed })) => {
                    self.let_go(&snapshot);
                    self.prepare(&snapshot);
                    if is_confirmed {
                        self.note(None);
                    }
                }
                // The log says why there is no lease.
                Ok(None) => {}
                Err(error) => self.note(Some(error.to_string())),
            }
        }
    }

    /// Says a problem once, and when it is over.
    fn note(&mut self, problem: Option<String>) {
        match (&problem, &self.last_problem) {
            (Some(new), old) if Some(new) != old.as_ref() => {
                tracing::warn!(reason = new, "cannot publish this node; retrying");
            }
            (None, Some(_)) => tracing::info!("publishing this node again"),
            _ => {}
        }
        if self.last_problem != problem {
            self.owned.set_problem(problem.clone());
        }
        self.last_problem = problem;
    }

    /// `None` without a lease.
    async fn publish(&mut self, lease: Option<LeaseId>) -> Result<Option<Attempt>, PublishError> {
        if self.lease != lease {
            (self.lease, self.sent) = (lease, None);
        }
        let Some(lease) = lease else { return Ok(None) };
        let (snapshot, config) = (self.service.snapshot().await, self.service.config());
        let now = published(&snapshot, &config, &self.fleet, &self.instance, &mut self.rates, Instant::now());
        let now = now.with_problems(&self.refused).signed(&self.fleet, &config.front.keys, lease);
        if self.rewrite_at.is_some_and(|at| at <= Instant::now()) {
            self.rewrite_at = None;
            self.sent = self.sent.take().map(Published::unknown);
        }
        let outcome = match self.sent.take() {
            None => self.enter(lease, &now).await,
            Some(sent) => {
                let is_due = self.verified_at.elapsed() >= VERIFY_EVERY;
                let updated = self.update(lease, &sent, &now, is_due).await;
                if is_due {
                    self.verified_at = Instant::now();
                }
                if matches!(&updated, Err(error) if !matches!(error, PublishError::Lost)) {
                    // Some of it may have been written, and a silent member may still do so.
                    self.sent = Some(sent.certain_beside(&now));
                    self.rewrite_at = Some(Instant::now() + REWRITE_AFTER);
                }
                updated
            }
        };
        match &outcome {
            Ok(_) => {
                self.owned.set_standing(Standing::Member);
                self.sent = Some(now);
            }
            Err(PublishError::Taken { .. }) => self.owned.set_standing(Standing::Taken),
            Err(_) => {}
        }
        outcome.map(|is_confirmed| Some(Attempt { snapshot, is_confirmed }))
    }

    /// Takes the node's name, and publishes everything.
    async fn enter(&self, lease: LeaseId, now: &Published) -> Result<bool, PublishError> {
        let first = match self.take_name(lease, now, None).await? {
            Name::Own(first) => first,
            Name::Others(found) => {
                let key = Key::Node(self.fleet.node.clone());
                let record = read::<NodeRecord>(&key, &found.value).ok();
                let record = record.as_ref().and_then(Reading::known);
                match (record, LeaseId::of(&found)) {
                    // An answer that was lost on its way leaves our own behind, and an older state of etcd has it, too.
                    (Some(record), under) if record.instance == self.instance && under == Some(lease) => {
                        self.read_own().await?
                    }
                    (Some(record), Some(under)) if self.orders.was_here(&record.instance) => {
                        self.take_over(lease, now, under).await?
                    }
                    (record, _) => {
                        let (instance, url) =
                            record.map_or(("?", "?"), |record| (&*record.instance, &*record.front_url));
                        let (instance, url) = (instance.to_owned(), url.to_owned());
                        return Err(PublishError::Taken { node: self.fleet.node.to_string(), instance, url });
                    }
                }
            }
        };
        self.update(lease, &first, now, false).await?;
        Ok(true)
    }

    /// Takes over from a process that was this node before, and is dead: this one has its state folder. In between the node
    /// is not away.
    async fn take_over(
        &self,
        lease: LeaseId,
        now: &Published,
        under: LeaseId,
    ) -> Result<Published, PublishError> {
        let Name::Own(first) = self.take_name(lease, now, Some(under)).await? else {
            return Err(PublishError::Lost);
        };
        tracing::info!("ends the lease of the process before this one");
        self.etcd.revoke(under).await?;
        Ok(first)
    }

    /// What etcd has of this node, without what it says.
    async fn read_own(&self) -> Result<Published, PublishError> {
        let path = format!("{}/models/", Key::Node(self.fleet.node.clone()).in_fleet(&self.fleet.name));
        let (entries, _) = self.etcd.read(&path).await?;
        let keys = entries.iter().filter_map(|entry| Key::parse(&self.fleet.name, &entry.key).ok());
        let names = keys.filter_map(|key| match key {
            Key::Model { model, .. } => Some(model),
            _ => None,
        });
        Ok(Published::unknown_of(names))
    }

    /// Where none has it, or only that lease. The node comes with its models, so that none seems to be missing.
    async fn take_name(
        &self,
        lease: LeaseId,
        now: &Published,
        under: Option<LeaseId>,
    ) -> Result<Name, PublishError> {
        let key = Key::Node(self.fleet.node.clone());
        let path = key.in_fleet(&self.fleet.name);
        let mut first = Published { node: now.node.clone(), models: BTreeMap::new() };
        let free = match under {
            Some(under) => Txn::new().if_leased(&path, under),
            None => Txn::new().if_created_at(&path, 0),
        };
        let mut txn = free.put(&path, &write(&key, &now.node)?, Some(lease)).or_get(&path);
        for (model, record) in now.models.iter().take(WRITES_MAX) {
            let key = Key::Model { node: self.fleet.node.clone(), model: model.clone() };
            txn = txn.put(&key.in_fleet(&self.fleet.name), &write(&key, record)?, Some(lease));
            first.models.insert(model.clone(), record.clone());
        }
        let answer = self.etcd.commit(&txn).await?;
        match answer.found.into_iter().next() {
            _ if answer.has_succeeded => Ok(Name::Own(first)),
            Some(found) => Ok(Name::Others(found)),
            None => Err(PublishError::Lost),
        }
    }

    /// Publishes what has changed, while the node's name is under this lease. Makes sure of the latter if it is due.
    /// Returns whether etcd was asked.
    async fn update(
        &self,
        lease: LeaseId,
        sent: &Published,
        now: &Published,
        is_due: bool,
    ) -> Result<bool, PublishError> {
        let node_key = Key::Node(self.fleet.node.clone());
        let node_path = node_key.in_fleet(&self.fleet.name);
        let begun = || Txn::new().if_leased(&node_path, lease);
        let model_path = |model: &ModelName| {
            let key = Key::Model { node: self.fleet.node.clone(), model: model.clone() };
            let path = key.in_fleet(&self.fleet.name);
            (key, path)
        };
        let mut txns = vec![begun()];
        let mut push = |add: &dyn Fn(Txn) -> Txn| {
            if txns.last().is_some_and(|txn| txn.len() == WRITES_MAX) {
                txns.push(begun());
            }
            let last = txns.pop().unwrap_or_default();
            txns.push(add(last));
        };
        if sent.node != now.node {
            let text = write(&node_key, &now.node)?;
            push(&|txn| txn.put(&node_path, &text, Some(lease)));
        }
        // They make room for what comes.
        for model in sent.models.keys().filter(|model| !now.models.contains_key(*model)) {
            let (_, path) = model_path(model);
            push(&|txn| txn.delete(&path));
        }
        for (model, record) in &now.models {
            if sent.models.get(model) != Some(record) {
                let (key, path) = model_path(model);
                let text = write::<ModelRecord>(&key, record)?;
                push(&|txn| txn.put(&path, &text, Some(lease)));
            }
        }
        let mut was_asked = false;
        for txn in txns.iter().filter(|txn| is_due || !txn.is_empty()) {
            if !self.etcd.commit(txn).await?.has_succeeded {
                return Err(PublishError::Lost);
            }
            was_asked = true;
        }
        Ok(was_asked)
    }

    /// Models that were ordered to leave sleep once their last request has ended.
    fn let_go(&self, snapshot: &Snapshot) {
        let is_over = |model: &&ModelNow| model.is_ready && model.running == 0 && model.queued == 0;
        for model in snapshot.models.iter().filter(is_over).filter(|model| !model.is_pinned) {
            if self.owned.goal(&model.name) == Some(Goal::None) {
                tracing::info!(model = model.name, "lets a model go, as ordered");
                let _known: bool = self.service.command(&model.name, ModelCommand::Sleep);
            }
        }
    }

    /// Brings one more warm model up, so that it is ready to wake.
    fn prepare(&mut self, snapshot: &Snapshot) {
        let is_warm = |model: &str| {
            self.fleet.prepare && self.placed.contains(model) && self.owned.goal(model) == Some(Goal::Warm)
        };
        if let Some(model) = self.preparations.next(snapshot, is_warm, host_free_bytes(), Instant::now()) {
            // A model that a reload removed has nothing to prepare.
            let _known: bool = self.service.command(&model, ModelCommand::Prepare);
        }
    }

    /// The goals of the models of this node; `None` while nothing is known.
    fn read_goals(&mut self, contents: &Contents) -> Option<BTreeMap<String, Goal>> {
        if contents.revision() == 0 {
            return None;
        }
        if std::mem::replace(&mut self.version, contents.version()).is_lost_by(contents.version()) {
            // The node's records may be of long ago, too.
            self.sent = None;
        }
        let (mut goals, mut refused) = (BTreeMap::new(), Vec::new());
        self.placed.clear();
        for model in &self.service.config().models {
            let Ok(name) = model.name.parse::<ModelName>() else { continue };
            let key = Key::Placement { model: name, node: self.fleet.node.clone() };
            let goal = match contents.entries().get(&key.in_fleet(&self.fleet.name)) {
                None => self.orders.absent(&model.name),
                Some(entry) => {
                    self.placed.insert(model.name.clone());
                    match ordered(&key, &entry.value) {
                        Ok(placement) => self.orders.take(&model.name, placement.goal, placement.is_held()),
                        Err(reason) => refused.push(reason),
                    }
                    self.orders.goal(&model.name)
                }
            };
            goals.extend(goal.map(|goal| (model.name.clone(), goal)));
        }
        for reason in refused.iter().filter(|reason| !self.refused.contains(reason)) {
            tracing::warn!(reason, "cannot follow a placement");
        }
        self.owned.set_refused(refused.len());
        self.refused = refused;
        Some(goals)
    }

    /// Orders what has changed; at first, and behind a reload, everything.
    async fn follow(&mut self, goals: Option<BTreeMap<String, Goal>>) {
        let Some(goals) = goals else { return };
        self.orders.keep().await;
        let is_first = !std::mem::replace(&mut self.was_followed, true);
        let held = self.orders.held();
        let before = std::mem::replace(&mut self.held, held.clone());
        let new = self.owned.set_goals(goals.clone());
        let is_new = |model: &String| new.iter().any(|(one, _)| one == model);
        let is_changed = |model: &String| held.contains(model) != before.contains(model);
        let due = goals.into_iter().filter(|(model, _)| is_first || is_new(model) || is_changed(model));
        let mut due: Vec<(String, Goal)> = due.collect();
        // Those that give memory come before those that take it.
        due.sort_by_key(|(model, goal)| (*goal, held.contains(model)));
        for (model, goal) in due {
            let is_held = held.contains(&model);
            tracing::info!(model, %goal, is_held, "a model has a new goal");
            self.order(&model, ModelCommand::Hot(goal == Goal::Hot));
            self.order(&model, ModelCommand::Hold(is_held));
            // What is not held looks for memory by itself, and takes none that is in use.
            if is_held && (is_new(&model) || is_changed(&model)) {
                self.order(&model, ModelCommand::Wake);
            }
        }
    }

    fn order(&self, model: &str, command: ModelCommand) {
        // A model that a reload removed has nothing to follow.
        let _known: bool = self.service.command(model, command);
    }
}

/// What a placement orders, or why it is not followed.
fn ordered(key: &Key, json: &[u8]) -> Result<Placement, String> {
    match read::<Placement>(key, json) {
        Ok(Reading::Known(placement)) => Ok(placement),
        Ok(Reading::Newer { format }) => {
            Err(format!("record `{key}` has format {format}; upgrade this node"))
        }
        Err(error) => Err(error.to_string()),
    }
}
