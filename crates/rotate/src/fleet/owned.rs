//! Which models this node may serve, as of now.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use poorwill_fleet::etcd::LeaseId;
use poorwill_fleet::records::Goal;
use poorwill_fleet::session::LeaseClock;
use poorwill_front::backend::NotOwned;
use tokio::sync::watch;

/// Which models this node may serve. Clones share it.
#[derive(Debug, Clone)]
pub struct Owned(Arc<Ownership>);

#[derive(Debug)]
struct Ownership {
    clock: LeaseClock,
    lease: watch::Receiver<Option<LeaseId>>,
    claims: watch::Sender<Claims>,
    late: AtomicU64,
}

#[derive(Debug, Default)]
struct Claims {
    /// The lease under which the node's name is this process's.
    lease: Option<LeaseId>,
    goals: BTreeMap<String, Goal>,
    /// What keeps its records from etcd, if anything does.
    problem: Option<String>,
}

/// Why routers may not send requests here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct NotReady {
    /// In general.
    pub reason: &'static str,
    /// What went wrong, with names and addresses.
    pub problem: Option<String>,
}

/// How a node is in its fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// Whether routers may send it requests, or why not.
    pub ready: Result<(), NotReady>,
    /// Requests that went to their engines when the lease or the placement had ended.
    pub late: u64,
}

impl Owned {
    pub(super) fn new(clock: LeaseClock, lease: watch::Receiver<Option<LeaseId>>) -> Self {
        Self(Arc::new(Ownership { clock, lease, claims: watch::Sender::default(), late: AtomicU64::new(0) }))
    }

    /// Whether this model may be served now.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, model: &str) -> Result<(), NotOwned> {
        let claims = self.0.claims.borrow();
        if claims.goal(model) == Goal::None {
            return Err(NotOwned::Placement);
        }
        let is_claimed = claims.lease.is_some() && claims.lease == *self.0.lease.borrow();
        // The clock is read last: nothing may come between it and the request.
        if is_claimed && self.0.clock.is_valid() { Ok(()) } else { Err(NotOwned::Lease) }
    }

    /// Waits until this model is not placed here any more.
    pub fn withdrawn(&self, model: &str) -> impl Future<Output = ()> + Send + use<> {
        let (mut claims, model) = (self.0.claims.subscribe(), model.to_owned());
        async move {
            let ended = claims.wait_for(|claims| claims.goal(&model) == Goal::None).await.map(drop);
            if ended.is_err() {
                // The agent is gone: nothing is withdrawn any more.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Counts a request that went to its engine when the model was not this node's any more. The process was stopped
    /// between the last look and the write.
    pub(crate) fn was_late(&self, model: &str) {
        let count = self.0.late.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::warn!(
            model,
            count,
            "a request went to its engine after the lease or the placement had ended"
        );
    }

    /// As of now.
    #[must_use]
    pub fn membership(&self) -> Membership {
        Membership { ready: self.ready(), late: self.0.late.load(Ordering::Relaxed) }
    }

    /// Whether the node has its lease, and its records are in etcd.
    fn ready(&self) -> Result<(), NotReady> {
        let claims = self.0.claims.borrow();
        let lease = *self.0.lease.borrow();
        let reason = if lease.is_none() {
            "this node has no lease of its fleet"
        } else if claims.lease != lease {
            "this node's records are not in etcd"
        } else if !self.0.clock.is_valid() {
            "this node's lease was not renewed in time"
        } else {
            return Ok(());
        };
        Err(NotReady { reason, problem: claims.problem.clone() })
    }

    pub(super) fn set_problem(&self, problem: Option<String>) {
        self.0.claims.send_modify(|claims| claims.problem = problem);
    }

    pub(super) fn claim(&self, lease: Option<LeaseId>) {
        self.0.claims.send_modify(|claims| claims.lease = lease);
    }

    pub(super) fn claimed(&self) -> Option<LeaseId> {
        self.0.claims.borrow().lease
    }

    /// What the controller wants of a model, as far as known.
    pub(super) fn goal(&self, model: &str) -> Goal {
        self.0.claims.borrow().goal(model)
    }

    /// Whether the controller wants a model elsewhere or nowhere, as far as known.
    pub(super) fn is_withdrawn(&self, model: &str) -> bool {
        self.0.claims.borrow().goals.get(model) == Some(&Goal::None)
    }

    /// Returns what changed.
    pub(super) fn set_goals(&self, goals: BTreeMap<String, Goal>) -> Vec<(String, Goal)> {
        let before = self.0.claims.borrow().goals.clone();
        self.0.claims.send_modify(|claims| claims.goals.clone_from(&goals));
        goals.into_iter().filter(|(model, goal)| before.get(model) != Some(goal)).collect()
    }
}

impl Claims {
    fn goal(&self, model: &str) -> Goal {
        self.goals.get(model).copied().unwrap_or(Goal::None)
    }
}
