//! `poorwill rotate`: runs the rotation service or its demo, writes and checks configurations, and controls a service
//! that runs.

mod args;
mod check;
mod control;
mod demo;
mod draft;
mod engines;
mod import;
mod init;
mod listening;
mod log;
mod opening;
mod serve;
mod show;
mod signals;
mod watched;

pub(crate) use self::demo::free_ports;
pub(crate) use self::opening::{config_failure, runtime};
pub(crate) use self::serve::logged;
pub(crate) use self::signals::{ServiceSignal, Signals};

use std::process::ExitCode;

use poorwill_rotate::config::SCHEMA;

use self::args::RotateCommand;
pub(crate) use self::args::{RotateArgs, with_config_usage};
use poorwill_local::failure::{self, Failure};
use poorwill_rotate::validate::Trial;

pub(crate) fn run(args: RotateArgs) -> ExitCode {
    let json = args.json;
    let duration = args.duration;
    match (args.command, args.config, args.demo) {
        (Some(RotateCommand::Validate { requests, cycles }), Some(config), _) => {
            let trial = Trial { requests: requests.get(), cycles: cycles.get() };
            failure::finish(json, control::validate(&config, trial, json))
        }
        (Some(RotateCommand::Init), config, _) => failure::finish(json, init::run(config.as_deref())),
        (Some(RotateCommand::Import { file }), config, _) => {
            failure::finish(json, import::run(&file, config.as_deref()))
        }
        (Some(RotateCommand::Schema), ..) => failure::print(Ok(SCHEMA.to_owned())),
        (Some(RotateCommand::Log { model, lines, follow: true }), Some(config), _) => {
            log::follow(&config, &model, lines)
        }
        (Some(RotateCommand::Check), Some(config), _) => failure::finish(json, check::run(&config)),
        (Some(command), Some(config), _) => failure::finish(json, control::run(&config, command)),
        (None, _, true) => failure::finish(json, demo::run(duration, json)),
        (None, Some(config), false) => ended(serve::run(&config, args.keep_engines, args.watch, json)),
        // The command line requires one of them.
        (_, None, _) => ended(Err(Failure::new("--config FILE is needed, or --demo"))),
    }
}

fn ended(outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure::report_error(&failure),
    }
}
