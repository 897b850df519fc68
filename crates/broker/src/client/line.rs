//! One socket of a client: a request goes out and its answer comes in, by a deadline.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::error::ClientError;
use crate::packets::{
    Flushed, Inbox, MESSAGE_BYTES_MAX, MESSAGE_DESCRIPTORS_MAX, Message, Outbox, PACKET_BYTES_MAX, Received,
};
use crate::protocol::{Answer, Refusal, Request};
use crate::socket_path::user;

/// How soon a full socket or backlog is tried again that cannot be waited for.
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct Line {
    socket: OwnedFd,
    inbox: Inbox,
    buffer: Vec<u8>,
}

/// How an exchange failed.
#[derive(Debug)]
pub(super) enum LineError {
    /// Nothing was sent: the request is too long.
    Unsent(String),
    Late,
    Ended,
    Failed(String),
}

impl LineError {
    pub(super) fn into_client_error(
        self,
        path: &Path,
        request: &'static str,
        within: Duration,
    ) -> ClientError {
        let path = path.to_owned();
        match self {
            Self::Unsent(why) => ClientError::BadRequest { path, request, why },
            Self::Late => ClientError::NoAnswer { path, request, within_ms: within.as_millis() },
            Self::Ended => ClientError::Lost { path, why: "it closed the connection".into() },
            Self::Failed(why) => ClientError::Lost { path, why },
        }
    }
}

impl From<Errno> for LineError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::PIPE | Errno::CONNRESET => Self::Ended,
            other => Self::Failed(format!("its socket fails: {other}")),
        }
    }
}

impl Line {
    /// Connects, says hello, and returns the client's number with the broker.
    pub(super) fn open(path: &Path, hello: &Request, timeout: Duration) -> Result<(Self, u64), ClientError> {
        let deadline = Instant::now() + timeout;
        let not_there = |why: String| ClientError::NotThere { path: path.to_owned(), why };
        let socket = connect_by(path, deadline).map_err(|error| not_there(error.to_string()))?;
        let broker = socket_peercred(&socket).map_err(|error| not_there(error.to_string()))?.uid.as_raw();
        if broker != user() {
            return Err(ClientError::OtherUser { path: path.to_owned(), broker, client: user() });
        }
        let mut line = Self { socket, inbox: Inbox::default(), buffer: vec![0; PACKET_BYTES_MAX] };
        let path = path.to_owned();
        match line.exchange(hello, Vec::new(), deadline) {
            Ok((Answer::Welcome { client }, _)) => Ok((line, client)),
            Ok((Answer::Refused { refusal }, _)) => Err(match refusal {
                Refusal::User { broker, client } => ClientError::OtherUser { path, broker, client },
                Refusal::Version { broker, client } => ClientError::OtherVersion { path, broker, client },
                Refusal::Full { connections } => ClientError::Full { path, connections },
                Refusal::Ending => not_there("it is ending".into()),
            }),
            Ok((Answer::Bad { why }, _)) => Err(ClientError::BadRequest { path, request: "hello", why }),
            Ok((other, _)) => {
                Err(ClientError::Lost { path, why: format!("it answers hello with {other:?}") })
            }
            // A broker that ends just now closes what it has not taken.
            Err(LineError::Ended) => Err(not_there("it closed the connection at once".into())),
            Err(error) => Err(error.into_client_error(&path, "hello", timeout)),
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends a request, and reads the answer with its descriptors.
    pub(super) fn exchange(
        &mut self,
        request: &Request,
        descriptors: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<(Answer, Vec<OwnedFd>), LineError> {
        self.send(request, descriptors, deadline)?;
        loop {
            if let Some(message) = self.receive()? {
                return read(message);
            }
            self.wait(PollFlags::IN, deadline)?;
        }
    }

    pub(super) fn send(
        &mut self,
        request: &Request,
        descriptors: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<(), LineError> {
        let text = serde_json::to_vec(request).map_err(|error| LineError::Unsent(error.to_string()))?;
        let (bytes, count) = (text.len(), descriptors.len());
        if bytes > MESSAGE_BYTES_MAX || count > MESSAGE_DESCRIPTORS_MAX {
            return Err(LineError::Unsent(format!(
                "it has {bytes} bytes and {count} descriptors, at most {MESSAGE_BYTES_MAX} and \
                 {MESSAGE_DESCRIPTORS_MAX} go at once; send less"
            )));
        }
        let mut outbox = Outbox::default();
        outbox.push(&text, descriptors);
        loop {
            match outbox.flush(self.socket.as_fd()) {
                Ok(Flushed::All) => return Ok(()),
                Ok(Flushed::Blocked) => self.wait(PollFlags::OUT, deadline)?,
                Ok(Flushed::Crowded) => pause(deadline).map_err(|Late| LineError::Late)?,
                // The broker's last words say why it closed.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// A message, if a whole one has arrived.
    pub(super) fn receive(&mut self) -> Result<Option<Message>, LineError> {
        loop {
            let Self { socket, inbox, buffer } = self;
            match inbox.receive(socket.as_fd(), buffer) {
                Ok(Received::Some) => {}
                Ok(Received::Nothing) => return Ok(None),
                Ok(Received::End) => return Err(LineError::Ended),
                Ok(Received::Message(message)) => return Ok(Some(message)),
                Err(error) => return Err(LineError::Failed(error.to_string())),
            }
        }
    }

    fn wait(&self, events: PollFlags, deadline: Instant) -> Result<(), LineError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(LineError::Late);
        }
        let timeout = Timespec::try_from(left).map_err(|_| LineError::Failed("no such wait".into()))?;
        match poll(&mut [PollFd::from_borrowed_fd(self.as_fd(), events)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// An answer that the broker has sent.
pub(super) fn read(message: Message) -> Result<(Answer, Vec<OwnedFd>), LineError> {
    let answer = serde_json::from_slice(&message.text)
        .map_err(|error| LineError::Failed(format!("its answer cannot be read: {error}")))?;
    Ok((answer, message.descriptors))
}

struct Late;

fn pause(deadline: Instant) -> Result<(), Late> {
    if Instant::now() >= deadline {
        return Err(Late);
    }
    std::thread::sleep(PAUSE);
    Ok(())
}

fn connect_by(path: &Path, deadline: Instant) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            // Its backlog is full.
            Err(Errno::AGAIN) => pause(deadline).map_err(|Late| Errno::AGAIN)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}
