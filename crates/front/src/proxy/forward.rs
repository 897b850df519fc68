//! The way of a request: body, model, queue, engine, and the head of the answer.
//!
//! All of it is one future, which a client's disconnect drops.

use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};
use http_body_util::{BodyExt, Either, Empty, Limited};
use hyper::body::{Body, Incoming};
use hyper::upgrade::OnUpgrade;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::account::{Account, End, Permit};
use super::answer::{AnswerBody, Comments, Ending, Flow, Forwarded, Gone, Tail, Upcoming, Waiting};
use super::api_error::{self, ApiError, Dialect};
use super::body::{Bodies, BodyReader};
use super::connection::Connection;
use super::direct::{self, Direct, Directed, EngineTarget};
use super::engines::{EngineBody, Engines, Unanswered};
use super::json::{self, RequestFields};
use super::limits::{Backoff, KeyRequests};
use super::load;
use super::local::Catalogue;
use super::multipart;
use super::origin::{self, Cors};
use super::prompt;
use super::request::{self, About, BodyKind};
use super::segments::Segments;
use super::span::{Ids, REQUEST_ID, TRACE_PARENT};
use super::stored::{IdReader, RESPONSES, StoredResponses};
use super::timeouts::Timeouts;
use super::trial::{self, OnTrial};
use super::tunnel::{Opening, Tunnel, TunnelLimits, TunnelPlace};
use super::usage::UsageReader;
use super::{query, upgrade, websocket};
use crate::affinity::Affinity;
use crate::backend::NotOwned;
use crate::backend::{Admission, Backend, Route, Trial};
use crate::requests::{Progress, Requests};
use crate::settings::{Front, Key, KeyShare, paths};
use poorwill_net::client::{is_out_of_descriptors, tls_failure};

/// Most bytes of an engine's error answer in an error event.
const EXCERPT_MAX_BYTES: usize = 64 << 10;

/// How often a request is sent once more to an engine that was wrong, after its new start.
const ANEW_MAX: usize = 2;

/// Shared by all connections.
pub(super) struct Proxy {
    backend: Arc<dyn Backend>,
    timeouts: Timeouts,
    requests: Arc<Requests>,
    engines: Engines,
    ids: Ids,
    active: Arc<AtomicUsize>,
    key_requests: KeyRequests,
    backoff: Backoff,
    bodies: Arc<Bodies>,
    catalogue: Catalogue,
    stored: Arc<StoredResponses>,
}

/// Empty for a WebSocket, which leaves HTTP.
pub(super) type ClientBody = Either<AnswerBody, Empty<Bytes>>;

#[derive(Debug, thiserror::Error)]
#[error("the client has gone")]
pub(super) struct Disconnected;

impl Proxy {
    pub(super) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        self.timeouts
    }

    pub(super) fn new(backend: Arc<dyn Backend>, timeouts: Timeouts) -> Self {
        let engines =
            Engines::new(timeouts.connect, timeouts.idle, backend.upstream_tls(), backend.is_router());
        let active = Arc::new(AtomicUsize::new(0));
        let (ids, bodies, catalogue) = (Ids::default(), Arc::default(), Catalogue::new());
        let (key_requests, backoff, stored) = (KeyRequests::default(), Backoff::default(), Arc::default());
        let requests = backend.requests();
        Self {
            requests,
            backend,
            timeouts,
            engines,
            ids,
            active,
            key_requests,
            backoff,
            bodies,
            catalogue,
            stored,
        }
    }

    pub(super) async fn handle(
        self: Arc<Self>,
        connection: Arc<Connection>,
        place: TunnelPlace,
        request: Request<Incoming>,
    ) -> Result<Response<ClientBody>, Disconnected> {
        connection.slot().begin();
        let mut account =
            Account::new(self.ids.request(request.headers()), &request, connection.peer(), &self.requests);
        let dialect = Dialect::of(request.uri().path());
        let is_head = request.method() == Method::HEAD;
        let cors = Cors::new(request.headers(), &self.backend.front());
        let mut gone: Gone = Box::pin(Arc::clone(&connection).wait_until_gone());
        let cancelled = account.cancelled().clone();
        let answered = tokio::select! {
            biased;
            // In a box, since hyper has space for this future from the start of a connection on.
            answered = Box::pin(self.answer(&connection, request, &mut account)) => answered,
            () = gone.as_mut() => return Err(Disconnected),
            () = cancelled.cancelled() => Err(ApiError::cancelled()),
        };
        let mut response = answered.unwrap_or_else(|error| {
            let error = error.backing_off(&self.backoff);
            let mut response = Response::new(Flow::Whole(Some(error.body(dialect))));
            *response.status_mut() = error.status;
            error.headers(response.headers_mut());
            response
        });
        cors.add(response.headers_mut());
        response.headers_mut().insert(REQUEST_ID.clone(), account.id.clone());
        account.status = Some(response.status());
        if is_head {
            // hyper does not poll its body.
            account.end = End::Whole;
        }
        Ok(response.map(|flow| match flow {
            Flow::Upgraded(opening) => {
                let idle = self.backend.front().websocket_idle_max;
                let limits = TunnelLimits { idle, reader: self.timeouts.reader };
                let tunnel = Tunnel { opening: *opening, account, limits };
                *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(tunnel);
                Either::Right(Empty::new())
            }
            flow => Either::Left(AnswerBody::new(flow, account, connection, gone)),
        }))
    }

    async fn answer(
        self: &Arc<Self>,
        connection: &Connection,
        request: Request<Incoming>,
        account: &mut Account,
    ) -> Result<Response<Flow>, ApiError> {
        let (parts, body) = request.into_parts();
        // Until the whole body is read.
        connection.linger(!body.is_end_stream());
        let front = self.backend.front();
        let about = request::about(&parts, &front)?;
        if about != About::Health {
            origin::check(&parts, &front)?;
            if let Some(headers) = origin::preflight(&parts, &front) {
                return Ok(empty(StatusCode::NO_CONTENT, headers));
            }
        }
        let share = authorize(&about, &parts.headers, &front, account)?;
        let (path, direct) = match about {
            About::Engine(path) => (path, None),
            About::Direct(direct, path) => (path, Some(direct)),
            about => return self.answer_here(&about, &parts.method),
        };
        if direct.is_none() && parts.method != Method::POST {
            return Err(ApiError::no_method("POST"));
        }
        self.reserve(share, front.requests_max, account)?;
        let asked = Asked { parts, path, body, connection };
        match direct {
            Some(direct) => self.forward_directly(&direct, asked, account).await,
            None => self.forward_by_body(asked, &front, account).await,
        }
    }

    /// What needs no engine.
    fn answer_here(&self, about: &About, method: &Method) -> Result<Response<Flow>, ApiError> {
        if !matches!(*method, Method::GET | Method::HEAD) {
            return Err(ApiError::no_method("GET, HEAD"));
        }
        match about {
            About::Models => Ok(json_of(self.catalogue.all(&*self.backend))),
            About::Tags => Ok(json_of(self.catalogue.tags(&*self.backend))),
            About::Model(name) => {
                let found = self.catalogue.one(&*self.backend, name);
                found.map(json_of).ok_or_else(|| ApiError::no_model(name, &self.backend.listed()))
            }
            _ => Ok(json_of(Bytes::from_static(b"{\"status\":\"ok\"}"))),
        }
    }

    /// A place among the requests of its key, and one among all.
    fn reserve(
        &self,
        share: Option<&KeyShare>,
        requests_max: usize,
        account: &mut Account,
    ) -> Result<(), ApiError> {
        if let Some((share, max)) = share.and_then(|share| Some((share, share.requests_max?))) {
            account.key_permit = self.key_requests.acquire(&share.name, max);
            if account.key_permit.is_none() {
                return Err(ApiError::key_crowded(&share.name, max));
            }
        }
        account.permit = Permit::acquire(&self.active, requests_max);
        if account.permit.is_none() {
            return Err(ApiError::crowded(requests_max));
        }
        Ok(())
    }

    async fn read_body(
        &self,
        body: Incoming,
        front: &Front,
        connection: &Connection,
    ) -> Result<Bytes, ApiError> {
        let body = BodyReader::new(body, front, self.timeouts, &self.bodies).read().await?;
        connection.linger(false);
        Ok(body)
    }

    fn choose_route(&self, name: &str, affinity: Affinity, account: &mut Account) -> Result<Route, ApiError> {
        let route = self.backend.route(name, affinity);
        let route = route.ok_or_else(|| ApiError::no_model(name, &self.backend.listed()))?;
        account.model = Some(route.name.clone());
        Ok(route)
    }

    /// A request that names its model in its body.
    async fn forward_by_body(
        self: &Arc<Self>,
        asked: Asked<'_>,
        front: &Front,
        account: &mut Account,
    ) -> Result<Response<Flow>, ApiError> {
        let Asked { parts, path, body, connection } = asked;
        let kind = request::body_kind(path.path(), &parts.headers)?;
        let body = self.read_body(body, front, connection).await?;
        let (RequestFields { name, is_stream, prompt }, span) = fields_of(&kind, &body)?;
        // A body that names a model counts, as it does for engines.
        let is_of_query = name.is_none() && query::has_model(path.query());
        let name = match name {
            Some(name) => name,
            None if is_of_query => query::model_of(path.query())?,
            None => return Err(ApiError::invalid_body(json::BodyError::NoModel)),
        };
        let new = match path.path() {
            RESPONSES => Some(self.stored.read(&body, account.key.as_deref())?),
            _ => None,
        };
        let place = new.and_then(|new| new.previous_place);
        // Only routers choose among several places.
        let key = self.backend.is_router().then(|| prompt::key(&body, prompt)).flatten();
        let route = self.choose_route(&name, Affinity { key, place }, account)?;
        let renamed = (is_of_query && name != route.served_as)
            .then(|| query::with_model(&path, &route.served_as).ok_or_else(ApiError::no_path));
        let path = renamed.transpose()?.unwrap_or(path);
        let stored = new.filter(|new| new.is_stored);
        let stored = stored.map(|_| self.stored.reader(&route.name, account.key.as_deref()));
        let segments = match span {
            Some(span) => Segments::with(&body, span, route.served_as.clone()),
            None if is_of_query => Segments::edited(body, &route.served_as, &route)?,
            None => Segments::edited(body, &name, &route)?,
        };
        // Asking twice for text does no harm, and is better than no answer. Of other paths that is not known here.
        let is_repeatable = stored.is_none() && paths::is_text(path.path());
        let has_events = is_stream && paths::streams_events(path.path());
        let is_old = parts.version < Version::HTTP_11;
        let dialect = Dialect::of(path.path());
        let upstream = self.upstream(parts, path, &route, &account.id, segments)?;
        let job = Job {
            proxy: Arc::clone(self),
            route: Arc::new(route),
            upstream,
            dialect,
            priority: account.priority,
            is_old,
            progress: account.progress().clone(),
            makes_tokens: true,
            is_repeatable,
            stored,
            socket: None,
            base: None,
        };
        match front.keep_alive.filter(|_| has_events) {
            Some(every) => job.forward_with_keep_alive(every).await,
            None => job.forward().await,
        }
    }

    /// A request that names its model elsewhere than in its body.
    async fn forward_directly(
        self: &Arc<Self>,
        direct: &Direct,
        asked: Asked<'_>,
        account: &mut Account,
    ) -> Result<Response<Flow>, ApiError> {
        let Asked { mut parts, path, body, connection } = asked;
        let owner = account.key.clone();
        let directed = direct.resolve(path, &parts, &*self.backend, &self.stored, owner.as_deref())?;
        let EngineTarget { route, path, base } = match directed {
            Directed::To(destination) => destination,
            Directed::Slash(there) => {
                let headers = HeaderMap::from_iter([(header::LOCATION, there)]);
                return Ok(empty(StatusCode::TEMPORARY_REDIRECT, headers));
            }
        };
        account.model = Some(route.name.clone());
        let socket = parts.extensions.remove::<OnUpgrade>().filter(|_| direct.is_websocket());
        let body = self.read_body(body, &self.backend.front(), connection).await?;
        let is_old = parts.version < Version::HTTP_11;
        let makes_tokens = parts.method == Method::POST && !matches!(direct, Direct::Stored(_));
        let is_repeatable = parts.method.is_idempotent();
        let mut upstream = self.upstream(parts, path, &route, &account.id, Segments::whole(body))?;
        if socket.is_some() {
            upgrade::switch(upstream.headers_mut());
        }
        let job = Job {
            proxy: Arc::clone(self),
            route: Arc::new(route),
            upstream,
            dialect: Dialect::OpenAi,
            priority: account.priority,
            is_old,
            progress: account.progress().clone(),
            makes_tokens,
            is_repeatable,
            stored: None,
            socket,
            base,
        };
        let route = Arc::clone(&job.route);
        let response = job.forward().await?;
        match direct {
            Direct::Stored(id) => kept_response(response, &route, id).await,
            _ => Ok(response),
        }
    }

    fn upstream(
        &self,
        parts: Parts,
        path: PathAndQuery,
        route: &Route,
        id: &HeaderValue,
        segments: Segments,
    ) -> Result<Request<Segments>, ApiError> {
        let mut headers = parts.headers;
        request::upstream_headers(&mut headers);
        headers.insert(header::HOST, host_of(route)?);
        headers.insert(REQUEST_ID.clone(), id.clone());
        self.ids.trace(&mut headers);
        let mut request = Request::new(segments);
        *request.method_mut() = parts.method;
        *request.uri_mut() = Uri::from(path);
        *request.headers_mut() = headers;
        Ok(request)
    }
}

impl Proxy {
    /// The end of a WebSocket's handshake.
    async fn open_tunnel(
        &self,
        route: &Route,
        client: OnUpgrade,
        engine: EngineBody,
        admission: Admission,
        mut parts: http::response::Parts,
    ) -> Result<Response<Flow>, ApiError> {
        let engine = match parts.extensions.remove::<OnUpgrade>() {
            Some(upgrade) => engine.upgrade(upgrade).await.ok(),
            None => None,
        };
        let Some(engine) = engine else {
            self.blame(route, &"a WebSocket did not begin");
            return Err(ApiError::broken(&route.name));
        };
        let (backend, model) = (Arc::clone(&self.backend), route.model);
        let opening = Opening { client, engine, admission, backend, model };
        let mut response = Response::new(Flow::Upgraded(Box::new(opening)));
        *response.status_mut() = parts.status;
        *response.headers_mut() = parts.headers;
        Ok(response)
    }

    /// Has an engine looked at that gave no answer.
    fn blame(&self, route: &Route, reason: &dyn std::fmt::Display) {
        tracing::warn!(model = route.name, %reason, "an engine gave no answer to a request");
        self.backend.suspect(route.model);
    }
}

/// What a client asks for. Its body is not read yet.
struct Asked<'c> {
    parts: Parts,
    path: PathAndQuery,
    body: Incoming,
    connection: &'c Connection,
}

/// Why an engine gave no answer.
struct NoAnswer {
    failed: Unanswered,
    /// Whether its engine may have begun with the request.
    may_have_begun: bool,
}

impl From<Unanswered> for NoAnswer {
    fn from(failed: Unanswered) -> Self {
        Self { failed, may_have_begun: false }
    }
}

/// A request before its admission.
struct Job {
    proxy: Arc<Proxy>,
    route: Arc<Route>,
    upstream: Request<Segments>,
    dialect: Dialect,
    /// Of its key.
    priority: i32,
    /// Whether the client's HTTP version has no chunked encoding.
    is_old: bool,
    progress: Progress,
    /// False for answers that repeat the counts of earlier ones.
    makes_tokens: bool,
    /// Whether its engine may do it twice.
    is_repeatable: bool,
    stored: Option<IdReader>,
    /// The client's end of a WebSocket.
    socket: Option<OnUpgrade>,
    /// What precedes the engine's paths in the client's.
    base: Option<String>,
}

impl Job {
    /// The future owns its data, so that it can continue in another one.
    fn admission(&self) -> Pin<Box<dyn Future<Output = Result<Admission, ApiError>> + Send>> {
        let (backend, route) = (Arc::clone(&self.proxy.backend), Arc::clone(&self.route));
        let (progress, priority) = (self.progress.clone(), self.priority);
        Box::pin(async move {
            backend.check(&route).map_err(|why| ApiError::not_owned(&route.name, why))?;
            progress.waits();
            let admitted = tokio::select! {
                biased;
                admitted = backend.admit(route.model, priority) => {
                    admitted.map_err(|refused| ApiError::refused(&route.name, refused))
                }
                why = backend.withdrawn(&route) => Err(ApiError::not_owned(&route.name, why)),
            };
            progress.runs();
            admitted
        })
    }

    async fn forward(self) -> Result<Response<Flow>, ApiError> {
        let admission = self.admission().await?;
        self.send(admission).await
    }

    /// As [`forward`](Self::forward), with keep-alive comments while the client waits.
    async fn forward_with_keep_alive(self, every: Duration) -> Result<Response<Flow>, ApiError> {
        let mut admission = self.admission();
        let (dialect, route) = (self.dialect, Arc::clone(&self.route));
        let requests = self.proxy.backend.load(&route);
        let sent: Pin<Box<dyn Future<Output = _> + Send>> =
            if let Ok(admission) = tokio::time::timeout(every, admission.as_mut()).await {
                let admission = admission?;
                let trial = admission.trial.clone();
                let mut sent = Box::pin(self.send(admission));
                loop {
                    // Its engine may sleep, and a new start takes long.
                    match tokio::time::timeout(every, sent.as_mut()).await {
                        Ok(response) => return response,
                        Err(_) if trial.as_ref().is_some_and(trial::is_held) => break sent,
                        Err(_) => {}
                    }
                }
            } else {
                Box::pin(async move { self.send(admission.await?).await })
            };
        let upcoming: Upcoming = Box::pin(async move {
            let ended = |error: ApiError| Ending { event: error.event(dialect, false), status: error.status };
            Self::events_of(sent.await.map_err(ended)?, &route, dialect).await
        });
        let mut response = Response::new(Flow::Waiting(Waiting::new(upcoming, dialect, every)));
        let headers = response.headers_mut();
        if let Some(requests) = requests {
            load::insert(headers, requests);
        }
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        Ok(response)
    }

    /// The stream to continue with, or the error event if the answer is something else.
    async fn events_of(
        response: Response<Flow>,
        route: &Route,
        dialect: Dialect,
    ) -> Result<Box<Forwarded>, Ending> {
        let status = response.status();
        let Flow::Forwarded(mut forwarded) = response.into_body() else {
            let error = ApiError::broken(&route.name);
            return Err(Ending { event: error.event(dialect, false), status: error.status });
        };
        if status == StatusCode::OK && forwarded.events.is_some() {
            forwarded.is_open = false;
            return Ok(forwarded);
        }
        let excerpt = excerpt_of(&mut forwarded).await;
        let said = serde_json::from_slice::<serde_json::Value>(&excerpt).ok();
        if let Some(said) = said.filter(|said| dialect.is_of(said)) {
            return Err(Ending { event: dialect.event(said.to_string().as_bytes(), false), status });
        }
        let error = ApiError::engine_error(&route.name, status, &String::from_utf8_lossy(&excerpt));
        Err(Ending { event: error.event(dialect, false), status })
    }

    fn check(&self) -> Result<(), ApiError> {
        let checked = self.proxy.backend.check(&self.route);
        checked.map_err(|why| ApiError::not_owned(&self.route.name, why))
    }

    /// Sends a request. If a kept connection breaks before the answer's head, its engine may have closed it. A request
    /// of which no byte was sent is sent once more on a new one. Another is, too, if the connection broke at once, and
    /// doing it twice does no harm.
    async fn exchange(
        &self,
        upstream: Request<Segments>,
        is_connected: &AtomicBool,
    ) -> Result<Response<EngineBody>, NoAnswer> {
        let (proxy, route) = (&self.proxy, &self.route);
        let link = proxy.engines.link(&route.url).await?;
        is_connected.store(true, Ordering::Relaxed);
        let spare = link.is_reused().then(|| copied(&upstream));
        let begun = Instant::now();
        let failed = match proxy.engines.send(link, upstream).await {
            Ok(response) => return Ok(response),
            Err(failed) => failed,
        };
        let is_unsent = matches!(failed, Unanswered::Broken { is_unsent: true, .. });
        let was_closed = begun.elapsed() < proxy.timeouts.closed;
        let Some(spare) = spare.filter(|_| is_unsent || self.is_repeatable && was_closed) else {
            return Err(failed.into());
        };
        proxy.requests.repeated(&route.name);
        tracing::warn!(
            model = route.name,
            cause = failed.cause(),
            "sends a request once more, since its engine has closed the connection"
        );
        let link = proxy.engines.connect(&route.url).await;
        let again = match link {
            Ok(link) => proxy.engines.send(link, spare).await,
            Err(error) => Err(error),
        };
        again.map_err(|failed| NoAnswer { failed, may_have_begun: !is_unsent })
    }

    /// The head of an answer. The request is gone afterwards. It may leave a destination where it waits in vain, for one
    /// that is none of `leaves`.
    async fn attempt(
        &mut self,
        aborted: CancellationToken,
        trial: Option<watch::Receiver<Trial>>,
        leaves: Option<&[String]>,
    ) -> Result<Response<EngineBody>, ApiError> {
        let mut upstream = std::mem::replace(&mut self.upstream, Request::new(Segments::whole(Bytes::new())));
        let (backend, route) = (&self.proxy.backend, &self.route);
        if let Some(parent) = self.progress.calls(&route.url, &route.served_as) {
            upstream.headers_mut().insert(&TRACE_PARENT, parent);
        }
        if let Some(key) = backend.upstream_key() {
            upstream.headers_mut().insert(header::AUTHORIZATION, key);
        }
        // It may have waited for long.
        self.check()?;
        let is_connected = AtomicBool::new(false);
        let answered = async {
            let mut response = self.exchange(upstream, &is_connected).await?;
            if route.first_byte_max.is_some() {
                let begun = response.body_mut().begin().await;
                begun.map_err(|error| Unanswered::Broken { error, is_unsent: false })?;
            }
            Ok(response)
        };
        let stands_still = async {
            match leaves.filter(|_| self.may_repeat()) {
                Some(tried) => backend.stands_still(route, tried).await,
                None => std::future::pending().await,
            }
        };
        let answered = tokio::select! {
            biased;
            () = aborted.cancelled() => return Err(ApiError::aborted(&route.name)),
            answered = answered => answered,
            () = backend.gone(route) => {
                backend.fails(route, true);
                let error = self.unreachable();
                return Err(if is_connected.load(Ordering::Relaxed) { error } else { error.not_begun() });
            }
            () = stands_still => return Err(ApiError::node_busy(&route.name)),
            limit = late(route.first_byte_max, trial) => {
                self.proxy.blame(route, &"it sent no byte within first_byte_max");
                return Err(ApiError::engine_late(&route.name, limit));
            }
        };
        let (failed, may_have_begun) = match answered {
            Ok(response)
                if !response.status().is_informational()
                    || self.socket.is_some() && response.status() == StatusCode::SWITCHING_PROTOCOLS =>
            {
                return Ok(response);
            }
            Ok(_) => (None, true),
            Err(NoAnswer { failed, may_have_begun }) => (Some(failed), may_have_begun),
        };
        Err(self.broke(failed.as_ref(), may_have_begun))
    }

    /// Whether its answer may be made twice.
    fn may_repeat(&self) -> bool {
        self.makes_tokens && self.is_repeatable
    }

    fn unreachable(&self) -> ApiError {
        if self.proxy.backend.is_router() {
            ApiError::node_unreachable(&self.route.name)
        } else {
            ApiError::unreachable(&self.route.name)
        }
    }

    /// The error of an attempt that failed, with what is known of why.
    fn broke(&self, failed: Option<&Unanswered>, may_have_begun: bool) -> ApiError {
        let route = &self.route;
        let unconnected = match failed {
            Some(Unanswered::Unconnected(error)) => Some(&**error),
            _ => None,
        };
        if unconnected.is_some_and(|error| is_out_of_descriptors(error)) {
            return ApiError::no_descriptor(&route.name);
        }
        let cause = failed.map(Unanswered::cause);
        if let Some(reason) = cause.and_then(tls_failure) {
            tracing::warn!(model = route.name, url = route.url, %reason, "TLS handshake failed");
        }
        match cause {
            Some(error) => self.proxy.blame(route, &error),
            None => self.proxy.blame(route, &"it answered what nothing had asked for"),
        }
        self.proxy.backend.fails(route, true);
        match unconnected {
            Some(_) if may_have_begun => self.unreachable(),
            Some(_) => self.unreachable().not_begun(),
            None => ApiError::broken(&route.name),
        }
    }

    /// Sends the request, and begins the answer to the client.
    async fn send(mut self, admission: Admission) -> Result<Response<Flow>, ApiError> {
        let chooses_realtime = self.socket.is_some() && websocket::offers_realtime(self.upstream.headers());
        let (response, mut admission) = self.attempt_each(admission).await?;
        let on_trial = admission.trial.take().map(OnTrial::new).filter(|_| is_events(response.headers()));
        let (mut parts, upstream) = response.into_parts();
        if let Some(requests) = load::remove(&mut parts.headers).filter(|_| self.proxy.backend.is_router()) {
            self.proxy.backend.note_load(&self.route, requests);
        }
        request::answer_headers(&mut parts.headers);
        if let Some(requests) = self.proxy.backend.load(&self.route) {
            load::insert(&mut parts.headers, requests);
        }
        if let Some(base) = &self.base {
            direct::rebase(&mut parts.headers, base, &self.route.url);
        }
        if parts.status == StatusCode::SWITCHING_PROTOCOLS
            && let Some(client) = self.socket
        {
            upgrade::switch(&mut parts.headers);
            if chooses_realtime {
                websocket::choose_realtime(&mut parts.headers);
            }
            return self.proxy.open_tunnel(&self.route, client, upstream, admission, parts).await;
        }
        Ok(self.pass_on(parts, upstream, admission, on_trial))
    }

    /// Sends the request to other destinations while the last one has not begun an answer.
    async fn attempt_each(
        &mut self,
        mut admission: Admission,
    ) -> Result<(Response<EngineBody>, Admission), ApiError> {
        let backend = Arc::clone(&self.proxy.backend);
        let (mut tried, mut anew) = (Vec::new(), 0);
        // Where it waited in vain. It may go back there, and stays then.
        let (mut was_taken_back, mut refused) = (None, None);
        let may_repeat = self.may_repeat();
        loop {
            // Kept only where there may be other destinations, or a new engine.
            let may_go_again = backend.is_router() || may_repeat && admission.trial.is_some();
            let again = may_go_again.then(|| copied(&self.upstream));
            let leaves = was_taken_back.is_none().then_some(&*tried);
            let answered = self.attempt(admission.aborted.clone(), admission.trial.clone(), leaves).await;
            let is_stream = answered.as_ref().ok().map(|response| is_events(response.headers()));
            let (trial, aborted) = (admission.trial.clone(), admission.aborted.clone());
            if !self.is_true(trial, aborted, is_stream).await? {
                drop(answered);
                anew += 1;
                let Some(again) = again.filter(|_| may_repeat && anew <= ANEW_MAX) else {
                    return Err(ApiError::untrue(&self.route.name));
                };
                self.upstream = again;
                // It counts as running until then.
                drop(admission);
                admission = self.admission().await?;
                continue;
            }
            let goes_elsewhere = match &answered {
                Ok(response) => response.headers().contains_key(&api_error::NOT_BEGUN),
                Err(error) => error.is_not_begun() || may_repeat,
            };
            let Some(again) = again.filter(|_| goes_elsewhere) else { return Ok((answered?, admission)) };
            if answered.is_ok() {
                backend.fails(&self.route, false);
            }
            if answered.as_ref().is_err_and(ApiError::is_node_busy) {
                was_taken_back = Some(self.route.url.clone());
            }
            tried.push(self.route.url.clone());
            let Some(route) = self.next_route(&mut tried, &mut was_taken_back) else {
                return self.most_telling(answered, admission, refused);
            };
            refused = NodeRefusal::of(answered, admission, &self.route).or(refused);
            self.upstream = again;
            self.upstream.headers_mut().insert(header::HOST, host_of(&route)?);
            self.route = Arc::new(route);
            admission = self.admission().await?;
        }
    }

    /// What the client gets where every destination refused its request. What a living one said of the model comes before
    /// that another one cannot be reached. It does not hide that the last one may have begun, or what failed here.
    fn most_telling(
        &mut self,
        last: Result<Response<EngineBody>, ApiError>,
        admission: Admission,
        before: Option<NodeRefusal>,
    ) -> Result<(Response<EngineBody>, Admission), ApiError> {
        let is_misdirected = |last: &Response<EngineBody>| last.status() == StatusCode::MISDIRECTED_REQUEST;
        let says_less = last.as_ref().map_or_else(ApiError::is_not_begun, is_misdirected);
        if let Some(NodeRefusal { response, admission, route }) = before.filter(|_| says_less) {
            self.route = route;
            return Ok((response, admission));
        }
        let last = last?;
        if is_misdirected(&last) {
            return Err(ApiError::not_owned(&self.route.name, NotOwned::Nowhere));
        }
        Ok((last, admission))
    }

    /// Another destination. If there is none, it is the one where the request waited in vain, once.
    fn next_route(&self, tried: &mut Vec<String>, was_taken_back: &mut Option<String>) -> Option<Route> {
        let backend = &self.proxy.backend;
        backend.elsewhere(&self.route, tried).or_else(|| {
            let first = was_taken_back.as_mut().map(std::mem::take).filter(|url| !url.is_empty())?;
            tried.retain(|other| *other != first);
            backend.elsewhere(&self.route, tried)
        })
    }

    /// Waits until the canary beside it lets an answer begin, if there is one. False where that was wrong.
    async fn is_true(
        &self,
        trial: Option<watch::Receiver<Trial>>,
        aborted: CancellationToken,
        is_stream: Option<bool>,
    ) -> Result<bool, ApiError> {
        let Some(trial) = trial else { return Ok(true) };
        let is_aborted = || aborted.is_cancelled() && *trial.borrow() != Trial::Wrong;
        if is_aborted() {
            return Err(ApiError::aborted(&self.route.name));
        }
        let Some(is_stream) = is_stream else { return Ok(!trial::is_wrong(&trial)) };
        tokio::select! {
            biased;
            is_right = trial::await_start(trial.clone(), is_stream) => match is_right {
                false if is_aborted() => Err(ApiError::aborted(&self.route.name)),
                is_right => Ok(is_right),
            },
            () = aborted.cancelled() => Err(ApiError::aborted(&self.route.name)),
        }
    }

    /// An engine's answer, as the client gets it.
    fn pass_on(
        self,
        parts: http::response::Parts,
        upstream: EngineBody,
        admission: Admission,
        on_trial: Option<OnTrial>,
    ) -> Response<Flow> {
        let is_open = upstream.size_hint().exact().is_none();
        let usage = UsageReader::of(parts.status, &parts.headers).filter(|_| self.makes_tokens);
        let stored = self.stored.filter(|_| usage.is_some());
        let stored = stored.map(|stored| stored.at_url(&self.route.url));
        let forwarded = Forwarded {
            upstream,
            aborted: Box::pin(admission.aborted.clone().cancelled_owned()),
            admission,
            backend: Arc::clone(&self.proxy.backend),
            route: self.route,
            dialect: self.dialect,
            events: (is_open && is_events(&parts.headers)).then(Tail::new),
            is_open: is_open && self.is_old,
            on_trial,
            held: None,
            says_comment: false,
            comments: self.proxy.backend.front().keep_alive.map(Comments::new),
            stored,
            usage,
        };
        let mut response = Response::new(Flow::Forwarded(Box::new(forwarded)));
        *response.status_mut() = parts.status;
        *response.headers_mut() = parts.headers;
        response
    }
}

/// A living node's refusal, before its engine had the request.
struct NodeRefusal {
    response: Response<EngineBody>,
    admission: Admission,
    route: Arc<Route>,
}

impl NodeRefusal {
    /// `None` if it said nothing of the model.
    fn of(
        answered: Result<Response<EngineBody>, ApiError>,
        admission: Admission,
        route: &Arc<Route>,
    ) -> Option<Self> {
        let response = answered.ok().filter(|one| one.status() != StatusCode::MISDIRECTED_REQUEST)?;
        Some(Self { response, admission, route: Arc::clone(route) })
    }
}

/// Checks the key, and accounts the request to it.
fn authorize<'f>(
    about: &About,
    headers: &HeaderMap,
    front: &'f Front,
    account: &mut Account,
) -> Result<Option<&'f KeyShare>, ApiError> {
    let key = match about {
        About::Health => None,
        _ => request::check_key(headers, &front.keys)?,
    };
    let share = key.and_then(Key::share);
    account.key = share.map(|share| share.name.clone());
    account.progress();
    account.priority = share.map_or(0, |share| share.priority);
    Ok(share)
}

/// What a body says, and where a form names its model.
fn fields_of(kind: &BodyKind, body: &Bytes) -> Result<(RequestFields, Option<Range<usize>>), ApiError> {
    match kind {
        BodyKind::Json => Ok((json::parse(body).map_err(ApiError::invalid_body)?, None)),
        BodyKind::Form { boundary } => {
            let form = multipart::parse(body, boundary).map_err(ApiError::invalid_body)?;
            Ok((form.fields, Some(form.model)))
        }
    }
}

/// Its engine's host and port.
fn host_of(route: &Route) -> Result<HeaderValue, ApiError> {
    let host = route.url.split_once("://").map_or("", |(_, host)| host);
    HeaderValue::from_str(host).map_err(|error| {
        tracing::error!(model = route.name, %error, "cannot use an engine's URL");
        ApiError::unreachable(&route.name)
    })
}

/// After the limit, if there is one. Time in which its engine sleeps does not count.
async fn late(limit: Option<Duration>, trial: Option<watch::Receiver<Trial>>) -> Duration {
    match limit {
        Some(limit) => {
            trial::late(limit, trial).await;
            limit
        }
        None => std::future::pending().await,
    }
}

/// The answer about a stored response. Where its engine knows no such path, its words would puzzle.
async fn kept_response(
    response: Response<Flow>,
    route: &Route,
    id: &str,
) -> Result<Response<Flow>, ApiError> {
    let status = response.status();
    if !matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED)
    {
        return Ok(response);
    }
    let (mut parts, flow) = response.into_parts();
    let Flow::Forwarded(mut forwarded) = flow else { return Ok(Response::from_parts(parts, flow)) };
    let said = excerpt_of(&mut forwarded).await;
    // Engines that keep responses say which one is missing.
    if !id.is_empty() && said.windows(id.len()).any(|part| part == id.as_bytes()) {
        parts.headers.remove(header::CONTENT_LENGTH);
        return Ok(Response::from_parts(parts, Flow::Whole(Some(said))));
    }
    Err(ApiError::response_not_kept(&route.name, id, status))
}

/// The beginning of an engine's error answer; nothing if it broke off, or is too long.
async fn excerpt_of(forwarded: &mut Forwarded) -> Bytes {
    let Forwarded { upstream, admission, .. } = forwarded;
    let excerpt = tokio::select! {
        excerpt = Limited::new(upstream, EXCERPT_MAX_BYTES).collect() => excerpt.map(http_body_util::Collected::to_bytes),
        () = admission.aborted.cancelled() => Ok(Bytes::new()),
    };
    excerpt.unwrap_or_default()
}

fn copied(request: &Request<Segments>) -> Request<Segments> {
    let mut copy = Request::new(request.body().clone());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    copy
}

/// Whether an event can be appended to this answer.
fn is_events(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let kind = text(header::CONTENT_TYPE).and_then(|kind| kind.split(';').next()).unwrap_or_default();
    let is_plain =
        text(header::CONTENT_ENCODING).is_none_or(|coding| coding.eq_ignore_ascii_case("identity"));
    kind.trim().eq_ignore_ascii_case("text/event-stream") && is_plain
}

fn empty(status: StatusCode, headers: HeaderMap) -> Response<Flow> {
    let mut response = Response::new(Flow::Whole(None));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

fn json_of(bytes: Bytes) -> Response<Flow> {
    let mut response = Response::new(Flow::Whole(Some(bytes)));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
