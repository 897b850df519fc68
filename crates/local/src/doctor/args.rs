//! Arguments of `doctor`.

use std::time::Duration;

use poorwill::budget::Caps;
use poorwill::{ByteSize, Cap, DeviceSpec, InvalidTag, Tag};

use crate::arguments::positive_time;

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Report this device only, beside the host: host, host:SIZE, cuda:N [default: all]
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceSpec>,

    /// Most memory to use of each device: bytes, like 20GiB, or a share, like 0.92, or one each, like
    /// cuda:0=20GiB,cuda:1=0.92
    #[arg(long, value_name = "BUDGET", allow_hyphen_values = true)]
    pub(crate) budget: Option<Caps>,

    /// Memory that an engine needs before its key-value cache, like weights=16GiB; may be repeated
    ///
    /// The report has the rest for the cache. Claims that do not fit into the budget are refused.
    #[arg(long = "claim", value_name = "NAME=SIZE", value_parser = claim)]
    pub(crate) claims: Vec<(Tag, u64)>,

    /// Open and measure GPUs for so long, like 30s [default: 7s]
    #[arg(long, value_name = "TIME", value_parser = positive_time)]
    pub(crate) timeout: Option<Duration>,

    /// Print one JSON object to standard output instead of tables; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

fn claim(text: &str) -> Result<(Tag, u64), String> {
    let (name, size) = text.split_once('=').ok_or("write it like weights=16GiB")?;
    let name = name.trim().parse().map_err(|error: InvalidTag| error.to_string())?;
    match (size.parse::<Cap>(), size.parse::<ByteSize>()) {
        (Ok(Cap::Share(_)), _) => {
            Err("a claim is a number of bytes, like weights=16GiB; shares are for --budget".into())
        }
        (_, Err(error)) => Err(error.to_string()),
        (Err(_), Ok(ByteSize(bytes))) if bytes > 0 => {
            Err(format!("without a unit it is {bytes} bytes; write it like weights=16GiB"))
        }
        (_, Ok(ByteSize(bytes))) => Ok((name, bytes)),
    }
}
