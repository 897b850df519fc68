//! The broker: a process that holds descriptors of memory for others, and gives or frees it when asked.
//!
//! One broker at a path: a lock beside the socket is held as long as it lives. It serves processes of its own user
//! only. No client holds up another, and what a client lends ends with its connection.

mod bind;
mod connection;
mod service;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::socket_path::{FolderError, prepare_folder};

/// How a broker behaves.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BrokerOptions {
    /// It ends when it has had no connection for so long.
    pub idle: Duration,
    /// A connection ends if it has not said so soon what it wants.
    pub hello: Duration,
    /// A client that leaves more than this unread is disconnected.
    pub queue_bytes_max: usize,
    /// More connections are refused.
    pub connections_max: usize,
}

impl Default for BrokerOptions {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(60),
            hello: Duration::from_secs(10),
            queue_bytes_max: 2 * crate::packets::MESSAGE_BYTES_MAX,
            connections_max: 1024,
        }
    }
}

/// Why a broker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrokerEnd {
    /// It had no connection for as long as its options say.
    Idle,
    /// It was stopped.
    Stopped,
}

/// Why a broker cannot begin or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BrokerError {
    /// Another one serves this path.
    #[error("a broker serves {} already; use that one", path.display())]
    AlreadyRunning {
        /// The path of its socket.
        path: PathBuf,
    },
    /// The folder of the socket will not do.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// Something else lies at the path.
    #[error("{} is no socket, so it is not replaced; remove it or choose another path", path.display())]
    NoSocket {
        /// The path.
        path: PathBuf,
    },
    /// The system refuses a step.
    #[error("cannot {step} for the broker at {}; try again or choose another path", path.display())]
    System {
        /// What was tried.
        step: &'static str,
        /// The path of the socket.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
}

impl BrokerError {
    fn of(step: &'static str, path: &Path) -> impl Fn(rustix::io::Errno) -> Self {
        move |error| Self::System { step, path: path.to_owned(), source: error.into() }
    }
}

/// Ends a [`Broker`] from another thread.
#[derive(Debug)]
pub struct BrokerStop(OwnedFd);

impl BrokerStop {
    /// A broker that runs with it goes on until [`Self::stop`].
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// The broker ends soon, or at once when it begins.
    pub fn stop(&self) {
        // It fails only when it has been called 2^64 - 2 times, and then it has been stopped.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A broker that clients can connect to.
#[derive(Debug)]
pub struct Broker {
    /// `None`: it has left its path.
    listener: Option<OwnedFd>,
    path: PathBuf,
    options: BrokerOptions,
    /// Goes last: who gets the lock finds no socket.
    _lock: File,
}

impl Broker {
    /// Listens at a path, in a folder that is made if it is not there. What an ended broker left is replaced.
    ///
    /// # Errors
    /// If another broker serves the path, or its folder is not ours alone.
    pub fn bind(path: &Path, options: BrokerOptions) -> Result<Self, BrokerError> {
        prepare_folder(path)?;
        let lock = bind::lock(path)?;
        let listener = bind::listen(path)?;
        tracing::info!(path = %path.display(), "broker listens");
        Ok(Self { listener: Some(listener), path: path.to_owned(), options, _lock: lock })
    }

    /// Serves until it is stopped or idle. All descriptors that it holds are closed at the end.
    ///
    /// # Errors
    /// If the system does not let it wait for clients.
    pub fn run(mut self, stop: &BrokerStop) -> Result<BrokerEnd, BrokerError> {
        let Some(listener) = self.listener.take() else { return Ok(BrokerEnd::Stopped) };
        let mut service = service::Service::new(listener, &self.options);
        let end = service.run(stop.as_fd()).map_err(BrokerError::of("wait for clients", &self.path));
        // From here on no client finds the socket. One that has just found it is refused, and begins another broker.
        bind::unlink(&self.path);
        service.refuse_rest();
        tracing::info!(path = %self.path.display(), ?end, "broker ended");
        end
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if self.listener.is_some() {
            bind::unlink(&self.path);
        }
    }
}
