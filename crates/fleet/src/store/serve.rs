//! A store over HTTP.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Either, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use poorwill_net::accept;
use poorwill_net::tls::ServerTls;
use rustix::net::sockopt;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::calls::{PasswordCall, WatchCall, parse};
use super::gateway::{answering, number};
use super::limits::StoreLimits;
use super::lock::Lock;
use super::refusal::{NO_USERS, Refusal, TOO_LARGE};
use super::state::Store;
use super::watches::{WatchBody, WatchState};
use crate::clock::Moment;

/// As etcd takes them.
const BODY_MAX_BYTES: usize = 3 << 19;
const AUTHENTICATE: &str = "/v3/auth/authenticate";
/// How often a connection without data is probed, and how often in vain.
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;
const PASSWORD_MAX_BYTES: usize = 4 << 10;
/// How long a watch may leave its last line unread.
const LINE_MAX: Duration = Duration::from_secs(60);
/// For a body to come.
const REQUEST_MAX: Duration = Duration::from_secs(10);
/// For the next head: longer than a client keeps a connection that it does not use.
const HEAD_MAX: Duration = Duration::from_secs(60);
const CONNECTIONS_MAX: usize = 16_384;
/// How often leases are looked at while nothing is called.
const TICK: Duration = Duration::from_millis(200);
/// Most time that passes for leases between two looks. In what is longer, this process stood still.
const STEP_MAX: Duration = Duration::from_secs(1);

type StoreAnswer = Response<Either<Full<Bytes>, WatchBody>>;

/// A store that is served, or waits for others. Clones share it.
#[derive(Debug, Clone)]
pub struct StoreService(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    instance: u64,
    lock: Option<Lock>,
    limits: StoreLimits,
    duty: Mutex<Duty>,
    /// The cluster and the revision that watches have to look at.
    version: watch::Sender<(u64, u64)>,
    watches: Arc<Semaphore>,
}

/// What this store does.
#[derive(Debug)]
enum Duty {
    /// It refuses, and says why.
    Waits(String),
    Keeps {
        store: Box<Store>,
        seen_at: Moment,
    },
}

/// A machine that vanished has its watches end.
fn keep_alive(stream: &TcpStream) -> rustix::io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)
}

impl StoreService {
    /// One that waits. The instance tells it from others, and has to be random.
    #[must_use]
    pub fn new(instance: u64, lock: Option<Lock>, limits: StoreLimits) -> Self {
        let duty = Mutex::new(Duty::Waits("this store does not know yet which one counts".to_owned()));
        let (version, watches) = (watch::Sender::default(), Arc::new(Semaphore::new(limits.watches)));
        Self(Arc::new(Shared { instance, lock, limits, duty, version, watches }))
    }

    pub(super) fn instance(&self) -> u64 {
        self.0.instance
    }

    /// Serves an empty store of this cluster from now on, unless it serves one already. The id has to be random, and not 0.
    pub fn keep(&self, cluster: u64) {
        let mut duty = self.duty();
        if matches!(*duty, Duty::Waits(_)) {
            *duty =
                Duty::Keeps { store: Box::new(Store::new(cluster, self.0.limits)), seen_at: Moment::now() };
            self.0.version.send_replace((cluster, 1));
            tracing::info!(cluster = format!("{cluster:x}"), "this store keeps the fleet's records");
        }
    }

    /// Forgets what it has, and refuses all calls, since another one keeps the records.
    pub fn defer_to(&self, other: &str) {
        let why = format!("{other} keeps this fleet's records");
        let was = std::mem::replace(&mut *self.duty(), Duty::Waits(why.clone()));
        if !matches!(was, Duty::Waits(before) if before == why) {
            self.0.version.send_replace((0, 0));
            tracing::info!(other, "another store keeps the fleet's records");
        }
    }

    /// Serves until `shutdown`.
    ///
    /// # Errors
    /// The listener cannot be used.
    pub async fn serve(
        &self,
        listener: TcpListener,
        tls: Option<ServerTls>,
        shutdown: CancellationToken,
    ) -> io::Result<()> {
        let ticks = async {
            loop {
                sleep(TICK).await;
                let _refused_while_it_waits = self.with_store(|_| Ok(()));
            }
        };
        let serve = |stream: TcpStream| {
            let (service, tls, shutdown) = (self.clone(), tls.clone(), shutdown.clone());
            async move {
                // What can be sent late is sent all the same.
                let _ = stream.set_nodelay(true);
                if let Err(error) = keep_alive(&stream) {
                    tracing::debug!(%error, "a connection to the store is not probed");
                }
                match tls {
                    None => service.serve_connection(stream, shutdown).await,
                    Some(tls) => match timeout(REQUEST_MAX, tls.accept(stream)).await {
                        Ok(Ok(stream)) => service.serve_connection(stream, shutdown).await,
                        failed => tracing::debug!(?failed, "a connection to the store has no TLS"),
                    },
                }
            }
        };
        tokio::select! {
            never = ticks => never,
            served = accept::accept(listener, "store", CONNECTIONS_MAX, &shutdown, serve) => served,
        }
    }

    async fn serve_connection(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        shutdown: CancellationToken,
    ) {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_MAX);
        let until = shutdown.clone();
        let service = service_fn(move |request| {
            let (shared, until) = (self.clone(), until.clone());
            async move { Ok::<_, Infallible>(shared.answer(request, until).await) }
        });
        if let Err(error) = accept::answer(&http, TokioIo::new(stream), service, &shutdown).await {
            tracing::debug!(%error, "a connection to the store failed");
        }
    }

    async fn answer(&self, request: Request<Incoming>, shutdown: CancellationToken) -> StoreAnswer {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        if path == "/health" {
            return self.health();
        }
        if parts.method != Method::POST {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "calls use POST");
        }
        if is_of_browser(&parts.headers) {
            return plain(StatusCode::FORBIDDEN, "this store answers no browser");
        }
        let checked = self.check(path, &parts.headers);
        let most = match path {
            // Nothing of the body is kept.
            _ if checked.is_err() => 0,
            AUTHENTICATE => PASSWORD_MAX_BYTES,
            _ => BODY_MAX_BYTES,
        };
        let body = match timeout(REQUEST_MAX, read_body(body, most)).await {
            Ok(body) => checked.and(body),
            Err(_) => return plain(StatusCode::REQUEST_TIMEOUT, "the body did not come in time"),
        };
        let body = match body {
            Ok(body) => body,
            Err(refusal) => return refused(&refusal),
        };
        let answered = match path {
            AUTHENTICATE => self.authenticate(&body),
            "/v3/watch" => return self.watch(&body, shutdown).unwrap_or_else(|refusal| refused(&refusal)),
            path => match answering(path) {
                Some(answering) => self.with_store(|store| answering(store, &body)),
                None => return plain(StatusCode::NOT_FOUND, "this store has a part of etcd's API only"),
            },
        };
        answered.map_or_else(|refusal| refused(&refusal), |value| json_answer(StatusCode::OK, &value))
    }

    /// Whether it serves, and the token is right.
    fn check(&self, path: &str, headers: &HeaderMap) -> Result<(), Refusal> {
        if let Duty::Waits(why) = &*self.duty() {
            return Err(Refusal::unavailable(why));
        }
        match &self.0.lock {
            Some(lock) if path != AUTHENTICATE => lock.check(headers),
            _ => Ok(()),
        }
    }

    /// Says without a token whether it serves, and which one it is.
    fn health(&self) -> StoreAnswer {
        let serves = matches!(*self.duty(), Duty::Keeps { .. });
        let status = if serves { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let instance = number(self.instance());
        json_answer(status, &json!({ "health": serves.to_string(), "instance": instance }))
    }

    fn authenticate(&self, body: &[u8]) -> Result<Value, Refusal> {
        let call: PasswordCall = parse(body)?;
        let lock = self.0.lock.as_ref().ok_or(NO_USERS)?;
        Ok(json!({ "token": lock.authenticate(&call)? }))
    }

    fn watch(&self, body: &[u8], shutdown: CancellationToken) -> Result<StoreAnswer, Refusal> {
        let WatchCall { create_request } = parse(body)?;
        let place = Arc::clone(&self.0.watches).try_acquire_owned();
        let place = place.map_err(|_| Refusal::busy(self.0.limits.watches))?;
        let (mut state, created) = self.with_store(|store| Ok(WatchState::begin(store, create_request)))?;
        let (sender, lines) = mpsc::channel(1);
        let (shared, mut version) = (self.clone(), self.0.version.subscribe());
        tokio::spawn(async move {
            let send = async {
                let mut next = (Some(created), true);
                loop {
                    let (line, goes_on) = next;
                    let is_read = match line {
                        Some(line) => matches!(timeout(LINE_MAX, sender.send(line)).await, Ok(Ok(()))),
                        None => true,
                    };
                    if !is_read || !goes_on {
                        break;
                    }
                    next = shared.with_store(|store| Ok(state.next(store))).unwrap_or((None, false));
                    if matches!(next, (None, true)) && version.changed().await.is_err() {
                        break;
                    }
                }
            };
            tokio::select! {
                () = send => {}
                () = sender.closed() => {}
                () = shutdown.cancelled() => {}
            }
            drop(place);
        });
        Ok(json_head(StatusCode::OK, Either::Right(WatchBody(lines))))
    }

    /// Time passes before.
    fn with_store<T>(&self, act: impl FnOnce(&mut Store) -> Result<T, Refusal>) -> Result<T, Refusal> {
        match &mut *self.duty() {
            Duty::Waits(why) => Err(Refusal::unavailable(why)),
            Duty::Keeps { store, seen_at } => {
                let now = Moment::now();
                store.pass(seen_at.until(now).min(STEP_MAX));
                *seen_at = now;
                let acted = act(store);
                let version = (store.cluster(), store.revision());
                self.0.version.send_if_modified(|seen| std::mem::replace(seen, version) != version);
                acted
            }
        }
    }

    fn duty(&self) -> MutexGuard<'_, Duty> {
        self.0.duty.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of what is too large, as much again is read, and not kept. Else the connection would break, and the next call on it.
async fn read_body(mut body: Incoming, most: usize) -> Result<Bytes, Refusal> {
    if let Ok(whole) = Limited::new(&mut body, most).collect().await {
        return Ok(whole.to_bytes());
    }
    let mut left = BODY_MAX_BYTES;
    while let Some(Ok(frame)) = body.frame().await {
        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        if left == 0 {
            break;
        }
    }
    Err(TOO_LARGE)
}

/// No client of a fleet says where its page is from.
fn is_of_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site")
}

fn refused(refusal: &Refusal) -> StoreAnswer {
    let Refusal { code, message } = refusal;
    json_answer(refusal.status(), &json!({ "error": message, "message": message, "code": code }))
}

fn json_answer(status: StatusCode, value: &Value) -> StoreAnswer {
    json_head(status, Either::Left(Full::from(value.to_string())))
}

fn json_head(status: StatusCode, body: Either<Full<Bytes>, WatchBody>) -> StoreAnswer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    answer
}

fn plain(status: StatusCode, text: &'static str) -> StoreAnswer {
    let mut answer = Response::new(Either::Left(Full::from(text)));
    *answer.status_mut() = status;
    answer
}
