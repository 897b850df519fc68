//! Why a broker cannot begin or go on.

use std::path::{Path, PathBuf};

use crate::socket_path::FolderError;

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
    pub(super) fn of(step: &'static str, path: &Path) -> impl Fn(rustix::io::Errno) -> Self {
        move |error| Self::System { step, path: path.to_owned(), source: error.into() }
    }
}
