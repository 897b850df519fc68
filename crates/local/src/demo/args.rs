//! Arguments of `demo`.

use poorwill::DeviceSpec;

use crate::arguments::BudgetArgs;

/// Arguments of `demo`.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Device to use: host, host:SIZE, cuda:N [default: host:4GiB, and host:64GiB for the large loads]
    ///
    /// On a smaller device the sizes of the large loads are divided by a power of two.
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceSpec>,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}
