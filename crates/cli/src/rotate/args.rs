//! Arguments of `rotate`.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use clap::error::ErrorKind;
use poorwill_local::arguments::{positive, positive_time, time};

#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct RotateArgs {
    #[command(subcommand)]
    pub(crate) command: Option<RotateCommand>,

    /// Configuration of the service; --demo needs none, and init and import write it, or else to standard output
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) config: Option<PathBuf>,

    /// Start three mock engines, send them traffic, and serve the status page; needs no GPU
    #[arg(long)]
    pub(crate) demo: bool,

    /// How long the demo sends traffic, with a unit, like 60s or 2m
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = positive_time)]
    pub(crate) duration: Duration,

    /// Keep the engines running when the service ends; the next service finds them
    #[arg(long)]
    pub(crate) keep_engines: bool,

    /// Read the configuration again when its file changes, as at SIGHUP
    #[arg(long, conflicts_with = "demo")]
    pub(crate) watch: bool,

    /// Print the result as one JSON object to standard output; the service logs JSON lines to standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

impl RotateArgs {
    /// What is wrong with options that are right one by one.
    pub(crate) fn mistake(&self) -> Option<(ErrorKind, String)> {
        let missing = |message: &str| Some((ErrorKind::MissingRequiredArgument, message.to_owned()));
        let conflict = |message: &str| Some((ErrorKind::ArgumentConflict, message.to_owned()));
        match (&self.command, self.demo, &self.config) {
            (Some(_), true, _) => {
                conflict("--demo starts its own rotation; leave --demo away to control one that runs")
            }
            (Some(RotateCommand::Schema), false, Some(_)) => {
                conflict("schema is of all configurations; leave --config away")
            }
            (Some(RotateCommand::Log { follow: true, .. }), ..) if self.json => conflict(
                "--follow prints lines as they come, and --json one object at the end; leave one away",
            ),
            (Some(command), false, None) if !command.does_without_config() => {
                missing("--config FILE is needed: the configuration of the rotation that runs")
            }
            (None, true, Some(_)) => conflict("--demo has its own configuration; leave --config away"),
            (None, false, None) => missing("--config FILE is needed, or --demo"),
            _ => None,
        }
    }
}

/// Commands to a rotation that runs, or about its configuration.
#[derive(Debug, Subcommand)]
pub(crate) enum RotateCommand {
    /// Write a first configuration, from the engines that run and the GPUs; changes no engine
    ///
    /// A file that exists is not replaced. API keys in command lines are left out.
    Init,
    /// Write the configuration that a llama-swap configuration becomes
    ///
    /// What has no counterpart is in comments, and on standard error. A file that exists is not replaced.
    Import {
        /// llama-swap's YAML file
        #[arg(value_name = "YAML")]
        file: PathBuf,
    },
    /// Check a configuration and this machine for it; starts no engine
    Check,
    /// Show the state of every model and GPU
    Status,
    /// Wake a model
    Wake {
        /// Name or alias of the model
        model: String,
        #[command(flatten)]
        wait: Wait,
    },
    /// Put a model to sleep, or all
    Sleep {
        /// Name or alias of the model
        #[arg(required_unless_present = "all")]
        model: Option<String>,
        /// Put every model to sleep
        #[arg(long, conflicts_with_all = ["model", "wait"])]
        all: bool,
        #[command(flatten)]
        wait: Wait,
    },
    /// Put a model to sleep, and take its engine's processes off their GPUs
    Hibernate {
        /// Name or alias of the model
        model: String,
        #[command(flatten)]
        wait: Wait,
    },
    /// Stop a model's engine, and start it again if it was running
    Restart {
        /// Name or alias of the model
        model: String,
        #[command(flatten)]
        wait: Wait,
    },
    /// Keep a model awake
    Pin {
        /// Name or alias of the model
        model: String,
        /// Unpin it
        #[arg(long)]
        off: bool,
    },
    /// Read the configuration again, without dropping a request
    Reload,
    /// Choose a profile: its names come before all others in clients' requests
    Profile {
        /// Name of the profile
        #[arg(required_unless_present = "off")]
        profile: Option<String>,
        /// Choose none
        #[arg(long, conflicts_with = "profile")]
        off: bool,
    },
    /// Put every model to sleep, wake it, and compare its answers before and after
    Validate {
        /// Number of prompts for each model, before and after
        #[arg(long, value_name = "N", default_value = "30", value_parser = positive, allow_negative_numbers = true)]
        requests: NonZeroU32,

        /// Number of sleeps of each model; from two on, memory that stays in use with each of them fails
        #[arg(long, value_name = "N", default_value = "1", value_parser = positive, allow_negative_numbers = true)]
        cycles: NonZeroU32,
    },
    /// Show the last lines of an engine's output
    Log {
        /// Name or alias of the model
        model: String,
        /// Most lines; at most 10000, of which the service keeps the last 1000
        #[arg(long, value_name = "N", default_value = "200", value_parser = clap::value_parser!(u16).range(..=10_000))]
        lines: u16,
        /// Go on with what comes
        #[arg(long)]
        follow: bool,
    },
    /// Print a JSON schema of the configuration, with which editors complete and check it
    Schema,
}

/// Whether a command waits until the model is where it should be.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Wait {
    /// Return when it is done, or failed; with a time, like 5m, at the latest then
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, value_parser = time)]
    wait: Option<Option<Duration>>,
}

impl Wait {
    /// The longest time to wait; `None` for no waiting.
    pub(crate) fn most(self) -> Option<Duration> {
        self.wait.map(|time| time.unwrap_or(Duration::MAX))
    }
}

impl RotateCommand {
    /// Whether `--config` names a file to be written, or none.
    fn does_without_config(&self) -> bool {
        matches!(self, Self::Init | Self::Import { .. } | Self::Schema)
    }
}

/// Shows `--config` as required: clap requires no option that may also stand before the subcommand.
pub(crate) fn with_config_usage(rotate: clap::Command) -> clap::Command {
    if rotate.get_name() != "rotate" {
        return rotate;
    }
    let usage = |command: clap::Command| {
        let config = match command.get_name() {
            "init" | "import" => "[--config <FILE>] ",
            "schema" => "",
            _ => "--config <FILE> ",
        };
        let names = command.get_positionals().filter_map(clap::Arg::get_value_names).flatten();
        let names: String = names.map(|name| format!(" <{name}>")).collect();
        let usage = format!("poorwill rotate {} {config}[OPTIONS]{names}", command.get_name());
        command.override_usage(usage)
    };
    rotate.mut_subcommands(usage).override_usage(
        "poorwill rotate --config <FILE> [OPTIONS] [COMMAND]\n       poorwill rotate --demo [OPTIONS]",
    )
}
