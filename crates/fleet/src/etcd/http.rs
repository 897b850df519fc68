//! HTTP to one member: a call, and its answer or why there is none.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use poorwill_net::tls::{ClientFiles, ClientTls, Connector};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::error::EtcdError;
use super::hints::{COMMON_NAME, hinted};

/// The call with a user's password. What is answered to it may be secret.
pub(super) const AUTHENTICATE: &str = "/v3/auth/authenticate";
/// Most bytes of an answer, or of a line of a stream. etcd's own limit is 1.5 MiB for a request.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Most characters of an answer in an error.
const EXCERPT_MAX: usize = 200;
/// How often a connection without data is probed, and how often in vain.
const KEEPALIVE: (Duration, u32) = (Duration::from_secs(2), 3);

/// What a member is asked. Clones share the body.
#[derive(Clone)]
pub(super) struct Call {
    path: &'static str,
    body: Bytes,
    token: Option<HeaderValue>,
}

impl Call {
    pub(super) fn new(path: &'static str, body: &Value) -> Self {
        Self { path, body: body.to_string().into(), token: None }
    }

    pub(super) fn with_token(&self, token: Option<HeaderValue>) -> Self {
        Self { token, ..self.clone() }
    }

    pub(super) fn path(&self) -> &'static str {
        self.path
    }
}

/// A client of HTTP.
pub(super) struct Http(Client<Connector, Full<Bytes>>);

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

impl Http {
    pub(super) fn new(connect_max: Duration, tls: Option<ClientFiles>) -> Result<Self, EtcdError> {
        let tls = tls.map(ClientTls::new).transpose()?;
        let mut tcp = HttpConnector::new();
        tcp.set_keepalive(Some(KEEPALIVE.0));
        tcp.set_keepalive_interval(Some(KEEPALIVE.0));
        tcp.set_keepalive_retries(Some(KEEPALIVE.1));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(30))
            .build(Connector::new(tcp, connect_max, tls));
        Ok(Self(client))
    }

    /// The one answer of a call.
    pub(super) async fn answer<T: DeserializeOwned>(
        &self,
        endpoint: &str,
        call: &Call,
    ) -> Result<T, EtcdError> {
        let body = self.send(endpoint, call).await?;
        let text = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let text = text.map_err(|error| unreachable(call.path, format!("{endpoint}: {error}")))?.to_bytes();
        parsed(endpoint, call.path, &text)
    }

    /// The answers of a call whose answer is a stream.
    pub(super) async fn lines(&self, endpoint: &str, call: &Call) -> Result<Lines, EtcdError> {
        let body = self.send(endpoint, call).await?;
        Ok(Lines { endpoint: endpoint.to_owned(), path: call.path, body, read: BytesMut::new() })
    }

    async fn send(&self, endpoint: &str, call: &Call) -> Result<Incoming, EtcdError> {
        let path = call.path;
        let mut request = Request::post(format!("{endpoint}{path}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(call.body.clone()))
            .map_err(|error| EtcdError::Endpoint {
                endpoint: endpoint.to_owned(),
                reason: error.to_string(),
            })?;
        if let Some(token) = &call.token {
            request.headers_mut().insert(header::AUTHORIZATION, token.clone());
        }
        let failed = |error: &dyn std::error::Error| {
            let causes = std::iter::successors(Some(error), |cause| cause.source());
            let deepest = causes.last().map(ToString::to_string).unwrap_or_default();
            unreachable(path, format!("{endpoint}: {deepest}"))
        };
        let response = self.0.request(request).await.map_err(|error| failed(&error))?;
        let (parts, body) = response.into_parts();
        if parts.status.is_success() {
            return Ok(body);
        }
        let text = Limited::new(body, ANSWER_BYTES_MAX).collect().await.map_err(|error| failed(&*error))?;
        let text = text.to_bytes();
        match serde_json::from_slice::<Problem>(&text) {
            Ok(Problem { message, code }) if code > 0 => {
                let message = hinted(endpoint, message, code);
                Err(EtcdError::Refused { path, code, message })
            }
            _ if String::from_utf8_lossy(&text).contains(COMMON_NAME) => {
                Err(EtcdError::CommonName { endpoint: endpoint.to_owned(), path })
            }
            _ => Err(odd(endpoint, path, &format!("status {} and {}", parts.status, excerpt(path, &text)))),
        }
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
        let message = hinted(endpoint, message, code);
        return Err(EtcdError::Refused { path, code, message });
    }
    serde_json::from_slice(text)
        .map_err(|error| odd(endpoint, path, &format!("{} ({error})", excerpt(path, text))))
}

pub(super) fn unreachable(path: &'static str, why: String) -> EtcdError {
    EtcdError::Unreachable { path, tried: vec![why] }
}

fn odd(endpoint: &str, path: &'static str, answer: &str) -> EtcdError {
    EtcdError::Answer { endpoint: endpoint.to_owned(), path, answer: answer.to_owned() }
}

fn excerpt(path: &str, text: &[u8]) -> String {
    if path == AUTHENTICATE {
        return "something else than a token".to_owned();
    }
    let text = String::from_utf8_lossy(text);
    let text = text.trim();
    let mut beginning: String = text.chars().take(EXCERPT_MAX).collect();
    if text.chars().nth(EXCERPT_MAX).is_some() {
        beginning.push('…');
    }
    format!("`{beginning}`")
}
