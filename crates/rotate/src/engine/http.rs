//! One engine's HTTP: what is asked, what came back, and in which words a failure is told.
//!
//! Promises:
//!
//! - Each request has a connection of its own, and is sent once. So a refused connection means that nobody listens.
//! - An answer is read up to [`BODY_MAX_BYTES`], whatever its head says.
//! - Errors have the beginning of what an engine said, without control characters, where the caller says that it may be
//!   told; parsers' errors name a place, and never a value.

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http_body_util::Full;
use hyper_util::client::legacy;
use serde_json::Value;

use super::EngineError;
use crate::config::check_url;
use crate::http::{self as transport, Client};

/// More than any answer that is asked for has.
pub(super) const BODY_MAX_BYTES: usize = 1 << 20;
/// How long a connection may take to come about. Engines are near.
const CONNECT_MAX: Duration = Duration::from_secs(4);

/// An engine's address, and a client for nothing else.
#[derive(Debug)]
pub(super) struct Http {
    client: Client<Full<Bytes>>,
    /// Without a slash at its end.
    base: String,
}

/// What an engine answered. Whether it did what it was asked for is for [`done`](Self::done) to say.
#[derive(Debug)]
pub(super) struct Reply {
    /// Method, and where.
    pub(super) asked: String,
    pub(super) status: u16,
    body: Vec<u8>,
    is_cut: bool,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Failure {
    /// Nobody is there: nobody listens, no way leads there, or the name is nobody's.
    pub(super) is_nobody_there: bool,
    pub(super) error: EngineError,
}

impl Http {
    /// For an engine at `url`, as configurations have it.
    pub(super) fn new(url: &str) -> Result<Self, String> {
        let base = url.trim_end_matches('/');
        check_url(base).map_err(|reason| format!("its url is odd: {reason}"))?;
        Ok(Self { client: transport::client(CONNECT_MAX, None), base: base.to_owned() })
    }

    pub(super) async fn get(&self, path: &str) -> Result<Reply, Failure> {
        self.ask(Method::GET, path, None).await
    }

    pub(super) async fn post(&self, path: &str, body: Option<Value>) -> Result<Reply, Failure> {
        self.ask(Method::POST, path, body).await
    }

    /// Gets the first of these paths that the engine knows: later versions call some of them otherwise.
    pub(super) async fn get_either(&self, path: &str, or: &str) -> Result<Reply, Failure> {
        let reply = self.get(path).await?;
        if reply.is_unknown() { self.get(or).await } else { Ok(reply) }
    }

    async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> Result<Reply, Failure> {
        let url = format!("{}{path}", self.base);
        let asked = format!("{method} {url}");
        let failed = |reason: String, is_nobody_there: bool| Failure {
            is_nobody_there,
            error: EngineError::Unreachable { asked: asked.clone(), reason },
        };
        let request = transport::request(&method, &url, body.as_ref());
        let request = request.map_err(|error| failed(error.to_string(), false))?;
        let response = self.client.request(request).await;
        let response =
            response.map_err(|error| failed(reason_of(&error), transport::is_nobody_there(&error)))?;
        let status = response.status().as_u16();
        let read = transport::read(response.into_body(), BODY_MAX_BYTES).await;
        match read.broke {
            // That it refused is known, and so is some of the reason.
            Some(error) if is_success(status) => {
                let (len, reason) = (read.bytes.len(), chain(&error));
                Err(failed(format!("its answer broke off after {len} bytes: {reason}"), false))
            }
            _ => Ok(Reply { asked, status, body: read.bytes, is_cut: read.is_cut }),
        }
    }
}

impl Reply {
    /// Whether the engine has no such endpoint.
    pub(super) fn is_unknown(&self) -> bool {
        self.status == 404
    }

    /// The answer of an engine that did what it was asked for.
    pub(super) fn done(self) -> Result<Self, EngineError> {
        if !is_success(self.status) {
            let words = words(&self.body);
            return Err(EngineError::Refused { asked: self.asked, status: self.status, words });
        }
        if self.is_cut {
            return Err(self.odd(&format!("its answer has more than {BODY_MAX_BYTES} bytes")));
        }
        Ok(self)
    }

    /// What it says as JSON, nothing for an empty body.
    pub(super) fn json(&self) -> Result<Option<Value>, EngineError> {
        if self.body.trim_ascii().is_empty() {
            return Ok(None);
        }
        let parsed = serde_json::from_slice(&self.body);
        parsed.map(Some).map_err(|error| self.odd(&format!("its answer is no JSON: {error}")))
    }

    /// An error about an answer that is not as it should be.
    pub(super) fn odd(&self, reason: &str) -> EngineError {
        EngineError::NotUnderstood { asked: self.asked.clone(), reason: reason.to_owned() }
    }

    /// As [`odd`](Self::odd), with the beginning of what it said. Not for answers that may have secrets in them.
    pub(super) fn odd_words(&self, reason: &str) -> EngineError {
        self.odd(&format!("{reason}; it answered: {}", words(&self.body)))
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
    chain(error)
}

/// What an error says, with each of its causes. Many repeat what is behind them.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut said: Vec<String> = Vec::new();
    for text in transport::causes(error).map(ToString::to_string) {
        if !said.iter().any(|before| before.contains(&text)) {
            said.push(text);
        }
    }
    transport::clean(&said.join(": "))
}

/// The beginning of what an engine said.
fn words(body: &[u8]) -> String {
    // No character has more than four bytes; one that is cut in two at the end is behind those that are told.
    let beginning = &body[..body.len().min(8 * transport::WORDS_MAX)];
    let said = transport::clean(&String::from_utf8_lossy(beginning));
    if said.is_empty() { "(nothing)".to_owned() } else { said }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::WORDS_MAX;

    #[test]
    fn words_are_short_and_on_one_line() {
        assert_eq!(words(b" \r\nno\x1b[31m room\0 "), "no [31m room");
        assert_eq!(words(b""), "(nothing)");
        assert_eq!(words(&[b'\n'; 9000]), "(nothing)");
        let long = words("ä".repeat(9000).as_bytes());
        assert_eq!(long.chars().count(), WORDS_MAX + 1);
        assert!(long.starts_with("ää") && long.ends_with("ä…"), "{long}");
        assert_eq!(words("ä".repeat(WORDS_MAX).as_bytes()), "ä".repeat(WORDS_MAX));
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
            let said = Http::new(url).expect_err(url);
            assert!(said.starts_with("its url is odd: ") && !said.contains("hunter2"), "{url}: {said}");
        }
    }
}
