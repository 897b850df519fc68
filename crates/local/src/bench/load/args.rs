//! Arguments of `bench load`.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

use poorwill::DeviceSpec;

use crate::arguments::{BudgetArgs, positive};

/// Arguments of `bench load`.
#[derive(Debug, clap::Args)]
pub struct LoadArgs {
    /// Files in the safetensors format, or folders of them
    #[arg(required = true, value_name = "CHECKPOINT")]
    pub(crate) checkpoints: Vec<PathBuf>,

    /// Device that the host memory is for: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// Number of concurrent readers [default: two for each core, 4 to 16]
    #[arg(long, value_name = "N", value_parser = readers, allow_negative_numbers = true)]
    pub(crate) readers: Option<NonZeroUsize>,

    /// How many times to load, and to read the files directly
    #[arg(long, value_name = "N", default_value = "4", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) rounds: NonZeroU32,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

fn readers(text: &str) -> Result<NonZeroUsize, String> {
    let readers = text.parse().ok().filter(|readers: &NonZeroUsize| readers.get() <= 256);
    readers.ok_or_else(|| format!("{} is not in 1..=256", text.escape_debug()))
}
