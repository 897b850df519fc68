//! Mock engines on real sockets: scripted HTTP, and raw bytes.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt as _;
use poorwill_rotate::config::{Canary, CanaryKind, Card, EngineKind, HttpApi, Model, Parameters};
use poorwill_rotate::engine::{Answer, Content};
use poorwill_rotation_policy::{Gpu, Rules};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// How long a test waits before it fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A received request.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    /// Method, path and query.
    pub(crate) line: String,
    pub(crate) body: Value,
}

impl fmt::Display for Received {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.line)?;
        if self.body.is_null() { Ok(()) } else { write!(f, " {}", self.body) }
    }
}

/// The script's reply to a request.
#[derive(Debug, Clone)]
pub(crate) enum Scripted {
    Text(u16, String),
    /// A redirect to another address.
    Elsewhere(String),
    /// No answer ever.
    Nothing,
    /// The head of an answer, and no more.
    Broken,
}

pub(crate) fn ok(text: &str) -> Scripted {
    Scripted::Text(200, text.to_owned())
}

type Answers = dyn Fn(&Received) -> Scripted + Send + Sync;

#[derive(Clone)]
struct ScriptState {
    answers: Arc<Answers>,
    asked: Arc<Mutex<Vec<Received>>>,
    came: mpsc::UnboundedSender<()>,
}

/// A scripted server that records its requests.
pub(crate) struct Script {
    pub(crate) url: String,
    asked: Arc<Mutex<Vec<Received>>>,
    came: mpsc::UnboundedReceiver<()>,
    server: JoinHandle<()>,
}

impl Script {
    pub(crate) async fn of(answers: impl Fn(&Received) -> Scripted + Send + Sync + 'static) -> Self {
        let (listener, url) = listen().await;
        let (send, came) = mpsc::unbounded_channel();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let state = ScriptState { answers: Arc::new(answers), asked: Arc::clone(&asked), came: send };
        let router = Router::new().fallback(serve).with_state(state);
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { url, asked, came, server }
    }

    /// The requests since the last call.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().drain(..).map(|asked| asked.to_string()).collect()
    }

    /// Waits for the next request.
    pub(crate) async fn came(&mut self) {
        tokio::time::timeout(TIMEOUT, self.came.recv()).await.expect("a request in time").unwrap();
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(State(state): State<ScriptState>, request: Request) -> Response {
    let line = format!("{} {}", request.method(), request.uri());
    let bytes = request.into_body().collect().await.unwrap().to_bytes();
    let body = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap() };
    let asked = Received { line, body };
    let reply = (state.answers)(&asked);
    state.asked.lock().unwrap().push(asked);
    // The test may be over.
    let _ = state.came.send(());
    match reply {
        Scripted::Text(status, text) => (http::StatusCode::from_u16(status).unwrap(), text).into_response(),
        Scripted::Elsewhere(url) => {
            (http::StatusCode::TEMPORARY_REDIRECT, [("location", url)]).into_response()
        }
        Scripted::Nothing => std::future::pending().await,
        Scripted::Broken => {
            let broken = futures_util::stream::iter([Err::<Vec<u8>, _>(std::io::Error::other("broken"))]);
            axum::body::Body::from_stream(broken).into_response()
        }
    }
}

/// A server that sends fixed bytes to every client, and then acts as `Then` says.
pub(crate) struct Raw {
    pub(crate) url: String,
    seen: mpsc::UnboundedReceiver<Seen>,
    server: JoinHandle<()>,
}

/// What a [`Raw`] does after its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Then {
    Close,
    /// Sends until the client stops reading.
    SendOn,
    /// Sends nothing more, until the client closes.
    Wait,
}

/// What a [`Raw`] has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Request,
    /// The client disconnected.
    End,
}

impl Raw {
    pub(crate) async fn of(bytes: &'static [u8], then: Then) -> Self {
        let (listener, url) = listen().await;
        let (send, seen) = mpsc::unbounded_channel();
        let server = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(talk(stream, bytes, then, send.clone()));
            }
        });
        Self { url, seen, server }
    }

    pub(crate) async fn sees(&mut self, what: Seen) {
        loop {
            let seen = tokio::time::timeout(TIMEOUT, self.seen.recv()).await;
            if seen.unwrap_or_else(|_| panic!("{what:?} did not come")) == Some(what) {
                return;
            }
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn talk(mut stream: TcpStream, bytes: &[u8], then: Then, seen: mpsc::UnboundedSender<Seen>) {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if stream.read_buf(&mut head).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let _ = seen.send(Seen::Request);
    // The client may have disconnected, which the test is about.
    let _ = stream.write_all(bytes).await;
    match then {
        Then::Close => {}
        Then::SendOn => while stream.write_all(&[b'a'; 4096]).await.is_ok() {},
        Then::Wait => while stream.read_buf(&mut head).await.unwrap_or(0) > 0 {},
    }
    let _ = seen.send(Seen::End);
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

/// An address without a listener.
pub(crate) async fn nowhere() -> String {
    listen().await.1
}

/// An answer to a completion.
pub(crate) fn completion(text: &str) -> Answer {
    Answer { kind: CanaryKind::Completion, content: Content::Text(text.to_owned()) }
}

fn usual_canary() -> Canary {
    Canary {
        kind: None,
        prompt: String::new(),
        tokens: 16,
        expect: None,
        path: None,
        is_beside: false,
        hint: None,
    }
}

/// A model whose engine is at `url`.
pub(crate) fn model(url: &str, engine: EngineKind, level: u8) -> Model {
    Model {
        name: "large".to_owned(),
        aliases: Vec::new(),
        adapters: Vec::new(),
        served_as: "Org/Large".to_owned(),
        parameters: Parameters::default(),
        variants: BTreeMap::new(),
        card: Card::default(),
        engine,
        url: url.to_owned(),
        http: HttpApi::default(),
        level,
        start: None,
        canary: Canary { prompt: "One, two,".to_owned(), tokens: 7, ..usual_canary() },
        rules: Rules::on(vec![Gpu(0)]),
        first_byte_max: None,
    }
}
