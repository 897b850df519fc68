//! Engines as processes: started, watched, and stopped completely.
//!
//! An engine is a process group and all of its descendants.
//!
//! Promises:
//!
//! - [`stop`](Supervisor::stop) returns when no process of the engine holds anything, including orphans. Only processes
//!   that were seen to belong to the engine are signalled, so a reused process id is safe.
//! - With a state folder, an engine outlives the service, however that ends, and the next service adopts it. Where the
//!   record cannot be written, the engine runs all the same, with a warning.
//! - Dropping a supervisor stops nothing.
//! - Starts and stops run one after the other, and continue if the caller gives up.
//!
//! Limits: how an adopted engine ended is unknown. Its output while no service runs is lost: writing to the broken pipe
//! ends programs that do not ignore `SIGPIPE` (Python does). A process that leaves the group and loses its parent
//! within moments is not found. All of this needs `/proc`.

mod error;
mod family;
mod log;
mod proc;
mod run;
mod state;
mod stop;

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

pub use self::error::SuperviseError;
pub use self::log::{Log as EngineLog, LogFollower};
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
    /// If the engine runs, if processes of an earlier one are left, or if it cannot be started or logged. Then nothing
    /// runs.
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

    /// What its processes have used of all cores. A container's are not among them: the daemon is their parent. As slow as
    /// [`processes`](Self::processes).
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        proc::cpu_time(&self.processes())
    }

    /// The last lines of its output, oldest first, with the supervisor's own lines between them.
    #[must_use]
    pub fn log(&self, lines: usize) -> Vec<String> {
        self.shared.log().last(lines)
    }

    /// All of its output.
    #[must_use]
    pub fn output(&self) -> Arc<EngineLog> {
        Arc::clone(self.shared.log())
    }

    /// Keeps these variables of this process from commands that start from now on, unless `environment` has them.
    pub fn withhold(&self, variables: &BTreeSet<String>) {
        self.shared.withhold(variables);
    }

    /// How often its record could not be written, as on a full disk.
    #[must_use]
    pub fn unwritten(&self) -> u64 {
        self.shared.unwritten()
    }

    /// Waits until the engine ends without `stop`, and returns how. Each end is reported once, unless a start or stop
    /// comes before. A dropped future loses nothing.
    pub async fn wait(&self) -> String {
        self.shared.wait().await
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
