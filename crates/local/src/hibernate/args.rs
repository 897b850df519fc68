//! Arguments of `hibernate`.

use std::path::PathBuf;
use std::time::Duration;

use poorwill::ByteSize;

use crate::arguments::time;

/// What `hibernate` does instead of hibernating.
const INSTEAD: [&str; 5] = ["resume", "state", "inspect", "recover", "serve"];

/// Arguments of `hibernate`.
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct HibernateArgs {
    /// Process of the set; may be repeated
    #[arg(long = "pid", value_name = "PID", required_unless_present_any = ["recover", "serve"],
        conflicts_with_all = ["recover", "serve"], value_parser = clap::value_parser!(u32).range(1..),
        allow_negative_numbers = true)]
    pub(crate) pids: Vec<u32>,

    /// Put the processes back
    #[arg(long, conflicts_with_all = ["state", "inspect", "recover", "serve"])]
    pub(crate) resume: bool,

    /// Print where each process stands
    #[arg(long, conflicts_with_all = ["inspect", "recover", "serve"])]
    pub(crate) state: bool,

    /// Print what each process holds and what hinders it, and change nothing
    #[arg(long, conflicts_with_all = ["recover", "serve"])]
    pub(crate) inspect: bool,

    /// Bring back what commands and helpers have left that were killed
    #[arg(long, conflicts_with = "serve")]
    pub(crate) recover: bool,

    /// Stay, and take requests from standard input, one JSON object a line, until its end or SIGTERM
    #[arg(long, conflicts_with = "json")]
    pub(crate) serve: bool,

    /// How long to wait for work that a process has queued, like 5s or 500ms
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time, conflicts_with_all = INSTEAD)]
    pub(crate) wait_max: Duration,

    /// Most host memory to take, like 8GiB; what the system has left limits it, too
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, conflicts_with_all = INSTEAD)]
    pub(crate) host_max: Option<ByteSize>,

    /// Go on where nothing says whether the GPUs have space for the processes again: without space they are lost
    #[arg(long, conflicts_with_all = ["state", "inspect", "recover", "serve"])]
    pub(crate) without_space_check: bool,

    /// How many of NCCL's communicators each process has suspended; others are refused, since they lose the process
    #[arg(long, value_name = "COUNT", default_value_t = 0, conflicts_with_all = INSTEAD)]
    pub(crate) suspended_communicators: usize,

    /// Folder where processes of the host device are registered, instead of NVIDIA's GPUs
    #[arg(long, value_name = "FOLDER")]
    pub(crate) processes: Option<PathBuf>,

    /// Folder of the journal [default: $XDG_RUNTIME_DIR/poorwill/hibernate, or /tmp/poorwill-UID/hibernate]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) journal: Option<PathBuf>,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}
