//! Arguments of `verify`.

use std::path::PathBuf;

use poorwill::{ByteSize, DeviceSpec};

use crate::arguments::BudgetArgs;

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub struct VerifyArgs {
    /// Files in the safetensors format, or folders of them
    #[arg(required = true, value_name = "CHECKPOINT")]
    pub(crate) checkpoints: Vec<PathBuf>,

    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// How many times to sleep and wake
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..),
        allow_negative_numbers = true)]
    pub(crate) cycles: u32,

    /// Sleep level: 1 keeps the weights in host memory, 2 drops them and reads the files again
    #[arg(long, value_name = "LEVEL", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) level: u8,

    /// Most memory to map on the device, like 24GiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) limit: Option<ByteSize>,

    /// Back up the weights in the background first, so that the first sleep copies nothing
    #[arg(long)]
    pub(crate) prepare: bool,

    /// Take this process off its device after each sleep, by a helper, and put it back before the wake
    #[arg(long)]
    pub(crate) hibernate: bool,

    /// Size of a key-value cache beside the weights, like 2GiB
    #[arg(long, value_name = "SIZE", default_value = "0", allow_hyphen_values = true)]
    pub(crate) kv_cache: ByteSize,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}
