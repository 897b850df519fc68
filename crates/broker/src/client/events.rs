//! The second connection of a client, and the thread that gives up memory when the broker asks.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use super::line::{Line, LineError, read};
use crate::protocol::{Answer, Request};

/// Ends the thread.
#[derive(Debug)]
pub(super) struct Events(OwnedFd);

impl Events {
    /// Starts the thread, which ends with its connection too.
    pub(super) fn start(
        line: Line,
        timeout: Duration,
        give_up: impl Fn(u64) -> u64 + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stopped = stop.try_clone()?;
        std::thread::Builder::new().name("poorwill-give-up".into()).spawn(move || {
            // The broker asks this process no more, and others cannot.
            if serve(line, &stopped, timeout, &give_up).is_err() {
                give_up(u64::MAX);
            }
        })?;
        Ok(Self(stop))
    }

    /// The thread ends, after a call that is under way.
    pub(super) fn stop(&self) {
        // It is written once, so it has space for it.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

fn serve(
    mut line: Line,
    stopped: &OwnedFd,
    timeout: Duration,
    give_up: &impl Fn(u64) -> u64,
) -> Result<(), LineError> {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(stopped.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(line.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
        let Some(message) = line.receive()? else { continue };
        let (Answer::GiveUp { ask, bytes }, _) = read(message)? else {
            return Err(LineError::Failed("it sends no event".into()));
        };
        let answer = Request::GaveUp { ask, bytes: give_up(bytes) };
        line.send(&answer, Vec::new(), Instant::now() + timeout)?;
    }
}
