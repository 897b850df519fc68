//! What the front asks of a service: where requests go, and when they may.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use http::HeaderValue;
use poorwill_net::tls::ClientTls;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::affinity::Affinity;
use crate::requests::Requests;
use crate::settings::{Card, Front, Parameters};

/// What the front needs from the service.
pub trait Backend: Send + Sync + 'static {
    /// Where a request with this name goes. A selector chooses now. Among several places its affinity decides.
    fn route(&self, name: &str, affinity: Affinity) -> Option<Route>;

    /// Where a request for the model with this own name goes, whatever the chosen profile says.
    fn route_of_model(&self, name: &str, affinity: Affinity) -> Option<Route>;

    /// All names, in the order of the configuration.
    fn listed(&self) -> Vec<Listed>;

    /// Waits until a request may go to its engine. Dropping the future withdraws the request. The priority is that of
    /// its key.
    fn admit(
        &self,
        model: ModelNumber,
        priority: i32,
    ) -> Pin<Box<dyn Future<Output = Result<Admission, Refused>> + Send + '_>>;

    /// Reports an engine that may be gone, since it refused or broke a connection.
    fn suspect(&self, model: ModelNumber);

    /// Where requests are listed and counted.
    fn requests(&self) -> Arc<Requests>;

    /// The current limits and keys.
    fn front(&self) -> Arc<Front>;

    /// Whether this model may be served here, read before a request waits and before it goes to its engine.
    ///
    /// # Errors
    /// Why not.
    fn check(&self, _route: &Route) -> Result<(), NotOwned> {
        Ok(())
    }

    /// Waits until this model may not be served here any more, and returns why. Dropping it does no harm.
    fn withdrawn(&self, _route: &Route) -> Pin<Box<dyn Future<Output = NotOwned> + Send>> {
        Box::pin(std::future::pending())
    }

    /// How many requests its model has here, for the routers that send them; `None` where there are none.
    fn load(&self, _route: &Route) -> Option<u64> {
        None
    }

    /// Whether requests may have other destinations.
    fn is_router(&self) -> bool {
        false
    }

    /// Another destination of a request that these have not begun to answer.
    fn elsewhere(&self, _route: &Route, _tried: &[String]) -> Option<Route> {
        None
    }

    /// Takes note of a destination that refused this request, or could not be reached for any.
    fn fails(&self, _route: &Route, _is_unreachable: bool) {}

    /// Takes note of how many requests a destination has for this model.
    fn note_load(&self, _route: &Route, _requests: u64) {}

    /// Waits until a destination has left its fleet.
    fn gone(&self, _route: &Route) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(std::future::pending())
    }

    /// Waits until a request waits at its destination in vain, and these are not all that there are.
    fn stands_still(&self, _route: &Route, _tried: &[String]) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(std::future::pending())
    }

    /// For `Authorization` at destinations.
    fn upstream_key(&self) -> Option<HeaderValue> {
        None
    }

    /// For destinations at `https://`. Asked once.
    fn upstream_tls(&self) -> Option<ClientTls> {
        None
    }
}

/// The number that a service gave a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelNumber(pub usize);

/// Where a request goes.
#[derive(Debug, Clone)]
pub struct Route {
    /// The model.
    pub model: ModelNumber,
    /// Its name in requests.
    pub name: String,
    /// `http://`, host, and port of its engine; of a node, it may be `https://`.
    pub url: String,
    /// Its name in the engine, or that of an adapter.
    pub served_as: String,
    /// Changes to a JSON body.
    pub parameters: Arc<Parameters>,
    /// Counts the request, for the choices of selectors.
    pub in_flight: Option<Arc<InFlight>>,
    /// How long its engine may send nothing of an answer; `None` for ever.
    pub first_byte_max: Option<Duration>,
    /// By which it was chosen.
    pub affinity: Affinity,
}

/// A name in the list of models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The name in requests.
    pub name: String,
    /// What it names.
    pub kind: NameKind,
    /// Whether requests are admitted at once.
    pub is_ready: bool,
    /// The stage of its model; of a selector, that of the model that it would choose.
    pub stage: &'static str,
    /// What else is shown.
    pub card: Card,
}

/// What a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameKind {
    /// A model.
    Model,
    /// A model by another name.
    Alias {
        /// The model.
        model: String,
    },
    /// An adapter.
    Adapter {
        /// Its model.
        model: String,
    },
    /// A choice.
    Selector {
        /// What it chooses from.
        targets: Vec<String>,
    },
}

/// An admitted request. It counts as running until dropped.
pub struct Admission {
    /// Fires when the request has to end because its model leaves.
    pub aborted: CancellationToken,
    /// The canary that runs beside it, if there is one.
    pub(crate) trial: Option<watch::Receiver<Trial>>,
    /// Counts what comes of its answer.
    pub(crate) answered: AnswerCount,
    _guard: Box<dyn Any + Send>,
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").field("aborted", &self.aborted.is_cancelled()).finish_non_exhaustive()
    }
}

impl Admission {
    /// For a request that counts as running while `guard` lives.
    #[must_use]
    pub fn new(aborted: CancellationToken, guard: Box<dyn Any + Send>) -> Self {
        Self { aborted, trial: None, answered: AnswerCount(None), _guard: guard }
    }

    /// With a canary beside it. A sender that is dropped before [`Trial::Right`] counts as [`Trial::Wrong`].
    #[must_use]
    pub fn on_trial(self, trial: watch::Receiver<Trial>) -> Self {
        Self { trial: Some(trial), ..self }
    }

    /// With a count of the parts of answers that came from the engine, which several requests share.
    #[must_use]
    pub fn counting(mut self, answered: Arc<AtomicU64>) -> Self {
        self.answered = AnswerCount(Some(answered));
        self
    }
}

/// How far the canary beside an engine's first requests has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trial {
    /// It has said nothing, or is asked again: nothing of an answer passes.
    Open,
    /// It has begun right: streams begin.
    Begun,
    /// It was right.
    Right,
    /// It was wrong, or gave no answer.
    Wrong,
}

/// Parts of answers that came from an engine, where the service counts them.
#[derive(Debug, Clone)]
pub(crate) struct AnswerCount(Option<Arc<AtomicU64>>);

impl AnswerCount {
    pub(crate) fn add(&self) {
        if let Some(count) = &self.0 {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A request to a model, from the choice of the model until this is dropped.
#[derive(Debug)]
pub struct InFlight(Arc<AtomicUsize>);

impl InFlight {
    /// Counts up until it is dropped.
    #[must_use]
    pub fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(count))
    }

    /// All that are counted now.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// The cause.
    pub refusal: Refusal,
    /// When to retry, if known.
    pub retry_after: Option<Duration>,
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Too many requests wait.
    QueueFull,
    /// It waited for too long.
    WaitedTooLong,
    /// The model has failed, and is left alone for a while.
    Quarantined,
    /// The model has not enough free memory.
    NoMemory,
    /// The model needs more than its GPU has.
    TooLarge {
        /// What it is known to need.
        need_bytes: u64,
        /// All of the GPU.
        total_bytes: u64,
    },
    /// The service is ending.
    ShuttingDown,
    /// The model's engine could not be started, and it is left alone for a while.
    NotStarted,
}

/// Why a model may not be served here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotOwned {
    /// The process was not yet the node of its name, has left its fleet, or another process has the name.
    #[error("this process is no member of its fleet now")]
    Member,
    /// The controller placed it elsewhere.
    #[error("it is not placed on this node")]
    Placement,
    /// A router knows no node that has it.
    #[error("no node of the fleet may serve it now")]
    Nowhere,
}
