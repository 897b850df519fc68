//! Arguments of `route` and `fleet`.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use poorwill_local::arguments::{positive, positive_time, time};

#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct RouteArgs {
    /// Configuration of the router
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,

    /// Run only this part: the front without a candidate for the controller, or the candidate without a front
    #[arg(long, value_name = "PART")]
    pub(crate) only: Option<RouterPart>,

    /// Say what the router would have and what stands against it, and start nothing
    #[arg(long)]
    pub(crate) check: bool,

    /// Log JSON lines to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

/// A part of a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum RouterPart {
    Front,
    Controller,
}

#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct FleetArgs {
    #[command(subcommand)]
    pub(crate) command: Option<FleetCommand>,

    /// Start an etcd, three nodes with mock engines and two routers, send traffic, and kill a node; needs no GPU
    #[arg(long)]
    pub(crate) demo: bool,

    /// How long the demo sends traffic, with a unit, like 60s or 2m
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = positive_time)]
    pub(crate) duration: Duration,

    /// Configuration of a router of the fleet
    #[arg(long, value_name = "FILE", global = true, required = false, default_value = "fleet.toml")]
    pub(crate) config: PathBuf,

    /// Print the result as one JSON object to standard output
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// Commands about a fleet.
#[derive(Debug, Subcommand)]
pub(crate) enum FleetCommand {
    /// Write a configuration of a router to standard output, with what nodes and an etcd need
    Init,
    /// Show the nodes, and every model on them
    Status,
    /// Have a node's models go elsewhere, as before work on the machine
    Drain {
        /// Name of the node
        node: String,
        /// Let it take models again
        #[arg(long)]
        off: bool,
        /// The reason, for people
        #[arg(long, value_name = "TEXT", default_value = "")]
        why: String,
        /// End the drain by itself after this time
        #[arg(long = "for", value_name = "TIME", value_parser = lease_time, conflicts_with = "off")]
        lasts: Option<Duration>,
    },
    /// Keep a model awake
    Pin {
        /// Name of the model
        model: String,
        /// On how many nodes
        #[arg(long, value_name = "N", default_value = "1", value_parser = positive)]
        copies: NonZeroU32,
        /// Only on these nodes
        #[arg(long = "node", value_name = "NODE")]
        nodes: Vec<String>,
        /// Unpin it
        #[arg(long, conflicts_with_all = ["copies", "nodes"])]
        off: bool,
    },
}

/// As a lease of etcd has it.
fn lease_time(text: &str) -> Result<Duration, String> {
    let time = time(text)?;
    match time.subsec_nanos() == 0 && (2..=86_400).contains(&time.as_secs()) {
        true => Ok(time),
        false => Err("it has to be whole seconds, from 2s to 1day".to_owned()),
    }
}
