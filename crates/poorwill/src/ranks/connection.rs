//! A coordinator's connection to one rank.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with,
};

use super::config::GroupConfig;
use super::line::{LineError, Lines, Until};
use super::message::{ANSWER_BYTES_MAX, Answer, Call, RankStatus, read, write};

/// An answered one: the rank is who it should be.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Arc<UnixStream>,
    lines: Lines,
}

impl Connection {
    /// Connects, and asks who is there. Errors are what the rank is complained of for.
    pub(super) fn open(config: &GroupConfig, rank: u32, end: Instant) -> Result<(Self, RankStatus), String> {
        let path = config.socket(rank).map_err(|error| error.to_string())?;
        let stream = connected(&path, end).map_err(|error| match error {
            Errno::NOENT => format!(
                "it does not serve: there is no socket {}; start it, or wait until it has",
                path.display()
            ),
            Errno::CONNREFUSED => {
                format!("its process has ended: {} is left; start it again", path.display())
            }
            Errno::AGAIN => {
                format!("it does not answer in time: is its process stopped? ({})", path.display())
            }
            error => format!("cannot connect to {}: {}", path.display(), io::Error::from(error)),
        })?;
        let mut connection = Self { stream: Arc::new(stream), lines: Lines::new(ANSWER_BYTES_MAX) };
        let status = match connection.ask(&Call::Status, end)? {
            Answer::Status(status) => status,
            Answer::Refused { why } => return Err(why),
            Answer::Staged | Answer::Ended(_) => return Err("it answered another question".into()),
        };
        if (status.group.as_str(), status.rank) != (config.name(), rank) {
            let (other, group) = (status.rank, status.group);
            return Err(format!(
                "{} answers as rank {other} of `{group}`: give each rank its own number",
                path.display()
            ));
        }
        if status.world_size != config.world_size() {
            let (its, own) = (status.world_size, config.world_size());
            return Err(format!(
                "it belongs to a group of {its} ranks, and {own} are asked: use one size everywhere"
            ));
        }
        Ok((connection, status))
    }

    /// To end it from another thread.
    pub(super) fn stream(&self) -> &Arc<UnixStream> {
        &self.stream
    }

    /// Sends a request and waits for its answer.
    pub(super) fn ask(&mut self, call: &Call, end: Instant) -> Result<Answer, String> {
        let mut line = write(call)?;
        line.push(b'\n');
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let sent = self.stream.set_write_timeout(Some(left)).and_then(|()| (&*self.stream).write_all(&line));
        sent.map_err(|error| lost(&error))?;
        match self.lines.next(&mut Until { stream: &self.stream, end }) {
            Ok(Some(line)) => read(&line),
            Ok(None) => Err("it hung up".into()),
            Err(LineError::Io(error)) => Err(lost(&error)),
            Err(error) => Err(format!("it sent {error}")),
        }
    }

    /// Whether it hung up, or says more than it was asked.
    pub(super) fn disturbance(&self) -> Option<String> {
        if self.lines.holds_more() {
            return Some("it answered twice".into());
        }
        match recv(&*self.stream, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Some("it hung up".into()),
            Ok(_) => Some("it answered twice".into()),
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(error) => Some(lost(&error.into())),
        }
    }
}

fn connected(path: &Path, end: Instant) -> Result<UnixStream, Errno> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // A stopped process that has many callers accepts no more.
    let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    set_socket_timeout(&socket, Timeout::Send, Some(left))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

fn lost(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => "it did not answer in time".into(),
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => "it hung up".into(),
        _ => format!("its connection failed: {error}"),
    }
}
