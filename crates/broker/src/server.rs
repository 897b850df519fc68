//! The broker: a process that holds descriptors of memory for others, and gives it back or frees it when asked.
//!
//! One broker at a path: a lock beside the socket is held as long as it lives. It serves processes of its own user
//! only. No client holds up another, and what a client lends ends with its connection.

mod bind;
mod connection;
mod error;
mod options;
mod service;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{EventfdFlags, eventfd};

pub use error::BrokerError;
pub use options::{BrokerEnd, BrokerOptions};

use crate::socket_path::prepare_folder;

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
    listener: OwnedFd,
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
        Ok(Self { listener, path: path.to_owned(), options, _lock: lock })
    }

    /// Serves until it is stopped or idle. All descriptors that it holds are closed at the end.
    ///
    /// # Errors
    /// If the system does not let it wait for clients.
    pub fn run(self, stop: &BrokerStop) -> Result<BrokerEnd, BrokerError> {
        let mut service = service::Service::new(self.listener.as_fd(), &self.options);
        let end = service.run(stop.as_fd()).map_err(BrokerError::of("wait for clients", &self.path));
        // From here on no client finds the socket. One that has just found it is refused, and begins another broker.
        bind::unlink(&self.path);
        service.refuse_rest();
        end
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        bind::unlink(&self.path);
    }
}
