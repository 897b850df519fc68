//! The controller: of all processes that campaign, one places models until its lease ends.
//!
//! It keeps nothing but what etcd has. Each write is fenced: it happens only while the election that this controller won
//! is the last one. So a controller that was stopped for a while and goes on changes nothing.
//!
//! Promises:
//!
//! - No two controllers write placements at a time, whatever each believes.
//! - It decides upon a state that has all that it and controllers before it wrote.
//! - While etcd cannot be reached it decides nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::clock::{Moment, now_unix_ms};
use crate::etcd::{Candidacy, Etcd, EtcdError, LeaseId, Txn};
use crate::keys::{self, Key};
use crate::mirror::{Contents, Mirror};
use crate::name::{FleetName, NodeName};
use crate::policy::{Change, Plan, Rules, Time, View, ViewError, Write, decide};
use crate::records::{RecordError, write};
use crate::session::{LeaseClock, Session};

/// Writes of one transaction; etcd takes 128 operations.
const WRITES_MAX: usize = 100;
/// Changes that come this close together are decided upon together.
const GATHER: Duration = Duration::from_millis(50);
/// How often it decides without a change, since demand and times go on.
const DECIDE_EVERY: Duration = Duration::from_secs(1);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(500);

/// What a controller is given.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The fleet.
    pub fleet: FleetName,
    /// How it places.
    pub rules: Rules,
    /// For how long it leads behind its last renewal.
    pub lease_ttl: Duration,
    /// Who it is, for people.
    pub who: String,
}

/// What a controller does, for its operator.
#[derive(Debug, Clone, Default)]
pub struct Status {
    /// The revision of its election, if it leads.
    pub leads_since: Option<u64>,
    /// The last plan.
    pub plan: Arc<Plan>,
    /// What it did not understand.
    pub problems: Vec<String>,
    /// How long the last decision took.
    pub decided_in: Duration,
    /// Placements written since it was started.
    pub written: u64,
}

/// Where a candidacy is in its election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Waits,
    Leads,
    Gone,
}

/// Why it does not lead any more.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("its lease ran out")]
    Lease,
    #[error("its candidacy is gone")]
    Fenced,
    #[error("its mirror is gone")]
    Mirror,
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// A controller. Dropping it has another one elected once its lease has ended; [`end`](Self::end), at once.
#[derive(Debug)]
pub struct Controller {
    status: watch::Receiver<Status>,
    task: tokio::task::JoinHandle<()>,
    session: Session,
}

impl Controller {
    /// Campaigns, and places models when it is elected.
    #[must_use]
    pub fn start(etcd: Etcd, settings: Settings) -> Self {
        let (sender, status) = watch::channel(Status::default());
        let session = Session::start(etcd.clone(), settings.lease_ttl);
        let mirror = Mirror::start(etcd.clone(), &keys::prefix(&settings.fleet));
        let (lease, clock) = (session.lease(), session.clock());
        let candidate = Candidate { etcd, settings, clock, status: sender };
        let task = tokio::spawn(async move { candidate.run(lease, &mirror).await });
        Self { status, task, session }
    }

    /// What it does.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Leads no more, and has another one elected.
    pub async fn end(self) {
        self.task.abort();
        // What it was writing has been fenced, and the fence ends with the lease.
        self.session.end().await;
    }
}

struct Candidate {
    etcd: Etcd,
    settings: Settings,
    clock: LeaseClock,
    status: watch::Sender<Status>,
}

impl Candidate {
    /// Until its session is dropped.
    async fn run(&self, mut lease: watch::Receiver<Option<LeaseId>>, mirror: &Mirror) {
        loop {
            let known = *lease.borrow_and_update();
            let lost = match known {
                None => None,
                Some(id) => tokio::select! {
                    lost = self.serve(id, mirror.contents()) => Some(lost),
                    changed = lease.changed() => match changed {
                        Ok(()) => Some(Lost::Lease),
                        Err(_) => return,
                    },
                },
            };
            match lost {
                None if lease.changed().await.is_err() => return,
                None => {}
                Some(lost) => {
                    if self.status.borrow().leads_since.is_some() {
                        tracing::warn!(reason = %lost, "lost leadership");
                        self.status.send_modify(|status| status.leads_since = None);
                    } else {
                        tracing::debug!(reason = %lost, "cannot stand for election; retrying");
                    }
                    sleep(AGAIN).await;
                }
            }
        }
    }

    /// Stands for election, and leads once it is the first, until it is over.
    async fn serve(&self, lease: LeaseId, mut contents: watch::Receiver<Contents>) -> Lost {
        let election = Key::Election.in_fleet(&self.settings.fleet);
        let candidacy = match self.etcd.stand(&election, lease, &self.settings.who).await {
            Ok(candidacy) => candidacy,
            Err(error) => return error.into(),
        };
        // What the mirror shows has been so, and no candidacy gets before another one later. Behind a loss of etcd's data it
        // shows less than before.
        let mut was_shown = false;
        loop {
            {
                let contents = contents.borrow_and_update();
                let is_shown = contents.revision() >= candidacy.revision();
                match self.standing(&candidacy, &contents) {
                    Standing::Leads => break,
                    Standing::Gone => return Lost::Fenced,
                    Standing::Waits if was_shown && !is_shown => return Lost::Fenced,
                    Standing::Waits => was_shown = is_shown,
                }
            }
            if contents.changed().await.is_err() {
                return Lost::Mirror;
            }
        }
        self.lead(&candidacy, contents).await
    }

    fn standing(&self, candidacy: &Candidacy, contents: &Contents) -> Standing {
        let below = format!("{}/", Key::Election.in_fleet(&self.settings.fleet));
        let all = contents.entries().range(below.clone()..).take_while(|(key, _)| key.starts_with(&below));
        let all: Vec<(u64, &str)> = all.map(|(key, entry)| (entry.create_revision, key.as_str())).collect();
        let own = (candidacy.revision(), candidacy.key());
        match () {
            () if contents.revision() < candidacy.revision() => Standing::Waits,
            () if !all.contains(&own) => Standing::Gone,
            () if all.iter().any(|other| *other < own) => Standing::Waits,
            () => Standing::Leads,
        }
    }

    /// Until it is over.
    async fn lead(&self, candidacy: &Candidacy, mut contents: watch::Receiver<Contents>) -> Lost {
        let mut revision = candidacy.revision();
        let mut version = contents.borrow().version();
        let mut missing: BTreeMap<NodeName, Moment> = BTreeMap::new();
        loop {
            if !self.clock.is_valid() {
                return Lost::Lease;
            }
            let read = {
                let contents = contents.borrow_and_update();
                let before = std::mem::replace(&mut version, contents.version());
                // What was written may be lost, and what is there may be of long ago.
                if before.is_lost_by(version) || self.standing(candidacy, &contents) != Standing::Leads {
                    return Lost::Fenced;
                }
                let is_ready = contents.revision() >= revision && contents.is_current();
                is_ready.then(|| self.read(&contents))
            };
            if let Some((mut view, errors)) = read {
                let now = Moment::now();
                let gone = view.missing_nodes().into_iter();
                missing = gone.map(|node| (node.clone(), missing.remove(&node).unwrap_or(now))).collect();
                let for_ms = |since: &Moment| u64::try_from(since.until(now).as_millis()).unwrap_or(u64::MAX);
                view.missing_ms = missing.iter().map(|(node, since)| (node.clone(), for_ms(since))).collect();
                match self.place(candidacy, &view, &errors).await {
                    Ok(written_at) => revision = revision.max(written_at),
                    Err(lost) => return lost,
                }
            }
            // A change, or a time, or what was written.
            if let Ok(Err(_)) = timeout(DECIDE_EVERY, contents.changed()).await {
                return Lost::Mirror;
            }
            sleep(GATHER).await;
        }
    }

    fn read(&self, contents: &Contents) -> (View, Vec<ViewError>) {
        let entries = contents.entries().iter().map(|(key, entry)| (key.as_str(), &*entry.value));
        View::read(&self.settings.fleet, entries)
    }

    /// Writes what has to change. Returns the revision at which goals were written last, or 0.
    async fn place(&self, candidacy: &Candidacy, view: &View, errors: &[ViewError]) -> Result<u64, Lost> {
        let began = Instant::now();
        let now = now_unix_ms();
        let plan = decide(view, &self.settings.rules, Time(now));
        let (decided_in, mut revision) = (began.elapsed(), 0);
        let problems: Vec<String> = errors.iter().map(ToString::to_string).collect();
        if self.status.borrow().problems != problems {
            for problem in &problems {
                tracing::warn!(problem, "unreadable record, left unchanged");
            }
        }
        for changes in plan.changes.chunks(WRITES_MAX) {
            let txn = self.written(candidacy, view, changes, now)?;
            if !self.clock.is_valid() {
                return Err(Lost::Lease);
            }
            let answer = self.etcd.commit(&txn).await?;
            if !answer.has_succeeded {
                return Err(Lost::Fenced);
            }
            // A removal of what is gone already has no revision.
            if changes.iter().any(|change| change.write != Write::Remove) {
                revision = answer.revision;
            }
            for change in changes {
                tracing::info!(%change, "changed a placement");
            }
        }
        let written = u64::try_from(plan.changes.len()).unwrap_or(u64::MAX);
        self.status.send_modify(|status| {
            (status.leads_since, status.decided_in) = (Some(candidacy.revision()), decided_in);
            (status.problems, status.plan) = (problems, Arc::new(plan));
            status.written += written;
        });
        Ok(revision)
    }

    fn written(
        &self,
        candidacy: &Candidacy,
        view: &View,
        changes: &[Change],
        now: u64,
    ) -> Result<Txn, RecordError> {
        let mut txn = candidacy.fence();
        for change in changes {
            let key = Key::Placement { model: change.model.clone(), node: change.node.clone() };
            let path = key.in_fleet(&self.settings.fleet);
            let before = view.placement(change.model.as_str(), change.node.as_str());
            txn = match change.placement(candidacy.revision(), before, Time(now)) {
                None => txn.delete(&path),
                Some(placement) => txn.put(&path, &write(&key, &placement)?, None),
            };
        }
        Ok(txn)
    }
}
