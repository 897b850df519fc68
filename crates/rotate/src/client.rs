//! A client of a running rotation, for the command line. It uses the same listeners as other clients.

mod goal;

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};

pub use self::goal::StageGoal;
use crate::config::{CanaryKind, Config, Control, Key, Model};
use crate::engine::canary::Unreadable;
use crate::engine::{Answer, Content, is_unserved};
use poorwill_net::client as transport;
use poorwill_rotation_policy::StageName;

/// Timeout of a control request.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Between two status requests.
const LOOK_EVERY: Duration = Duration::from_millis(50);

const CONNECT_MAX: Duration = Duration::from_secs(10);

/// A status contains a bounded number of swaps.
const ANSWER_MAX_BYTES: usize = 64 << 20;

/// A running rotation, found by its configuration.
#[derive(Debug)]
pub struct Client {
    http: transport::HttpClient<Full<Bytes>>,
    /// `None` for operators' commands, which need no key of it.
    front: Option<Endpoint>,
    control: Endpoint,
}

#[derive(Debug)]
struct Endpoint {
    name: &'static str,
    base: String,
    key: Option<Key>,
}

/// The result of waiting for a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waited {
    /// Its status then.
    pub now: Value,
    /// The last failure seen while waiting.
    pub failure: Option<String>,
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The connection failed.
    #[error(
        "no service answers at {base}, the rotation's {listener}: {reason}; is `poorwill rotate --config …` running?"
    )]
    Unreachable {
        /// `front` or `control`.
        listener: &'static str,
        /// The base URL.
        base: String,
        /// The cause.
        reason: String,
    },
    /// The service refused.
    #[error("{request_line}: {status}: {message}")]
    Refused {
        /// Method and path.
        request_line: String,
        /// The HTTP status.
        status: u16,
        /// Its message.
        message: String,
        /// Its error code, if it has one.
        code: Option<String>,
    },
    /// The request timed out.
    #[error("{request_line}: no answer within {limit_s:.0} s")]
    Timeout {
        /// Method and path.
        request_line: String,
        /// The timeout.
        limit_s: f64,
    },
    /// The answer is not one of this service.
    #[error("{request_line}: {reason}")]
    Unexpected {
        /// Method and path.
        request_line: String,
        /// What is unexpected.
        reason: String,
    },
    /// A model did not reach a stage in time.
    #[error("model `{model}` is {stage} after {waited_s:.0} s, and not {wanted}{because}")]
    Late {
        /// Its name.
        model: String,
        /// Its stage.
        stage: String,
        /// The time waited.
        waited_s: f64,
        /// The stage waited for.
        wanted: StageName,
        /// Its last failure, in parentheses, or nothing.
        because: String,
    },
    /// A model will not reach a stage.
    #[error("model `{model}` will not be {wanted}: {reason}{because}")]
    GivenUp {
        /// Its name.
        model: String,
        /// The stage waited for.
        wanted: StageName,
        /// Why nothing leads there.
        reason: String,
        /// Its last failure, in parentheses, or nothing.
        because: String,
    },
}

impl ClientError {
    fn is_unserved(&self) -> bool {
        matches!(self, Self::Refused { status, message, .. } if is_unserved(*status, message))
    }
}

impl Client {
    /// For the rotation with this configuration.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        let front = endpoint("front", config.front.listen, &config.front.keys);
        Self { front: Some(front), ..Self::of_control(&config.control) }
    }

    /// For its operators' listener alone.
    #[must_use]
    pub fn of_control(control: &Control) -> Self {
        let control = endpoint("control", control.listen, &control.keys);
        Self { http: transport::client(CONNECT_MAX, None), front: None, control }
    }

    /// The service's status, a [`Snapshot`](crate::service::Snapshot).
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn status(&self) -> Result<Value, ClientError> {
        self.send(&self.control, Method::GET, "/rotate/status", None, ANSWER_MAX).await
    }

    /// Sends `wake`, `sleep`, `restart` or `pin` to a model.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn command(
        &self,
        model: &str,
        action: &str,
        body: Option<Value>,
    ) -> Result<Value, ClientError> {
        let path = format!("/rotate/models/{}/{action}", escaped(model));
        self.send(&self.control, Method::POST, &path, body, ANSWER_MAX).await
    }

    /// Reloads the configuration.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn reload(&self) -> Result<Value, ClientError> {
        self.send(&self.control, Method::POST, "/rotate/reload", None, ANSWER_MAX).await
    }

    /// Puts every model to sleep.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn sleep_all(&self) -> Result<Value, ClientError> {
        self.send(&self.control, Method::POST, "/rotate/sleep", None, ANSWER_MAX).await
    }

    /// Reads the last lines of an engine's output, and with `follow` what comes then. `take` gets the bytes as they come.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn log(
        &self,
        model: &str,
        lines: usize,
        follow: bool,
        mut take: impl FnMut(&[u8]) -> bool,
    ) -> Result<(), ClientError> {
        let path = format!("/rotate/models/{}/log?lines={lines}&follow={follow}", escaped(model));
        let opened = self.open(&self.control, &Method::GET, &path, None);
        let mut body = match tokio::time::timeout(ANSWER_MAX, opened).await {
            Ok(response) => response?.into_body(),
            Err(_) => {
                let (request_line, limit_s) = (format!("GET {path}"), ANSWER_MAX.as_secs_f64());
                return Err(ClientError::Timeout { request_line, limit_s });
            }
        };
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| self.control.unreached(&error))?;
            if frame.data_ref().is_some_and(|data| !take(data)) {
                break;
            }
        }
        Ok(())
    }

    /// Chooses a profile, or none.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn set_profile(&self, profile: Option<&str>) -> Result<Value, ClientError> {
        let body = json!({"profile": profile});
        self.send(&self.control, Method::POST, "/rotate/profile", Some(body), ANSWER_MAX).await
    }

    /// Completes a prompt through the front.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn complete(
        &self,
        model: &str,
        prompt: &str,
        tokens: u32,
        limit: Duration,
    ) -> Result<String, ClientError> {
        match self.ask_as(CanaryKind::Completion, model, (prompt, tokens), limit).await?.content {
            Content::Text(text) => Ok(text),
            Content::Vector(_) | Content::Scores(_) => Ok(String::new()),
        }
    }

    /// Asks a question through the front, by the canary's kind, or `known` if the canary has none.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn ask(
        &self,
        model: &Model,
        known: Option<CanaryKind>,
        prompt: &str,
        tokens: u32,
        limit: Duration,
    ) -> Result<Answer, ClientError> {
        let mut unserved = None;
        for kind in CanaryKind::candidates(&model.canary, known) {
            match self.ask_as(kind, &model.name, (prompt, tokens), limit).await {
                Err(error) if error.is_unserved() => {
                    unserved.get_or_insert(error);
                }
                other => return other,
            }
        }
        Err(unserved.unwrap_or_else(|| ClientError::Unexpected {
            request_line: format!("the canary of `{}`", model.name),
            reason: "it has no kind to ask by".to_owned(),
        }))
    }

    async fn ask_as(
        &self,
        kind: CanaryKind,
        model: &str,
        (prompt, tokens): (&str, u32),
        limit: Duration,
    ) -> Result<Answer, ClientError> {
        let Some((path, body)) = kind.question(model, prompt, tokens) else {
            return Ok(Answer { kind, content: Content::Text(String::new()) });
        };
        let Some(front) = &self.front else {
            let reason = "this client is for the operators' listener alone".to_owned();
            return Err(ClientError::Unexpected { request_line: format!("POST {path}"), reason });
        };
        let answer = self.send(front, Method::POST, path, Some(body), limit).await?;
        let unexpected = |unreadable: Unreadable| ClientError::Unexpected {
            request_line: format!("POST {path}"),
            reason: format!("{}: {}", unreadable.reason(), transport::one_line(&answer.to_string())),
        };
        Ok(Answer { kind, content: kind.content(&answer).map_err(unexpected)? })
    }

    /// The model's status, by any of its names; `None` if there is no such model.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn model(&self, name: &str) -> Result<Option<Value>, ClientError> {
        let mut status = self.status().await?;
        let is_named = |now: &Value| {
            let others = ["aliases", "adapters"].into_iter().filter_map(|key| now[key].as_array()).flatten();
            others.chain([&now["name"]]).any(|one| *one == *name)
        };
        let models = status["models"].as_array_mut();
        Ok(models.and_then(|models| models.iter().position(is_named).map(|at| models.swap_remove(at))))
    }

    /// Waits until a model has reached a goal.
    ///
    /// # Errors
    /// `Late`, `GivenUp` as soon as it will not reach it, and all errors of a status request.
    pub async fn until(
        &self,
        model: &str,
        goal: StageGoal,
        timeout: Duration,
    ) -> Result<Waited, ClientError> {
        let began = Instant::now();
        let mut failure = None;
        loop {
            let now = self.model(model).await?.unwrap_or(Value::Null);
            failure = now["last_failure"].as_str().map(str::to_owned).or(failure);
            if goal.is_reached(&now) {
                return Ok(Waited { now, failure });
            }
            let because = || failure.as_ref().map(|failure| format!(" ({failure})")).unwrap_or_default();
            let (name, wanted) = (model.to_owned(), goal.name());
            let lost = if now.is_null() { Some("it was removed".to_owned()) } else { goal.lost(&now) };
            if let Some(reason) = lost {
                return Err(ClientError::GivenUp { model: name, wanted, reason, because: because() });
            }
            if began.elapsed() >= timeout {
                return Err(ClientError::Late {
                    model: name,
                    stage: now["stage"].as_str().unwrap_or("in an unknown stage").to_owned(),
                    waited_s: began.elapsed().as_secs_f64(),
                    wanted,
                    because: because(),
                });
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn send(
        &self,
        endpoint: &Endpoint,
        method: Method,
        path: &str,
        body: Option<Value>,
        limit: Duration,
    ) -> Result<Value, ClientError> {
        let request_line = format!("{method} {path}");
        let answered = async {
            let response = self.open(endpoint, &method, path, body).await?;
            let status = response.status();
            Ok((status, read_text(endpoint, &request_line, response).await?))
        };
        let answered = tokio::time::timeout(limit, answered).await;
        let (status, text) = answered.unwrap_or_else(|_| {
            let (request_line, limit_s) = (request_line.clone(), limit.as_secs_f64());
            Err(ClientError::Timeout { request_line, limit_s })
        })?;
        if text.is_empty() || status == StatusCode::NO_CONTENT {
            return Ok(Value::Null);
        }
        serde_json::from_str(&text).map_err(|error| {
            let reason = format!("it is no JSON ({error}): {}", transport::one_line(&text));
            ClientError::Unexpected { request_line, reason }
        })
    }

    /// The beginning of a good answer.
    async fn open(
        &self,
        endpoint: &Endpoint,
        method: &Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<Response<Incoming>, ClientError> {
        let request_line = format!("{method} {path}");
        let request = transport::request(method, &format!("{}{path}", endpoint.base), body.as_ref());
        let mut request = request.map_err(|error| ClientError::Unexpected {
            request_line: request_line.clone(),
            reason: error.to_string(),
        })?;
        if let Some(key) = &endpoint.key {
            request.headers_mut().insert(header::AUTHORIZATION, key.header_value());
        }
        let response = self.http.request(request).await.map_err(|error| {
            if transport::is_late(&error) {
                let limit_s = CONNECT_MAX.as_secs_f64();
                ClientError::Timeout { request_line: request_line.clone(), limit_s }
            } else {
                endpoint.unreached(&error)
            }
        })?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let text = read_text(endpoint, &request_line, response).await?;
        let body = serde_json::from_str::<Value>(&text).ok();
        let message = body.as_ref().and_then(|body| body.pointer("/error/message")?.as_str());
        let message = transport::one_line(message.unwrap_or(&text));
        let code = body.as_ref().and_then(|body| body.pointer("/error/code")?.as_str()).map(str::to_owned);
        Err(ClientError::Refused { request_line, status: status.as_u16(), message, code })
    }
}

impl Endpoint {
    fn unreached(&self, error: &(dyn std::error::Error + 'static)) -> ClientError {
        let reason = transport::causes(error).last().map(ToString::to_string).unwrap_or_default();
        ClientError::Unreachable { listener: self.name, base: self.base.clone(), reason }
    }
}

async fn read_text(
    endpoint: &Endpoint,
    request_line: &str,
    response: Response<Incoming>,
) -> Result<String, ClientError> {
    let read = transport::read(response.into_body(), ANSWER_MAX_BYTES).await;
    match read.broke {
        Some(error) => Err(endpoint.unreached(&error)),
        None if read.is_cut => Err(ClientError::Unexpected {
            request_line: request_line.to_owned(),
            reason: format!("it has more than {ANSWER_MAX_BYTES} bytes"),
        }),
        None => Ok(String::from_utf8_lossy(&read.bytes).into_owned()),
    }
}

fn endpoint(name: &'static str, listen: std::net::SocketAddr, keys: &[Key]) -> Endpoint {
    Endpoint { name, base: format!("http://{}", reachable(listen)), key: keys.first().cloned() }
}

/// Replaces the unspecified address by the loopback address.
fn reachable(listen: std::net::SocketAddr) -> std::net::SocketAddr {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
    match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), listen.port()),
        IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), listen.port()),
        _ => listen,
    }
}

/// Percent-encodes a name as one path segment.
fn escaped(name: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    name.bytes().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_one_segment() {
        assert_eq!(escaped("org/Model-7B.v1"), "org%2FModel-7B.v1");
        assert_eq!(escaped("a b?é"), "a%20b%3F%C3%A9");
    }

    #[test]
    fn an_unspecified_address_is_reached_by_loopback() {
        for (listen, expected) in
            [("0.0.0.0:80", "127.0.0.1:80"), ("[::]:80", "[::1]:80"), ("10.0.0.1:80", "10.0.0.1:80")]
        {
            assert_eq!(reachable(listen.parse().unwrap()).to_string(), expected);
        }
    }
}
