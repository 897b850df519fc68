//! `poorwill route` and `poorwill fleet`: the front of many nodes, and what operators see and want of a fleet.

mod orders;
mod serve;

use std::process::ExitCode;

use poorwill::chain;
use poorwill_fleet::etcd::EtcdError;

pub(crate) use self::orders::FleetStatus;
use crate::args::{FleetArgs, RouteArgs};
use crate::failure::{self, Failure};

pub(crate) fn route(args: &RouteArgs) -> ExitCode {
    match serve::run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure::report_error(&failure),
    }
}

pub(crate) fn run(args: FleetArgs) -> ExitCode {
    failure::finish(args.json, orders::run(&args.config, args.command))
}

impl From<EtcdError> for Failure {
    fn from(error: EtcdError) -> Self {
        Self::new(chain(&error))
    }
}
