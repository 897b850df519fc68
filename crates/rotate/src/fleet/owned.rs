//! Which models this node may serve, as of now.
//!
//! Promise: what was placed here may be served until an order ends it, or another process has the node's name. Nothing
//! else ends it: not a lease, and not an etcd that cannot be reached.

use std::collections::BTreeMap;

use poorwill_fleet::records::Goal;
use poorwill_front::backend::NotOwned;
use tokio::sync::watch;

/// Which models this node may serve. Clones share it.
#[derive(Debug, Clone)]
pub struct Owned(watch::Sender<Claims>);

#[derive(Debug, Default)]
struct Claims {
    standing: Standing,
    goals: BTreeMap<String, Goal>,
    /// What keeps its records from etcd, if anything does.
    problem: Option<String>,
    /// Placements that it cannot follow.
    refused: usize,
}

/// How a node is in its fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// Whether routers may send it requests, or why not.
    pub ready: Result<(), NotReady>,
    /// Placements that it cannot follow: they are for a newer version, or not readable.
    pub refused: usize,
}

/// Whether this process is the node of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Standing {
    /// etcd was not reached yet.
    #[default]
    Unknown,
    /// A process before it was. etcd was not reached since.
    Inherited,
    /// Its records are in etcd, or were when that was reached last.
    Member,
    /// Another process has the name.
    Taken,
    /// It has left in order.
    Left,
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

impl Owned {
    /// With the goals that a process before this one had.
    pub(super) fn new(goals: BTreeMap<String, Goal>) -> Self {
        let standing = if goals.is_empty() { Standing::Unknown } else { Standing::Inherited };
        Self(watch::Sender::new(Claims { standing, goals, problem: None, refused: 0 }))
    }

    /// Whether this model may be served now.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, model: &str) -> Result<(), NotOwned> {
        self.0.borrow().check(model)
    }

    /// Waits until this model may not be served here any more.
    pub fn withdrawn(&self, model: &str) -> impl Future<Output = NotOwned> + Send + use<> {
        let (mut claims, model) = (self.0.subscribe(), model.to_owned());
        async move {
            let ended = claims.wait_for(|claims| claims.check(&model).is_err()).await;
            match ended.map(|claims| claims.check(&model)) {
                Ok(Err(why)) => why,
                // The agent is gone: nothing is withdrawn any more.
                _ => std::future::pending().await,
            }
        }
    }

    /// As of now.
    #[must_use]
    pub fn membership(&self) -> Membership {
        let claims = self.0.borrow();
        Membership { ready: claims.ready(), refused: claims.refused }
    }

    pub(super) fn set_refused(&self, refused: usize) {
        self.0.send_modify(|claims| claims.refused = refused);
    }

    pub(super) fn set_problem(&self, problem: Option<String>) {
        self.0.send_modify(|claims| claims.problem = problem);
    }

    pub(super) fn set_standing(&self, standing: Standing) {
        self.0.send_if_modified(|claims| std::mem::replace(&mut claims.standing, standing) != standing);
    }

    /// What the controller wants of a model, as far as known.
    pub(super) fn goal(&self, model: &str) -> Option<Goal> {
        self.0.borrow().goals.get(model).copied()
    }

    /// Returns what changed.
    pub(super) fn set_goals(&self, goals: BTreeMap<String, Goal>) -> Vec<(String, Goal)> {
        let before = self.0.borrow().goals.clone();
        self.0.send_modify(|claims| claims.goals.clone_from(&goals));
        goals.into_iter().filter(|(model, goal)| before.get(model) != Some(goal)).collect()
    }
}

impl Claims {
    /// Whether the node's records are in etcd, or were when that was reached last.
    fn ready(&self) -> Result<(), NotReady> {
        let reason = match self.standing {
            Standing::Member => return Ok(()),
            Standing::Unknown | Standing::Inherited => "this node's records are not in etcd yet",
            Standing::Taken => "another process has this node's name",
            Standing::Left => "this node has left its fleet",
        };
        Err(NotReady { reason, problem: self.problem.clone() })
    }

    fn check(&self, model: &str) -> Result<(), NotOwned> {
        match (self.standing, self.goals.get(model)) {
            (Standing::Unknown | Standing::Taken | Standing::Left, _) => Err(NotOwned::Member),
            (_, None | Some(Goal::None)) => Err(NotOwned::Placement),
            _ => Ok(()),
        }
    }
}
