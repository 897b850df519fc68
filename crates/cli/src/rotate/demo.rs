//! A rotation of three mock engines on a simulated GPU, with traffic and the status page.
//!
//! Two of the three fit at a time, and two of them hibernate. One injects faults in turn: it reports sleep and keeps its memory, wakes and
//! generates gibberish, or crashes while it wakes. Each answer is compared with the model's first one, and a single
//! difference fails the demo.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use poorwill::chain;
use poorwill_mock_engine::Fault;
use poorwill_net::descriptors;
use poorwill_rotate::client::{Client, ClientError};
use poorwill_rotate::config::Config;
use poorwill_rotate::policy::StageName;
use poorwill_rotate::run;
use poorwill_rotate::service::{EventKind, ServiceEvent, Swap};
use serde::Serialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{sleep, timeout};

use super::opening::runtime;
use super::signals::Signals;
use poorwill_local::failure::{CommandOutput, Failure};

const MODELS: [&str; 3] = ["amber", "birch", "cedar"];
/// Memory of each engine while awake.
const ENGINE: &str = "192MiB";
/// The model that injects faults, by its place in `MODELS`.
const FAULTY: usize = 2;
/// What each still holds asleep, until it hibernates.
const RESIDUE: &str = "24MiB";
/// The model that does not hibernate, by its place in `MODELS`.
const NO_HIBERNATION: usize = 1;
/// What it does after it becomes ready, in turn. A fault ends in a new engine, so a sound turn shows a wake.
const FAULTS: [Option<Fault>; 6] =
    [Some(Fault::KeepsMemory), None, Some(Fault::Gibberish), None, Some(Fault::CrashesInWake), None];
const FAULT_SET_MAX: Duration = Duration::from_secs(5);
/// Memory of the simulated GPU: enough for two models.
const GPU: &str = "560MiB";
const CLIENTS: usize = 6;
const TOKENS: u32 = 12;
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Refusals by the service. A refusal by an engine is an error: it should not have got the request.
const REFUSALS: [&str; 6] =
    ["queue_full", "waited_too_long", "quarantined", "no_room", "shutting_down", "aborted"];
/// With more requests every model must have been active.
const MANY: u64 = 200;
/// Requests of a client to one model before the next.
const STAYS: usize = 4;

#[derive(Debug, Serialize)]
pub(crate) struct RotateDemoReport {
    /// How long it ran.
    seconds: f64,
    /// All requests.
    requests: u64,
    /// Answers that were equal to the model's first one.
    right: u64,
    /// Answers that differed.
    wrong: u64,
    /// Refused by the service, with a reason.
    refused: u64,
    /// Swaps in which the engine woke with its weights.
    swaps_hot: usize,
    /// Swaps in which an engine was started.
    swaps_cold: usize,
    /// Of hot swaps.
    hot_median_s: Option<f64>,
    /// Of cold swaps.
    cold_median_s: Option<f64>,
    /// How often an engine was taken off its GPU.
    hibernations: u64,
    /// Of swaps that began with it.
    resume_median_s: Option<f64>,
    /// Faults that the service detected, by kind.
    found: BTreeMap<String, u64>,
    #[serde(skip)]
    mismatch: Option<String>,
}

impl CommandOutput for RotateDemoReport {
    const MISMATCH: &'static str = "wrong answers";

    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        let median = |seconds: Option<f64>| seconds.map_or_else(|| "–".to_owned(), |s| format!("{s:.3} s"));
        let mut text = format!(
            "{} requests in {:.0} s: {} right, {} refused with a reason, {} wrong\n\
             {} swaps by waking (median {}), {} by starting an engine (median {})\n",
            self.requests,
            self.seconds,
            self.right,
            self.refused,
            self.wrong,
            self.swaps_hot,
            median(self.hot_median_s),
            self.swaps_cold,
            median(self.cold_median_s),
        );
        text += &format!(
            "{} times an engine was taken off its GPU, and put back in {} (median)\n",
            self.hibernations,
            median(self.resume_median_s),
        );
        for (what, times) in &self.found {
            text += &format!("detected {times} times: {what}\n");
        }
        text
    }
}

#[derive(Debug, Default)]
struct Tally {
    first: BTreeMap<(usize, usize), String>,
    answered: BTreeSet<usize>,
    requests: u64,
    right: u64,
    refused: u64,
    wrong: Vec<String>,
    found: BTreeMap<String, u64>,
    swaps: Vec<Swap>,
    hibernations: u64,
}

/// Runs for `duration`, or until it is interrupted.
pub(super) fn run(duration: Duration, json: bool) -> Result<RotateDemoReport, Failure> {
    let folder =
        tempfile::tempdir().map_err(|error| Failure::new(format!("cannot make a folder: {error}")))?;
    let ports = free_ports(MODELS.len())?;
    let config = config(folder.path(), &ports)?;
    let faulty = ports[FAULTY];
    descriptors::raise()
        .map_err(|error| Failure::new(format!("cannot raise the limit of file descriptors: {error}")))?;
    let runtime = runtime()?;
    let outcome = runtime.block_on(serve(config, faulty, duration, json));
    runtime.shutdown_background();
    outcome
}

fn config(state: &Path, ports: &[u16]) -> Result<Config, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::new(format!("cannot find this program to start it again: {error}")))?;
    let processes = toml_string(&state.join("processes").display().to_string());
    let journal = toml_string(&state.join("journal").display().to_string());
    let helper = toml_string(&program.display().to_string());
    let mut text = format!(
        "state = {}\n[front]\nlisten = \"127.0.0.1:0\"\n[control]\nlisten = \"127.0.0.1:0\"\n[memory]\n\
         measure = \"processes\"\ngpu = \"{GPU}\"\n[every_model]\nresidence_min = \"500ms\"\nturn_max = \"2s\"\n\
         slack = \"24MiB\"\nwait_max = \"30s\"\nsleep_max = \"5s\"\nrelease_max = \"3s\"\nwake_max = \"5s\"\n\
         canary_max = \"5s\"\nstart_max = \"30s\"\nstop_max = \"5s\"\npause_min = \"1s\"\npause_max = \"10s\"\n\
         [hibernate]\nafter = \"0s\"\nwait_max = \"2s\"\nhelper = [{helper}, \"hibernate\", \"--serve\", \"--processes\", {processes}, \
         \"--journal\", {journal}]\n",
        toml_string(&state.display().to_string()),
    );
    for (nth, (name, port)) in MODELS.into_iter().zip(ports).enumerate() {
        let mut command = vec![program.display().to_string(), "mock-engine".to_owned()];
        for (option, value) in [
            ("--listen", format!("127.0.0.1:{port}")),
            ("--model", name.to_owned()),
            ("--bytes", ENGINE.to_owned()),
            ("--residue", RESIDUE.to_owned()),
        ] {
            command.extend([option.to_owned(), value]);
        }
        let command: Vec<String> = command.iter().map(|word| toml_string(word)).collect();
        text += &format!(
            "[[model]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{port}\"\nneed = \"240MiB\"\ncommand = [{}]\n\
             environment = {{ POORWILL_HOST_PROCESSES = {processes} }}\nrules = {{ hibernates = {} }}\n",
            command.join(", "),
            nth != NO_HIBERNATION,
        );
    }
    Config::parse(&text, &|_| Err("a demo has no keys".to_owned()))
        .map_err(|error| Failure::new(chain(&error)))
}

fn toml_string(text: &str) -> String {
    serde_json::Value::String(text.to_owned()).to_string()
}

/// Free at this moment.
pub(crate) fn free_ports(count: usize) -> Result<Vec<u16>, Failure> {
    let failed = |error: io::Error| Failure::new(format!("no port is free on this computer: {error}"));
    let all: Result<Vec<TcpListener>, io::Error> =
        (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect();
    let port = |listener: &TcpListener| listener.local_addr().map(|address| address.port());
    all.and_then(|all| all.iter().map(port).collect()).map_err(failed)
}

async fn serve(
    mut config: Config,
    faulty: u16,
    duration: Duration,
    json: bool,
) -> Result<RotateDemoReport, Failure> {
    let mut signals = Signals::new()?;
    let running = run::begin(config.clone(), None).await?;
    // Without standard error there is no place for it.
    let print = |message: &str| drop(writeln!(io::stderr(), "{message}"));
    print(&format!(
        "three mock engines on one simulated GPU of {GPU}, two of which fit; {} injects faults",
        MODELS[FAULTY]
    ));
    print(&format!("the page: http://{}/", running.control()));
    print(&format!("the models: http://{}/v1/models", running.front()));
    print(&format!("traffic for {:.0} s; end it with Ctrl-C", duration.as_secs_f64()));
    let began = Instant::now();
    let tally = Arc::new(Mutex::new(Tally::default()));
    let follower = tokio::spawn(follow(running.service().events(), Arc::clone(&tally), json));
    let injector = tokio::spawn(inject(running.service().events(), faulty));
    set_addresses(&mut config, running.front(), running.control());
    let client = Arc::new(Client::of(&config));
    let clients: Vec<_> =
        (0..CLIENTS).map(|nth| tokio::spawn(traffic(Arc::clone(&client), nth, Arc::clone(&tally)))).collect();
    tokio::select! {
        () = sleep(duration) => {}
        () = signals.end() => print("ending"),
    }
    clients.iter().for_each(tokio::task::JoinHandle::abort);
    let seconds = began.elapsed().as_secs_f64();
    tokio::select! {
        () = running.end(Duration::from_secs(10), true) => {}
        () = signals.end() => return Err(Failure::new("ended at once: mock engines may be left running")),
    }
    follower.abort();
    injector.abort();
    let tally = std::mem::take(&mut *tally.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(tally.outcome(seconds))
}

fn set_addresses(config: &mut Config, front: SocketAddr, control: SocketAddr) {
    Arc::make_mut(&mut config.front).listen = front;
    Arc::make_mut(&mut config.control).listen = control;
}

/// Sends a few requests to one model, then to the next.
async fn traffic(client: Arc<Client>, nth: usize, tally: Arc<Mutex<Tally>>) {
    for turn in 0.. {
        let model = (nth + turn / STAYS) % MODELS.len();
        let prompt = (turn * 7 + nth) % 5;
        let answer =
            client.complete(MODELS[model], &format!("Tell me of tree {prompt}."), TOKENS, ANSWER_MAX).await;
        tally.lock().unwrap_or_else(PoisonError::into_inner).add(model, prompt, answer);
        sleep(Duration::from_millis(60)).await;
    }
}

/// The next event that was not lost; `None` at the end.
async fn next(events: &mut Receiver<Arc<ServiceEvent>>) -> Option<Arc<ServiceEvent>> {
    loop {
        match events.recv().await {
            Ok(event) => return Some(event),
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return None,
        }
    }
}

/// Sets the next fault each time the faulty model becomes ready. A new engine has none, and forgets its seed's past,
/// so chance in the engine would repeat itself.
async fn inject(mut events: Receiver<Arc<ServiceEvent>>, port: u16) {
    let mut turns = FAULTS.into_iter().cycle();
    while let Some(event) = next(&mut events).await {
        if event.model != MODELS[FAULTY] || !matches!(event.what, EventKind::Ready { .. }) {
            continue;
        }
        let fault = turns.next().flatten();
        let failure = match timeout(FAULT_SET_MAX, set_fault(port, fault)).await {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        let name = fault.map_or("no fault", Fault::name);
        let _ = writeln!(io::stderr(), "  {}: cannot inject {name}: {failure}", event.model);
    }
}

/// Replaces the faults of the mock engine at this port.
async fn set_fault(port: u16, fault: Option<Fault>) -> io::Result<()> {
    let names: Vec<&str> = fault.iter().map(|fault| fault.name()).collect();
    let body = serde_json::to_string(&names)?;
    let head = format!(
        "PUT /mock/faults HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    match answer.lines().next() {
        Some(line) if line.contains(" 200 ") => Ok(()),
        line => Err(io::Error::other(format!("it answered `{}`", line.unwrap_or_default()))),
    }
}

async fn follow(mut events: Receiver<Arc<ServiceEvent>>, tally: Arc<Mutex<Tally>>, json: bool) {
    while let Some(event) = next(&mut events).await {
        let (key, message) = match &event.what {
            EventKind::Failed { stage, reason } => {
                (Some(format!("{} failed in {stage}", event.model)), reason.clone())
            }
            EventKind::Shortfall { expected_bytes, freed_bytes, .. } => (
                Some(format!("{} reported sleep, and kept its memory", event.model)),
                format!("{freed_bytes} of {expected_bytes} bytes came back"),
            ),
            EventKind::Quarantined { for_s, .. } => {
                (Some(format!("{} was quarantined", event.model)), format!("for {for_s:.0} s"))
            }
            EventKind::Hibernated { .. } => {
                tally.lock().unwrap_or_else(PoisonError::into_inner).hibernations += 1;
                (None, "hibernates".to_owned())
            }
            EventKind::Ready { swap } => {
                tally.lock().unwrap_or_else(PoisonError::into_inner).swaps.push(swap.clone());
                (None, format!("ready, {} in {:.3} s", swap.path, swap.total_s))
            }
            _ => continue,
        };
        if !json {
            let _ =
                writeln!(io::stderr(), "  {}: {}{message}", event.model, key.as_ref().map_or("", |_| "! "));
        }
        if let Some(key) = key {
            *tally.lock().unwrap_or_else(PoisonError::into_inner).found.entry(key).or_default() += 1;
        }
    }
}

impl Tally {
    fn add(&mut self, model: usize, prompt: usize, answer: Result<String, ClientError>) {
        self.requests += 1;
        match answer {
            Ok(answer) => {
                let first = self.first.entry((model, prompt)).or_insert_with(|| answer.clone());
                if *first == answer {
                    self.right += 1;
                    self.answered.insert(model);
                } else {
                    self.wrong.push(format!("{} answered {answer:?}, and {first:?} before", MODELS[model]));
                }
            }
            Err(ClientError::Refused { code: Some(code), .. }) if REFUSALS.contains(&code.as_str()) => {
                self.refused += 1;
            }
            // Neither a right answer nor a refusal by the service.
            Err(error) => self.wrong.push(chain(&error)),
        }
    }

    fn outcome(self, seconds: f64) -> RotateDemoReport {
        let of = |path: &str| {
            let mut times: Vec<f64> = self
                .swaps
                .iter()
                .filter(|swap| swap.path.as_str() == path)
                .map(|swap| swap.total_s)
                .collect();
            times.sort_by(f64::total_cmp);
            (times.len(), times.get(times.len() / 2).copied())
        };
        let ((swaps_hot, hot_median_s), (swaps_cold, cold_median_s)) = (of("hot"), of("cold"));
        let mut resumes: Vec<f64> = self
            .swaps
            .iter()
            .flat_map(|swap| &swap.phases)
            .filter_map(|(stage, seconds)| (*stage == StageName::Resuming).then_some(*seconds))
            .collect();
        resumes.sort_by(f64::total_cmp);
        let wrong = u64::try_from(self.wrong.len()).unwrap_or(u64::MAX);
        let mismatch = match self.wrong.first() {
            Some(first) => Some(format!("{wrong} of {}: {first}", self.requests)),
            None if self.right == 0 => Some(format!("not one of {} requests was answered", self.requests)),
            None if self.requests > MANY && (swaps_hot == 0 || self.answered.len() < MODELS.len()) => {
                Some("not every model was active".to_owned())
            }
            None => None,
        };
        RotateDemoReport {
            seconds,
            requests: self.requests,
            right: self.right,
            wrong,
            refused: self.refused,
            swaps_hot,
            swaps_cold,
            hot_median_s,
            cold_median_s,
            hibernations: self.hibernations,
            resume_median_s: resumes.get(resumes.len() / 2).copied(),
            found: self.found,
            mismatch,
        }
    }
}
