//! A store in a thread of the test, which does what a test has an etcd do. A store that is killed has lost its data.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use poorwill_fleet::etcd::User;
use poorwill_fleet::store::{Lock, StoreLimits, StoreService, precedence};
use poorwill_net::listener::bind;
use poorwill_net::tls::ServerTls;
use poorwill_testkit::etcd::Port;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

/// A store, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Servers {
    port: Port,
    settings: Settings,
    running: Option<Running>,
    /// What it waits for while it is held still.
    held: Mutex<Option<mpsc::Sender<()>>>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    pub(crate) user: Option<User>,
    pub(crate) tls: Option<ServerTls>,
    pub(crate) limits: StoreLimits,
}

#[derive(Debug)]
struct Running {
    runtime: Handle,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Servers {
    #[allow(clippy::unnecessary_wraps, reason = "there may be no etcd")]
    pub(crate) fn one() -> Option<Self> {
        Some(Self::with(Settings::default()))
    }

    pub(crate) fn with(settings: Settings) -> Self {
        let mut servers = Self { port: Port::free(), settings, running: None, held: Mutex::default() };
        servers.restart(0);
        servers
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        let scheme = if self.settings.tls.is_some() { "https" } else { "http" };
        vec![format!("{scheme}://127.0.0.1:{}", self.port.number())]
    }

    pub(crate) fn port(&self, _: usize) -> u16 {
        self.port.number()
    }

    pub(crate) fn kill(&mut self, _: usize) {
        self.go_on(0);
        self.running = None;
    }

    pub(crate) fn restart(&mut self, member: usize) {
        self.kill(member);
        self.running = Some(Running::start(self.port.number(), self.settings.clone()));
    }

    pub(crate) fn lose_all(&mut self) {
        self.restart(0);
    }

    pub(crate) fn hold(&self, _: usize) {
        let (go_on, waits) = mpsc::channel();
        let (is_held, holds) = mpsc::channel();
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(go_on);
        // Its runtime has one thread.
        self.running.as_ref().unwrap().runtime.spawn(async move {
            is_held.send(()).unwrap();
            let _ended = waits.recv();
        });
        holds.recv().unwrap();
    }

    pub(crate) fn go_on(&self, _: usize) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(crate) fn post(&self, _: usize, path: &str, body: &str) -> String {
        exchange(self.port.number(), path, body).1
    }
}

/// A call's status and answer.
pub(crate) fn exchange(port: u16, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let length = body.len();
    write!(stream, "POST {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

impl Running {
    fn start(port: u16, Settings { user, tls, limits }: Settings) -> Self {
        let stop = CancellationToken::new();
        let (sender, listens) = mpsc::channel();
        let until = stop.clone();
        let thread = std::thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (listener, _) =
                    bind("store", SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await.unwrap();
                let lock = user.map(|user| Lock::new(&user, precedence::random().unwrap()));
                let service = StoreService::new(precedence::random_id().unwrap(), lock, limits);
                service.keep(precedence::random_id().unwrap());
                sender.send(Handle::current()).unwrap();
                // A process that is killed closes nothing in order.
                let serving = service.serve(listener, tls, CancellationToken::new());
                let _stopped = until.run_until_cancelled(serving).await;
            });
        });
        Self { runtime: listens.recv().unwrap(), stop, thread: Some(thread) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}
