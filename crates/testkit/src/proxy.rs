//! A TCP proxy in front of a server of this machine, which a test cuts, holds and lets go on.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Most bytes that one look takes, and those of the last one that are searched again.
const CHUNK: usize = 16 << 10;
const KEPT: usize = 256;

/// Forwards connections to a port. It ends when this is dropped.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    accepting: Option<thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    to: u16,
    links: Mutex<Links>,
    changed: Condvar,
    /// What comes waits so long, in either direction.
    delay_ms: AtomicU64,
}

#[derive(Debug, Default)]
struct Links {
    mode: Mode,
    links: Vec<Link>,
    made: u64,
}

#[derive(Debug, Default)]
enum Mode {
    #[default]
    Open,
    /// New connections end at once.
    Cut,
    /// Nothing goes through.
    Hold,
    /// Nothing goes through on connections whose client has sent one of these texts.
    HoldThose(Vec<String>),
    Ended,
}

/// A connection.
#[derive(Debug)]
struct Link {
    number: u64,
    client: TcpStream,
    server: TcpStream,
    /// What the client has sent last.
    sent: Vec<u8>,
    /// It has sent a text of `HoldThose`.
    is_held: bool,
    /// What it has sent, and is not forwarded.
    waiting: Vec<u8>,
}

impl Proxy {
    /// In front of this port, on a port of its own.
    ///
    /// # Panics
    /// If the system refuses a socket.
    #[must_use]
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let own = listener.local_addr().unwrap().port();
        let links = Mutex::new(Links::default());
        let shared =
            Arc::new(Shared { to: port, links, changed: Condvar::new(), delay_ms: AtomicU64::default() });
        let accepting = Arc::clone(&shared);
        let accepting = Some(thread::spawn(move || accepting.accept(&listener)));
        Self { port: own, shared, accepting }
    }

    /// Where it listens.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The same, for clients of HTTP.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Closes all connections. New ones are closed at once.
    pub fn cut(&self) {
        self.set(Mode::Cut);
    }

    /// Closes all connections. New ones work.
    pub fn cut_once(&self) {
        self.set(Mode::Cut);
        self.set(Mode::Open);
    }

    /// Takes everything, and forwards nothing.
    pub fn hold(&self) {
        self.set(Mode::Hold);
    }

    /// The same for connections only whose client sends one of these texts, such as a path.
    pub fn hold_those_with(&self, texts: &[&str]) {
        self.set(Mode::HoldThose(texts.iter().map(|text| (*text).to_owned()).collect()));
    }

    /// The same for those connections that there are. New ones go on.
    pub fn hold_open_ones_with(&self, text: &str) {
        let texts = Mode::HoldThose(vec![text.to_owned()]);
        let mut state = self.shared.links();
        for link in &mut state.links {
            link.look(&texts);
        }
    }

    /// Forwards what comes from now on so much later, in either direction.
    pub fn delay(&self, delay_ms: u64) {
        self.shared.delay_ms.store(delay_ms, Ordering::Relaxed);
    }

    /// Forwards what was held, and all that comes.
    pub fn go_on(&self) {
        self.set(Mode::Open);
    }

    /// Whether a text, sent by a client, is held.
    #[must_use]
    pub fn is_holding(&self, text: &str) -> bool {
        self.shared.links().links.iter().any(|link| has(&link.waiting, text))
    }

    fn set(&self, mode: Mode) {
        let mut state = self.shared.links();
        if matches!(mode, Mode::Cut | Mode::Ended) {
            for link in state.links.drain(..) {
                link.shut();
            }
        }
        state.mode = mode;
        let Links { mode, links, .. } = &mut *state;
        for link in links {
            link.is_held = false;
            link.look(mode);
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.set(Mode::Ended);
        // Wakes the thread that accepts.
        drop(TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)));
        let _ = self.accepting.take().map(thread::JoinHandle::join);
    }
}

impl Shared {
    fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming() {
            if matches!(self.links().mode, Mode::Ended) {
                return;
            }
            let linked = client.and_then(|client| self.link(client));
            // What cannot be forwarded is closed.
            drop(linked);
        }
    }

    fn link(self: &Arc<Self>, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, self.to))?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let [from_client, to_client] = [client.try_clone()?, client.try_clone()?];
        let [from_server, to_server] = [server.try_clone()?, server.try_clone()?];
        let number = {
            let mut state = self.links();
            if matches!(state.mode, Mode::Cut | Mode::Ended) {
                return Ok(());
            }
            state.made += 1;
            let number = state.made;
            state.links.push(Link {
                number,
                client,
                server,
                sent: Vec::new(),
                is_held: false,
                waiting: Vec::new(),
            });
            number
        };
        let (up, down) = (Arc::clone(self), Arc::clone(self));
        thread::spawn(move || up.forward(number, from_client, to_server, true));
        thread::spawn(move || down.forward(number, from_server, to_client, false));
        Ok(())
    }

    fn forward(&self, number: u64, mut from: TcpStream, mut to: TcpStream, is_from_client: bool) {
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = from.read(&mut chunk).unwrap_or_default();
            thread::sleep(Duration::from_millis(self.delay_ms.load(Ordering::Relaxed)));
            let is_open = self.pass(number, if is_from_client { &chunk[..read] } else { &[] });
            if read == 0 || !is_open || to.write_all(&chunk[..read]).is_err() {
                break;
            }
        }
        let mut state = self.links();
        if let Some(at) = state.links.iter().position(|link| link.number == number) {
            state.links.swap_remove(at).shut();
        }
    }

    /// Waits until the connection may go on. False if it is closed.
    fn pass(&self, number: u64, sent: &[u8]) -> bool {
        let mut state = self.links();
        let mut is_first = true;
        loop {
            let Links { mode, links, .. } = &mut *state;
            let Some(link) = links.iter_mut().find(|link| link.number == number) else { return false };
            if is_first {
                let kept = link.sent.len().saturating_sub(KEPT);
                link.sent.drain(..kept);
                link.sent.extend_from_slice(sent);
                link.look(mode);
            }
            is_first = false;
            if !(link.is_held || matches!(mode, Mode::Hold)) {
                if !sent.is_empty() {
                    link.waiting.clear();
                }
                return true;
            }
            if !sent.is_empty() {
                link.waiting = sent.to_vec();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Link {
    fn look(&mut self, mode: &Mode) {
        if let Mode::HoldThose(texts) = mode {
            self.is_held |= texts.iter().any(|text| has(&self.sent, text));
        }
    }

    fn shut(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

fn has(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|part| part == text.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    /// Answers each line with itself.
    fn echo() -> u16 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                thread::spawn(move || io::copy(&mut stream.try_clone().unwrap(), &mut &stream));
            }
        });
        port
    }

    struct Caller(BufReader<TcpStream>);

    impl Caller {
        fn of(proxy: &Proxy) -> Self {
            let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).unwrap();
            Self(BufReader::new(stream))
        }

        fn say(&mut self, line: &str) {
            writeln!(self.0.get_mut(), "{line}").unwrap();
        }

        /// `None` if nothing comes for this long, or the connection has ended.
        fn hears(&mut self, wait: Duration) -> Option<String> {
            self.0.get_ref().set_read_timeout(Some(wait)).unwrap();
            let mut line = String::new();
            self.0.read_line(&mut line).ok().filter(|read| *read > 0)?;
            Some(line.trim_end().to_owned())
        }
    }

    const LONG: Duration = crate::watchdog::TEST_TIMEOUT;
    const SHORT: Duration = Duration::from_millis(50);

    #[test]
    fn it_forwards_holds_and_goes_on() {
        let proxy = Proxy::to(echo());
        let mut caller = Caller::of(&proxy);
        caller.say("one");
        assert_eq!(caller.hears(LONG).as_deref(), Some("one"));
        proxy.hold();
        caller.say("two");
        let mut another = Caller::of(&proxy);
        another.say("three");
        assert_eq!((caller.hears(SHORT), another.hears(SHORT)), (None, None));
        proxy.go_on();
        assert_eq!(caller.hears(LONG).as_deref(), Some("two"));
        assert_eq!(another.hears(LONG).as_deref(), Some("three"));
    }

    #[test]
    fn it_cuts_what_there_is() {
        let proxy = Proxy::to(echo());
        let mut caller = Caller::of(&proxy);
        caller.say("one");
        assert_eq!(caller.hears(LONG).as_deref(), Some("one"));
        proxy.cut();
        assert_eq!(caller.hears(LONG), None);
        assert_eq!(Caller::of(&proxy).hears(LONG), None);
        proxy.go_on();
        let mut caller = Caller::of(&proxy);
        caller.say("two");
        assert_eq!(caller.hears(LONG).as_deref(), Some("two"));
        proxy.cut_once();
        assert_eq!(caller.hears(LONG), None);
        let mut caller = Caller::of(&proxy);
        caller.say("three");
        assert_eq!(caller.hears(LONG).as_deref(), Some("three"));
        drop(proxy);
        assert_eq!(caller.hears(LONG), None);
    }

    #[test]
    fn it_holds_those_that_said_something() {
        let proxy = Proxy::to(echo());
        let (mut early, mut late, mut other) = (Caller::of(&proxy), Caller::of(&proxy), Caller::of(&proxy));
        early.say("a watch");
        assert_eq!(early.hears(LONG).as_deref(), Some("a watch"));
        proxy.hold_those_with(&["watch"]);
        early.say("more");
        late.say("another watch");
        other.say("a call");
        assert_eq!(other.hears(LONG).as_deref(), Some("a call"));
        assert_eq!((early.hears(SHORT), late.hears(SHORT)), (None, None));
        proxy.go_on();
        assert_eq!(early.hears(LONG).as_deref(), Some("more"));
        assert_eq!(late.hears(LONG).as_deref(), Some("another watch"));
        proxy.hold_open_ones_with("watch");
        late.say("held");
        crate::watchdog::eventually("it is held", || proxy.is_holding("held"));
        assert_eq!(late.hears(SHORT), None);
        let mut new = Caller::of(&proxy);
        new.say("a new watch");
        assert_eq!(new.hears(LONG).as_deref(), Some("a new watch"));
        proxy.go_on();
        assert_eq!(late.hears(LONG).as_deref(), Some("held"));
        assert!(!proxy.is_holding("held"));
    }
}
