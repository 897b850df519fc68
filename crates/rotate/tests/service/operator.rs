//! Control with a fake service, and clients of it over real sockets.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use poorwill_front::requests::{Recent, Requests};
use poorwill_front::settings::Control;
use poorwill_rotate::config::Config;
use poorwill_rotate::control::{ControlApi, Later, serve};
use poorwill_rotate::fleet::{Membership, NotReady};
use poorwill_rotate::lending::LentTotals;
use poorwill_rotate::service::{
    EventKind, GpuNow, LeftModel, ModelCommand, ModelNow, PromiseNow, ServiceEvent, Snapshot, Swap, SwapPath,
    Swapping,
};
use poorwill_rotate::supervise::EngineLog;
use poorwill_rotation_policy::StageName;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, broadcast};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) use super::client::{Answer, Metrics, STUCK};
use super::client::{ask, send};

/// A fake service, which records its calls.
pub(crate) struct FakeApi {
    pub(crate) snapshot: Mutex<Snapshot>,
    pub(crate) commands: Mutex<Vec<(String, ModelCommand)>>,
    pub(crate) reloads: Mutex<Vec<Result<(), String>>>,
    /// What a reload waits for.
    pub(crate) barrier: Option<(Notify, Notify)>,
    pub(crate) reloaded: Mutex<u32>,
    pub(crate) control: Mutex<Arc<Control>>,
    pub(crate) requests: Arc<Requests>,
    pub(crate) events: broadcast::Sender<Arc<ServiceEvent>>,
    pub(crate) ready: Mutex<Option<Result<(), NotReady>>>,
    /// Of every supervised engine.
    pub(crate) log: Arc<EngineLog>,
}

impl ControlApi for FakeApi {
    fn snapshot(&self) -> Later<'_, Snapshot> {
        Box::pin(async { self.snapshot.lock().unwrap().clone() })
    }

    fn events(&self) -> broadcast::Receiver<Arc<ServiceEvent>> {
        self.events.subscribe()
    }

    fn command<'a>(&'a self, name: &'a str, command: ModelCommand) -> Later<'a, bool> {
        Box::pin(async move {
            let mut snapshot = self.snapshot.lock().unwrap();
            let Some(model) = snapshot.models.iter_mut().find(|model| is_it(model, name)) else {
                return false;
            };
            if let ModelCommand::Pin(is_pinned) = command {
                model.is_pinned = is_pinned;
            }
            self.commands.lock().unwrap().push((name.to_owned(), command));
            true
        })
    }

    fn log(&self, name: &str) -> Option<Arc<EngineLog>> {
        let snapshot = self.snapshot.lock().unwrap();
        let model = snapshot.models.iter().find(|model| is_it(model, name))?;
        model.is_supervised.then(|| Arc::clone(&self.log))
    }

    fn reload(&self) -> Later<'_, Result<(), String>> {
        Box::pin(async {
            if let Some((begun, may_end)) = &self.barrier {
                begun.notify_one();
                may_end.notified().await;
            }
            *self.reloaded.lock().unwrap() += 1;
            self.reloads.lock().unwrap().pop().unwrap_or(Ok(()))
        })
    }

    fn set_profile(&self, profile: Option<&str>) -> Result<(), String> {
        if profile == Some("none such") {
            return Err("there is no profile `none such`".to_owned());
        }
        self.snapshot.lock().unwrap().profile = profile.map(str::to_owned);
        Ok(())
    }

    fn requests(&self) -> Arc<Requests> {
        Arc::clone(&self.requests)
    }

    fn control(&self) -> Arc<Control> {
        Arc::clone(&self.control.lock().unwrap())
    }

    fn fleet(&self) -> Option<Membership> {
        self.ready.lock().unwrap().clone().map(|ready| Membership { ready, refused: 3 })
    }
}

pub(crate) fn is_it(model: &ModelNow, name: &str) -> bool {
    model.is_named(name)
}

/// Control with these keys. Only a configuration can contain keys.
pub(crate) fn control(keys: &[&str]) -> Arc<Control> {
    let places: Vec<String> = keys.iter().map(|key| format!("\"env:{key}\"")).collect();
    let text = format!(
        "[control]\nkeys = [{}]\n[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"\n",
        places.join(", ")
    );
    let secret = |place: &str| Ok(place.trim_start_matches("env:").to_owned());
    Config::parse(&text, &secret).unwrap().control
}

pub(crate) fn model(name: &str, gpus: &[usize]) -> ModelNow {
    ModelNow {
        kept: 0,
        name: name.to_owned(),
        aliases: vec![format!("{name}-alias")],
        adapters: vec![format!("{name}-adapter")],
        engine: "vllm",
        url: "http://127.0.0.1:8000".to_owned(),
        gpus: gpus.to_vec(),
        stage: StageName::Asleep,
        stage_s: 12.5,
        is_ready: false,
        is_starting: false,
        is_pinned: false,
        is_supervised: true,
        queued: 0,
        running: 0,
        admitted: 0,
        refused: 0,
        held_bytes: None,
        residue_bytes: None,
        can_hibernate: false,
        cannot_hibernate: None,
        host_bytes: 0,
        need_bytes: None,
        known_need_bytes: None,
        failures: 0,
        last_failure: None,
        starts: 0,
        oldest_wait_s: None,
        wake_s: None,
        start_s: None,
        leave_s: None,
        hibernate_s: None,
        resume_s: None,
        recent: Recent::default(),
        canary_kind: None,
        state_writes_failed: 0,
    }
}

pub(crate) fn snapshot() -> Snapshot {
    let ready = ModelNow {
        stage: StageName::Ready,
        is_ready: true,
        is_starting: false,
        running: 3,
        admitted: 40,
        refused: 2,
        starts: 1,
        held_bytes: Some(vec![7 << 30]),
        wake_s: Some(1.25),
        leave_s: Some(0.5),
        residue_bytes: Some(vec![1 << 30]),
        ..model("one", &[0])
    };
    let draining = ModelNow {
        stage: StageName::Draining,
        queued: 5,
        oldest_wait_s: Some(7.5),
        ..model("org/two \"q\"\\", &[0, 1])
    };
    let hibernating = ModelNow {
        stage: StageName::Hibernating,
        can_hibernate: true,
        host_bytes: 2 << 30,
        residue_bytes: Some(vec![2 << 30]),
        hibernate_s: Some(1.0),
        resume_s: Some(0.625),
        ..model("three", &[1])
    };
    Snapshot {
        uptime_s: 61.5,
        is_ending: false,
        profile: None,
        models: vec![ready, draining, hibernating],
        gpus: vec![
            GpuNow {
                gpu: 0,
                is_measured: true,
                total_bytes: Some(80 << 30),
                free_bytes: Some(9 << 30),
                reclaimable_bytes: Some(3 << 30),
                promised_bytes: 60 << 30,
                models: vec![PromiseNow { model: "one".to_owned(), bytes: 60 << 30 }],
                swapping: Swapping { recent_share: 0.5, recent_window_s: 61.5, share: 0.5, total_s: 30.75 },
                advice: Some("raise it".to_owned()),
            },
            GpuNow {
                gpu: 1,
                is_measured: true,
                total_bytes: None,
                free_bytes: None,
                reclaimable_bytes: None,
                promised_bytes: 0,
                models: Vec::new(),
                swapping: Swapping::default(),
                advice: None,
            },
        ],
        lending: Some(LentTotals {
            lent_bytes: 9 << 30,
            taken_bytes: 4 << 30,
            brought_back_bytes: 2 << 30,
            given_up_bytes: 0,
        }),
        swaps: vec![swap()],
    }
}

pub(crate) fn swap() -> Swap {
    let phases = vec![(StageName::FindingMemory, 0.2), (StageName::Waking, 1.5), (StageName::Canary, 0.3)];
    let left = LeftModel { model: "three".to_owned(), phases: vec![(StageName::FallingAsleep, 0.5)] };
    Swap {
        at_unix_ms: 1_700_000_000_000,
        model: "one".to_owned(),
        path: SwapPath::Hot,
        total_s: 2.0,
        whole_s: 2.5,
        waited_s: Some(3.0),
        phases,
        left: vec![left],
    }
}

pub(crate) fn event(seq: u64, model: &str, what: EventKind) -> Arc<ServiceEvent> {
    Arc::new(ServiceEvent { seq, at_unix_ms: 1_700_000_000_000 + seq, model: model.to_owned(), what })
}

pub(crate) fn stage(seq: u64) -> Arc<ServiceEvent> {
    event(seq, "one", EventKind::Stage { before: StageName::Asleep, before_s: 1.0, stage: StageName::Waking })
}

/// A running control.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) api: Arc<FakeApi>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) served: JoinHandle<std::io::Result<()>>,
}

pub(crate) struct Options<'a> {
    pub(crate) keys: &'a [&'a str],
    pub(crate) listen: &'a str,
    pub(crate) events_kept: usize,
    pub(crate) has_barrier: bool,
}

pub(crate) const PLAIN: Options<'static> =
    Options { keys: &[], listen: "127.0.0.1:0", events_kept: 8192, has_barrier: false };

pub(crate) async fn running(options: Options<'_>) -> Running {
    let api = Arc::new(FakeApi {
        snapshot: Mutex::new(snapshot()),
        commands: Mutex::default(),
        reloads: Mutex::default(),
        barrier: options.has_barrier.then(Default::default),
        reloaded: Mutex::default(),
        control: Mutex::new(control(options.keys)),
        requests: Arc::default(),
        events: broadcast::Sender::new(options.events_kept),
        ready: Mutex::default(),
        log: Arc::default(),
    });
    let listener = TcpListener::bind(options.listen).await.unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], listener.local_addr().unwrap().port()));
    let shutdown = CancellationToken::new();
    let served = tokio::spawn(serve(listener, Arc::<FakeApi>::clone(&api), shutdown.clone()));
    let running = Running { address, api, shutdown, served };
    // An answered request proves that events are received.
    assert_eq!(running.ask("GET /health", "", "").await.status, 200);
    running
}

impl Running {
    /// Sends a request with these header lines, which may contain another host.
    pub(crate) async fn ask(&self, what: &str, head: &str, body: &str) -> Answer {
        ask(self.address, what, head, body).await
    }

    pub(crate) async fn send(&self, text: &str) -> Answer {
        send(self.address, text).await
    }

    pub(crate) async fn follow(&self, path: &str, head: &str) -> Follower {
        let mut follower = self.followed(path, head, "text/event-stream").await;
        assert_eq!(follower.until("\n\n").await.as_deref(), Some("retry: 2000"));
        follower
    }

    /// An answer of this type that goes on.
    pub(crate) async fn followed(&self, path: &str, head: &str, kind: &str) -> Follower {
        let socket = TcpSocket::new_v4().unwrap();
        // A small buffer, so that a client that does not read soon falls behind.
        socket.set_recv_buffer_size(16 << 10).unwrap();
        let mut stream = socket.connect(self.address).await.unwrap();
        // With HTTP/1.0 the body has no framing, and ends with the connection.
        let ask = format!("GET {path} HTTP/1.0\r\nHost: {}\r\n{head}\r\n", self.address);
        stream.write_all(ask.as_bytes()).await.unwrap();
        let mut follower = Follower { stream, rest: String::new() };
        let head = follower.until("\r\n\r\n").await.expect("a head");
        assert!(head.starts_with("HTTP/1.0 200") || head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(head.to_ascii_lowercase().contains(&format!("content-type: {kind}")), "{head}");
        follower
    }

    pub(crate) fn send_event(&self, event: Arc<ServiceEvent>) {
        self.api.events.send(event).unwrap();
    }

    /// The metrics, once this one has this value.
    pub(crate) async fn metrics_when(&self, sample: &str, value: f64) -> Metrics {
        let wait = async {
            loop {
                let metrics = Metrics::of(&self.ask("GET /metrics", "", "").await.body);
                if metrics.samples.get(sample) == Some(&value) {
                    return metrics;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(STUCK, wait).await.unwrap_or_else(|_| panic!("{sample} is not {value}"))
    }
}

pub(crate) struct Follower {
    pub(crate) stream: TcpStream,
    pub(crate) rest: String,
}

impl Follower {
    /// The text before `end`; `None` if the stream ends first.
    pub(crate) async fn until(&mut self, end: &str) -> Option<String> {
        loop {
            if let Some((found, rest)) = self.rest.split_once(end) {
                let found = found.to_owned();
                self.rest = rest.to_owned();
                return Some(found);
            }
            let mut bytes = vec![0; 1 << 20];
            let read =
                tokio::time::timeout(STUCK, self.stream.read(&mut bytes)).await.expect("something comes");
            match read.unwrap() {
                0 => return None,
                count => self.rest.push_str(std::str::from_utf8(&bytes[..count]).unwrap()),
            }
        }
    }

    /// The next event: number, kind and data.
    pub(crate) async fn next(&mut self) -> Option<(Option<u64>, String, Value)> {
        loop {
            let block = self.until("\n\n").await?;
            let of = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
            let Some(data) = of("data: ") else { continue };
            let id = of("id: ").map(|id| id.parse().unwrap());
            return Some((id, of("event: ").unwrap().to_owned(), serde_json::from_str(data).unwrap()));
        }
    }

    pub(crate) async fn id(&mut self) -> u64 {
        let (id, kind, data) = self.next().await.expect("an event");
        id.unwrap_or_else(|| panic!("no event with a number: {kind} {data}"))
    }
}
