//! Why an engine cannot be started or stopped.

use std::path::PathBuf;
use std::time::Duration;

/// Why a start or stop failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SuperviseError {
    /// No process could be started.
    #[error("cannot start `{program}` in {}: {reason}", folder.display())]
    Spawn {
        /// The program.
        program: String,
        /// The working directory.
        folder: PathBuf,
        /// The cause, and what would help.
        reason: String,
    },
    /// The engine runs already.
    #[error("cannot start the engine: it runs already, as process {pid}; stop it first")]
    AlreadyRunning {
        /// Its first process.
        pid: u32,
    },
    /// The engine ended, but some of its processes did not.
    #[error("cannot start the engine: the one before left processes {pids:?} behind; stop it first")]
    LeftBehind {
        /// Their ids.
        pids: Vec<u32>,
    },
    /// The log cannot be opened.
    #[error("cannot open the log {}: {reason}", path.display())]
    Log {
        /// The file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The engine's record cannot be read or written.
    #[error("cannot {doing} {}, where the state of engines is: {reason}", path.display())]
    State {
        /// The operation.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// Processes are left after `SIGKILL`.
    #[error(
        "processes {pids:?} are there {waited:?} after SIGKILL{}; see what they wait for",
        because(refused)
    )]
    StillThere {
        /// Their ids.
        pids: Vec<u32>,
        /// The time waited.
        waited: Duration,
        /// Why a process could not be signalled.
        refused: Option<String>,
    },
    /// `/proc` cannot be read.
    #[error("cannot look at processes: {reason}; engines can be supervised only with Linux's /proc")]
    Proc {
        /// The cause.
        reason: String,
    },
    /// A thread or pipe for the engine cannot be made.
    #[error("cannot {doing} for the engine: {reason}")]
    Resources {
        /// The operation.
        doing: &'static str,
        /// The cause.
        reason: String,
    },
    /// The service is ending.
    #[error("nothing is started or stopped any more: the service is ending")]
    Ending,
}

fn because(refused: &Option<String>) -> String {
    refused.as_ref().map_or_else(String::new, |reason| format!(", and {reason}"))
}
