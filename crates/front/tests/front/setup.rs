//! A front with a backend and an engine that a test controls.

use std::any::Any;
use std::fmt::Write as _;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use poorwill_front::affinity::Affinity;
use poorwill_front::backend::{
    Admission, Backend, Listed, ModelNumber, NameKind, NotOwned, Refusal, Refused, Route, Trial,
};
use poorwill_front::file::{self, RawFront};
use poorwill_front::proxy::{self, Timeouts};
use poorwill_front::requests::Requests;
use poorwill_front::settings::{Card, Front, Mistakes};
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Longer than any test takes.
const WATCHDOG: Duration = Duration::from_secs(120);

/// Runs a test.
pub(crate) fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(WATCHDOG, test).await.expect("the test hangs") });
}

/// Runs a test on one thread, so that every ready task has run after [`Setup::rounds`].
pub(crate) fn run_on_one_thread(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(WATCHDOG, test).await.expect("the test hangs") });
}

/// The settings with these lines of `[front]`. The key at `env:ONE` is `key-of-ONE`.
pub(crate) fn front_of(lines: &str) -> Front {
    #[derive(Deserialize)]
    struct OnlyFront {
        front: RawFront,
    }
    let secret = |place: &str| Ok(format!("key-of-{}", &place[4..]));
    let text = format!("[front]\n{lines}\n");
    let file: OnlyFront = file::parse(&text, &secret, &[]).unwrap();
    let mut mistakes = Mistakes::default();
    let front = file.front.checked(&secret, &mut mistakes.of("front"));
    file::without_mistakes(Some(front), mistakes, &text, &secret).unwrap()
}

/// The backend's decision for each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Wait,
    Admit,
    Refuse(Refused),
}

/// What the backend has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) waiting: usize,
    pub(crate) gave_up: usize,
    pub(crate) running: usize,
    pub(crate) admitted: usize,
    pub(crate) suspects: usize,
    /// Of the last request.
    pub(crate) priority: i32,
}

pub(crate) struct FakeBackend {
    models: Vec<(Route, Vec<String>)>,
    pub(crate) requests: Arc<Requests>,
    pub(crate) front: Mutex<Arc<Front>>,
    pub(crate) verdict: watch::Sender<Verdict>,
    pub(crate) seen: watch::Sender<Seen>,
    pub(crate) aborted: CancellationToken,
    /// The canary beside each admitted request.
    pub(crate) trial: Mutex<Option<watch::Receiver<Trial>>>,
    pub(crate) fleet: Mutex<InFleet>,
    pub(crate) first_byte_max: Mutex<Option<Duration>>,
}

/// What a node or a router of a fleet decides.
#[derive(Debug, Default)]
pub(crate) struct InFleet {
    /// How often a node may still serve; `None` for ever.
    pub(crate) checks_left: Option<usize>,
    /// Of a router: where else to go. `None` for a node.
    pub(crate) others: Option<Vec<String>>,
    /// Of a node: how many requests it says that it has.
    pub(crate) load: Option<u64>,
    /// What requests went by.
    pub(crate) affinities: Vec<Affinity>,
    /// What destinations said that they have.
    pub(crate) loads: Vec<(String, u64)>,
    /// Of a router: fires when a destination has left.
    pub(crate) left: CancellationToken,
    /// Of a router: fires when a request waits in vain.
    pub(crate) still: CancellationToken,
}

/// Counts down what it counted up.
struct Counted(watch::Sender<Seen>, fn(&mut Seen));

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(self.1);
    }
}

impl Backend for FakeBackend {
    fn route(&self, name: &str, affinity: Affinity) -> Option<Route> {
        let is_it = |(route, aliases): &&(Route, Vec<String>)| {
            route.name == name || aliases.iter().any(|one| one == name)
        };
        let (route, _) = self.models.iter().find(is_it)?;
        if affinity != Affinity::default() {
            self.fleet.lock().unwrap().affinities.push(affinity);
        }
        let first_byte_max = *self.first_byte_max.lock().unwrap();
        Some(Route { first_byte_max, affinity, ..route.clone() })
    }

    fn route_of_model(&self, name: &str, affinity: Affinity) -> Option<Route> {
        self.route(name, affinity)
    }

    fn listed(&self) -> Vec<Listed> {
        let mut all = Vec::new();
        for (nth, (route, aliases)) in self.models.iter().enumerate() {
            let listed = |name: &str, kind| Listed {
                name: name.to_owned(),
                kind,
                is_ready: nth == 0,
                stage: if nth == 0 { "ready" } else { "asleep" },
                card: Card::default(),
            };
            all.push(listed(&route.name, NameKind::Model));
            let alias = || NameKind::Alias { model: route.name.clone() };
            all.extend(aliases.iter().map(|name| listed(name, alias())));
        }
        all
    }

    fn admit(
        &self,
        _: ModelNumber,
        priority: i32,
    ) -> Pin<Box<dyn Future<Output = Result<Admission, Refused>> + Send + '_>> {
        Box::pin(async move {
            self.seen.send_modify(|seen| (seen.waiting, seen.priority) = (seen.waiting + 1, priority));
            let waiting = Counted(self.seen.clone(), |seen| {
                seen.waiting -= 1;
                seen.gave_up += 1;
            });
            let mut verdict = self.verdict.subscribe();
            let said = *verdict.wait_for(|verdict| *verdict != Verdict::Wait).await.unwrap();
            // It has not given up.
            std::mem::forget(waiting);
            self.seen.send_modify(|seen| {
                seen.waiting -= 1;
                if said == Verdict::Admit {
                    seen.running += 1;
                    seen.admitted += 1;
                }
            });
            match said {
                Verdict::Refuse(refused) => Err(refused),
                _ => {
                    let guard: Box<dyn Any + Send> =
                        Box::new(Counted(self.seen.clone(), |seen| seen.running -= 1));
                    let admission = Admission::new(self.aborted.child_token(), guard);
                    Ok(match self.trial.lock().unwrap().clone() {
                        Some(trial) => admission.on_trial(trial),
                        None => admission,
                    })
                }
            }
        })
    }

    fn suspect(&self, _: ModelNumber) {
        self.seen.send_modify(|seen| seen.suspects += 1);
    }

    fn requests(&self) -> Arc<Requests> {
        Arc::clone(&self.requests)
    }

    fn front(&self) -> Arc<Front> {
        Arc::clone(&self.front.lock().unwrap())
    }

    fn check(&self, _: &Route) -> Result<(), NotOwned> {
        match &mut self.fleet.lock().unwrap().checks_left {
            None => Ok(()),
            Some(0) => Err(NotOwned::Member),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }

    fn load(&self, _: &Route) -> Option<u64> {
        self.fleet.lock().unwrap().load
    }

    fn note_load(&self, route: &Route, requests: u64) {
        self.fleet.lock().unwrap().loads.push((route.url.clone(), requests));
    }

    fn is_router(&self) -> bool {
        self.fleet.lock().unwrap().others.is_some()
    }

    fn elsewhere(&self, route: &Route, tried: &[String]) -> Option<Route> {
        let fleet = self.fleet.lock().unwrap();
        let url = fleet.others.as_ref()?.iter().find(|other| !tried.contains(other))?;
        Some(Route { url: url.clone(), ..route.clone() })
    }

    fn stands_still(&self, _: &Route, tried: &[String]) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let still = self.fleet.lock().unwrap().still.clone();
        match tried {
            [] => Box::pin(async move { still.cancelled().await }),
            _ => Box::pin(std::future::pending()),
        }
    }

    fn gone(&self, _: &Route) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let left = self.fleet.lock().unwrap().left.clone();
        Box::pin(async move { left.cancelled().await })
    }
}

/// A front with its backend and engine.
pub(crate) struct Setup {
    pub(crate) address: SocketAddr,
    pub(crate) engine: TcpListener,
    pub(crate) backend: Arc<FakeBackend>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) served: JoinHandle<io::Result<()>>,
}

impl Setup {
    /// With these lines of `[front]`.
    pub(crate) async fn new(lines: &str) -> Self {
        Self::with_timeouts(lines, Timeouts::default()).await
    }

    /// As [`new`](Self::new), which answers to any name, but as on loopback: only to loopback names.
    pub(crate) async fn local(lines: &str) -> Self {
        Self::listening(lines, Timeouts::default(), Ipv4Addr::LOCALHOST, Requests::default()).await
    }

    /// As the front of a router, which knows no other destination.
    #[allow(dead_code)]
    pub(crate) async fn of_router() -> Self {
        let fleet = InFleet { others: Some(Vec::new()), ..InFleet::default() };
        Self::within("", Timeouts::default(), Ipv4Addr::UNSPECIFIED, Requests::default(), fleet).await
    }

    pub(crate) async fn with_timeouts(lines: &str, timeouts: Timeouts) -> Self {
        Self::listening(lines, timeouts, Ipv4Addr::UNSPECIFIED, Requests::default()).await
    }

    #[allow(dead_code)] // The traces of rotation are tested with it.
    pub(crate) async fn with_requests(requests: Requests) -> Self {
        Self::listening("", Timeouts::default(), Ipv4Addr::UNSPECIFIED, requests).await
    }

    /// As if it listened on this address.
    async fn listening(lines: &str, timeouts: Timeouts, ip: Ipv4Addr, requests: Requests) -> Self {
        Self::within(lines, timeouts, ip, requests, InFleet::default()).await
    }

    async fn within(
        lines: &str,
        timeouts: Timeouts,
        ip: Ipv4Addr,
        requests: Requests,
        fleet: InFleet,
    ) -> Self {
        let front = Arc::new(Front { listen: (ip, 8080).into(), ..front_of(lines) });
        let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", engine.local_addr().unwrap());
        let route = |id, name: &str, served_as: &str| Route {
            model: ModelNumber(id),
            name: name.to_owned(),
            url: url.clone(),
            served_as: served_as.to_owned(),
            parameters: Arc::default(),
            in_flight: None,
            first_byte_max: None,
            affinity: Affinity::default(),
        };
        let backend = Arc::new(FakeBackend {
            models: vec![
                (route(0, "org/one", "org/one"), vec!["small".to_owned()]),
                (route(1, "two", "/models/\"two\""), vec!["large".to_owned()]),
            ],
            requests: Arc::new(requests),
            front: Mutex::new(front),
            verdict: watch::Sender::new(Verdict::Admit),
            seen: watch::Sender::new(Seen::default()),
            aborted: CancellationToken::new(),
            trial: Mutex::default(),
            fleet: Mutex::new(fleet),
            first_byte_max: Mutex::default(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let served = tokio::spawn(proxy::serve(
            listener,
            Arc::clone(&backend) as Arc<dyn Backend>,
            shutdown.clone(),
            timeouts,
        ));
        Self { address, engine, backend, shutdown, served }
    }

    pub(crate) async fn client(&self) -> Wire {
        Wire::to(self.address).await
    }

    /// A client that has sent a `POST`.
    pub(crate) async fn asking(&self, body: &str) -> Wire {
        let mut client = self.client().await;
        client.send(post(body)).await;
        client
    }

    /// The engine's end of the next connection.
    pub(crate) async fn engine(&self) -> Wire {
        Wire::new(self.engine.accept().await.unwrap().0)
    }

    /// Answers the next request as its engine, and returns it.
    pub(crate) async fn answered(&self, said: impl AsRef<[u8]>) -> (Head, Vec<u8>) {
        let mut engine = self.engine().await;
        let asked = engine.message().await;
        engine.send(said).await;
        asked
    }

    /// Waits until the backend has seen something.
    pub(crate) async fn until(&self, is_it: impl FnMut(&Seen) -> bool) -> Seen {
        *self.backend.seen.subscribe().wait_for(is_it).await.unwrap()
    }

    /// Requests the front's health several times: on one thread, every ready task has run after that.
    pub(crate) async fn rounds(&self) {
        let mut client = self.client().await;
        for _ in 0..100 {
            client.send("GET /health HTTP/1.1\r\nHost: a\r\n\r\n").await;
            assert_eq!(client.message().await.0.status(), 200);
        }
    }

    /// Has an engine send an endless stream until all buffers on the way to its client are full.
    pub(crate) async fn fill(&self, engine: &mut Wire) {
        let chunk = chunk(&format!("data: {}\n\n", "x".repeat(64 << 10)));
        loop {
            tokio::select! {
                sent = engine.stream.write_all(chunk.as_bytes()) => sent.expect("the answer was not ended"),
                () = self.rounds() => break,
            }
        }
    }

    pub(crate) fn say(&self, verdict: Verdict) {
        self.backend.verdict.send_replace(verdict);
    }

    pub(crate) fn refuse(&self, refusal: Refusal, retry_after: Option<Duration>) {
        self.say(Verdict::Refuse(Refused { refusal, retry_after }));
    }
}

pub(crate) fn post(body: &str) -> String {
    post_with("/v1/chat/completions", "", body)
}

/// With more header lines, each ended.
pub(crate) fn post_with(path: &str, lines: &str, body: &str) -> String {
    let mut head = format!("POST {path} HTTP/1.1\r\nHost: front\r\nContent-Type: application/json\r\n");
    write!(head, "{lines}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    head
}

/// An answer with a body.
pub(crate) fn answer(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// As [`answer`], and the next request comes on another connection.
pub(crate) fn last_answer(body: &str) -> String {
    answer(body).replacen("\r\n", "\r\nConnection: close\r\n", 1)
}

/// The head of a stream.
pub(crate) const EVENTS: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
/// The end of a stream.
pub(crate) const END: &str = "0\r\n\r\n";

pub(crate) fn chunk(bytes: &str) -> String {
    format!("{:x}\r\n{bytes}\r\n", bytes.len())
}

/// The head of a message.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) first: String,
    pub(crate) fields: Vec<(String, String)>,
}

impl Head {
    pub(crate) fn status(&self) -> u16 {
        self.first.split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }
}

/// One end of a connection.
pub(crate) struct Wire {
    pub(crate) stream: TcpStream,
    got: Vec<u8>,
}

impl Wire {
    pub(crate) fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        Self { stream, got: Vec::new() }
    }

    pub(crate) async fn to(address: SocketAddr) -> Self {
        Self::new(TcpStream::connect(address).await.unwrap())
    }

    /// From this address of this machine.
    pub(crate) async fn between(from: &str, to: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from.parse::<Ipv4Addr>().unwrap(), 0).into()).unwrap();
        Self::new(socket.connect(to).await.unwrap())
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Whether nothing has come that was not read.
    pub(crate) fn is_silent(&self) -> bool {
        let nothing = self.stream.try_read(&mut [0; 1]);
        self.got.is_empty() && nothing.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Reads more; false at the end.
    async fn more(&mut self) -> io::Result<bool> {
        Ok(self.stream.read_buf(&mut self.got).await? > 0)
    }

    async fn until(&mut self, mark: &[u8]) -> Vec<u8> {
        loop {
            if let Some(at) = self.got.windows(mark.len()).position(|window| window == mark) {
                let rest = self.got.split_off(at + mark.len());
                return std::mem::replace(&mut self.got, rest);
            }
            let got = String::from_utf8_lossy(&self.got).into_owned();
            assert!(self.more().await.unwrap(), "the connection ended behind {got:?}");
        }
    }

    pub(crate) async fn bytes(&mut self, count: usize) -> Vec<u8> {
        while self.got.len() < count {
            assert!(
                self.more().await.unwrap(),
                "the connection ended {} bytes early",
                count - self.got.len()
            );
        }
        let rest = self.got.split_off(count);
        std::mem::replace(&mut self.got, rest)
    }

    pub(crate) async fn head(&mut self) -> Head {
        let text = String::from_utf8(self.until(b"\r\n\r\n").await).unwrap();
        let mut lines = text.trim_end().split("\r\n");
        let first = lines.next().unwrap().to_owned();
        let fields = lines.map(|line| {
            let (name, value) = line.split_once(':').unwrap();
            (name.to_ascii_lowercase(), value.trim().to_owned())
        });
        Head { first, fields: fields.collect() }
    }

    /// Whether another message has begun; false at the end of the connection.
    async fn has_more(&mut self) -> bool {
        !self.got.is_empty() || self.more().await.unwrap_or(false)
    }

    /// The next head, unless the connection ends first.
    #[allow(dead_code)]
    pub(crate) async fn head_if_any(&mut self) -> Option<Head> {
        if self.has_more().await { Some(self.head().await) } else { None }
    }

    /// As [`message`](Self::message), unless the connection ends first.
    #[allow(dead_code)]
    pub(crate) async fn message_if_any(&mut self) -> Option<(Head, Vec<u8>)> {
        if self.has_more().await { Some(self.message().await) } else { None }
    }

    /// The next chunk; `None` for the last.
    pub(crate) async fn chunk(&mut self) -> Option<String> {
        let line = String::from_utf8(self.until(b"\r\n").await).unwrap();
        let len = usize::from_str_radix(line.trim(), 16).unwrap();
        let bytes = self.bytes(len + 2).await;
        (len > 0).then(|| String::from_utf8(bytes[..len].to_vec()).unwrap())
    }

    /// Chunks until they have this many bytes.
    pub(crate) async fn chunks_with(&mut self, bytes: usize) -> String {
        let mut all = String::new();
        while all.len() < bytes {
            all += &self.chunk().await.expect("the stream ended early");
        }
        all
    }

    /// A message with `Content-Length`, or without a body.
    pub(crate) async fn message(&mut self) -> (Head, Vec<u8>) {
        let head = self.head().await;
        let len = head.field("content-length").map_or(0, |len| len.parse().unwrap());
        let body = self.bytes(len).await;
        (head, body)
    }

    /// As [`message`](Self::message), with a JSON body.
    pub(crate) async fn json(&mut self) -> (Head, serde_json::Value) {
        let (head, body) = self.message().await;
        let body = serde_json::from_slice(&body).expect("a body of JSON");
        (head, body)
    }

    /// Waits until the other end has closed or reset it, and returns the bytes before.
    pub(crate) async fn ended(&mut self) -> Vec<u8> {
        while self.more().await.unwrap_or(false) {}
        std::mem::take(&mut self.got)
    }

    /// As [`ended`](Self::ended), for a reset.
    pub(crate) async fn reset(&mut self) -> io::ErrorKind {
        loop {
            match self.more().await {
                Ok(true) => {}
                Ok(false) => panic!("it was closed, not reset"),
                Err(error) => return error.kind(),
            }
        }
    }
}
