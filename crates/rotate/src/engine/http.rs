//! HTTP requests to one engine.
//!
//! Promises:
//!
//! - Each request uses its own connection and is sent once. A refused connection therefore means that no process
//!   listens.
//! - Answers are read up to [`BODY_MAX_BYTES`].
//! - Errors quote the beginning of an answer, without control characters, only where the caller allows it. Parse errors
//!   name a position, never a value.

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http_body_util::Full;
use hyper_util::client::legacy;
use serde_json::Value;

use super::contract::EngineError;
use poorwill_front::file::check_url;
use poorwill_net::client::{self as transport, HttpClient};

/// Larger than any expected answer.
pub(super) const BODY_MAX_BYTES: usize = 1 << 20;
/// Engines are near.
const CONNECT_MAX: Duration = Duration::from_secs(4);

#[derive(Debug, Clone)]
pub(super) struct Http {
    client: HttpClient<Full<Bytes>>,
    /// Without a trailing slash.
    base: String,
}

/// [`done`](Self::done) checks the status.
#[derive(Debug)]
pub(super) struct Reply {
    /// Method and URL.
    pub(super) request_line: String,
    pub(super) status: u16,
    body: Vec<u8>,
    is_cut: bool,
}

#[derive(Debug)]
pub(super) struct Failure {
    /// Connection refused, host unreachable, or unknown name.
    pub(super) is_unreachable: bool,
    pub(super) error: EngineError,
}

impl Http {
    pub(super) fn new(url: &str) -> Result<Self, String> {
        let base = url.trim_end_matches('/');
        check_url(base).map_err(|reason| format!("its url is invalid: {reason}"))?;
        Ok(Self { client: transport::client(CONNECT_MAX, None), base: base.to_owned() })
    }

    pub(super) async fn get(&self, path: &str) -> Result<Reply, Failure> {
        self.send(Method::GET, path, None).await
    }

    pub(super) async fn post(&self, path: &str, body: Option<Value>) -> Result<Reply, Failure> {
        self.send(Method::POST, path, body).await
    }

    /// Some versions have another name for a path.
    pub(super) async fn get_either(&self, path: &str, or: &str) -> Result<Reply, Failure> {
        let reply = self.get(path).await?;
        if reply.is_unknown() { self.get(or).await } else { Ok(reply) }
    }

    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<Reply, Failure> {
        self.send_for_parts(method, path, body, &mut |_| ()).await
    }

    /// Has each part of the answer looked at as it comes.
    pub(super) async fn send_for_parts(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
        on_part: &mut (dyn FnMut(&[u8]) + Send),
    ) -> Result<Reply, Failure> {
        let url = format!("{}{path}", self.base);
        let request_line = format!("{method} {url}");
        let failed = |reason: String, is_unreachable: bool| Failure {
            is_unreachable,
            error: EngineError::Unreachable { request_line: request_line.clone(), reason },
        };
        let request = transport::request(&method, &url, body.as_ref());
        let request = request.map_err(|error| failed(error.to_string(), false))?;
        let response = self.client.request(request).await;
        let response =
            response.map_err(|error| failed(reason_of(&error), transport::is_unreachable(&error)))?;
        let status = response.status().as_u16();
        let read = transport::read_in_parts(response.into_body(), BODY_MAX_BYTES, on_part).await;
        match read.broke {
            // A refusal is informative even if its body is incomplete.
            Some(error) if is_success(status) => {
                let (len, reason) = (read.bytes.len(), message_of(&error));
                Err(failed(format!("its answer broke off after {len} bytes: {reason}"), false))
            }
            _ => Ok(Reply { request_line, status, body: read.bytes, is_cut: read.is_cut }),
        }
    }
}

impl Reply {
    pub(super) fn is_unknown(&self) -> bool {
        self.status == 404
    }

    pub(super) fn done(self) -> Result<Self, EngineError> {
        if !is_success(self.status) {
            let message = excerpt(&self.body);
            return Err(EngineError::Refused {
                request_line: self.request_line,
                status: self.status,
                message,
            });
        }
        if self.is_cut {
            return Err(self.unexpected(&format!("its answer has more than {BODY_MAX_BYTES} bytes")));
        }
        Ok(self)
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// `None` if empty.
    pub(super) fn json(&self) -> Result<Option<Value>, EngineError> {
        if self.body.trim_ascii().is_empty() {
            return Ok(None);
        }
        let parsed = serde_json::from_slice(&self.body);
        parsed.map(Some).map_err(|error| self.unexpected(&format!("its answer is no JSON: {error}")))
    }

    pub(super) fn unexpected(&self, reason: &str) -> EngineError {
        EngineError::Unexpected { request_line: self.request_line.clone(), reason: reason.to_owned() }
    }

    pub(super) fn unsupported(&self, reason: &str) -> EngineError {
        EngineError::Unsupported { request_line: self.request_line.clone(), reason: reason.to_owned() }
    }

    /// In the engine's own words.
    pub(super) fn unsupported_as_said(&self) -> EngineError {
        self.unsupported(&excerpt(&self.body))
    }

    /// With the beginning of the answer. Not for answers that may contain secrets.
    pub(super) fn unexpected_with_excerpt(&self, reason: &str) -> EngineError {
        self.unexpected(&format!("{reason}; it answered: {}", excerpt(&self.body)))
    }
}

impl From<Failure> for EngineError {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

fn is_success(status: u16) -> bool {
    (200..300).contains(&status)
}

fn reason_of(error: &legacy::Error) -> String {
    if transport::is_late(error) {
        return format!("no connection came about within {} s", CONNECT_MAX.as_secs());
    }
    message_of(error)
}

/// The causes, without repetitions.
fn message_of(error: &(dyn Error + 'static)) -> String {
    let mut messages: Vec<String> = Vec::new();
    for text in transport::causes(error).map(ToString::to_string) {
        if !messages.iter().any(|before| before.contains(&text)) {
            messages.push(text);
        }
    }
    transport::one_line(&messages.join(": "))
}

fn excerpt(body: &[u8]) -> String {
    // A character has at most four bytes. One that is split here lies beyond the shown text.
    let beginning = &body[..body.len().min(8 * transport::EXCERPT_MAX)];
    let text = transport::one_line(&String::from_utf8_lossy(beginning));
    if text.is_empty() { "(nothing)".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poorwill_net::client::EXCERPT_MAX;

    #[test]
    fn excerpts_are_short_and_on_one_line() {
        assert_eq!(excerpt(b" \r\nno\x1b[31m room\0 "), "no [31m room");
        assert_eq!(excerpt(b""), "(nothing)");
        assert_eq!(excerpt(&[b'\n'; 9000]), "(nothing)");
        let long = excerpt("ä".repeat(9000).as_bytes());
        assert_eq!(long.chars().count(), EXCERPT_MAX + 1);
        assert!(long.starts_with("ää") && long.ends_with("ä…"), "{long}");
        assert_eq!(excerpt("ä".repeat(EXCERPT_MAX).as_bytes()), "ä".repeat(EXCERPT_MAX));
    }

    #[test]
    fn only_an_address_is_one() {
        for good in ["http://127.0.0.1:8000", "http://[::1]:8000", "http://host:1/"] {
            assert!(Http::new(good).is_ok(), "{good}");
        }
        let bad = [
            "127.0.0.1:8000",
            "https://host:1",
            "http://user:hunter2@host:1",
            "http://host:1/v1",
            "http://host:1?v1",
            "http://host:1#v1",
            "http://hunter2@host:1",
            "http://a host:1",
            "http://",
            "",
        ];
        for url in bad {
            let message = Http::new(url).expect_err(url);
            assert!(
                message.starts_with("its url is invalid: ") && !message.contains("hunter2"),
                "{url}: {message}"
            );
        }
    }
}
