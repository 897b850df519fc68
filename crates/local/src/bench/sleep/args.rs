//! Arguments of `bench sleep`.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use poorwill::DeviceSpec;
use poorwill::backup::{Compress, UnknownCompress};
use poorwill_bench::sleep::{Fraction, InvalidFraction};
use poorwill_bench::{Contents, ParseContentsError};

use crate::arguments::{BudgetArgs, load_bytes, positive, positive_bytes};

/// Arguments of `bench sleep`.
#[derive(Debug, clap::Args)]
pub struct SleepArgs {
    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// How much to load: bytes, or with a unit like 24GiB [default: 1GiB on the host device, 24GiB on a GPU]
    ///
    /// It becomes whole layers of 496 MiB, or one smaller layer.
    #[arg(long, value_name = "SIZE", value_parser = positive_bytes, allow_hyphen_values = true)]
    size: Option<NonZeroU64>,

    /// Part of the load that changes before the last sleep, like 1% or 0.01
    #[arg(long, value_name = "PART", default_value = "1%", value_parser = fraction, allow_hyphen_values = true)]
    pub(crate) changed: Fraction,

    /// What to load: random bytes, of which codes save nothing; bf16 weights as of a layer, normally distributed; or
    /// zeros
    #[arg(long, value_name = "CONTENT", default_value_t, value_parser = content_parser())]
    pub(crate) content: Contents,

    /// Whether backups are stored as codes, which save three tenths of bf16 weights; auto: where the device encodes
    /// faster than its link
    #[arg(long, value_name = "WHEN", default_value_t, value_parser = compress_parser())]
    pub(crate) compress: Compress,

    /// Folder on a local disk: some sleeps move their backups there, and the wakes are timed beside a plain reader of
    /// the same file
    #[arg(long, value_name = "FOLDER")]
    pub(crate) disk: Option<PathBuf>,

    /// How many times to sleep and wake without changes
    #[arg(long, value_name = "N", default_value = "3", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) cycles: NonZeroU32,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

impl SleepArgs {
    pub(crate) fn bytes(&self) -> NonZeroU64 {
        self.size.unwrap_or(load_bytes(&self.device))
    }
}

fn fraction(text: &str) -> Result<Fraction, String> {
    text.parse().map_err(|error: InvalidFraction| error.to_string())
}

fn content_parser() -> impl TypedValueParser<Value = Contents> {
    PossibleValuesParser::new(Contents::ALL.map(Contents::name))
        .try_map(|name| -> Result<_, ParseContentsError> { name.parse() })
}

fn compress_parser() -> impl TypedValueParser<Value = Compress> {
    PossibleValuesParser::new(["auto", "off", "always"])
        .try_map(|name| -> Result<_, UnknownCompress> { name.parse() })
}
