//! `hibernate`: takes processes off their devices and puts them back, once or as a helper.

mod args;
mod outcomes;
mod own;
mod requests;
mod serve;
mod show;
mod signals;

use std::process::ExitCode;

use poorwill::hibernation::{HibernateError, Hibernator, HibernatorOptions};
use serde_json::Value;

pub use self::args::HibernateArgs;
use self::outcomes::{Inspections, States};
pub(crate) use self::own::OwnHelper;
use self::requests::{options, recover, request, resume, warn_of_unreadable};
use self::signals::HeldSignals;
use crate::failure::{self, Failure};

pub(crate) fn run(args: HibernateArgs) -> ExitCode {
    let options = options(args.processes, args.journal);
    if args.serve {
        return serve::run(&options);
    }
    let json = args.json;
    match once(&options) {
        Err(failure) => failure::finish(json, Err::<States, _>(failure)),
        Ok((hibernator, _signals)) if args.recover => failure::finish(json, failing(recover(&hibernator))),
        Ok((hibernator, _signals)) if args.resume => {
            failure::finish(json, failing(resume(&hibernator, &args.pids, args.without_space_check)))
        }
        Ok((hibernator, _signals)) if args.state => {
            failure::finish(json, failing(States::of(&hibernator, &args.pids)))
        }
        Ok((hibernator, _signals)) if args.inspect => {
            failure::finish(json, failing(Inspections::of(&hibernator, &args.pids)))
        }
        Ok((hibernator, _signals)) => {
            let host_max = args.host_max.map(|size| size.0);
            let request = request(args.wait_max, host_max, args.without_space_check)
                .with_suspended_communicators(args.suspended_communicators);
            failure::finish(json, failing(hibernator.hibernate(&args.pids, &request)))
        }
    }
}

/// A command is not ended between two steps: it finishes what it has begun.
fn once(options: &HibernatorOptions) -> Result<(Hibernator, HeldSignals), Failure> {
    let signals = HeldSignals::new()?;
    let hibernator = failing(Hibernator::open(options))?;
    warn_of_unreadable(&hibernator);
    Ok((hibernator, signals))
}

fn failing<T>(result: Result<T, HibernateError>) -> Result<T, Failure> {
    result.map_err(failed)
}

/// With what programs may want to know.
fn failed(error: HibernateError) -> Failure {
    let details = serde_json::to_value(&error);
    let failure = Failure::from(error);
    match details {
        Ok(Value::Object(mut details)) => {
            details.remove("message");
            failure.with_details(details)
        }
        _ => failure,
    }
}
