//! One engine's HTTP: what is asked, what came back, and in which words a failure is told.
//!
//! Promises:
//!
//! - Nothing stands between us and the engine: no proxy out of the environment, no redirect that is followed, no
//!   connection that an earlier request left behind. So a refused connection means that nobody listens.
//! - An answer is read up to [`BODY_MAX_BYTES`], whatever its head says, and no request is sent twice.
//! - Dropping a request closes its connection.
//! - Errors have the beginning of what an engine said, without control characters, where the caller says that it may be
//!   told; parsers' errors name a place, and never a value.

use std::error::Error;
use std::io;
use std::time::Duration;

use reqwest::{Client, Method, Url, redirect};
use serde_json::Value;

use super::EngineError;

/// More than any answer that is asked for has.
pub(super) const BODY_MAX_BYTES: usize = 1 << 20;
/// How many characters of an engine's words are told.
const WORDS_MAX: usize = 300;
/// How long a connection may take to come about. Engines are near.
const CONNECT_MAX: Duration = Duration::from_secs(4);

/// An engine's address, and a client for nothing else.
#[derive(Debug)]
pub(super) struct Http {
    client: Client,
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
    /// For an engine at `url`: `http://`, a host and a port. What is wrong with another one is said without it: it may
    /// have a password in it.
    pub(super) fn new(url: &str) -> Result<Self, String> {
        let wrong = |reason: &str| format!("its url is odd: {reason}; say http://, a host and a port");
        let parsed = Url::parse(url).map_err(|error| wrong(&error.to_string()))?;
        if parsed.scheme() != "http" || parsed.host_str().is_none() {
            return Err(wrong("it is not one that begins with http://"));
        }
        if !parsed.username().is_empty() || parsed.password().is_some() {
            return Err(wrong("it has a user or a password in it"));
        }
        if parsed.path() != "/" || parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(wrong("there is something behind its port"));
        }
        let client = Client::builder()
            .no_proxy()
            .redirect(redirect::Policy::none())
            .retry(reqwest::retry::never())
            .connect_timeout(CONNECT_MAX)
            .pool_max_idle_per_host(0)
            .build()
            .map_err(|error| format!("no client can be made for it: {}", chain(&error)))?;
        Ok(Self { client, base: url.trim_end_matches('/').to_owned() })
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
        let mut request = self.client.request(method, url);
        if let Some(body) = &body {
            request = request.json(body);
        }
        let mut response = request.send().await.map_err(|error| failure(&asked, &error))?;
        let status = response.status().as_u16();
        let (mut body, mut is_cut) = (Vec::new(), false);
        while !is_cut {
            match response.chunk().await {
                Ok(Some(chunk)) => {
                    let room = BODY_MAX_BYTES - body.len();
                    is_cut = chunk.len() > room;
                    body.extend_from_slice(&chunk[..chunk.len().min(room)]);
                }
                Ok(None) => break,
                // That it refused is known, and so is some of the reason.
                Err(_) if !is_success(status) => break,
                Err(error) => {
                    let reason =
                        format!("its answer broke off after {} bytes: {}", body.len(), chain(&error));
                    let error = EngineError::Unreachable { asked, reason };
                    return Err(Failure { is_nobody_there: false, error });
                }
            }
        }
        Ok(Reply { asked, status, body, is_cut })
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

fn failure(asked: &str, error: &reqwest::Error) -> Failure {
    let reason = if error.is_connect() && error.is_timeout() {
        format!("no connection came about within {} s", CONNECT_MAX.as_secs())
    } else {
        chain(error)
    };
    Failure {
        is_nobody_there: error.is_connect() && !error.is_timeout() && is_nobodys(error),
        error: EngineError::Unreachable { asked: asked.to_owned(), reason },
    }
}

/// Whether a connection failed because of who is not there, and not because of what we lack.
fn is_nobodys(error: &reqwest::Error) -> bool {
    causes(error).any(|cause| {
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        let is_away = matches!(
            kind,
            Some(
                io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::HostUnreachable
                    | io::ErrorKind::NetworkUnreachable
            )
        );
        // What the resolver says has no kind of its own.
        is_away || cause.to_string().starts_with("dns error")
    })
}

/// What an error says, with each of its causes.
fn chain(error: &reqwest::Error) -> String {
    let mut said: Vec<String> = Vec::new();
    for cause in causes(error) {
        // The outermost says no more than where, and many repeat what is behind them.
        let text = match cause.downcast_ref::<reqwest::Error>() {
            Some(_) => continue,
            None => cause.to_string(),
        };
        if !said.iter().any(|before| before.contains(&text)) {
            said.push(text);
        }
    }
    if said.is_empty() {
        said.push("the connection failed".to_owned());
    }
    clean(&said.join(": "))
}

fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    let first: &(dyn Error + 'static) = error;
    std::iter::successors(Some(first), |cause: &&(dyn Error + 'static)| (*cause).source())
}

/// The beginning of what an engine said.
fn words(body: &[u8]) -> String {
    // No character has more than four bytes; one that is cut in two at the end is behind those that are told.
    let beginning = &body[..body.len().min(8 * WORDS_MAX)];
    let said = clean(&String::from_utf8_lossy(beginning));
    if said.is_empty() { "(nothing)".to_owned() } else { said }
}

/// On one line, and not long.
fn clean(text: &str) -> String {
    let on_a_line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let all = on_a_line.trim();
    let mut beginning: String = all.chars().take(WORDS_MAX).collect();
    if all.chars().nth(WORDS_MAX).is_some() {
        beginning.push('…');
    }
    beginning
}

#[cfg(test)]
mod tests {
    use super::*;

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
            "http://",
            "",
        ];
        for url in bad {
            let said = Http::new(url).expect_err(url);
            assert!(said.contains("say http://") && !said.contains("hunter2"), "{url}: {said}");
        }
    }
}
