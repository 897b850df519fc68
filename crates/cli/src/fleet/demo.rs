//! A fleet on this machine: an etcd, three nodes with mock engines, two routers, and traffic. One node is killed on the
//! way, and comes back.
//!
//! Each answer is compared with the model's first one, and a single difference fails the demo.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use poorwill_rotate::client::{Client, ClientError};
use poorwill_rotate::config::Config;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::rotate::{Signals, free_ports, runtime};
use poorwill_local::failure::{CommandOutput, Failure};

const MODELS: [&str; 4] = ["amber", "birch", "cedar", "dogwood"];
const NODES: usize = 3;
const ROUTERS: usize = 2;
/// Memory of each engine while awake.
const ENGINE: &str = "64MiB";
/// Memory of each node's simulated GPU: enough for two models.
const GPU: &str = "200MiB";
/// Of nodes and controllers.
const LEASE: &str = "3s";
const CLIENTS: usize = 6;
const TOKENS: u32 = 12;
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// For a part to answer after its start.
const START_MAX: Duration = Duration::from_secs(30);
/// For a part to end after its signal.
const END_MAX: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The node that is killed.
const VICTIM: usize = 0;

#[derive(Debug, Serialize)]
pub(crate) struct FleetDemoReport {
    /// How long it ran.
    seconds: f64,
    /// All requests.
    requests: u64,
    /// Answers that were equal to the model's first one.
    right: u64,
    /// Answers that differed.
    wrong: u64,
    /// Requests that were refused or broke off, by what was said.
    failed: BTreeMap<String, u64>,
    /// From the kill of a node until each model had answered again.
    served_again_s: Option<f64>,
    #[serde(skip)]
    mismatch: Option<String>,
}

impl CommandOutput for FleetDemoReport {
    const MISMATCH: &'static str = "wrong answers";

    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        let Self { seconds, requests, right, wrong, .. } = self;
        let mut text = format!("{requests} requests in {seconds:.0} s: {right} right, {wrong} wrong\n");
        if let Some(served_again_s) = self.served_again_s {
            text +=
                &format!("a node was killed; every model had answered again after {served_again_s:.1} s\n");
        }
        for (what, times) in &self.failed {
            text += &format!("failed {times} times: {what}\n");
        }
        text
    }
}

#[derive(Debug, Default)]
struct DemoRequests {
    first: BTreeMap<(usize, usize), String>,
    right: u64,
    wrong: Vec<String>,
    failed: BTreeMap<String, u64>,
    killed_at: Option<Instant>,
    /// By model: when it first answered behind the kill.
    again: BTreeMap<usize, Instant>,
}

impl DemoRequests {
    fn add(&mut self, model: usize, prompt: usize, asked_at: Instant, answer: Result<String, ClientError>) {
        match answer {
            Err(error) => {
                *self.failed.entry(error.to_string()).or_default() += 1;
            }
            Ok(text) => {
                let first = self.first.entry((model, prompt)).or_insert_with(|| text.clone());
                if *first != text {
                    self.wrong.push(format!("{} says {text:?}, and said {first:?}", MODELS[model]));
                    return;
                }
                self.right += 1;
                if self.killed_at.is_some_and(|killed_at| asked_at >= killed_at) {
                    self.again.entry(model).or_insert_with(Instant::now);
                }
            }
        }
    }

    fn report(self, seconds: f64) -> FleetDemoReport {
        let last = self.again.values().max().filter(|_| self.again.len() == MODELS.len());
        let served_again = self.killed_at.zip(last).map(|(killed_at, last)| *last - killed_at);
        let (failed, wrong) = (self.failed.values().sum::<u64>(), self.wrong.len() as u64);
        FleetDemoReport {
            seconds,
            requests: self.right + failed + wrong,
            right: self.right,
            wrong,
            failed: self.failed,
            served_again_s: served_again.map(|time| time.as_secs_f64()),
            mismatch: self
                .wrong
                .first()
                .cloned()
                .or_else(|| (self.right == 0).then(|| "nothing was answered".into())),
        }
    }
}

/// The processes. What is dropped is ended.
struct Parts {
    program: PathBuf,
    folder: PathBuf,
    running: BTreeMap<String, Child>,
}

impl Parts {
    fn start(&mut self, name: &str, program: &Path, words: &[&str]) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::new(format!("cannot start {name}: {error}"));
        let log = File::options().create(true).append(true).open(self.folder.join(format!("{name}.log")));
        let log = log.map_err(failed)?;
        let child = Command::new(program)
            .args(words)
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(failed)?)
            .stderr(log)
            .spawn()
            .map_err(failed)?;
        self.running.insert(name.to_owned(), child);
        Ok(())
    }

    fn start_own(&mut self, name: &str, command: &str) -> Result<(), Failure> {
        let program = self.program.clone();
        self.start(name, &program, &[command, "--config", &format!("{name}.toml")])
    }

    fn kill(&mut self, name: &str) -> Result<(), Failure> {
        let Some(mut child) = self.running.remove(name) else { return Ok(()) };
        let failed = |error: io::Error| Failure::new(format!("cannot kill {name}: {error}"));
        child.kill().map_err(failed)?;
        child.wait().map(drop).map_err(failed)
    }

    /// Asks these to end, and kills what does not.
    fn end(&mut self, names: &[String]) {
        let mut children: Vec<Child> = names.iter().filter_map(|name| self.running.remove(name)).collect();
        for child in &children {
            if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                // One that has ended needs no signal.
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        let until = Instant::now() + END_MAX;
        for child in &mut children {
            while matches!(child.try_wait(), Ok(None)) {
                if Instant::now() > until {
                    // It is waited for next.
                    let _ = child.kill();
                }
                std::thread::sleep(LOOK_EVERY);
            }
        }
    }

    fn end_all(&mut self) {
        let of =
            |prefix: &str| self.running.keys().filter(|name| name.starts_with(prefix)).cloned().collect();
        let (routers, nodes, etcd): (Vec<_>, Vec<_>, Vec<_>) = (of("router"), of("node"), of("etcd"));
        // Nodes say in etcd that they leave.
        [routers, nodes, etcd].iter().for_each(|names| self.end(names));
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        self.end_all();
    }
}

/// Runs for `duration`, or until it is interrupted.
pub(super) fn run(duration: Duration) -> Result<FleetDemoReport, Failure> {
    let etcd = on_path("etcd").ok_or_else(|| {
        Failure::new(
            "there is no `etcd` on the path; install it (Debian and Ubuntu: apt install etcd-server; elsewhere: the \
             archive of its releases), and try again",
        )
    })?;
    let folder =
        tempfile::tempdir().map_err(|error| Failure::new(format!("cannot make a folder: {error}")))?;
    let program = std::env::current_exe()
        .map_err(|error| Failure::new(format!("cannot find this program to start it again: {error}")))?;
    let mut parts = Parts { program, folder: folder.path().to_owned(), running: BTreeMap::new() };
    let runtime = runtime()?;
    let outcome = runtime.block_on(serve(&mut parts, &etcd, duration));
    parts.end_all();
    runtime.shutdown_background();
    outcome
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

async fn serve(parts: &mut Parts, etcd: &Path, duration: Duration) -> Result<FleetDemoReport, Failure> {
    let mut signals = Signals::new()?;
    let ports = free_ports(2 + NODES * (2 + MODELS.len()) + 2 * ROUTERS)?;
    let ([client, peer], others) = ports.split_first_chunk().expect("there are more");
    let url = start_etcd(parts, etcd, *client, *peer)?;
    let (of_nodes, of_routers) = others.split_at(NODES * (2 + MODELS.len()));
    let fleet = format!("[fleet]\nname = \"demo\"\netcd = [\"{url}\"]\nlease = \"{LEASE}\"\n");
    start_nodes(parts, &fleet, of_nodes)?;
    let routers = start_routers(parts, &fleet, of_routers)?;
    print(&format!(
        "an etcd, {NODES} nodes of {} models each, two of which fit, and {ROUTERS} routers; all on this machine",
        MODELS.len()
    ));
    wait_until_served(&routers, parts).await?;
    print_places(parts, &routers);
    print(&format!("traffic for {:.0} s; end it with Ctrl-C", duration.as_secs_f64()));
    let began = Instant::now();
    let tally = Arc::new(Mutex::new(DemoRequests::default()));
    let clients = start_clients(&routers, &tally)?;
    let victim = format!("node{VICTIM}");
    tokio::select! {
        happened = kill_and_restart(parts, &victim, duration, &tally) => happened?,
        () = signals.end() => print("ending"),
    }
    clients.iter().for_each(JoinHandle::abort);
    if !parts.running.contains_key(&victim) {
        // So that its engines are ended.
        parts.start_own(&victim, "rotate")?;
    }
    let tally = std::mem::take(&mut *tally.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(tally.report(began.elapsed().as_secs_f64()))
}

/// Without standard error there is no place for it.
fn print(message: &str) {
    drop(writeln!(io::stderr(), "{message}"));
}

/// Starts etcd, and returns its URL.
fn start_etcd(parts: &mut Parts, etcd: &Path, client: u16, peer: u16) -> Result<String, Failure> {
    let url = format!("http://127.0.0.1:{client}");
    let peer = format!("http://127.0.0.1:{peer}");
    let words = [
        "--data-dir",
        "etcd",
        "--listen-client-urls",
        &url,
        "--advertise-client-urls",
        &url,
        "--listen-peer-urls",
        &peer,
        "--unsafe-no-fsync",
    ];
    parts.start("etcd", etcd, &words)?;
    Ok(url)
}

fn start_nodes(parts: &mut Parts, fleet: &str, ports: &[u16]) -> Result<(), Failure> {
    for (nth, ports) in ports.chunks(2 + MODELS.len()).enumerate() {
        let name = format!("node{nth}");
        write(parts, &name, &node(&parts.program, &parts.folder, &name, fleet, ports))?;
        parts.start_own(&name, "rotate")?;
    }
    Ok(())
}

/// Where a router listens.
struct RouterPlace {
    front: SocketAddr,
    /// The port of its page.
    control: u16,
}

fn start_routers(parts: &mut Parts, fleet: &str, ports: &[u16]) -> Result<Vec<RouterPlace>, Failure> {
    let mut routers = Vec::new();
    for (nth, ports) in ports.chunks(2).enumerate() {
        let name = format!("router{nth}");
        let front = SocketAddr::from((Ipv4Addr::LOCALHOST, ports[0]));
        let control = ports[1];
        let text = format!(
            "{fleet}[front]\nlisten = \"{front}\"\n[control]\nlisten = \"127.0.0.1:{control}\"\n[rules]\nkeep_min = \"5s\"\n"
        );
        write(parts, &name, &text)?;
        parts.start_own(&name, "route")?;
        routers.push(RouterPlace { front, control });
    }
    Ok(routers)
}

fn print_places(parts: &Parts, routers: &[RouterPlace]) {
    for RouterPlace { control, .. } in routers {
        print(&format!("the page: http://127.0.0.1:{control}/"));
    }
    for RouterPlace { front, .. } in routers {
        print(&format!("the models: http://{front}/v1/models"));
    }
    let config = parts.folder.join("router0.toml");
    print(&format!("the fleet: poorwill fleet status --config {}", config.display()));
}

fn start_clients(
    routers: &[RouterPlace],
    tally: &Arc<Mutex<DemoRequests>>,
) -> Result<Vec<JoinHandle<()>>, Failure> {
    let mut clients = Vec::new();
    for nth in 0..CLIENTS {
        let client = client_of(routers[nth % ROUTERS].front)?;
        clients.push(tokio::spawn(traffic(client, nth, Arc::clone(tally))));
    }
    Ok(clients)
}

/// Each takes a third of `duration`: all nodes, without this one, and with it again.
async fn kill_and_restart(
    parts: &mut Parts,
    victim: &str,
    duration: Duration,
    tally: &Mutex<DemoRequests>,
) -> Result<(), Failure> {
    sleep(duration / 3).await;
    print(&format!("{victim} is killed"));
    tally.lock().unwrap_or_else(PoisonError::into_inner).killed_at = Some(Instant::now());
    parts.kill(victim)?;
    sleep(duration / 3).await;
    print(&format!("{victim} comes back"));
    parts.start_own(victim, "rotate")?;
    sleep(duration / 3).await;
    Ok(())
}

fn write(parts: &Parts, name: &str, text: &str) -> Result<(), Failure> {
    let path = parts.folder.join(format!("{name}.toml"));
    std::fs::write(&path, text).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}

fn node(program: &Path, folder: &Path, name: &str, fleet: &str, ports: &[u16]) -> String {
    let (front, control) = (ports[0], ports[1]);
    let mut text = format!(
        "state = {}\n{fleet}node = \"{name}\"\n[front]\nlisten = \"127.0.0.1:{front}\"\n[control]\n\
         listen = \"127.0.0.1:{control}\"\n[memory]\nmeasure = \"processes\"\ngpu = \"{GPU}\"\n[every_model]\n\
         residence_min = \"500ms\"\nturn_max = \"2s\"\nslack = \"8MiB\"\nwait_max = \"30s\"\n",
        json!(folder.join(format!("{name}.state")))
    );
    for (model, port) in MODELS.iter().zip(&ports[2..]) {
        let listen = format!("127.0.0.1:{port}");
        let words = [
            &program.display().to_string(),
            "mock-engine",
            "--listen",
            &listen,
            "--model",
            model,
            "--bytes",
            ENGINE,
        ];
        text += &format!(
            "[[model]]\nname = \"{model}\"\nurl = \"http://{listen}\"\nneed = \"80MiB\"\ncommand = {}\n",
            json!(words)
        );
    }
    text
}

/// A client of a router. The model that a configuration has to have is not asked.
fn client_of(front: SocketAddr) -> Result<Client, Failure> {
    let text =
        format!("[front]\nlisten = \"{front}\"\n[[model]]\nname = \"any\"\nurl = \"http://127.0.0.1:1\"\n");
    let config = Config::parse(&text, &|_| Err("a demo has no keys".to_owned()));
    config.map(|config| Client::of(&config)).map_err(|error| Failure::new(error.to_string()))
}

/// Waits until each router serves each model.
async fn wait_until_served(routers: &[RouterPlace], parts: &mut Parts) -> Result<(), Failure> {
    let began = Instant::now();
    for RouterPlace { front, .. } in routers {
        let client = client_of(*front)?;
        for model in MODELS {
            while let Err(error) = client.complete(model, "Are you there?", 1, ANSWER_MAX).await {
                let ended = parts.running.iter_mut().find_map(|(name, child)| {
                    let status = child.try_wait().ok().flatten()?;
                    Some(format!("{name} has ended: {status}"))
                });
                let is_late = began.elapsed() > START_MAX;
                if let Some(reason) = ended.or_else(|| is_late.then(|| error.to_string())) {
                    return Err(Failure::new(format!("the fleet does not start: {reason}")));
                }
                sleep(LOOK_EVERY).await;
            }
        }
    }
    Ok(())
}

async fn traffic(client: Client, nth: usize, tally: Arc<Mutex<DemoRequests>>) {
    for turn in 0.. {
        let (model, prompt) = ((nth + turn / 4) % MODELS.len(), (turn * 7 + nth) % 5);
        let asked_at = Instant::now();
        let answer =
            client.complete(MODELS[model], &format!("Tell me of tree {prompt}."), TOKENS, ANSWER_MAX).await;
        tally.lock().unwrap_or_else(PoisonError::into_inner).add(model, prompt, asked_at, answer);
        sleep(Duration::from_millis(60)).await;
    }
}
