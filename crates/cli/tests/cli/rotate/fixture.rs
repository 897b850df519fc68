//! A rotation of mock engines in its own folder, and requests to it. A variable in the environment marks all
//! of its processes, and ends them with the test.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::http::{self, Answer};
use crate::support::{Folder, Ran, command};

/// A longer wait is a hang.
pub(crate) const HANGS: Duration = Duration::from_secs(120);
const MARK: &str = "POORWILL_TEST_ROTATION";
/// The key of a fixture that has one, where its configuration says that it is.
pub(crate) const KEY_NAME: &str = "POORWILL_TEST_KEY";
pub(crate) const KEY: &str = "a-key-of-this-test";
pub(crate) const TOKENS: u32 = 12;

pub(crate) struct Fixture {
    pub(crate) folder: Folder,
    pub(crate) front: u16,
    pub(crate) control: u16,
    pub(crate) gpu: &'static str,
    pub(crate) models: Vec<Model>,
    pub(crate) has_keys: bool,
    /// More tables of the configuration.
    pub(crate) tables: String,
    /// Whether GPUs are measured by an NVML that cannot be loaded.
    pub(crate) lacks_nvml: bool,
    /// Whether engines share the GPU as a device, and lend what they hold while they sleep.
    pub(crate) lends: bool,
}

/// A model, and its mock engine.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) port: u16,
    /// What its mock engine holds awake.
    pub(crate) bytes: &'static str,
    /// Its configured memory need.
    pub(crate) need: &'static str,
    /// Arguments of its mock engine.
    pub(crate) more: Vec<&'static str>,
    /// More of them, which a test makes up.
    pub(crate) made: Vec<String>,
    /// Lines of its table.
    pub(crate) lines: String,
    /// Whether its engine waits for the latch before it listens.
    pub(crate) is_held: bool,
    /// Whether its faults have another seed with each start.
    pub(crate) is_moody: bool,
}

impl Model {
    pub(crate) fn new(name: &'static str) -> Self {
        Self {
            name,
            port: free_port(),
            bytes: "64MiB",
            need: "80MiB",
            more: Vec::new(),
            made: Vec::new(),
            lines: String::new(),
            is_held: false,
            is_moody: false,
        }
    }

    pub(crate) fn faulty(name: &'static str, fault: &'static str) -> Self {
        Self { more: vec!["--fault", fault], ..Self::new(name) }
    }

    /// Sets the faults of the running engine.
    pub(crate) fn faults(&self, faults: &[&str]) {
        let body = json!(faults).to_string();
        let answer = http::ask(self.port, "PUT", "/mock/faults", &[], &body).unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
    }

    /// Whether its engine has injected this fault.
    pub(crate) fn has_injected(&self, fault: &str) -> bool {
        self.injected(fault) > 0
    }

    /// How often its engine has injected this fault.
    pub(crate) fn injected(&self, fault: &str) -> u64 {
        let answer = http::ask(self.port, "GET", "/metrics", &[], "").unwrap();
        let line = answer.body.lines().find(|line| line.contains(&format!("fault=\"{fault}\""))).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// What its engine says of its sleep; nothing if it is not there.
    pub(crate) fn is_sleeping(&self) -> Option<bool> {
        let answer = http::ask(self.port, "GET", "/is_sleeping", &[], "").ok()?;
        Some(serde_json::from_str::<Value>(&answer.body).unwrap()["is_sleeping"].as_bool().unwrap())
    }
}

/// A free port that no other test takes, in any process: a socket with its name reserves it while this
/// process runs. Ports that the system gives to clients are others.
pub(crate) fn free_port() -> u16 {
    static TAKEN: Mutex<(u16, Vec<UnixListener>)> = Mutex::new((20_000, Vec::new()));
    let (next, taken) = &mut *TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    for port in *next..32_000 {
        let name = SocketAddr::from_abstract_name(format!("poorwill-test-port-{port}")).unwrap();
        let Ok(mark) = UnixListener::bind_addr(&name) else { continue };
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            taken.push(mark);
            *next = port + 1;
            return port;
        }
    }
    panic!("no port is free from 20000 to 32000");
}

impl Fixture {
    /// With room for one model of two, whatever a mock engine has beside what it holds. No step of theirs is late, unless a
    /// test says so.
    pub(crate) fn of_two() -> Self {
        Self::new("128MiB", vec![Model::new("amber"), Model::new("birch")])
    }

    pub(crate) fn new(gpu: &'static str, models: Vec<Model>) -> Self {
        let folder = Folder::new();
        Self {
            folder,
            front: free_port(),
            control: free_port(),
            gpu,
            models,
            has_keys: false,
            tables: String::new(),
            lacks_nvml: false,
            lends: false,
        }
    }

    pub(crate) fn config(&self) -> String {
        let keys = if self.has_keys { format!("keys = [\"env:{KEY_NAME}\"]\n") } else { String::new() };
        let memory = match self.lacks_nvml {
            true => "measure = \"devices\"".to_owned(),
            false => format!("measure = \"processes\"\ngpu = \"{}\"", self.gpu),
        };
        let (gpus, broker) = (self.folder.join("gpus"), self.folder.join("broker.sock"));
        let (folder, lend) = match self.lends {
            true => (format!("folder = {gpus:?}\n"), format!("[lend]\nbroker = {broker:?}\n")),
            false => (String::new(), String::new()),
        };
        let device = format!("host:{}@{}", self.gpu, gpus.join("gpu0").display());
        let mut text = format!(
            "state = {:?}\n[front]\nlisten = \"127.0.0.1:{}\"\n{keys}[control]\nlisten = \"127.0.0.1:{}\"\n{keys}\
             [memory]\n{memory}\n{folder}{lend}\
             [every_model]\nresidence_min = \"50ms\"\nturn_max = \"500ms\"\nslack = \"4MiB\"\nwait_max = \"90s\"\n\
             sleep_max = \"60s\"\nrelease_max = \"60s\"\nwake_max = \"60s\"\ncanary_max = \"60s\"\nstart_max = \"60s\"\n\
             stop_max = \"60s\"\npause_min = \"100ms\"\npause_max = \"1s\"\n{}",
            self.folder.join("state"),
            self.front,
            self.control,
            self.tables,
        );
        let until_open =
            format!("until [ -e '{}' ]; do sleep 0.05; done; exec \"$0\" \"$@\"", self.latch().display());
        for Model { name, port, bytes, need, more, made, lines, is_held, is_moody } in &self.models {
            let listen = format!("127.0.0.1:{port}");
            let mut words = Vec::new();
            if *is_held {
                words.extend(["sh", "-c", &until_open]);
            }
            if *is_moody {
                words.extend(["sh", "-c", "exec \"$0\" \"$@\" --seed $$"]);
            }
            words.extend([env!("CARGO_BIN_EXE_poorwill"), "mock-engine", "--listen", &listen]);
            words.extend(["--model", name, "--bytes", bytes]);
            if self.lends {
                words.extend(["--device", &device]);
            }
            words.extend(more);
            words.extend(made.iter().map(String::as_str));
            writeln!(
                text,
                "[[model]]\nname = \"{name}\"\nurl = \"http://{listen}\"\nneed = \"{need}\"\ncommand = {}\n{lines}",
                json!(words)
            )
            .unwrap();
        }
        text
    }

    fn latch(&self) -> PathBuf {
        self.folder.join("latch")
    }

    /// Lets engines listen that are held.
    pub(crate) fn open_latch(&self) {
        fs::write(self.latch(), "").unwrap();
    }

    /// The command in this fixture.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = command(self.folder.path(), args);
        self.mark(&mut command);
        command.env(KEY_NAME, KEY).env_remove("POORWILL_LOG");
        if self.lacks_nvml {
            for name in ["libnvidia-ml.so.1", "libnvidia-ml.so"] {
                self.folder.write(name, "no library");
            }
            command.env("LD_LIBRARY_PATH", self.folder.path());
        }
        command
    }

    /// Makes whatever a command starts one of this fixture's.
    pub(crate) fn mark(&self, command: &mut Command) {
        command.env(MARK, self.folder.path()).env("TMPDIR", self.folder.path());
    }

    pub(crate) fn write(&self) {
        self.folder.write("rotation.toml", self.config());
    }

    /// Starts the rotation, and waits until operators are answered.
    pub(crate) fn start(&self, more: &[&str]) -> Rotator {
        self.start_with(&self.config(), more)
    }

    /// The same with another configuration, for the same ports.
    pub(crate) fn start_with(&self, config: &str, more: &[&str]) -> Rotator {
        self.folder.write("rotation.toml", config);
        let args = [&["rotate", "--config", "rotation.toml"], more].concat();
        Rotator::spawned(&mut self.command(&args), self.control)
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        ran(&mut self.command(args))
    }

    /// The same for a command to the rotation.
    pub(crate) fn order(&self, args: &[&str]) -> Ran {
        self.run(&[&["rotate"], args, &["--config", "rotation.toml"]].concat())
    }

    pub(crate) fn status(&self) -> Value {
        let key = format!("Bearer {KEY}");
        let answer =
            http::ask(self.control, "GET", "/rotate/status", &[("authorization", &key)], "").unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
        serde_json::from_str(&answer.body).unwrap()
    }

    /// One model of the status.
    pub(crate) fn now(&self, name: &str) -> Value {
        let status = self.status();
        let models = status["models"].as_array().unwrap();
        models.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{status}")).clone()
    }

    /// What clients get.
    pub(crate) fn complete(&self, model: &str, prompt: &str) -> Answer {
        self.ask(model, prompt).unwrap()
    }

    /// The same, where it may break off.
    pub(crate) fn ask(&self, model: &str, prompt: &str) -> io::Result<Answer> {
        let body = json!({ "model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0 });
        let key = format!("Bearer {KEY}");
        http::ask(self.front, "POST", "/v1/completions", &[("authorization", &key)], &body.to_string())
    }

    /// The text of an answer.
    pub(crate) fn say(&self, model: &str, prompt: &str) -> String {
        text_of(&self.complete(model, prompt))
    }

    /// The same where an engine may be gone, or quarantined since it is too slow: repeats until there is an answer.
    pub(crate) fn say_at_last(&self, model: &str, prompt: &str) -> String {
        let began = Instant::now();
        loop {
            let answer = self.complete(model, prompt);
            if ![502, 503].contains(&answer.status) || began.elapsed() > HANGS {
                return text_of(&answer);
            }
            sleep(Duration::from_millis(50));
        }
    }

    /// Answers of a model to some prompts, from a separate mock engine that never sleeps.
    pub(crate) fn truth(&self, model: &str, prompts: &[&str], tokens: u32) -> Vec<String> {
        let (mut child, port) = self.mock(model, &[]);
        let output = prompts.iter().map(|prompt| {
            let body = json!({ "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0 });
            text_of(&http::ask(port, "POST", "/v1/completions", &[], &body.to_string()).unwrap())
        });
        let output = output.collect();
        child.kill().unwrap();
        child.wait().unwrap();
        output
    }

    /// A mock engine outside the rotation, and its port.
    pub(crate) fn mock(&self, model: &str, more: &[&str]) -> (Child, u16) {
        let args = ["mock-engine", "--listen", "127.0.0.1:0", "--model", model, "--bytes", "1MiB"];
        let mut child = self.command(&[&args, more].concat()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (child, line.trim_end().rsplit_once(':').unwrap().1.parse().unwrap())
    }

    /// Every process of this fixture, engines and all.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let mark = format!("{MARK}={}", self.folder.path().display());
        let is_ours = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes())
        };
        let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_ours).collect()
    }

    /// The process of a model's engine, if one is written down.
    pub(crate) fn engine(&self, model: &str) -> Option<u32> {
        engine_of(&self.folder.join("state").join(format!("{model}.json")))
    }

    /// All of it has ended, and did not only get the signal.
    pub(crate) fn assert_empty(&self) {
        let pids = self.processes();
        assert!(pids.is_empty(), "processes {pids:?} are left");
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for _ in 0..200 {
            let pids = self.processes();
            if pids.is_empty() {
                return;
            }
            pids.iter().for_each(|pid| signal("KILL", *pid));
            sleep(Duration::from_millis(20));
        }
        // Another panic would hide why the test failed.
        eprintln!("processes {:?} do not end", self.processes());
    }
}

/// A rotation that runs.
pub(crate) struct Rotator {
    pub(crate) child: Child,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Rotator {
    /// Starts a service, and waits until it answers at this port.
    pub(crate) fn spawned(command: &mut Command, port: u16) -> Self {
        let mut rotator = Self::begun(command);
        let began = Instant::now();
        while http::ask(port, "GET", "/health", &[], "").is_err() {
            assert!(rotator.child.try_wait().unwrap().is_none(), "it ended: {}", rotator.log());
            assert!(began.elapsed() < HANGS, "nobody listens: {}", rotator.log());
            sleep(Duration::from_millis(20));
        }
        rotator
    }

    /// Starts a service.
    pub(crate) fn begun(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let log: Arc<Mutex<String>> = Arc::default();
        let (lines, shared) = (BufReader::new(child.stderr.take().unwrap()).lines(), Arc::clone(&log));
        let reader = thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| shared.lock().unwrap().push_str(&(line + "\n")));
        });
        Self { child, log, reader: Some(reader) }
    }

    /// Its output so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(name, self.child.id());
    }

    /// Ends it as nothing may.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Its exit code and its whole output.
    pub(crate) fn ended(mut self) -> (Option<i32>, String) {
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(began.elapsed() < HANGS, "it does not end: {}", self.log());
            sleep(Duration::from_millis(10));
        };
        self.reader.take().unwrap().join().unwrap();
        let log = self.log();
        assert!(!log.contains("panicked"), "{log}");
        (status.code(), log)
    }

    /// Asks it to end, and it does, as one that is well.
    pub(crate) fn end(self) -> String {
        self.signal("TERM");
        let (code, log) = self.ended();
        assert_eq!(code, Some(0), "{log}");
        log
    }
}

impl Drop for Rotator {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("output of the rotation:\n{}", self.log());
        }
        // One that has ended is waited for in vain.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for something that is to come.
pub(crate) fn until(rotator: &Rotator, what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < HANGS, "not so: {what}\n{}", rotator.log());
        sleep(Duration::from_millis(20));
    }
}

/// Runs a command to its end. A hanging one is killed with its fixture.
pub(crate) fn ran(command: &mut Command) -> Ran {
    ended(command.spawn().unwrap())
}

/// What a command has done, once it has ended.
pub(crate) fn ended(child: Child) -> Ran {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(child.wait_with_output()));
    Ran::from(receiver.recv_timeout(HANGS).expect("the command hangs").unwrap())
}

pub(crate) fn text_of(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{answer:?}");
    let body: Value = serde_json::from_str(&answer.body).unwrap();
    body["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer:?}")).to_owned()
}

/// One that is not there is not signalled.
pub(crate) fn signal(name: &str, pid: u32) {
    let _ =
        Command::new("sh").args(["-c", "kill -s \"$0\" \"$1\" 2>/dev/null", name, &pid.to_string()]).status();
}

/// Whether a process on this machine has unread bytes from this port.
pub(crate) fn has_unread_from(port: u16) -> bool {
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    // Of each socket: its number, its address, the other's, its state, and what waits to be sent and to be read.
    table.lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let unread = fields[4].rsplit_once(':').map(|(_, unread)| u64::from_str_radix(unread, 16).unwrap());
        fields[2].ends_with(&format!(":{port:04X}")) && unread > Some(0)
    })
}

/// The process that a rotation has written down in such a file of its state.
pub(crate) fn engine_of(file: &Path) -> Option<u32> {
    let record: Value = serde_json::from_str(&fs::read_to_string(file).ok()?).ok()?;
    record["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
}

/// Whether a folder has nothing in it.
pub(crate) fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}
