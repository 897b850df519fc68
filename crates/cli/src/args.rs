//! What the command line accepts.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use poorwill::{ByteSize, DeviceSpec};

/// GPU memory runtime for language-model engines: sleep, wake, and verified bytes.
#[derive(Debug, Parser)]
#[command(name = "poorwill", version, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write a small mixture-of-experts checkpoint to a temporary folder, load it, put it to sleep and wake it,
    /// and verify every tensor
    Demo(DemoArgs),
    /// Load safetensors files, put them to sleep and wake them, and verify every tensor
    Nap(NapArgs),
}

/// Arguments of `poorwill demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host:4GiB")]
    pub(crate) device: DeviceSpec,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `poorwill nap`.
#[derive(Debug, clap::Args)]
pub(crate) struct NapArgs {
    /// Files in the safetensors format, or folders of them
    #[arg(required = true, value_name = "CHECKPOINT")]
    pub(crate) checkpoints: Vec<PathBuf>,

    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    /// How many times to sleep and wake
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) cycles: u32,

    /// Sleep level: 1 keeps the weights in host memory, 2 drops them and reads them from the files again
    #[arg(long, value_name = "LEVEL", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) level: u8,

    /// Most memory to map on the device, like 24GiB
    #[arg(long, value_name = "SIZE")]
    pub(crate) limit: Option<ByteSize>,

    /// Size of a key-value cache to hold beside the weights, like 2GiB
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub(crate) kv_cache: ByteSize,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}
