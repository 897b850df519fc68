//! HTTP to the members: which one is asked, for how long, and what its answer is.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Request, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use super::error::EtcdError;
use poorwill_net::tls::{ClientFiles, ClientTls, Connector};

/// Most bytes of an answer, or of a line of a stream. etcd's own limit is 1.5 MiB for a request.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Most characters of an answer in an error.
const EXCERPT_MAX: usize = 200;
/// gRPC's code of what cannot be reached.
const UNAVAILABLE: u32 = 14;
/// How often a connection without data is probed, and how often in vain.
const KEEPALIVE: (Duration, u32) = (Duration::from_secs(2), 3);

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connecting to a member.
    pub connect: Duration,
    /// A call to a member.
    pub call: Duration,
}

impl Limits {
    /// Short enough that a lease of so long is renewed in time by another member while one is silent.
    #[must_use]
    pub fn for_lease(ttl: Duration) -> Self {
        let usual = Self::default();
        let call = (ttl / 4).min(usual.call);
        Self { connect: call.min(usual.connect), call }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { connect: Duration::from_secs(1), call: Duration::from_secs(3) }
    }
}

/// An etcd, by its members. Clones share their connections.
#[derive(Clone)]
pub struct Etcd(Arc<Inner>);

struct Inner {
    endpoints: Vec<String>,
    /// The member that answered last.
    at: AtomicUsize,
    limits: Limits,
    client: Client<Connector, Full<Bytes>>,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("endpoints", &self.0.endpoints).finish_non_exhaustive()
    }
}

/// What the gateway says of an error; inside of a stream it stands one level deeper.
#[derive(Deserialize)]
struct Problem {
    #[serde(default)]
    message: String,
    #[serde(default, alias = "grpc_code")]
    code: u32,
}

#[derive(Deserialize)]
struct StreamProblem {
    error: Problem,
}

impl Etcd {
    /// For the members at these URLs, such as `http://10.0.0.1:2379`.
    ///
    /// # Errors
    /// [`EtcdError::Endpoint`] if there is none, or one cannot be used.
    pub fn new(endpoints: &[String], limits: Limits) -> Result<Self, EtcdError> {
        Self::with_tls(endpoints, limits, None)
    }

    /// For members at `https://`, if there are files of TLS.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`EtcdError::Tls`] if a file cannot be used.
    pub fn with_tls(
        endpoints: &[String],
        limits: Limits,
        tls: Option<&ClientFiles>,
    ) -> Result<Self, EtcdError> {
        if endpoints.is_empty() {
            return Err(wrong("", "name at least one member, such as http://127.0.0.1:2379"));
        }
        let checked = |endpoint: &String| checked(endpoint, tls.is_some());
        let endpoints = endpoints.iter().map(checked).collect::<Result<_, _>>()?;
        let tls = tls.cloned().map(ClientTls::new).transpose()?;
        let mut tcp = HttpConnector::new();
        tcp.set_keepalive(Some(KEEPALIVE.0));
        tcp.set_keepalive_interval(Some(KEEPALIVE.0));
        tcp.set_keepalive_retries(Some(KEEPALIVE.1));
        let connector = Connector::new(tcp, limits.connect, tls);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(30))
            .build(connector);
        Ok(Self(Arc::new(Inner { endpoints, at: AtomicUsize::new(0), limits, client })))
    }

    /// One call with one answer.
    pub(super) async fn call<T: DeserializeOwned>(
        &self,
        path: &'static str,
        body: &Value,
    ) -> Result<T, EtcdError> {
        let mut turns = Turns::of(&self.0, path);
        while let Some(endpoint) = turns.next() {
            let answered = timeout(self.0.limits.call, self.answer(endpoint, path, body)).await;
            if let Some(done) = turns.judged(answered.unwrap_or_else(|_| Err(self.silent(endpoint, path)))) {
                return done;
            }
        }
        Err(turns.failed())
    }

    /// A call whose answer is a stream.
    pub(super) async fn stream(&self, path: &'static str, body: &Value) -> Result<Lines, EtcdError> {
        let mut turns = Turns::of(&self.0, path);
        while let Some(endpoint) = turns.next() {
            let opened = timeout(self.0.limits.call, self.send(endpoint, path, body)).await;
            let opened = opened.unwrap_or_else(|_| Err(self.silent(endpoint, path)));
            let lines = |body| Lines { endpoint: endpoint.to_owned(), path, body, read: BytesMut::new() };
            if let Some(done) = turns.judged(opened.map(lines)) {
                return done;
            }
        }
        Err(turns.failed())
    }

    /// Begins with the next member from now on. For one that answers, and is cut off from the others.
    pub fn avoid_member(&self) {
        self.0.at.fetch_add(1, Ordering::Relaxed);
    }

    fn silent(&self, endpoint: &str, path: &'static str) -> EtcdError {
        unreachable(path, format!("{endpoint} is silent for {:?}", self.0.limits.call))
    }

    async fn send(&self, endpoint: &str, path: &'static str, body: &Value) -> Result<Incoming, EtcdError> {
        let request = Request::post(format!("{endpoint}{path}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(body.to_string()))
            .map_err(|error| wrong(endpoint, &error.to_string()))?;
        let failed = |error: &dyn std::error::Error| {
            let causes = std::iter::successors(Some(error), |cause| cause.source());
            let deepest = causes.last().map(ToString::to_string).unwrap_or_default();
            unreachable(path, format!("{endpoint}: {deepest}"))
        };
        let response = self.0.client.request(request).await.map_err(|error| failed(&error))?;
        let (parts, body) = response.into_parts();
        if parts.status.is_success() {
            return Ok(body);
        }
        let text = Limited::new(body, ANSWER_BYTES_MAX).collect().await.map_err(|error| failed(&*error))?;
        let text = text.to_bytes();
        match serde_json::from_slice::<Problem>(&text) {
            Ok(Problem { message, code }) if code > 0 => {
                let message = with_hint(endpoint, message, code);
                Err(EtcdError::Refused { path, code, message })
            }
            _ => Err(odd(endpoint, path, &format!("status {} and {}", parts.status, excerpt(&text)))),
        }
    }

    async fn answer<T: DeserializeOwned>(
        &self,
        endpoint: &str,
        path: &'static str,
        body: &Value,
    ) -> Result<T, EtcdError> {
        let body = self.send(endpoint, path, body).await?;
        let text = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let text = text.map_err(|error| unreachable(path, format!("{endpoint}: {error}")))?.to_bytes();
        parsed(endpoint, path, &text)
    }
}

/// The members in turn, from the one that answered last on.
struct Turns<'a> {
    inner: &'a Inner,
    path: &'static str,
    first: usize,
    asked: usize,
    tried: Vec<String>,
}

impl<'a> Turns<'a> {
    fn of(inner: &'a Inner, path: &'static str) -> Self {
        Self { inner, path, first: inner.at.load(Ordering::Relaxed), asked: 0, tried: Vec::new() }
    }

    fn next(&mut self) -> Option<&'a str> {
        let endpoints = &self.inner.endpoints;
        if self.asked == endpoints.len() {
            return None;
        }
        let at = self.first.wrapping_add(self.asked) % endpoints.len();
        self.asked += 1;
        Some(&endpoints[at])
    }

    /// What the call comes to, unless another member has to be asked.
    fn judged<T>(&mut self, answered: Result<T, EtcdError>) -> Option<Result<T, EtcdError>> {
        match answered {
            Err(EtcdError::Unreachable { tried, .. }) => self.tried.extend(tried),
            Err(error) if error.is_of_member() => self.tried.push(error.to_string()),
            done => {
                if self.asked > 1 {
                    self.inner.at.store(self.first.wrapping_add(self.asked - 1), Ordering::Relaxed);
                }
                return Some(done);
            }
        }
        None
    }

    fn failed(self) -> EtcdError {
        EtcdError::Unreachable { path: self.path, tried: self.tried }
    }
}

/// The answers of a stream, one in each line.
#[derive(Debug)]
pub(super) struct Lines {
    endpoint: String,
    path: &'static str,
    body: Incoming,
    read: BytesMut,
}

impl Lines {
    /// `None` at the end.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, EtcdError> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line = self.read.split_to(end + 1);
                return parsed(&self.endpoint, self.path, &line).map(Some);
            }
            if self.read.len() > ANSWER_BYTES_MAX {
                return Err(odd(&self.endpoint, self.path, "a line that is too long"));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.read.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new())),
                Some(Err(error)) => {
                    return Err(unreachable(self.path, format!("{}: {error}", self.endpoint)));
                }
                None => return Ok(None),
            }
        }
    }
}

fn parsed<T: DeserializeOwned>(endpoint: &str, path: &'static str, text: &[u8]) -> Result<T, EtcdError> {
    if let Ok(StreamProblem { error: Problem { message, code } }) = serde_json::from_slice(text) {
        return Err(EtcdError::Refused { path, code, message });
    }
    serde_json::from_slice(text).map_err(|error| odd(endpoint, path, &format!("{} ({error})", excerpt(text))))
}

fn checked(endpoint: &str, has_tls: bool) -> Result<String, EtcdError> {
    let url = endpoint.trim().trim_end_matches('/');
    let uri: Uri = url.parse().map_err(|error: http::uri::InvalidUri| wrong(endpoint, &error.to_string()))?;
    let is_whole = uri.host().is_some() && uri.path() == "/";
    match uri.scheme_str() {
        Some("http") if has_tls => {
            Err(wrong(endpoint, "there is a CA for etcd; say https://, or leave etcd_ca out"))
        }
        Some("https") if !has_tls => {
            Err(wrong(endpoint, "it is https://, so name the CA of its certificate by etcd_ca"))
        }
        Some("http" | "https") if is_whole => Ok(url.to_owned()),
        _ => Err(wrong(endpoint, "say http://, a host and a port, or the same with https://")),
    }
}

/// A gateway is a client of its own member, and that refuses it if its certificate is only a server's.
fn with_hint(endpoint: &str, message: String, code: u32) -> String {
    if code != UNAVAILABLE || !endpoint.starts_with("https://") || message.starts_with("etcdserver:") {
        return message;
    }
    format!(
        "{message}; the gateway of {endpoint} cannot reach its own etcd, to which it shows the certificate of --cert-file: \
         with --client-cert-auth, that has to be of a CA in --trusted-ca-file, for serverAuth and clientAuth"
    )
}

fn wrong(endpoint: &str, reason: &str) -> EtcdError {
    EtcdError::Endpoint { endpoint: endpoint.to_owned(), reason: reason.to_owned() }
}

fn unreachable(path: &'static str, why: String) -> EtcdError {
    EtcdError::Unreachable { path, tried: vec![why] }
}

fn odd(endpoint: &str, path: &'static str, answer: &str) -> EtcdError {
    EtcdError::Answer { endpoint: endpoint.to_owned(), path, answer: answer.to_owned() }
}

fn excerpt(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let text = text.trim();
    let mut beginning: String = text.chars().take(EXCERPT_MAX).collect();
    if text.chars().nth(EXCERPT_MAX).is_some() {
        beginning.push('…');
    }
    format!("`{beginning}`")
}
