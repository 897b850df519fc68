//! `poorwill rotate`: runs the rotation service or its demo, writes and checks configurations, and controls a service
//! that runs.

mod check;
mod control;
mod demo;
mod draft;
mod engines;
mod import;
mod init;
mod listening;
mod serve;
mod signals;

pub(crate) use self::demo::free_ports;
pub(crate) use self::serve::logged;
pub(crate) use self::signals::{ServiceSignal, Signals};

use std::io;
use std::path::Path;
use std::process::ExitCode;

use poorwill::chain;
use poorwill_rotate::client::ClientError;
use poorwill_rotate::config::{Config, ConfigError};
use poorwill_rotate::run::RunError;
use tokio::runtime::{Builder, Runtime};

use crate::args::{RotateArgs, RotateCommand};
use crate::failure::{self, Failure};

pub(crate) fn run(args: RotateArgs) -> ExitCode {
    let json = args.json;
    let duration = args.duration();
    match (args.command, args.config, args.demo) {
        (Some(RotateCommand::Validate { requests }), Some(config), _) => {
            failure::finish(json, control::validate(&config, requests.get(), json))
        }
        (Some(RotateCommand::Init), config, _) => failure::finish(json, init::run(config.as_deref())),
        (Some(RotateCommand::Import { file }), config, _) => {
            failure::finish(json, import::run(&file, config.as_deref()))
        }
        (Some(RotateCommand::Check), Some(config), _) => failure::finish(json, check::run(&config)),
        (Some(command), Some(config), _) => failure::finish(json, control::run(&config, command)),
        (None, _, true) => failure::finish(json, demo::run(duration, json)),
        (None, Some(config), false) => ended(serve::run(&config, args.keep_engines, json)),
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

fn read(path: &Path) -> Result<Config, Failure> {
    Config::read(path).map_err(|error| config_failure(path, &error))
}

/// All mistakes of the file.
pub(crate) fn config_failure(path: &Path, error: &ConfigError) -> Failure {
    let mut all = error.mistakes().iter().map(|mistake| match mistake {
        ConfigError::Read { .. } => Failure::new(chain(mistake)),
        _ => {
            let excerpt = mistake.place().and_then(|place| place.excerpt.clone());
            Failure::new(format!("{}: {}", path.display(), chain(mistake))).with_excerpt(excerpt)
        }
    });
    match all.next() {
        Some(first) => first.with_others(all.collect()),
        None => Failure::new(chain(error)),
    }
}

pub(crate) fn runtime() -> Result<Runtime, Failure> {
    let failed = |error: io::Error| Failure::new(format!("cannot start threads: {error}"));
    Builder::new_multi_thread().enable_all().build().map_err(failed)
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self::new(chain(&error))
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        Self::new(chain(&error))
    }
}
