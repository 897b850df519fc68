//! Engines as processes: started, watched, and stopped so that nothing of them is left.
//!
//! An engine is a group of processes of its own, and their descendants wherever these went. [`Supervisor`] starts the
//! command of one, keeps what it writes, says when it ends, and stops all of it.
//!
//! Promises:
//!
//! - [`stop`](Supervisor::stop) says that it is done only when no process of the engine holds anything any more, also
//!   those that the first one left behind. Nothing is signalled that was not seen to belong to it: a number that
//!   another process got meanwhile is not taken for the engine.
//! - With a folder for state, an engine outlives the service, however that ends, and is adopted by the next one.
//! - Dropping a supervisor stops nothing. Who wants engines to end with the service stops them before.
//! - Starting and stopping come one after the other, and what was begun goes on if its caller gives up.
//!
//! The limits: of an adopted engine nobody knows how it ended. What it wrote while no service was there is lost, and
//! until the next one comes its output is a broken pipe, which ends programs that do not ignore `SIGPIPE` (Python's do).
//! A process that leaves the group and loses its parent within moments is not found. All of this needs `/proc`.

mod family;
mod log;
mod proc;
mod run;
mod state;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

use self::run::Shared;
use crate::config::Start;

pub(crate) use self::proc::has_ended;
pub(crate) use self::state::file_name;

/// The processes of one engine. See the module.
pub struct Supervisor {
    shared: Arc<Shared>,
    /// Whose turn it is to start or stop.
    turn: Arc<Mutex<()>>,
}

impl Supervisor {
    /// One for this model's engine, with a folder for what is to survive the service. An engine that an earlier service
    /// wrote down there, and that still runs, is adopted. Without a folder none is.
    ///
    /// Reads some files, and so belongs to where a service begins.
    ///
    /// # Errors
    /// If what was written down cannot be read, or the system does not tell of processes.
    pub fn new(model: &str, start: Start, state: Option<&Path>) -> Result<Self, SuperviseError> {
        let shared = Shared::open(model, start, state)?;
        Ok(Self { shared, turn: Arc::default() })
    }

    /// Starts the command, and comes back as soon as there is a process.
    ///
    /// # Errors
    /// If it runs already, if something of the one before is left, or if it cannot be started, logged, or written down;
    /// then nothing runs.
    pub async fn start(&self) -> Result<(), SuperviseError> {
        self.in_turn(Shared::launch).await
    }

    /// Asks all of the engine to end (`SIGTERM`), and after `grace` ends what is left (`SIGKILL`). It is done when all of
    /// it is gone, which may be at once: nothing to stop is no error.
    ///
    /// # Errors
    /// If something of it cannot be ended.
    pub async fn stop(&self, grace: Duration) -> Result<(), SuperviseError> {
        self.in_turn(move |shared| shared.halt(grace)).await
    }

    /// Whether its first process is there.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.shared.is_running()
    }

    /// The numbers of all of its processes. Reads all of `/proc`, which takes milliseconds: not for a thread that others
    /// wait for. If that cannot be read now, they are those that were found last.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        self.shared.pids()
    }

    /// What it wrote last, so many lines at most, the oldest first, with what the supervisor has to say between them.
    #[must_use]
    pub fn log(&self, lines: usize) -> Vec<String> {
        self.shared.log(lines)
    }

    /// Waits until it has ended without having been stopped, and says how. Each end is told once: to who waits, or to who
    /// asks next, unless it was started again or stopped meanwhile. A caller that gives up before misses nothing.
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
    /// Without the environment, which may have secrets in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervisor").field("is_running", &self.is_running()).finish_non_exhaustive()
    }
}

/// Why an engine was not started or stopped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SuperviseError {
    /// There is no process.
    #[error("cannot start `{program}` in {}: {reason}", folder.display())]
    Spawn {
        /// The program.
        program: String,
        /// Where it was to run.
        folder: PathBuf,
        /// Why, and what would help.
        reason: String,
    },
    /// It runs already.
    #[error("cannot start the engine: it runs already, as process {pid}; stop it first")]
    AlreadyRunning {
        /// Its first process.
        pid: u32,
    },
    /// It ended, and some of its processes did not.
    #[error("cannot start the engine: the one before left processes {pids:?} behind; stop it first")]
    LeftBehind {
        /// Which.
        pids: Vec<u32>,
    },
    /// Its log cannot be opened.
    #[error("cannot open the log {}: {reason}", path.display())]
    Log {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// What is to survive the service cannot be read or written.
    #[error("cannot {doing} {}, where the state of engines is: {reason}", path.display())]
    State {
        /// What was tried.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Not all of it is gone, though it was killed.
    #[error(
        "processes {pids:?} are there {waited:?} after SIGKILL{}; see what they wait for",
        because(refused)
    )]
    StillThere {
        /// Which.
        pids: Vec<u32>,
        /// For how long that was waited.
        waited: Duration,
        /// Why one of them could not be signalled, if one could not.
        refused: Option<String>,
    },
    /// The system does not tell of processes.
    #[error("cannot look at processes: {reason}; engines can be supervised only with Linux's /proc")]
    Proc {
        /// Why.
        reason: String,
    },
    /// The threads or pipes that an engine needs cannot be made.
    #[error("cannot {doing} for the engine: {reason}")]
    Resources {
        /// What was tried.
        doing: &'static str,
        /// Why.
        reason: String,
    },
    /// The service ends, and begins nothing any more.
    #[error("nothing is started or stopped any more: the service is ending")]
    Ending,
}

fn because(refused: &Option<String>) -> String {
    refused.as_ref().map_or_else(String::new, |reason| format!(", and {reason}"))
}
