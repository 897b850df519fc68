//! Arguments of `bench offload`.

use std::num::{NonZeroU32, NonZeroU64};

use poorwill::DeviceSpec;

use crate::arguments::{BudgetArgs, load_bytes, positive, positive_bytes};

/// Arguments of `bench offload`.
#[derive(Debug, clap::Args)]
pub struct OffloadArgs {
    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// How much to keep in host memory: bytes, or with a unit like 24GiB [default: 1GiB on the host device, 24GiB on a
    /// GPU]
    ///
    /// Each layer has whole granules.
    #[arg(long, value_name = "SIZE", value_parser = positive_bytes, allow_hyphen_values = true)]
    size: Option<NonZeroU64>,

    /// Number of layers
    #[arg(long, value_name = "N", default_value = "32", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) layers: NonZeroU32,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

impl OffloadArgs {
    pub(crate) fn bytes(&self) -> NonZeroU64 {
        self.size.unwrap_or(load_bytes(&self.device))
    }
}
