//! Arguments of `broker`.

use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use poorwill::ByteSize;
use poorwill_local::arguments::{positive_time, time};

#[derive(Debug, clap::Args)]
pub(crate) struct BrokerArgs {
    /// Socket of the broker, in a folder of this user alone [default: $POORWILL_BROKER, or
    /// $XDG_RUNTIME_DIR/poorwill/broker-v1.sock, or /tmp/poorwill-UID/broker-v1.sock]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// End when there has been no connection for so long, like 60s or 2m
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = positive_time,
        conflicts_with_all = ["status", "give_up"])]
    pub(crate) idle: Duration,

    /// Print what the broker that runs has, instead of running one
    #[arg(long, conflicts_with = "give_up")]
    pub(crate) status: bool,

    /// Have the broker that runs free lent memory of --device: all of it, or so much, like 8GiB
    #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "all", value_parser = amount,
        requires = "device")]
    pub(crate) give_up: Option<Amount>,

    /// Device of --give-up, as --status prints it: the UUID of a GPU
    #[arg(long, value_name = "DEVICE", requires = "give_up", allow_hyphen_values = true)]
    pub(crate) device: Option<String>,

    /// How long owners of --give-up may take that have to back memory up first, like 5s or 500ms
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time, requires = "give_up",
        conflicts_with = "idle")]
    pub(crate) wait_max: Duration,

    /// Print the result of --status or --give-up as one JSON object to standard output
    #[arg(long)]
    pub(crate) json: bool,
}

impl BrokerArgs {
    /// What is wrong with options that are right one by one.
    pub(crate) fn mistake(&self) -> Option<(ErrorKind, String)> {
        let serves = !self.status && self.give_up.is_none();
        (self.json && serves).then(|| {
            let message =
                "--json is of --status and --give-up: a broker that runs has no result; leave it away";
            (ErrorKind::MissingRequiredArgument, message.to_owned())
        })
    }
}

/// How much memory is to be freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Amount {
    All,
    Bytes(u64),
}

fn amount(text: &str) -> Result<Amount, String> {
    if text == "all" {
        return Ok(Amount::All);
    }
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => Err("nothing is to be freed; write it like 8GiB, or all".to_owned()),
        Ok(ByteSize(bytes)) => Ok(Amount::Bytes(bytes)),
        Err(error) => Err(format!("{error}; write it like 8GiB, or all")),
    }
}
