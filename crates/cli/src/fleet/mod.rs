//! `poorwill route` and `poorwill fleet`: the front of many nodes, and what operators see and want of a fleet.

mod demo;
mod orders;
mod serve;

use std::process::ExitCode;

use poorwill::chain;
use poorwill_fleet::etcd::EtcdError;
use poorwill_net::listener::ListenerError;
use poorwill_router::RouterError;
use poorwill_router::wishes::WishError;

use crate::args::{FleetArgs, RouteArgs};
use crate::failure::{self, Failure};

pub(crate) fn route(args: &RouteArgs) -> ExitCode {
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

impl From<EtcdError> for Failure {
    fn from(error: EtcdError) -> Self {
        Self::new(chain(&error))
    }
}

impl From<RouterError> for Failure {
    fn from(error: RouterError) -> Self {
        Self::new(chain(&error))
    }
}

impl From<ListenerError> for Failure {
    fn from(error: ListenerError) -> Self {
        Self::new(chain(&error))
    }
}

impl From<WishError> for Failure {
    fn from(error: WishError) -> Self {
        Self::new(chain(&error))
    }
}
