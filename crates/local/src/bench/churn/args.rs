//! Arguments of `bench churn`.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use poorwill::{ByteSize, DeviceSpec};
use poorwill_bench::churn::{Load, ParseLoadError};

use crate::arguments::{BudgetArgs, positive};

/// Arguments of `bench churn`.
#[derive(Debug, clap::Args)]
pub struct ChurnArgs {
    /// The load: experts converted with large transients, dense layers converted to half size, or experts copied to new
    /// blocks
    #[arg(long, value_name = "LOAD", value_parser = load_parser())]
    pub(crate) load: Load,

    /// Seed of the sizes that vary
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// How many times to load; each round first frees the one before
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) rounds: NonZeroU32,

    /// Most memory to map on the device, like 24GiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) limit: Option<ByteSize>,

    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host:64GiB")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// Write live and mapped memory after each step to this file, as comma-separated values
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

fn load_parser() -> impl TypedValueParser<Value = Load> {
    PossibleValuesParser::new(Load::ALL.map(Load::name))
        .try_map(|name| -> Result<_, ParseLoadError> { name.parse() })
}
