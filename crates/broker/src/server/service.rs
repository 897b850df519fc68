//! The broker's one thread: waits on all sockets, answers requests, and ends what is over.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::connection::{Connection, Role, refuse};
use super::options::{BrokerEnd, BrokerOptions};
use crate::ledger::{Chunk, ConnectionId, Effect, Ledger, LedgerError};
use crate::packets::{Message, PACKET_BYTES_MAX, Received};
use crate::protocol::{
    Answer, AnyHello, BrokerStatus, ChunkLine, NAME_BYTES_MAX, Refusal, Request, SPARED_MAX, VERSION,
    WITHIN_MS_MAX,
};

/// Packets that are read of one connection before the others have their turn.
const TURN_PACKETS: usize = 64;

/// Connections that are taken before the others have their turn.
const TURN_ACCEPTS: usize = 64;

/// How soon connections are taken again when this process has no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Service<'o> {
    listener: BorrowedFd<'o>,
    options: &'o BrokerOptions,
    began: Instant,
    ledger: Ledger<OwnedFd>,
    connections: BTreeMap<ConnectionId, Connection>,
    accepted: u64,
    /// When the last connection ended.
    idle_since: Instant,
    accept_at: Option<Instant>,
    last_problem: Option<String>,
    buffer: Vec<u8>,
}

/// Why a connection ends. The peer sees the text.
type Violation = String;

impl<'o> Service<'o> {
    pub(super) fn new(listener: BorrowedFd<'o>, options: &'o BrokerOptions) -> Self {
        let now = Instant::now();
        Self {
            listener,
            options,
            began: now,
            ledger: Ledger::default(),
            connections: BTreeMap::new(),
            accepted: 0,
            idle_since: now,
            accept_at: None,
            last_problem: None,
            buffer: vec![0; PACKET_BYTES_MAX],
        }
    }

    pub(super) fn run(&mut self, stop: BorrowedFd<'_>) -> Result<BrokerEnd, Errno> {
        loop {
            let ready = self.wait(stop)?;
            if ready.stops {
                return Ok(BrokerEnd::Stopped);
            }
            if self.accept_at.is_none_or(|at| at <= Instant::now()) {
                self.accept();
            }
            for id in ready.ended {
                self.end(id);
            }
            for id in ready.connections {
                self.read(id);
            }
            self.expire();
            let is_idle = self.connections.is_empty() && self.idle_since.elapsed() >= self.options.idle;
            if is_idle {
                return Ok(BrokerEnd::Idle);
            }
        }
    }

    /// Refuses what has connected and was not served. The socket has no path any more.
    pub(super) fn refuse_rest(self) {
        while let Ok(socket) = accept_with(self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            let _ = refuse(socket, Refusal::Ending);
        }
    }

    fn wait(&self, stop: BorrowedFd<'_>) -> Result<Ready, Errno> {
        let listens = if self.accept_at.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![
            PollFd::from_borrowed_fd(stop, PollFlags::IN),
            PollFd::from_borrowed_fd(self.listener, listens),
        ];
        let mut owners = Vec::new();
        for (id, connection) in &self.connections {
            for (nth, fd) in connection.poll_fds().enumerate() {
                fds.push(fd);
                owners.push((*id, nth > 0));
            }
        }
        let timeout = self.deadline().map(|at| at.saturating_duration_since(Instant::now()));
        // A wait that is too long for the system is made in pieces.
        let timeout = timeout.map(|wait| Timespec::try_from(wait.min(Duration::from_secs(3600))));
        let timeout = timeout.transpose().map_err(|_| Errno::INVAL)?;
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let mut ready = Ready { stops: !fds[0].revents().is_empty(), ..Ready::default() };
        for ((id, is_process), fd) in owners.into_iter().zip(&fds[2..]) {
            let list = if is_process { &mut ready.ended } else { &mut ready.connections };
            list.extend((!fd.revents().is_empty()).then_some(id));
        }
        Ok(ready)
    }

    fn deadline(&self) -> Option<Instant> {
        let hello = self.connections.values().filter_map(|one| one.is_due(self.options.hello));
        let retry = self.connections.values().filter_map(Connection::retry_at);
        let asks = self.ledger.deadline().and_then(|at| self.began.checked_add(at));
        let is_empty = self.connections.is_empty();
        let idle = is_empty.then(|| self.idle_since.checked_add(self.options.idle)).flatten();
        hello.chain(retry).chain(asks).chain(idle).chain(self.accept_at).min()
    }

    fn accept(&mut self) {
        self.accept_at = None;
        for _ in 0..TURN_ACCEPTS {
            let socket = match accept_with(self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => {
                    self.last_problem = Some(format!("connections cannot be taken: {error}"));
                    self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            };
            let connections = self.connections.len();
            if connections >= self.options.connections_max {
                self.last_problem = Some(refuse(socket, Refusal::Full { connections }));
                continue;
            }
            match Connection::accept(socket, Instant::now()) {
                Ok(connection) => {
                    self.accepted += 1;
                    self.connections.insert(self.accepted, connection);
                }
                Err(problem) => self.last_problem = Some(problem),
            }
        }
    }

    /// Reads what a connection has sent, and sends what waits for it.
    fn read(&mut self, id: ConnectionId) {
        for _ in 0..TURN_PACKETS {
            let Some(connection) = self.connections.get_mut(&id) else { return };
            match connection.receive(&mut self.buffer) {
                Ok(Received::Some) => {}
                Ok(Received::Nothing) => break,
                Ok(Received::End) => return self.end(id),
                Ok(Received::Message(message)) => {
                    if let Err(violation) = self.handle(id, message) {
                        return self.reject(id, violation);
                    }
                }
                Err(error) => return self.reject(id, error.to_string()),
            }
        }
        self.flush(id);
    }

    fn flush(&mut self, id: ConnectionId) {
        if self.connections.get_mut(&id).is_some_and(|connection| !connection.flush()) {
            self.end(id);
        }
    }

    /// What the clock alone brings about.
    fn expire(&mut self) {
        let now = Instant::now();
        let effects = self.ledger.expire(self.now());
        self.perform(effects);
        let retries = self.connections.iter().filter(|(_, one)| one.retry_at().is_some_and(|at| at <= now));
        let retries: Vec<ConnectionId> = retries.map(|(id, _)| *id).collect();
        retries.into_iter().for_each(|id| self.flush(id));
        let hello = self.options.hello;
        let late = self.connections.iter().filter(|(_, one)| one.is_due(hello).is_some_and(|at| at <= now));
        let late: Vec<ConnectionId> = late.map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.reject(id, "it has not said what it wants".into()));
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn send(&mut self, id: ConnectionId, answer: &Answer, descriptors: Vec<OwnedFd>) {
        let bytes_max = self.options.queue_bytes_max;
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if !connection.send(answer, descriptors, bytes_max) {
            self.note(id, "it does not read its answers");
            self.end(id);
        }
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::GiveUp { events, ask, bytes } => {
                    self.send(events, &Answer::GiveUp { ask, bytes }, Vec::new());
                }
                Effect::Answer { client, asked } => self.send(client, &Answer::Asked(asked), Vec::new()),
                Effect::Close { events } => self.end(events),
            }
        }
    }

    /// Says to a peer what it did wrong, and ends its connection.
    fn reject(&mut self, id: ConnectionId, why: Violation) {
        self.note(id, &why);
        self.send(id, &Answer::Bad { why }, Vec::new());
        self.end(id);
    }

    fn note(&mut self, id: ConnectionId, why: &str) {
        if let Some(connection) = self.connections.get(&id) {
            self.last_problem = Some(format!("process {} was disconnected: {why}", connection.pid()));
        }
    }

    fn end(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.remove(&id) else { return };
        let now = self.now();
        self.idle_since = Instant::now();
        let effects = match connection.role() {
            Role::New => Vec::new(),
            Role::Client => self.ledger.leave(id, now),
            Role::Events { client } => self.ledger.stop_listening(client, now),
        };
        self.perform(effects);
    }

    fn handle(&mut self, id: ConnectionId, message: Message) -> Result<(), Violation> {
        let Some(connection) = self.connections.get(&id) else { return Ok(()) };
        let (role, pid) = (connection.role(), connection.pid());
        if role == Role::New && !self.has_version(id, &message)? {
            return Ok(());
        }
        let request: Request =
            serde_json::from_slice(&message.text).map_err(|error| format!("no request: {error}"))?;
        if !matches!(request, Request::Lend { .. }) && !message.descriptors.is_empty() {
            return Err(format!("{} descriptors came where none belong", message.descriptors.len()));
        }
        match (role, request) {
            (Role::New, Request::Hello { device, name, .. }) => {
                if device.len() > NAME_BYTES_MAX || name.len() > NAME_BYTES_MAX || device.is_empty() {
                    return Err(format!("a device or a name is empty or over {NAME_BYTES_MAX} bytes"));
                }
                self.ledger.join(id, device, name, pid);
                self.welcome(id, id, Role::Client);
                Ok(())
            }
            (Role::New, Request::Events { client, .. }) => {
                if self.ledger.pid(client) != Some(pid) || !self.ledger.listen(client, id) {
                    return Err(format!("process {pid} has no client {client} that lacks events"));
                }
                self.welcome(id, client, Role::Events { client });
                Ok(())
            }
            (Role::Events { client }, Request::GaveUp { ask, bytes }) => {
                let effects = self.ledger.gave_up(client, ask, bytes, self.now());
                self.perform(effects);
                Ok(())
            }
            (Role::Client, _) if self.ledger.is_waiting(id) => {
                Err("a request came before the last one was answered".into())
            }
            (Role::Client, Request::Lend { chunks }) => {
                self.lend(id, chunks, message.descriptors, message.is_cut)
            }
            (Role::Client, request) => self.answer(id, request),
            (_, other) => Err(format!("not a request for now: {other:?}")),
        }
    }

    /// Whether the first message of a connection has our version. Another one is refused with both.
    fn has_version(&mut self, id: ConnectionId, message: &Message) -> Result<bool, Violation> {
        let hello: AnyHello =
            serde_json::from_slice(&message.text).map_err(|error| format!("no hello: {error}"))?;
        if hello.version == VERSION {
            return Ok(true);
        }
        let refusal = Refusal::Version { broker: VERSION, client: hello.version };
        self.send(id, &Answer::Refused { refusal }, Vec::new());
        self.note(id, "it has another version");
        self.end(id);
        Ok(false)
    }

    fn welcome(&mut self, id: ConnectionId, client: ConnectionId, role: Role) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.assign(role);
        }
        self.send(id, &Answer::Welcome { client }, Vec::new());
    }

    fn lend(
        &mut self,
        id: ConnectionId,
        chunks: Vec<ChunkLine>,
        descriptors: Vec<OwnedFd>,
        is_cut: bool,
    ) -> Result<(), Violation> {
        if is_cut {
            drop(descriptors);
            let why = "the broker has no descriptor left; raise its `ulimit -n` or lend larger chunks";
            self.send(id, &Answer::Bad { why: why.into() }, Vec::new());
            return Ok(());
        }
        if chunks.len() != descriptors.len() {
            return Err(format!("{} chunks came with {} descriptors", chunks.len(), descriptors.len()));
        }
        let chunks = chunks.into_iter().zip(descriptors);
        let chunks =
            chunks.map(|((id, bytes, is_dropped), memory)| Chunk { id, bytes, is_dropped, memory }).collect();
        let done = self.ledger.lend(id, chunks, self.now());
        self.send(id, &done_or(done), Vec::new());
        Ok(())
    }

    fn answer(&mut self, id: ConnectionId, request: Request) -> Result<(), Violation> {
        let now = self.now();
        let answer = match request {
            Request::TakeBack { ids } => {
                let chunks = self.ledger.take_back(id, ids.as_deref()).into_iter();
                let line = |chunk: Chunk<OwnedFd>| ((chunk.id, chunk.bytes, chunk.is_dropped), chunk.memory);
                let (chunks, descriptors) = chunks.map(line).unzip();
                self.send(id, &Answer::Chunks { chunks }, descriptors);
                return Ok(());
            }
            Request::Ask { bytes, spared, within_ms } => {
                if spared.processes.len() > SPARED_MAX || within_ms > WITHIN_MS_MAX {
                    return Err(format!(
                        "an ask spares over {SPARED_MAX} processes or waits over {WITHIN_MS_MAX} ms"
                    ));
                }
                let deadline = now + Duration::from_millis(within_ms);
                let effects = self.ledger.ask(id, bytes, spared, now, deadline);
                self.perform(effects);
                return Ok(());
            }
            Request::Announce { bytes } => done_or(self.ledger.announce(id, bytes, now)),
            Request::Status => {
                let last_problem = self.last_problem.clone();
                Answer::Status { status: BrokerStatus { last_problem, ..self.ledger.status(now) } }
            }
            other => return Err(format!("not a request for now: {other:?}")),
        };
        self.send(id, &answer, Vec::new());
        Ok(())
    }
}

/// What a wait ended with.
#[derive(Debug, Default)]
struct Ready {
    stops: bool,
    connections: Vec<ConnectionId>,
    /// Connections whose processes have ended.
    ended: Vec<ConnectionId>,
}

fn done_or(done: Result<(), LedgerError>) -> Answer {
    done.map_or_else(|error| Answer::Bad { why: error.to_string() }, |()| Answer::Done)
}
