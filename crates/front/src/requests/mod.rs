//! The front's requests: those in progress, and counts and times of those that ended.
//!
//! Promises:
//!
//! - Neither bodies nor keys are kept, and of an address only its path.
//! - Labels of metrics are bounded: models of the configuration, status codes, and ends.

mod now;
mod recent;
mod series;
mod tracer;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::HeaderValue;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tokio_util::sync::CancellationToken;

pub use self::now::{RequestNow, RequestState, Tokens};
use self::recent::Window;
pub use self::recent::{RECENT, Recent};
pub use self::series::{Forget, ModelLabel, Series};
pub use self::tracer::{RequestTrace, TraceParent, Tracer};

/// Buckets, from a health check to the start of a large engine.
pub const SECONDS: [f64; 15] =
    [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0];

type Times<L> = Series<L, Histogram>;

/// A request that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended<'a> {
    /// Its model, if it named one of the configuration.
    pub model: Option<&'a str>,
    /// The answer's status; `None` if the client left before.
    pub status: Option<u16>,
    /// `whole`, `left` or `broken`.
    pub end: &'static str,
    /// From its arrival to its end.
    pub total: Duration,
    /// In the queue of its model.
    pub waited: Option<Duration>,
    /// Until the engine's first byte.
    pub ttft: Option<Duration>,
    /// What its engine counted.
    pub tokens: Tokens,
}

/// The label of a model.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
pub struct OfModel {
    /// Its name.
    pub model: String,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct OfClass {
    model: String,
    class: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct OfAnswer {
    model: String,
    code: u16,
    end: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct OfTokens {
    model: String,
    kind: &'static str,
}

impl ModelLabel for OfModel {
    fn model(&self) -> &str {
        &self.model
    }
}

impl ModelLabel for OfClass {
    fn model(&self) -> &str {
        &self.model
    }
}

impl ModelLabel for OfAnswer {
    fn model(&self) -> &str {
        &self.model
    }
}

impl ModelLabel for OfTokens {
    fn model(&self) -> &str {
        &self.model
    }
}

/// Shared by the front, which reports, and control, which shows.
pub struct Requests {
    next: AtomicU64,
    active: Mutex<BTreeMap<u64, Arc<Mutex<Active>>>>,
    answers: Series<OfAnswer, Counter>,
    total: Times<OfClass>,
    waited: Times<OfModel>,
    ttft: Times<OfModel>,
    tokens: Series<OfTokens, Counter>,
    repeats: Series<OfModel, Counter>,
    recent: Mutex<BTreeMap<String, Window>>,
    tracer: Option<Arc<dyn Tracer>>,
}

#[derive(Debug)]
struct Active {
    arrived: Instant,
    cancelled: CancellationToken,
    waits_since: Option<Instant>,
    now: RequestNow,
    spans: Option<Box<dyn RequestTrace>>,
}

/// A request in progress. Dropping it ends its listing.
#[derive(Debug)]
pub(crate) struct Tracked {
    number: u64,
    requests: Arc<Requests>,
    progress: Progress,
    cancelled: CancellationToken,
}

/// Changes what is shown of a request.
#[derive(Debug, Clone)]
pub(crate) struct Progress(Arc<Mutex<Active>>);

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Requests").field("active", &locked(&self.active).len()).finish_non_exhaustive()
    }
}

impl Default for Requests {
    fn default() -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(SECONDS);
        Self {
            next: AtomicU64::new(0),
            active: Mutex::default(),
            answers: Series::default(),
            total: Times::new(histogram),
            waited: Times::new(histogram),
            ttft: Times::new(histogram),
            tokens: Series::default(),
            repeats: Series::default(),
            recent: Mutex::default(),
            tracer: None,
        }
    }
}

impl Requests {
    /// With spans of each request.
    #[must_use]
    pub fn traced(tracer: Arc<dyn Tracer>) -> Self {
        Self { tracer: Some(tracer), ..Self::default() }
    }

    /// Counts a request that ended.
    pub fn record(&self, ended: &Ended<'_>) {
        let named = ended.model.unwrap_or_default().to_owned();
        let code = ended.status.unwrap_or(0);
        self.answers.of(OfAnswer { model: named.clone(), code, end: ended.end }).inc();
        let Some(model) = ended.model else { return };
        let class = OfClass { model: named.clone(), class: class_of(code) };
        self.total.of(class).observe(ended.total.as_secs_f64());
        for (times, passed) in [(&self.waited, ended.waited), (&self.ttft, ended.ttft)] {
            if let Some(passed) = passed {
                times.of(OfModel { model: named.clone() }).observe(passed.as_secs_f64());
            }
        }
        for (kind, tokens) in [("prompt", ended.tokens.prompt), ("completion", ended.tokens.completion)] {
            if let Some(tokens) = tokens {
                self.tokens.of(OfTokens { model: named.clone(), kind }).inc_by(tokens);
            }
        }
        let mut recent = locked(&self.recent);
        let window = match recent.get_mut(model) {
            Some(window) => window,
            None => recent.entry(named).or_default(),
        };
        window.add(Instant::now(), ended.tokens, ended.ttft);
    }

    /// Counts a request that was sent once more.
    pub fn repeated(&self, model: &str) {
        self.repeats.of(OfModel { model: model.to_owned() }).inc();
    }

    /// What a model's answers of the last minute took.
    #[must_use]
    pub fn recent(&self, model: &str) -> Recent {
        locked(&self.recent).get_mut(model).map(|window| window.recent(Instant::now())).unwrap_or_default()
    }

    /// The metrics by model.
    #[must_use]
    pub fn series(&self) -> Vec<Box<dyn Forget>> {
        vec![
            Box::new(self.answers.clone()),
            Box::new(self.total.clone()),
            Box::new(self.waited.clone()),
            Box::new(self.ttft.clone()),
            Box::new(self.tokens.clone()),
            Box::new(self.repeats.clone()),
        ]
    }

    /// Forgets a removed model's window.
    pub fn forget(&self, model: &str) {
        locked(&self.recent).remove(model);
    }

    /// The oldest requests in progress, at most `max`, and how many there are.
    #[must_use]
    pub fn active(&self, max: usize) -> (Vec<RequestNow>, usize) {
        let (oldest, count) = {
            let active = locked(&self.active);
            (active.values().take(max).cloned().collect::<Vec<_>>(), active.len())
        };
        (oldest.iter().map(|active| locked(active).now()).collect(), count)
    }

    /// Ends the requests in progress with this identifier, and returns how many that are. Clients may use an identifier
    /// twice.
    #[must_use]
    pub fn cancel(&self, id: &str) -> usize {
        let all: Vec<_> = locked(&self.active).values().cloned().collect();
        let of_it = all.iter().map(|active| locked(active)).filter(|active| active.now.id == id);
        of_it.map(|active| active.cancelled.cancel()).count()
    }

    /// Lists a request that has just come. Its state and times are set here.
    pub(crate) fn begin(self: &Arc<Self>, now: RequestNow, parent: Option<TraceParent>) -> Tracked {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let spans = self.tracer.as_ref().and_then(|tracer| tracer.request(&now, parent));
        let (arrived, cancelled) = (Instant::now(), CancellationToken::new());
        let active = Active { arrived, cancelled: cancelled.clone(), waits_since: None, now, spans };
        let active = Arc::new(Mutex::new(active));
        locked(&self.active).insert(number, Arc::clone(&active));
        Tracked { number, requests: Arc::clone(self), progress: Progress(active), cancelled }
    }

    /// Adds its metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help =
            "Requests that ended, by status code and end; code 0 is a client that left before its answer";
        registry.register("requests", help, self.answers.clone());
        let help = "Seconds from the arrival of a request to its end, by class of its status code";
        registry.register_with_unit("request", help, Unit::Seconds, self.total.clone());
        let help = "Seconds of requests in the queue of their model";
        registry.register_with_unit("request_wait", help, Unit::Seconds, self.waited.clone());
        let help = "Seconds from the arrival of a request to the first byte of its engine";
        registry.register_with_unit("request_ttft", help, Unit::Seconds, self.ttft.clone());
        let help = "Tokens of prompts and answers, as far as engines counted them";
        registry.register("tokens", help, self.tokens.clone());
        let help = "Requests that were sent once more, since their engine had closed a kept connection";
        registry.register("requests_repeated", help, self.repeats.clone());
    }
}

impl Tracked {
    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Fires when an operator cancels it.
    pub(crate) fn cancelled(&self) -> &CancellationToken {
        &self.cancelled
    }

    /// Counts the request, and ends its listing.
    pub(crate) fn end(
        &self,
        model: Option<&str>,
        status: Option<u16>,
        end: &'static str,
        tokens: Tokens,
    ) -> RequestNow {
        let now = {
            let mut active = locked(&self.progress.0);
            let now = active.now();
            if let Some(mut spans) = active.spans.take() {
                spans.end(&now, status, end, tokens);
            }
            now
        };
        let passed = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        self.requests.record(&Ended {
            model,
            status,
            end,
            total: passed(now.age_s),
            waited: now.waited_s.map(passed),
            ttft: now.ttft_s.map(passed),
            tokens,
        });
        locked(&self.requests.active).remove(&self.number);
        now
    }
}

impl Progress {
    pub(crate) fn is_of(&self, key: Option<&str>, model: Option<&str>) {
        let mut active = locked(&self.0);
        (active.now.key, active.now.model) = (key.map(str::to_owned), model.map(str::to_owned));
    }

    pub(crate) fn waits(&self) {
        let mut active = locked(&self.0);
        active.waits_since = Some(Instant::now());
        active.now.state = RequestState::Waiting;
        if let Some(spans) = &mut active.spans {
            spans.waits();
        }
    }

    pub(crate) fn runs(&self) {
        let mut active = locked(&self.0);
        active.now.waited_s = active.waited_s();
        active.waits_since = None;
        active.now.state = RequestState::Running;
        let Active { now, spans, .. } = &mut *active;
        if let Some(spans) = spans {
            spans.runs(now.model.as_deref());
        }
    }

    /// The `traceparent` for its engine, if requests are traced.
    pub(crate) fn calls(&self, url: &str, served_as: &str) -> Option<HeaderValue> {
        let mut active = locked(&self.0);
        let Active { now, spans, .. } = &mut *active;
        spans.as_mut()?.calls(&now.path, url, served_as)
    }

    /// Adds bytes of the answer. Those of an engine may be its first.
    pub(crate) fn sent(&self, bytes: u64, is_of_engine: bool) {
        let mut active = locked(&self.0);
        active.now.bytes += bytes;
        if is_of_engine && bytes > 0 && active.now.ttft_s.is_none() {
            active.now.ttft_s = Some(active.arrived.elapsed().as_secs_f64());
            active.now.state = RequestState::Streaming;
            if let Some(spans) = &mut active.spans {
                spans.begins();
            }
        }
    }
}

impl Active {
    fn waited_s(&self) -> Option<f64> {
        self.waits_since.map(|since| since.elapsed().as_secs_f64()).or(self.now.waited_s)
    }

    fn now(&self) -> RequestNow {
        let age_s = self.arrived.elapsed().as_secs_f64();
        RequestNow { age_s, waited_s: self.waited_s(), ..self.now.clone() }
    }
}

fn class_of(code: u16) -> &'static str {
    match code / 100 {
        1 => "1xx",
        2 => "2xx",
        3 => "3xx",
        4 => "4xx",
        5 => "5xx",
        _ => "none",
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
