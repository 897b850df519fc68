//! `poorwill route` and `poorwill fleet`: the front of many nodes, and what operators see and want of a fleet.

mod args;
mod demo;
mod orders;
mod serve;
mod show;

use std::process::ExitCode;

pub(crate) use self::args::{FleetArgs, RouteArgs};
use poorwill_local::failure::{self, Failure};

pub(crate) fn route(args: &RouteArgs) -> ExitCode {
    if args.check {
        return failure::print(serve::check(args));
    }
    match serve::run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure::report_error(&failure),
    }
}

pub(crate) fn run(args: FleetArgs) -> ExitCode {
    let FleetArgs { command, config, demo, duration, json } = args;
    match command {
        Some(_) if demo => failed("--demo starts its own fleet; leave --demo away to look at another one"),
        Some(command) => failure::finish(json, orders::run(&config, command)),
        None if demo => failure::finish(json, demo::run(duration)),
        None => failed("say a command, such as `poorwill fleet status`, or --demo"),
    }
}

fn failed(reason: &str) -> ExitCode {
    failure::report_error(&Failure::new(reason))
}
