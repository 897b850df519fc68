//! A connection of the broker: what has arrived of its messages, what has not left yet, and what it is for.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::ledger::ConnectionId;
use crate::packets::{Flushed, Inbox, Outbox, PacketError, Received};
use crate::protocol::{Answer, Refusal};
use crate::socket_path::user;

/// How soon a socket is tried again that could not pass descriptors.
const CROWDED_PAUSE: Duration = Duration::from_millis(10);

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// It has not said yet.
    New,
    /// Requests of a client.
    Client,
    /// Events for a client.
    Events { client: ConnectionId },
}

#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    /// The process, whose end counts though a forked child may keep the connection.
    process: Option<OwnedFd>,
    pid: u32,
    inbox: Inbox,
    outbox: Outbox,
    retry_at: Option<Instant>,
    role: Role,
    began: Instant,
}

impl Connection {
    /// A connection of this user. Another user's is refused, and the text says so.
    pub(super) fn accept(socket: OwnedFd, now: Instant) -> Result<Self, String> {
        let peer = socket_peercred(&socket).map_err(|error| format!("a connection has no user: {error}"))?;
        let (broker, client) = (user(), peer.uid.as_raw());
        if client != broker {
            return Err(refuse(socket, Refusal::User { broker, client }));
        }
        // Without a descriptor of the process its socket alone says when it has ended.
        let process = pidfd_open(peer.pid, PidfdFlags::empty()).ok();
        let pid = Pid::as_raw(Some(peer.pid)).unsigned_abs();
        let (inbox, outbox) = (Inbox::default(), Outbox::default());
        Ok(Self { socket, process, pid, inbox, outbox, retry_at: None, role: Role::New, began: now })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn role(&self) -> Role {
        self.role
    }

    pub(super) fn assign(&mut self, role: Role) {
        self.role = role;
    }

    /// When it has to have a role, counted from its beginning.
    pub(super) fn is_due(&self, hello: Duration) -> Option<Instant> {
        self.began.checked_add(hello).filter(|_| self.role == Role::New)
    }

    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// What to wait for: its socket, and its process if that can be watched.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let wants_write = self.outbox.bytes() > 0 && self.retry_at.is_none();
        let events = if wants_write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let socket = PollFd::from_borrowed_fd(self.as_fd(), events);
        let process = self.process.iter().map(|process| PollFd::new(process, PollFlags::IN));
        std::iter::once(socket).chain(process)
    }

    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, PacketError> {
        let Self { socket, inbox, .. } = self;
        inbox.receive(socket.as_fd(), buffer)
    }

    /// Queues an answer and sends what can be sent. False: the peer is gone, or leaves more than `bytes_max` unread.
    pub(super) fn send(&mut self, answer: &Answer, descriptors: Vec<OwnedFd>, bytes_max: usize) -> bool {
        self.outbox.push(&json(answer), descriptors);
        self.flush() && self.outbox.bytes() <= bytes_max
    }

    /// Sends what can be sent. False: the peer is gone.
    pub(super) fn flush(&mut self) -> bool {
        let flushed = self.outbox.flush(self.socket.as_fd());
        self.retry_at = (flushed == Ok(Flushed::Crowded)).then(|| Instant::now() + CROWDED_PAUSE);
        flushed.is_ok()
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Says to a peer why it is not served, ends its connection, and returns the same for others.
pub(super) fn refuse(socket: OwnedFd, refusal: Refusal) -> String {
    let mut outbox = Outbox::default();
    outbox.push(&json(&Answer::Refused { refusal }), Vec::new());
    // A peer that is gone needs no reason.
    let _ = outbox.flush(socket.as_fd());
    drop(socket);
    format!("a connection was refused: {refusal:?}")
}

fn json(answer: &Answer) -> Vec<u8> {
    serde_json::to_vec(answer).expect("answers have text for keys and no other failures")
}
