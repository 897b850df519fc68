//! Publishes the node under its lease, and carries out its placements.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use poorwill_fleet::etcd::{Etcd, EtcdError, LeaseId, Limits, Txn};
use poorwill_fleet::keys::{self, Key};
use poorwill_fleet::mirror::{Contents, Mirror};
use poorwill_fleet::name::ModelName;
use poorwill_fleet::records::{Goal, ModelRecord, NodeRecord, Placement, Reading, RecordError, read, write};
use poorwill_fleet::session::Session;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::owned::Owned;
use super::preparations::Preparations;
use super::published::{Published, Rates, host_free_bytes, published};
use crate::config::{Config, Fleet};
use crate::service::{ModelCommand, ModelNow, Service, Snapshot};

/// How often the node looks whether it has changed.
const PUBLISH_EVERY: Duration = Duration::from_millis(500);
/// How often the node makes sure that its name is still under its lease.
const VERIFY_EVERY: Duration = Duration::from_secs(2);
/// Writes of one transaction; etcd takes 128 operations.
const WRITES_MAX: usize = 100;
/// The greatest fence of each model, in the state folder.
const FENCES: &str = "fleet.json";

/// Why a node cannot take part in its fleet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// etcd cannot be used.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// What was kept in the state folder cannot be read.
    #[error("{}: {reason}; remove it if no other controller than today's is left", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
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
        let etcd = Etcd::with_tls(&fleet.etcd, Limits::for_lease(fleet.lease), fleet.etcd_tls.as_ref())?;
        let fences = Fences::read(state)?;
        let session = Session::start(etcd.clone(), fleet.lease);
        let owned = Owned::new(session.clock(), session.lease());
        let placements = format!("{}placements/", keys::prefix(&fleet.name));
        let mirror = Mirror::start(etcd.clone(), &placements);
        let mut instance = String::new();
        // Cannot fail.
        let _ = write!(instance, "{:016x}", fastrand::u64(..));
        let (ending, config) = (CancellationToken::new(), service.config());
        let worker = Worker {
            service,
            fleet,
            etcd,
            instance,
            owned: owned.clone(),
            fences,
            rates: Rates::default(),
            preparations: Preparations::default(),
            sent: None,
            verified_at: Instant::now(),
            config,
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
        self.owned.claim(None);
        self.session.end().await;
    }
}

struct Worker {
    service: Service,
    fleet: Fleet,
    etcd: Etcd,
    instance: String,
    owned: Owned,
    fences: Fences,
    rates: Rates,
    preparations: Preparations,
    /// What etcd has, under the claimed lease.
    sent: Option<Published>,
    /// When that was made sure of.
    verified_at: Instant,
    /// Whose models have their goals.
    config: Arc<Config>,
    last_problem: Option<String>,
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
                    self.follow(goals, false).await;
                    continue;
                }
                _ = ticks.tick() => {}
            }
            let config = self.service.config();
            if !Arc::ptr_eq(&config, &self.config) {
                // A reload may have brought models, and has set pins as the file says.
                self.config = config;
                let goals = self.read_goals(&placements.borrow());
                self.follow(goals, true).await;
            }
            let current = *lease.borrow_and_update();
            let outcome = tokio::select! {
                () = until.cancelled() => return,
                outcome = self.publish(current) => outcome,
            };
            if let Ok(Some(snapshot)) = &outcome {
                self.let_go(snapshot);
                self.prepare(snapshot);
            }
            self.note(outcome.err().map(|error| error.to_string()));
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

    /// Returns what was published, if there is a lease.
    async fn publish(&mut self, lease: Option<LeaseId>) -> Result<Option<Snapshot>, PublishError> {
        let Some(lease) = lease else {
            self.owned.claim(None);
            self.sent = None;
            return Ok(None);
        };
        if self.owned.claimed() != Some(lease) {
            self.owned.claim(None);
            self.sent = None;
        }
        let (snapshot, config) = (self.service.snapshot().await, self.service.config());
        let now = published(&snapshot, &config, &self.fleet, &self.instance, &mut self.rates, Instant::now());
        let outcome = match self.sent.take() {
            None => self.enter(lease, &now).await,
            Some(sent) => {
                let is_due = self.verified_at.elapsed() >= VERIFY_EVERY;
                let updated = self.update(lease, &sent, &now, is_due).await;
                if is_due {
                    self.verified_at = Instant::now();
                }
                if updated.is_err() {
                    // Some of it may have been written. Only what is gone has to be entered again.
                    self.sent = Some(sent);
                }
                updated
            }
        };
        match outcome {
            Ok(()) => {
                self.owned.claim(Some(lease));
                self.sent = Some(now);
                Ok(Some(snapshot))
            }
            Err(error) => {
                if matches!(error, PublishError::Lost | PublishError::Taken { .. }) {
                    self.owned.claim(None);
                    self.sent = None;
                }
                Err(error)
            }
        }
    }

    /// Takes the node's name, and publishes everything. The node comes with its models, so that none seems to be missing.
    async fn enter(&self, lease: LeaseId, now: &Published) -> Result<(), PublishError> {
        let key = Key::Node(self.fleet.node.clone());
        let path = key.in_fleet(&self.fleet.name);
        let mut first = Published { node: now.node.clone(), models: BTreeMap::new() };
        let mut txn = Txn::new()
            .if_created_at(&path, 0)
            .put(&path, &write(&key, &now.node)?, Some(lease))
            .or_get(&path);
        for (model, record) in now.models.iter().take(WRITES_MAX) {
            let key = Key::Model { node: self.fleet.node.clone(), model: model.clone() };
            txn = txn.put(&key.in_fleet(&self.fleet.name), &write(&key, record)?, Some(lease));
            first.models.insert(model.clone(), record.clone());
        }
        let answer = self.etcd.commit(&txn).await?;
        if !answer.has_succeeded {
            let Some(found) = answer.found.first() else { return Err(PublishError::Lost) };
            let record = read::<NodeRecord>(&key, &found.value).ok();
            let record = record.as_ref().and_then(Reading::known);
            // An answer that was lost on its way leaves our own behind.
            if record.is_some_and(|record| record.instance == self.instance) {
                // It may say what was so before.
                first = Published { node: NodeRecord::new(""), models: BTreeMap::new() };
            } else {
                let (instance, url) =
                    record.map_or(("?", "?"), |record| (&*record.instance, &*record.front_url));
                let node = self.fleet.node.to_string();
                return Err(PublishError::Taken { node, instance: instance.to_owned(), url: url.to_owned() });
            }
        }
        self.update(lease, &first, now, false).await
    }

    /// Publishes what has changed, while the node's name is under this lease. Makes sure of the latter if it is due.
    async fn update(
        &self,
        lease: LeaseId,
        sent: &Published,
        now: &Published,
        is_due: bool,
    ) -> Result<(), PublishError> {
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
        for (model, record) in &now.models {
            if sent.models.get(model) != Some(record) {
                let (key, path) = model_path(model);
                let text = write::<ModelRecord>(&key, record)?;
                push(&|txn| txn.put(&path, &text, Some(lease)));
            }
        }
        for model in sent.models.keys().filter(|model| !now.models.contains_key(*model)) {
            let (_, path) = model_path(model);
            push(&|txn| txn.delete(&path));
        }
        for txn in txns.iter().filter(|txn| is_due || !txn.is_empty()) {
            if !self.etcd.commit(txn).await?.has_succeeded {
                return Err(PublishError::Lost);
            }
        }
        Ok(())
    }

    /// Models that are not placed here sleep once their last request has ended.
    fn let_go(&self, snapshot: &Snapshot) {
        let is_over = |model: &&ModelNow| model.is_ready && model.running == 0 && model.queued == 0;
        for model in snapshot.models.iter().filter(is_over).filter(|model| !model.is_pinned) {
            if self.owned.is_withdrawn(&model.name) {
                let _known: bool = self.service.command(&model.name, ModelCommand::Sleep);
            }
        }
    }

    /// Brings one more warm model up, so that it is ready to wake.
    fn prepare(&mut self, snapshot: &Snapshot) {
        let is_warm = |model: &str| self.fleet.prepare && self.owned.goal(model) == Goal::Warm;
        if let Some(model) = self.preparations.next(snapshot, is_warm, host_free_bytes(), Instant::now()) {
            // A model that a reload removed has nothing to prepare.
            let _known: bool = self.service.command(&model, ModelCommand::Prepare);
        }
    }

    /// The goals of all models of this node; `None` while nothing is known.
    fn read_goals(&mut self, contents: &Contents) -> Option<BTreeMap<String, Goal>> {
        if contents.revision() == 0 {
            return None;
        }
        let mut goals = BTreeMap::new();
        for model in &self.service.config().models {
            let Ok(name) = model.name.parse::<ModelName>() else { continue };
            let key = Key::Placement { model: name, node: self.fleet.node.clone() };
            let goal = match contents.entries().get(&key.in_fleet(&self.fleet.name)) {
                None => Goal::None,
                Some(entry) => match read::<Placement>(&key, &entry.value) {
                    Ok(Reading::Known(placement)) if placement.fence >= self.fences.of(&model.name) => {
                        self.fences.raise(&model.name, placement.fence);
                        placement.goal
                    }
                    Ok(Reading::Known(placement)) => {
                        let (fence, known) = (placement.fence, self.fences.of(&model.name));
                        tracing::warn!(
                            model = model.name,
                            fence,
                            known,
                            "ignored a placement of an older controller; if etcd was set up anew, remove fleet.json of the state \
                             folder, and start the node again"
                        );
                        self.owned.goal(&model.name)
                    }
                    Ok(Reading::Newer { format }) => {
                        tracing::warn!(
                            model = model.name,
                            format,
                            "a placement is for newer nodes; upgrade this one"
                        );
                        self.owned.goal(&model.name)
                    }
                    Err(error) => {
                        tracing::warn!(%error, "ignored an unreadable placement");
                        self.owned.goal(&model.name)
                    }
                },
            };
            goals.insert(model.name.clone(), goal);
        }
        Some(goals)
    }

    /// Orders what has changed, or everything.
    async fn follow(&mut self, goals: Option<BTreeMap<String, Goal>>, everything: bool) {
        let Some(goals) = goals else { return };
        if let Err(error) = self.fences.keep().await {
            tracing::warn!(path = %self.fences.path(), %error, "cannot save fences for the next start");
        }
        let config = self.service.config();
        let all = everything.then(|| goals.clone().into_iter().collect());
        let changed = self.owned.set_goals(goals);
        for (model, goal) in all.unwrap_or(changed) {
            let is_pinned = config.models.iter().any(|one| one.name == model && one.rules.is_pinned);
            tracing::info!(model, %goal, "a model has a new goal");
            let order = |command| {
                // A model that a reload removed has nothing to follow.
                let _known: bool = self.service.command(&model, command);
            };
            order(ModelCommand::Pin(is_pinned || goal == Goal::Hot));
            if goal == Goal::Hot {
                order(ModelCommand::Wake);
            }
        }
    }
}

/// The greatest fence that each model was placed with.
#[derive(Debug, Default)]
struct Fences {
    path: Option<PathBuf>,
    by_model: BTreeMap<String, u64>,
    is_changed: bool,
}

impl Fences {
    fn read(state: Option<&Path>) -> Result<Self, FleetError> {
        let Some(path) = state.map(|folder| folder.join(FENCES)) else { return Ok(Self::default()) };
        let failed = |reason: String| FleetError::State { path: path.clone(), reason };
        let by_model = match std::fs::read(&path) {
            Ok(json) => serde_json::from_slice(&json).map_err(|error| failed(error.to_string()))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(failed(error.to_string())),
        };
        Ok(Self { path: Some(path), by_model, is_changed: false })
    }

    fn of(&self, model: &str) -> u64 {
        self.by_model.get(model).copied().unwrap_or_default()
    }

    fn raise(&mut self, model: &str, fence: u64) {
        if self.of(model) < fence {
            self.by_model.insert(model.to_owned(), fence);
            self.is_changed = true;
        }
    }

    fn path(&self) -> String {
        self.path.as_deref().unwrap_or_else(|| Path::new("")).display().to_string()
    }

    /// Before anything is done by them.
    async fn keep(&mut self) -> std::io::Result<()> {
        let Some(path) = self.path.clone().filter(|_| self.is_changed) else { return Ok(()) };
        let json = serde_json::to_vec(&self.by_model)?;
        let new = path.with_extension("new");
        tokio::fs::write(&new, json).await?;
        tokio::fs::rename(&new, &path).await?;
        self.is_changed = false;
        Ok(())
    }
}

#[test]
fn fences_only_rise() {
    let folder = tempfile::tempdir().unwrap();
    let mut fences = Fences::read(Some(folder.path())).unwrap();
    fences.raise("a", 7);
    fences.raise("a", 3);
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(fences.keep()).unwrap();
    assert_eq!(Fences::read(Some(folder.path())).unwrap().of("a"), 7);
    std::fs::write(folder.path().join(FENCES), "{").unwrap();
    assert!(Fences::read(Some(folder.path())).unwrap_err().to_string().contains("remove it"));
}
