//! Errors of the front, in OpenAI's format or Anthropic's.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use poorwill_core::ByteSize;
use serde_json::json;

use super::json::BodyError;
use super::limits::Backoff;
use super::upgrade;
use crate::backend::NotOwned;
use crate::backend::{Listed, NameKind};
use crate::backend::{Refusal, Refused};

const NODE_BUSY: &str = "node_busy";

/// On an answer of a front that gave the request to no engine. Engines cannot set it.
pub(super) static NOT_BEGUN: HeaderName = HeaderName::from_static("x-poorwill-not-begun");

/// On an answer after which OpenAI's and Anthropic's clients do not ask again by themselves.
static SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// Most names in a message.
const NAMES_MAX: usize = 64;
/// Most characters of an engine's answer in a message.
const EXCERPT_MAX: usize = 1024;

/// The format of errors that a client expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    OpenAi,
    Anthropic,
}

impl Dialect {
    /// Anthropic's is that of its own paths only.
    pub(super) fn of(path: &str) -> Self {
        let is_anthropic = path == "/v1/messages" || path.starts_with("/v1/messages/");
        if is_anthropic { Self::Anthropic } else { Self::OpenAi }
    }

    /// Whether an engine's error is in this format.
    pub(super) fn is_of(self, said: &serde_json::Value) -> bool {
        let has_error = said.get("error").is_some_and(|error| !error.is_null());
        has_error && (self == Self::OpenAi || said.get("type").is_some_and(|kind| kind == "error"))
    }

    /// A `data:` event with one line of JSON. An unfinished event is closed first.
    pub(super) fn event(self, json: &[u8], is_amid: bool) -> Bytes {
        let end: &[u8] = if is_amid { b"\n\n" } else { b"" };
        let begin: &[u8] = match self {
            Self::OpenAi => b"data: ",
            Self::Anthropic => b"event: error\ndata: ",
        };
        [end, begin, json, b"\n\n"].concat().into()
    }
}

#[derive(Debug, Clone)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    kind: &'static str,
    code: &'static str,
    param: Option<&'static str>,
    message: String,
    header: Option<ErrorHeader>,
    /// Whether it is certain that no engine has the request.
    is_not_begun: bool,
}

#[derive(Debug, Clone, Copy)]
enum ErrorHeader {
    /// In seconds.
    RetryAfter(u64),
    /// The accepted methods.
    Allow(&'static str),
    /// Asks for a key.
    Challenge,
    /// Asks for a WebSocket.
    Upgrade,
    /// Asks the client not to repeat it.
    NoRetry,
}

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let kind = match status.as_u16() {
            421 => "server_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        let (param, message) = (None, message.into());
        let error = Self { status, kind, code, param, message, header: None, is_not_begun: false };
        // Each of them may go well later.
        let is_passing = matches!(status.as_u16(), 429 | 502..=504);
        if is_passing { error.retry_after(None) } else { error }
    }

    fn retry_after(mut self, wait: Option<Duration>) -> Self {
        let wait = wait.unwrap_or_default();
        let seconds = wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1);
        self.header = Some(ErrorHeader::RetryAfter(seconds));
        self
    }

    /// With this `Retry-After` if the request was one too many.
    pub(super) fn backing_off(self, backoff: &Backoff) -> Self {
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            self.retry_after(Some(backoff.retry_after()))
        } else {
            self
        }
    }

    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    pub(super) fn no_key() -> Self {
        let text = "a key is missing, or is none of those that are known here; send one key, as \
                    `Authorization: Bearer KEY`, `x-api-key: KEY` or `api-key: KEY`";
        let mut error = Self::new(StatusCode::UNAUTHORIZED, "invalid_api_key", text);
        error.header = Some(ErrorHeader::Challenge);
        error
    }

    pub(super) fn no_path() -> Self {
        let text = "there is nothing here; paths begin with /v1/, as in /v1/chat/completions";
        Self::new(StatusCode::NOT_FOUND, "unknown_path", text)
    }

    pub(super) fn unlisted_path(path: &str) -> Self {
        let path: String = path.chars().take(256).collect();
        let text = format!(
            "{path} is none of the paths for clients; if it should be, add it to `paths` of [front] in the configuration"
        );
        Self::new(StatusCode::NOT_FOUND, "unknown_path", text)
    }

    pub(super) fn no_passthrough() -> Self {
        let text = "paths of engines are not reached here; to allow it, set `passthrough` of [front] in the configuration";
        Self::new(StatusCode::NOT_FOUND, "unknown_path", text)
    }

    pub(super) fn no_response(id: &str) -> Self {
        let id: String = id.chars().take(256).collect();
        let text = format!(
            "response `{id}` is unknown here: it was made before this service started, too long ago, with another key, or \
             with `\"store\": false`; send the whole conversation as `input`"
        );
        Self::new(StatusCode::NOT_FOUND, "response_not_found", text)
    }

    pub(super) fn no_websocket() -> Self {
        Self::bad(
            "WebSockets are not supported at this path; send a POST, with `\"stream\": true` for a stream, or add it to \
             `paths` of [front] in the configuration",
        )
    }

    pub(super) fn upgrade_required(why: &str) -> Self {
        let text = format!("{why}; send `Upgrade: websocket` and `Sec-WebSocket-Version: 13`");
        let mut error = Self::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", text);
        error.header = Some(ErrorHeader::Upgrade);
        error
    }

    pub(super) fn not_ready(name: &str) -> Self {
        let text = format!(
            "model `{name}` is not ready, and parts of an open page do not wake it; load the page again"
        );
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", text)
    }

    pub(super) fn bad_model(message: &str) -> Self {
        let mut error = Self::bad(message);
        error.param = Some("model");
        error
    }

    pub(super) fn forbidden_host() -> Self {
        let text = "this listens on this machine only, and was asked for by the name of another; ask for it by \
                    localhost or 127.0.0.1, or configure `keys`";
        Self::new(StatusCode::FORBIDDEN, "forbidden_host", text)
    }

    pub(super) fn forbidden_origin() -> Self {
        let text = "a page of another site asked for this; to allow it, add its origin to `origins` of [front] in the \
                    configuration, as in origins = [\"https://chat.example\"]";
        Self::new(StatusCode::FORBIDDEN, "forbidden_origin", text)
    }

    pub(super) fn no_json_type() -> Self {
        let text = "the body has to be JSON, and its type has to say so; send `Content-Type: application/json`, with curl \
                    by -H 'Content-Type: application/json'";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", text)
    }

    /// A form whose type this front does not read.
    pub(super) fn odd_form() -> Self {
        let text = "a form is `multipart/form-data` with one `boundary` of at most 70 letters, digits and plain signs; let \
                    the client's library write its type";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", text)
    }

    pub(super) fn form_elsewhere(path: &str, taken: &[&str]) -> Self {
        let text = format!("`{path}` takes no form; send JSON. Forms go to {}", taken.join(", "));
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", text)
    }

    pub(super) fn no_method(allowed: &'static str) -> Self {
        let text = format!("this method is not allowed here; use {allowed}");
        let mut error = Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", text);
        error.header = Some(ErrorHeader::Allow(allowed));
        error
    }

    pub(super) fn no_model(asked: &str, all: &[Listed]) -> Self {
        let is_own = |one: &&Listed| !one.card.is_hidden && !matches!(one.kind, NameKind::Alias { .. });
        let mut all = all.iter().filter(is_own).map(|one| one.name.as_str());
        let mut names: Vec<&str> = all.by_ref().take(NAMES_MAX).collect();
        if all.next().is_some() {
            names.push("and more, which GET /v1/models lists");
        }
        let asked: String = asked.chars().take(256).collect();
        let text = format!("there is no model `{asked}`; there are: {}", names.join(", "));
        let mut error = Self::new(StatusCode::NOT_FOUND, "model_not_found", text);
        error.param = Some("model");
        error
    }

    pub(super) fn invalid_body(error: BodyError) -> Self {
        let text = match error {
            BodyError::NotJson(why) => format!("the body is no JSON object: {why}"),
            BodyError::NotForm(why) => format!("the body is no form by its type: {why}"),
            BodyError::NoModel => {
                "neither the body nor the query names a `model`; GET /v1/models lists those that there are"
                    .to_owned()
            }
            BodyError::NotString => "the `model` of the body is no string".to_owned(),
            BodyError::Duplicate => "the body has more than one `model`; say one".to_owned(),
        };
        let mut error = Self::bad(text);
        error.param = Some("model");
        error
    }

    pub(super) fn unsupported_type(what: &str) -> Self {
        let text = format!("bodies that are {what} are not taken here; send JSON, as it is");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", text)
    }

    pub(super) fn slow_body(limit: Duration) -> Self {
        let text = format!("nothing of the body came for {} s; send the request again", limit.as_secs());
        Self::new(StatusCode::REQUEST_TIMEOUT, "slow_body", text)
    }

    pub(super) fn late_body(limit: Duration) -> Self {
        let text = format!("the body was not complete after {} s, which is the limit", limit.as_secs());
        Self::new(StatusCode::REQUEST_TIMEOUT, "slow_body", text)
    }

    pub(super) fn many_slow_bodies(max: usize) -> Self {
        let text = format!("{max} bodies come slowly at present, which is the limit; try again");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", text)
    }

    pub(super) fn bodies_full(max_bytes: u64) -> Self {
        let text = format!("the bodies of all requests would be longer than {max_bytes} bytes; try again");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "bodies_full", text)
    }

    pub(super) fn large_body(max_bytes: u64) -> Self {
        let text = format!("the body is longer than {max_bytes} bytes, which is the limit");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", text)
    }

    pub(super) fn large_head(max_bytes: u64) -> Self {
        let text = format!("the head is longer than {max_bytes} bytes, which is the limit");
        Self::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", text)
    }

    pub(super) fn heads_full() -> Self {
        let text =
            "the unfinished heads of all requests are too long together; try again, or send a shorter one";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "heads_full", text)
    }

    pub(super) fn crowded(max: usize) -> Self {
        let text = format!("{max} requests are in progress, which is the limit; try again");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", text)
    }

    pub(super) fn key_crowded(name: &str, max: usize) -> Self {
        let text =
            format!("{max} requests with keys of `{name}` are in progress, which is their limit; try again");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "key_requests_full", text)
    }

    /// As it is certain that no engine has the request.
    pub(super) fn not_begun(mut self) -> Self {
        self.is_not_begun = true;
        self
    }

    pub(super) fn is_not_begun(&self) -> bool {
        self.is_not_begun
    }

    /// Whether it was taken back from a node that did not come to it.
    pub(super) fn is_node_busy(&self) -> bool {
        self.code == NODE_BUSY
    }

    pub(super) fn refused(name: &str, refused: Refused) -> Self {
        let unavailable = StatusCode::SERVICE_UNAVAILABLE;
        let (status, code, why) = match refused.refusal {
            Refusal::QueueFull => (StatusCode::TOO_MANY_REQUESTS, "queue_full", "its queue is full"),
            Refusal::WaitedTooLong => (unavailable, "waited_too_long", "it did not become ready in time"),
            Refusal::Quarantined => {
                (unavailable, "quarantined", "its engine has failed, and is quarantined for a while")
            }
            Refusal::NoMemory => {
                (unavailable, "no_room", "its GPUs have too little free memory now, or it cannot be measured")
            }
            Refusal::TooLarge { need_bytes, total_bytes } => {
                let (need, total) = (ByteSize(need_bytes), ByteSize(total_bytes));
                let text =
                    format!("model `{name}` cannot be served: it needs {need} of a GPU that has {total}");
                return Self::new(unavailable, "no_room", text).retry_after(refused.retry_after).not_begun();
            }
            Refusal::ShuttingDown => (unavailable, "shutting_down", "the service is ending"),
            Refusal::NotStarted => (
                unavailable,
                "not_started",
                "this service could not start its engine, which has not failed itself, and waits for a while",
            ),
        };
        let text = format!("model `{name}` is not served now: {why}; try again");
        Self::new(status, code, text).retry_after(refused.retry_after).not_begun()
    }

    /// A node of a fleet may not serve this model, or no node may.
    pub(super) fn not_owned(name: &str, why: NotOwned) -> Self {
        let misdirected = |code| {
            let text = format!("model `{name}` is not served here: {why}; send it to a router of the fleet");
            Self::new(StatusCode::MISDIRECTED_REQUEST, code, text).not_begun()
        };
        match why {
            NotOwned::Member => misdirected("not_member"),
            NotOwned::Placement => misdirected("not_placed"),
            NotOwned::Nowhere => {
                let text = format!("model `{name}` is not served now: {why}; try again");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_placed", text)
            }
        }
    }

    pub(super) fn aborted(name: &str) -> Self {
        let text = format!("model `{name}` had to leave before the answer was complete; try again");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "aborted", text)
    }

    /// Its canary was wrong.
    pub(super) fn untrue(name: &str) -> Self {
        let text = format!(
            "model `{name}` failed its test beside this answer, so nothing of it is to be relied on; its engine is stopped, try again"
        );
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "untrue", text)
    }

    pub(super) fn cancelled() -> Self {
        let text = "an operator cancelled this request; ask them before you send it again";
        let mut error = Self::new(StatusCode::GONE, "cancelled", text);
        error.header = Some(ErrorHeader::NoRetry);
        error
    }

    pub(super) fn no_descriptor(name: &str) -> Self {
        let text = format!(
            "no file descriptor is left for a connection to model `{name}`; try again, or raise the service's limit"
        );
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "no_descriptor", text)
    }

    pub(super) fn unreachable(name: &str) -> Self {
        let text = format!("the engine of model `{name}` cannot be reached; try again");
        Self::new(StatusCode::BAD_GATEWAY, "engine_unreachable", text)
    }

    /// What an engine is to a node, a node is to a router.
    pub(super) fn node_unreachable(name: &str) -> Self {
        let text = format!("the node that has model `{name}` cannot be reached; try again");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "node_unreachable", text)
    }

    /// It was taken back from a node that did not come to it.
    pub(super) fn node_busy(name: &str) -> Self {
        let text = format!("model `{name}` is not awake on the node that has this request; try again");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, NODE_BUSY, text)
    }

    pub(super) fn broken(name: &str) -> Self {
        let text = format!("the engine of model `{name}` broke off its answer; try again");
        Self::new(StatusCode::BAD_GATEWAY, "engine_broke_off", text)
    }

    /// By the model's own rule.
    pub(super) fn engine_late(name: &str, limit: Duration) -> Self {
        let text = format!(
            "the engine of model `{name}` sent no byte of its answer for {} s, which is `first_byte_max` of its rules; \
             try again",
            limit.as_secs_f64()
        );
        Self::new(StatusCode::GATEWAY_TIMEOUT, "engine_late", text)
    }

    /// An engine that made a response, and does not have it.
    pub(super) fn response_not_kept(name: &str, id: &str, status: StatusCode) -> Self {
        let id: String = id.chars().take(256).collect();
        let text = format!(
            "response `{id}` was made by model `{name}`, whose engine keeps no responses, or not this one (it answered \
             {}); send the whole conversation as `input`",
            status.as_u16()
        );
        Self::new(StatusCode::NOT_FOUND, "response_not_kept", text)
    }

    pub(super) fn engine_error(name: &str, status: StatusCode, excerpt: &str) -> Self {
        let excerpt: String = excerpt.chars().take(EXCERPT_MAX).collect();
        let text = format!("the engine of model `{name}` answered {}: {excerpt}", status.as_u16());
        Self::new(status, "engine_error", text)
    }

    fn to_json(&self, dialect: Dialect) -> Vec<u8> {
        let Self { kind, code, param, message, .. } = self;
        let json = match dialect {
            Dialect::OpenAi => {
                json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
            }
            Dialect::Anthropic => {
                json!({"type": "error", "error": {"type": self.anthropic_kind(), "message": message}})
            }
        };
        json.to_string().into_bytes()
    }

    fn anthropic_kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }

    pub(super) fn body(&self, dialect: Dialect) -> Bytes {
        self.to_json(dialect).into()
    }

    /// As [`Dialect::event`].
    pub(super) fn event(&self, dialect: Dialect, is_amid: bool) -> Bytes {
        dialect.event(&self.to_json(dialect), is_amid)
    }

    pub(super) fn headers(&self, headers: &mut HeaderMap) {
        if self.is_not_begun {
            headers.insert(&NOT_BEGUN, HeaderValue::from_static("1"));
        }
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let (name, value) = match self.header {
            None => return,
            Some(ErrorHeader::RetryAfter(seconds)) => (header::RETRY_AFTER, HeaderValue::from(seconds)),
            Some(ErrorHeader::Allow(methods)) => (header::ALLOW, HeaderValue::from_static(methods)),
            Some(ErrorHeader::Upgrade) => {
                headers.insert(header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
                upgrade::switch(headers);
                return;
            }
            Some(ErrorHeader::NoRetry) => (SHOULD_RETRY.clone(), HeaderValue::from_static("false")),
            Some(ErrorHeader::Challenge) => (header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")),
        };
        headers.insert(name, value);
    }
}
