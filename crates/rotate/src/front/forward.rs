//! The way of a request: body, model, queue, engine, and the head of the answer.
//!
//! All of it is one future, which the client's connection drops when the client disconnects.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::request::Parts;
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::account::{Account, Place};
use super::answer::{Answer, Ending, Flow, Going, Gone, Passing, Tail, Waiting};
use super::fault::{self, Fault};
use super::json::{self, Asked};
use super::line::Line;
use super::local::Catalogue;
use super::request::{self, About};
use super::span::{Ids, REQUEST_ID};
use super::{Admission, Gate, Patience, Route};
use crate::http::Client;

/// Most bytes to read of an engine's error answer.
const WORDS_MAX_BYTES: usize = 64 << 10;

/// State of all connections.
pub(super) struct Desk {
    pub(super) gate: Arc<dyn Gate>,
    pub(super) patience: Patience,
    client: Client<Pieces>,
    ids: Ids,
    here: Arc<AtomicUsize>,
    catalogue: Catalogue,
}

/// The client disconnected.
#[derive(Debug, thiserror::Error)]
#[error("the client has gone")]
pub(super) struct Left;

impl Desk {
    pub(super) fn new(gate: Arc<dyn Gate>, patience: Patience) -> Self {
        let client = crate::http::client(patience.connect, Some(patience.idle));
        let here = Arc::new(AtomicUsize::new(0));
        Self { gate, patience, client, ids: Ids::default(), here, catalogue: Catalogue::new() }
    }

    pub(super) async fn handle(
        self: Arc<Self>,
        line: Arc<Line>,
        request: Request<Incoming>,
    ) -> Result<Response<Answer>, Left> {
        let mut account = Account::new(self.ids.request(request.headers()));
        let mut gone: Gone = Box::pin(Arc::clone(&line).gone());
        let answered = tokio::select! {
            biased;
            answered = self.answered(&line, request, &mut account) => answered,
            () = gone.as_mut() => return Err(Left),
        };
        let mut response = answered.unwrap_or_else(|fault| {
            let mut response = Response::new(Flow::Whole(Some(fault.body())));
            *response.status_mut() = fault.status;
            fault.headers(response.headers_mut());
            response
        });
        response.headers_mut().insert(REQUEST_ID.clone(), account.id.clone());
        account.status = Some(response.status());
        Ok(response.map(|flow| Answer::new(flow, account, line, gone)))
    }

    async fn answered(
        self: &Arc<Self>,
        line: &Line,
        request: Request<Incoming>,
        account: &mut Account,
    ) -> Result<Response<Flow>, Fault> {
        let (parts, body) = request.into_parts();
        // Until the whole body is read.
        line.linger(!body.is_end_stream());
        let front = self.gate.front();
        let about = request::about(&parts, front.head_max_bytes)?;
        if about != About::Health {
            request::check_key(&parts.headers, &front.keys)?;
        }
        let is_reading = matches!(parts.method, Method::GET | Method::HEAD);
        let path = match about {
            About::Engine(path) => path,
            _ if !is_reading => return Err(Fault::no_method("GET, HEAD")),
            About::Health => return Ok(json_of(Bytes::from_static(b"{\"status\":\"ok\"}"))),
            About::Models => return Ok(json_of(self.catalogue.all(&*self.gate))),
            About::Model(name) => {
                let found = self.catalogue.one(&*self.gate, &name);
                return found.map(json_of).ok_or_else(|| Fault::no_model(&name, &self.gate.listed()));
            }
        };
        if parts.method != Method::POST {
            return Err(Fault::no_method("POST"));
        }
        account.place = Place::taken(&self.here, front.requests_max);
        if account.place.is_none() {
            return Err(Fault::crowded(front.requests_max));
        }
        request::check_type(&parts.headers)?;
        let body = request::body(body, front.body_max_bytes, self.patience.body).await?;
        line.linger(false);
        let Asked { name, is_stream } = json::asked(&body).map_err(Fault::wrong_body)?;
        let Some(route) = self.gate.route(&name) else {
            return Err(Fault::no_model(&name, &self.gate.listed()));
        };
        account.model = Some(route.name.clone());
        let pieces = Pieces::named(body, &name, &route.served_as)?;
        let is_old = parts.version < Version::HTTP_11;
        let upstream = self.upstream(parts, path, &route, &account.id, pieces)?;
        let job = Job { desk: Arc::clone(self), route: Arc::new(route), upstream, is_old };
        match front.keep_alive.filter(|_| is_stream) {
            Some(every) => job.patiently(every, account).await,
            None => {
                let begun = Instant::now();
                let admission = job.admission().await;
                account.waited = begun.elapsed();
                job.sent(admission?).await
            }
        }
    }

    /// The request to the engine.
    fn upstream(
        &self,
        parts: Parts,
        path: PathAndQuery,
        route: &Route,
        id: &HeaderValue,
        pieces: Pieces,
    ) -> Result<Request<Pieces>, Fault> {
        let authority = route.url.strip_prefix("http://").unwrap_or_default();
        let uri = Uri::builder().scheme(Scheme::HTTP).authority(authority).path_and_query(path).build();
        let uri = uri.map_err(|error| {
            tracing::error!(model = route.name, %error, "the URL of an engine cannot be used");
            Fault::unreachable(&route.name)
        })?;
        let mut headers = parts.headers;
        request::upstream_headers(&mut headers);
        headers.insert(REQUEST_ID.clone(), id.clone());
        self.ids.trace(&mut headers);
        let mut request = Request::new(pieces);
        *request.method_mut() = parts.method;
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        Ok(request)
    }
}

/// A request before its admission.
struct Job {
    desk: Arc<Desk>,
    route: Arc<Route>,
    upstream: Request<Pieces>,
    /// Whether the client's HTTP version has no chunked encoding.
    is_old: bool,
}

impl Job {
    /// Waits for admission. Owns its data, so that it can continue in another future.
    fn admission(&self) -> Pin<Box<dyn Future<Output = Result<Admission, Fault>> + Send>> {
        let (gate, route) = (Arc::clone(&self.desk.gate), Arc::clone(&self.route));
        Box::pin(async move {
            let admitted = gate.admit(route.model).await;
            admitted.map_err(|refused| Fault::refused(&route.name, refused))
        })
    }

    /// As [`sent`](Self::sent), with keep-alive comments for a client that waits for a stream.
    async fn patiently(self, every: Duration, account: &mut Account) -> Result<Response<Flow>, Fault> {
        let begun = Instant::now();
        let mut admission = self.admission();
        if let Ok(admission) = tokio::time::timeout(every, admission.as_mut()).await {
            account.waited = begun.elapsed();
            return self.sent(admission?).await;
        }
        let going: Going = Box::pin(async move {
            let ended = |fault: Fault| Ending { event: fault.event(false), status: fault.status };
            let admission = admission.await.map_err(ended)?;
            let waited = begun.elapsed();
            let route = Arc::clone(&self.route);
            let response = self.sent(admission).await.map_err(ended)?;
            Self::events_of(response, &route).await.map(|passing| (passing, waited))
        });
        let mut response = Response::new(Flow::Waiting(Waiting::new(going, every)));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        Ok(response)
    }

    /// The stream to continue with, or the error event if the answer is something else.
    async fn events_of(response: Response<Flow>, route: &Route) -> Result<Passing, Ending> {
        let status = response.status();
        let Flow::Passing(mut passing) = response.into_body() else {
            let fault = Fault::broken(&route.name);
            return Err(Ending { event: fault.event(false), status: fault.status });
        };
        if status == StatusCode::OK && passing.events.is_some() {
            passing.is_open = false;
            return Ok(passing);
        }
        let Passing { upstream, admission, .. } = &mut passing;
        let words = tokio::select! {
            words = Limited::new(upstream, WORDS_MAX_BYTES).collect() => words.map(http_body_util::Collected::to_bytes),
            () = admission.aborted.cancelled() => Ok(Bytes::new()),
        };
        let words = words.unwrap_or_default();
        let said = serde_json::from_slice::<serde_json::Value>(&words).ok();
        if let Some(said) = said.filter(|said| said.get("error").is_some_and(|error| !error.is_null())) {
            return Err(Ending { event: fault::event(said.to_string().as_bytes(), false), status });
        }
        let fault = Fault::odd(&route.name, status, &String::from_utf8_lossy(&words));
        Err(Ending { event: fault.event(false), status })
    }

    /// Sends the request, and returns the head of the answer with its body.
    async fn sent(self, admission: Admission) -> Result<Response<Flow>, Fault> {
        let Self { desk, route, upstream, is_old } = self;
        let answered = tokio::select! {
            biased;
            () = admission.aborted.cancelled() => return Err(Fault::aborted(&route.name)),
            answered = desk.client.request(upstream) => answered,
        };
        let response = match answered {
            Ok(response) if !response.status().is_informational() => response,
            other => {
                desk.gate.suspect(route.model);
                let is_connect = other.as_ref().is_err_and(hyper_util::client::legacy::Error::is_connect);
                return Err(if is_connect {
                    Fault::unreachable(&route.name)
                } else {
                    Fault::broken(&route.name)
                });
            }
        };
        let (mut parts, upstream) = response.into_parts();
        request::drop_hop(&mut parts.headers);
        parts.headers.remove(header::SERVER);
        let is_open = upstream.size_hint().exact().is_none();
        let passing = Passing {
            upstream,
            aborted: Box::pin(admission.aborted.clone().cancelled_owned()),
            admission,
            gate: Arc::clone(&desk.gate),
            route,
            events: (is_open && is_events(&parts.headers)).then(Tail::new),
            is_open: is_open && is_old,
        };
        let mut response = Response::new(Flow::Passing(passing));
        *response.status_mut() = parts.status;
        *response.headers_mut() = parts.headers;
        Ok(response)
    }
}

/// Whether an event can be appended to this answer.
fn is_events(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let kind = text(header::CONTENT_TYPE).and_then(|kind| kind.split(';').next()).unwrap_or_default();
    let is_plain =
        text(header::CONTENT_ENCODING).is_none_or(|coding| coding.eq_ignore_ascii_case("identity"));
    kind.trim().eq_ignore_ascii_case("text/event-stream") && is_plain
}

fn json_of(bytes: Bytes) -> Response<Flow> {
    let mut response = Response::new(Flow::Whole(Some(bytes)));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A body in up to three segments: before the model's name, the name, and after it.
#[derive(Debug)]
pub(super) struct Pieces {
    pieces: [Bytes; 3],
    next: usize,
}

impl Pieces {
    /// Replaces the model name `asked` by `wanted`.
    fn named(body: Bytes, asked: &str, wanted: &str) -> Result<Self, Fault> {
        if asked == wanted {
            return Ok(Self { pieces: [body, Bytes::new(), Bytes::new()], next: 0 });
        }
        let Some(span) = json::name_span(&body) else {
            // `parse` has found the name before.
            return Err(Fault::wrong_body(json::Wrong::NoModel));
        };
        let name = serde_json::Value::from(wanted).to_string();
        Ok(Self { pieces: [body.slice(..span.start), name.into(), body.slice(span.end..)], next: 0 })
    }
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        while let Some(piece) = self.pieces.get(self.next).cloned() {
            self.next += 1;
            if !piece.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.iter().skip(self.next).all(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        let left: usize = self.pieces.iter().skip(self.next).map(Bytes::len).sum();
        SizeHint::with_exact(u64::try_from(left).unwrap_or(u64::MAX))
    }
}
