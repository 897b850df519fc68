//! Engines as processes: started, watched, and stopped completely.
//!
//! An engine is a process group and all of its descendants.
//!
//! Promises:
//!
//! - [`stop`](Supervisor::stop) returns when no process of the engine holds anything, including orphans. Only processes
//!   that were seen to belong to the engine are signalled, so a reused process id is safe.
//! - With a state folder, an engine outlives the service, however that ends, and the next service adopts it.
//! - Dropping a supervisor stops nothing.
//! - Starts and stops run one after the other, and continue if the caller gives up.
//!
//! Limits: how an adopted engine ended is unknown. Its output while no service runs is lost: writing to the broken pipe
//! ends programs that do not ignore `SIGPIPE` (Python does). A process that leaves the group and loses its parent
//! within moments is not found. All of this needs `/proc`.

mod family;
mod log;
mod proc;
mod run;
mod state;
mod stop;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

use self::run::Shared;
use crate::config::Start;

pub(crate) use self::state::file_name;

/// The processes of one engine.
pub struct Supervisor {
    shared: Arc<Shared>,
    /// Serializes starts and stops.
    turn: Arc<Mutex<()>>,
}

impl Supervisor {
    /// For a model's engine. An engine that an earlier service recorded in the folder `state`, and that still runs, is
    /// adopted.
    ///
    /// Reads files, so call it while the service starts.
    ///
    /// # Errors
    /// If the record cannot be read, or `/proc` is missing.
    pub fn new(model: &str, start: Start, state: Option<&Path>) -> Result<Self, SuperviseError> {
        let shared = Shared::open(model, start, state)?;
        Ok(Self { shared, turn: Arc::default() })
    }

    /// Starts the command, and returns as soon as the process exists.
    ///
    /// # Errors
    /// If the engine runs, if processes of an earlier one are left, or if it cannot be started, logged or recorded.
    /// Then nothing runs.
    pub async fn start(&self) -> Result<(), SuperviseError> {
        self.in_turn(Shared::launch).await
    }

    /// Sends `SIGTERM` to all processes, and `SIGKILL` after `grace`. Returns when all are gone, at once if none runs.
    ///
    /// A stop command runs before that, and has `grace` to end them. `SIGTERM` then has what is left of it, and half of
    /// it at least.
    ///
    /// # Errors
    /// If a process cannot be ended.
    pub async fn stop(&self, grace: Duration) -> Result<(), SuperviseError> {
        self.in_turn(move |shared| shared.halt(grace)).await
    }

    /// Runs the stop command, if there is one, although no process is known: for an engine that outlived them all, such
    /// as a container. A command that needs the id of a process does not run.
    ///
    /// # Errors
    /// If the service is ending. That the command failed is in the log.
    pub async fn stop_stray(&self, most: Duration) -> Result<(), SuperviseError> {
        self.in_turn(move |shared| {
            shared.stop_stray(most);
            Ok(())
        })
        .await
    }

    /// Whether its first process runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.shared.is_running()
    }

    /// All of its process ids, or those of the last scan if `/proc` cannot be read. Takes milliseconds, so do not call
    /// it on an async thread.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        self.shared.pids()
    }

    /// The last lines of its output, oldest first, with the supervisor's own lines between them.
    #[must_use]
    pub fn log(&self, lines: usize) -> Vec<String> {
        self.shared.log(lines)
    }

    /// Waits until the engine ends without `stop`, and returns how. Each end is reported once, unless a start or stop
    /// comes before. A dropped future loses nothing.
    pub async fn ended(&self) -> String {
        self.shared.ended().await
    }

    async fn in_turn(
        &self,
        what: impl FnOnce(&Arc<Shared>) -> Result<(), SuperviseError> + Send + 'static,
    ) -> Result<(), SuperviseError> {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let shared = Arc::clone(&self.shared);
        let done = spawn_blocking(move || {
            let _turn = turn;
            what(&shared)
        });
        match done.await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(SuperviseError::Ending),
            },
        }
    }
}

impl fmt::Debug for Supervisor {
    /// Omits the environment, which may contain secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervisor").field("is_running", &self.is_running()).finish_non_exhaustive()
    }
}

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
