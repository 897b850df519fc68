//! Real etcd servers: one member or three, which a test kills, holds still and isolates.
//!
//! They keep their state in a temporary folder, and end with the test, also if that panics or is killed.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

use crate::child::OwnedChild;
use crate::proxy::Proxy;
use crate::watchdog::TEST_TIMEOUT;

/// Elections take parts of a second, and no write waits for the disk.
const FLAGS: [&str; 3] = ["--heartbeat-interval=20", "--election-timeout=200", "--unsafe-no-fsync"];
const LOOK: Duration = Duration::from_millis(20);
/// How long a member may take for an answer. Only a member that holds still takes as long.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Ends its process once this one has ended, however it does.
const GUARD: &str = "read -r line || kill -s KILL \"$1\"";

/// The members of an etcd. They end when this is dropped.
#[derive(Debug)]
pub struct Servers {
    folder: TempDir,
    flags: Vec<String>,
    /// Of clients' URLs.
    scheme: &'static str,
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    client: Port,
    peer: Port,
    /// What the other members reach it by.
    of_peers: Proxy,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    server: OwnedChild,
    guard: OwnedChild,
    to_guard: Option<ChildStdin>,
}

/// A port that no other test takes, in any process, as long as this lives.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _mark: UnixListener,
}

impl Port {
    /// A socket with its name reserves it. Ports that the system gives to clients are others.
    ///
    /// # Panics
    /// If none is free.
    #[must_use]
    pub fn free() -> Self {
        static NEXT: Mutex<u16> = Mutex::new(10_000);
        let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
        for number in *next..20_000 {
            let name = SocketAddr::from_abstract_name(format!("poorwill-test-port-{number}")).unwrap();
            let Ok(mark) = UnixListener::bind_addr(&name) else { continue };
            if TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok() {
                *next = number + 1;
                return Self { number, _mark: mark };
            }
        }
        panic!("no port is free from 10000 to 20000");
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    fn url(&self, scheme: &str) -> String {
        format!("{scheme}://127.0.0.1:{}", self.number)
    }
}

impl Servers {
    /// One member, or `None` if there is no etcd on this machine: then the test says that it is skipped.
    ///
    /// # Panics
    /// If it does not start, or is missing in CI.
    #[must_use]
    pub fn one() -> Option<Self> {
        Self::start(1, &[])
    }

    /// Three members; see [`one`](Self::one).
    ///
    /// # Panics
    /// If one does not start, or etcd is missing in CI.
    #[must_use]
    pub fn three() -> Option<Self> {
        Self::start(3, &[])
    }

    /// So many members with more flags; see [`one`](Self::one). With `--cert-file=`, clients speak TLS to them, and they are
    /// not waited for until they serve, only until they listen.
    ///
    /// # Panics
    /// If one does not start, or etcd is missing in CI.
    #[must_use]
    pub fn start(members: usize, flags: &[&str]) -> Option<Self> {
        if is_missing() {
            return None;
        }
        let member = |_| {
            let (client, peer) = (Port::free(), Port::free());
            let of_peers = Proxy::to(peer.number);
            Member { client, peer, of_peers, running: None }
        };
        let has_tls = flags.iter().any(|flag| flag.starts_with("--cert-file="));
        let scheme = if has_tls { "https" } else { "http" };
        let flags = FLAGS.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
        let folder = TempDir::with_prefix("poorwill-etcd-").unwrap();
        let mut servers = Self { folder, flags, scheme, members: (0..members).map(member).collect() };
        for member in 0..members {
            servers.spawn(member);
        }
        for member in 0..members {
            servers.await_healthy(member);
        }
        Some(servers)
    }

    /// Where clients reach each of them.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        self.members.iter().map(|member| member.client.url(self.scheme)).collect()
    }

    /// The port of a member, for a [`Proxy`].
    #[must_use]
    pub fn port(&self, member: usize) -> u16 {
        self.members[member].client.number
    }

    /// Ends a member as by `kill -9`.
    pub fn kill(&mut self, member: usize) {
        self.members[member].running = None;
    }

    /// Starts a member again that was killed, with its state, and waits until it is healthy.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self, member: usize) {
        self.kill(member);
        self.spawn(member);
        self.await_healthy(member);
    }

    /// Ends all, and starts them with no state.
    ///
    /// # Panics
    /// If one does not start.
    pub fn lose_all(&mut self) {
        let all = 0..self.members.len();
        for member in all.clone() {
            self.kill(member);
            fs::remove_dir_all(self.state(member)).unwrap();
        }
        for member in all.clone() {
            self.spawn(member);
        }
        for member in all {
            self.await_healthy(member);
        }
    }

    /// Keeps what the only member has, which is started again for it.
    ///
    /// # Panics
    /// If it does not start.
    pub fn save(&mut self) {
        self.copied("saved", |state, saved| (state, saved));
    }

    /// Has the only member be as it was when it was saved, as a restore does.
    ///
    /// # Panics
    /// If it was not saved, or does not start.
    pub fn restore(&mut self) {
        self.copied("saved", |state, saved| (saved, state));
    }

    fn copied(&mut self, name: &str, order: impl Fn(PathBuf, PathBuf) -> (PathBuf, PathBuf)) {
        assert_eq!(self.members.len(), 1);
        self.kill(0);
        let (from, to) = order(self.state(0), self.folder.path().join(name));
        let _none = fs::remove_dir_all(&to);
        copy_folder(&from, &to).unwrap();
        self.spawn(0);
        self.await_healthy(0);
    }

    /// Holds a member still, and waits until it is.
    ///
    /// # Panics
    /// If it was killed.
    pub fn hold(&self, member: usize) {
        self.signal(member, Signal::STOP);
        let stat = format!("/proc/{}/stat", self.pid(member));
        let is_still = || {
            let stat = fs::read_to_string(&stat).unwrap();
            stat.rsplit_once(')').unwrap().1.trim_start().starts_with('T')
        };
        await_that("a member holds still", is_still);
    }

    /// Lets a member go on that was held.
    ///
    /// # Panics
    /// If it was killed.
    pub fn go_on(&self, member: usize) {
        self.signal(member, Signal::CONT);
    }

    /// Cuts a member off from the others. Clients reach it.
    pub fn isolate(&self, member: usize) {
        // So does a member say who it is.
        let from_it = format!("X-Server-From: {:x}", self.id(member));
        for (at, other) in self.members.iter().enumerate() {
            if at == member { other.of_peers.hold() } else { other.of_peers.hold_those_with(&[&from_it]) }
        }
    }

    /// Ends all isolation.
    pub fn rejoin(&self) {
        for member in &self.members {
            // What was held is old.
            member.of_peers.cut_once();
        }
    }

    /// The member that leads, once those that answer agree on one of them.
    ///
    /// # Panics
    /// If they never do.
    #[must_use]
    pub fn leader(&self) -> usize {
        let mut leader = None;
        await_that("a member leads", || {
            let said: Vec<(usize, String, String)> = (0..self.members.len())
                .filter_map(|member| {
                    let status = self.try_post(member, "/v3/maintenance/status", "{}", "").ok()?;
                    Some((member, field(&status, "member_id")?, field(&status, "leader")?))
                })
                .collect();
            let leads = |(_, id, _): &&(usize, String, String)| said.iter().all(|(_, _, leads)| leads == id);
            leader = said.iter().find(leads).map(|(member, ..)| *member);
            leader.is_some()
        });
        leader.unwrap()
    }

    /// A call of etcd's JSON gateway: what it answers, an error or not.
    ///
    /// # Panics
    /// If the member does not answer.
    #[must_use]
    pub fn post(&self, member: usize, path: &str, body: &str) -> String {
        self.try_post(member, path, body, "").unwrap()
    }

    /// Writes a key, as an operator could.
    ///
    /// # Panics
    /// If the first member does not take it.
    pub fn put(&self, key: &str, value: &str) {
        let encoded = |text: &str| STANDARD.encode(text);
        let body = format!(r#"{{"key":"{}","value":"{}"}}"#, encoded(key), encoded(value));
        let answer = self.post(0, "/v3/kv/put", &body);
        assert!(answer.contains("revision"), "{answer}");
    }

    /// Has it ask for users: `root`, and `poor`, whose role permits what is below `/poorwill/`. Both have this password.
    ///
    /// # Panics
    /// If it does not.
    pub fn enable_users(&self, password: &str) {
        let range = json!({
            "permType": "READWRITE", "key": STANDARD.encode("/poorwill/"), "range_end": STANDARD.encode("/poorwill0"),
        });
        for (call, body) in [
            ("user/add", json!({ "name": "root", "password": password })),
            ("role/add", json!({ "name": "root" })),
            ("user/grant", json!({ "user": "root", "role": "root" })),
            ("user/add", json!({ "name": "poor", "password": password })),
            ("role/add", json!({ "name": "poorwill" })),
            ("role/grant", json!({ "name": "poorwill", "perm": range })),
            ("user/grant", json!({ "user": "poor", "role": "poorwill" })),
            ("enable", json!({})),
        ] {
            let answer = self.post(0, &format!("/v3/auth/{call}"), &body.to_string());
            assert!(!answer.contains("\"error\""), "{call}: {answer}");
        }
    }

    /// As [`post`](Self::post), by `root`.
    ///
    /// # Panics
    /// If this is not its password.
    #[must_use]
    pub fn post_as_root(&self, password: &str, path: &str, body: &str) -> String {
        let root = json!({ "name": "root", "password": password }).to_string();
        let answer = self.post(0, "/v3/auth/authenticate", &root);
        let token = field(&answer, "token").unwrap_or_else(|| panic!("no token: {answer}"));
        self.try_post(0, path, body, &format!("Authorization: {token}\r\n")).unwrap()
    }

    fn try_post(&self, member: usize, path: &str, body: &str, header: &str) -> io::Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port(member)))?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        let length = body.len();
        write!(stream, "POST {path} HTTP/1.0\r\n{header}Content-Length: {length}\r\n\r\n{body}")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (_, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(body.to_owned())
    }

    fn id(&self, member: usize) -> u64 {
        let status = self.post(member, "/v3/maintenance/status", "{}");
        field(&status, "member_id").unwrap().parse().unwrap()
    }

    fn state(&self, member: usize) -> PathBuf {
        self.folder.path().join(format!("m{member}"))
    }

    fn pid(&self, member: usize) -> u32 {
        self.members[member].running.as_ref().expect("it runs").server.id()
    }

    fn signal(&self, member: usize, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.pid(member)).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    fn spawn(&mut self, member: usize) {
        let name = |at: usize| format!("m{at}");
        let all = self.members.iter().enumerate();
        let all: Vec<String> = all.map(|(at, it)| format!("{}={}", name(at), it.of_peers.url())).collect();
        let Member { client, peer, of_peers, .. } = &self.members[member];
        let log = File::options().create(true).append(true).open(self.log(member)).unwrap();
        let mut command = Command::new("etcd");
        command.args(["--name", &name(member), "--data-dir"]).arg(self.state(member));
        let (client, peer) = (client.url(self.scheme), peer.url("http"));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &of_peers.url()]);
        command.args(["--initial-cluster", &all.join(","), "--logger=zap", "--log-outputs=stderr"]);
        command.args(&self.flags).env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        // Ctrl-C ends it by the guard.
        let server = OwnedChild::start(command.process_group(0));
        let mut guard = Command::new("sh");
        guard.args(["-c", GUARD, "sh", &server.id().to_string()]).process_group(0);
        let mut guard = OwnedChild::start(guard.stdin(Stdio::piped()).stdout(Stdio::null()));
        let to_guard = guard.stdin.take();
        self.members[member].running = Some(Running { server, guard, to_guard });
    }

    fn log(&self, member: usize) -> PathBuf {
        self.folder.path().join(format!("m{member}.log"))
    }

    fn await_healthy(&mut self, member: usize) {
        let started = Instant::now();
        // It serves a read that a majority has agreed to.
        let read = r#"{"key": "YQ=="}"#;
        let serves = |servers: &Self| match servers.scheme {
            "https" => TcpStream::connect((Ipv4Addr::LOCALHOST, servers.port(member))).is_ok(),
            _ => {
                let answer = servers.try_post(member, "/v3/kv/range", read, "");
                answer.is_ok_and(|answer| answer.contains("revision"))
            }
        };
        while !serves(self) {
            let running = self.members[member].running.as_mut().expect("it was started");
            let ended = running.server.try_wait().unwrap();
            if ended.is_some() || started.elapsed() > TEST_TIMEOUT {
                let log = fs::read_to_string(self.log(member)).unwrap_or_default();
                panic!("etcd does not start ({ended:?}):\n{log}");
            }
            thread::sleep(LOOK);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The guard ends by the line, so that it kills nothing that has the same number later.
        let _ = self.to_guard.take().map(|mut guard| writeln!(guard));
        let _ = self.guard.wait();
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Whether there is no etcd on this machine, which the test says.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), &to)?;
        }
    }
    Ok(())
}

fn is_missing() -> bool {
    let found = Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if found.is_ok() {
        return false;
    }
    let thread = thread::current();
    let why = "there is no etcd; install it (Debian: etcd-server)";
    assert!(std::env::var_os("CI").is_none(), "{why}");
    // Not by the macro, whose output is kept from those who look.
    let _ = writeln!(io::stderr(), "{}: skipped: {why}", thread.name().unwrap_or("etcd"));
    true
}

/// The text of a field of JSON, where it comes first.
fn field(json: &str, name: &str) -> Option<String> {
    let (_, rest) = json.split_once(&format!("\"{name}\":\""))?;
    Some(rest.split_once('"')?.0.to_owned())
}

fn await_that(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < TEST_TIMEOUT, "{what}: not after {:?}", started.elapsed());
        thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PUT: (&str, &str) = ("/v3/kv/put", r#"{"key": "YQ==", "value": "Yg=="}"#);
    const GET: (&str, &str) = ("/v3/kv/range", r#"{"key": "YQ=="}"#);

    #[test]
    fn a_member_keeps_its_state_until_it_is_lost() {
        let Some(mut servers) = Servers::one() else { return };
        let _ = servers.post(0, PUT.0, PUT.1);
        servers.restart(0);
        assert!(servers.post(0, GET.0, GET.1).contains("Yg=="));
        servers.lose_all();
        assert!(!servers.post(0, GET.0, GET.1).contains("Yg=="));
    }

    #[test]
    fn another_member_leads_when_the_leader_is_gone() {
        let Some(mut servers) = Servers::three() else { return };
        let first = servers.leader();
        servers.kill(first);
        let second = servers.leader();
        assert_ne!(second, first);
        servers.restart(first);
        servers.hold(second);
        servers.go_on(second);
        let _ = servers.leader();
    }

    #[test]
    fn an_isolated_member_knows_nothing_new() {
        let Some(servers) = Servers::three() else { return };
        let alone = servers.leader();
        servers.isolate(alone);
        let refused = servers.post(alone, PUT.0, PUT.1);
        assert!(refused.contains("error"), "{refused}");
        let other = (alone + 1) % 3;
        await_that("the others elect one", || servers.post(other, PUT.0, PUT.1).contains("revision"));
        let local = r#"{"key": "YQ==", "serializable": true}"#;
        assert!(!servers.post(alone, GET.0, local).contains("Yg=="));
        servers.rejoin();
        await_that("it learns of it", || servers.post(alone, GET.0, local).contains("Yg=="));
    }

    #[test]
    fn servers_end_with_their_test() {
        if crate::child::role().is_some() {
            let Some(servers) = Servers::one() else { return };
            println!("pid {}", servers.pid(0));
            kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        }
        if is_missing() {
            return;
        }
        let output = crate::child::command("is killed", &[]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let pid = said.lines().find_map(|line| line.split_once("pid ")).expect("it says it").1.to_owned();
        let stat = format!("/proc/{pid}/stat");
        // Who takes it in then may leave it a zombie.
        await_that("it ends", || fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z ")));
    }
}
