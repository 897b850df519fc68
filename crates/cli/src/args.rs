//! The commands: those of this machine, and the services. `docs/reference/commands.md` is generated from them.

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use poorwill_local::command_line::CommandLine;
use poorwill_local::failure;

use crate::broker::{self, BrokerArgs};
use crate::completions::{self, CompletionsArgs};
use crate::fleet::{self, FleetArgs, RouteArgs};
use crate::man::{self, ManArgs};
use crate::mock_engine::{self, MockEngineArgs};
use crate::reference::{self, visible_commands};
use crate::replay::{self, ReplayArgs};
use crate::rotate::{self, RotateArgs, with_config_usage};
use crate::warnings;

/// GPU memory runtime for language-model engines: sleep, wake, and verified bytes.
#[derive(Debug, Parser)]
#[command(name = "poorwill", version, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Local(poorwill_local::Command),
    /// Say what recorded allocations would need: with any allocator, on any card, without a GPU
    Replay(ReplayArgs),
    /// Share GPUs between many models: run the rotation service, or control one that runs
    Rotate(RotateArgs),
    /// Serve the models of many rotations at one address: route each request to a node that has its model
    ///
    /// The nodes are rotations with [fleet] in their configuration. Any number of routers run side by side. One of them
    /// is elected to place models on nodes.
    Route(RouteArgs),
    /// Look at a fleet of rotations, or say what its controller should do
    Fleet(FleetArgs),
    /// Run the broker of this user, at which sleeping engines lend their GPU memory, or look at the one that runs
    ///
    /// It has no GPU context, and never the only copy of bytes. Processes that lend start one themselves. Where another
    /// broker serves the socket already, the command says so and ends with exit code 0. SIGTERM and SIGINT end a broker.
    Broker(BrokerArgs),
    /// Print completions for a shell
    Completions(CompletionsArgs),
    /// Print the man page, or write the page of every command to a folder
    Man(ManArgs),
    /// Serve a mock engine with vLLM's HTTP paths, in host memory
    #[command(hide = true)]
    MockEngine(MockEngineArgs),
    /// Print the command reference as Markdown
    #[command(hide = true)]
    Reference,
}

impl Command {
    /// Whether it is a service, which logs as its configuration says, or reports by itself what a service warns of.
    fn logs(&self) -> bool {
        match self {
            Self::Rotate(args) => args.command.is_none(),
            Self::Route(_) => true,
            _ => false,
        }
    }
}

impl CommandLine for Args {
    const PROGRAM: &str = "poorwill";

    fn complete(command: clap::Command) -> clap::Command {
        command.mut_subcommands(with_config_usage)
    }

    fn mistake(&self) -> Option<(ErrorKind, String)> {
        match &self.command {
            Command::Local(command) => command.mistake(),
            Command::Rotate(args) => args.mistake(),
            Command::Broker(args) => args.mistake(),
            _ => None,
        }
    }

    fn run(self) -> ExitCode {
        if !self.command.logs() {
            warnings::show();
        }
        match self.command {
            Command::Local(command) => command.run(),
            Command::Replay(args) => failure::finish(args.json, replay::run(&args)),
            Command::Rotate(args) => rotate::run(args),
            Command::Route(args) => fleet::route(&args),
            Command::Fleet(args) => fleet::run(args),
            Command::Broker(args) => broker::run(args),
            Command::Completions(args) => failure::print(completions::run(&args, visible_commands::<Self>())),
            Command::Man(args) => failure::print(man::run(&args, visible_commands::<Self>())),
            Command::MockEngine(args) => mock_engine::run(args),
            Command::Reference => failure::print(Ok(reference::page(visible_commands::<Self>()))),
        }
    }
}
