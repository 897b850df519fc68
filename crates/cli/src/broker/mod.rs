//! `poorwill broker`: runs the broker of this user, or looks at the one that runs.

mod args;
mod orders;
mod serve;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use poorwill_broker::default_path;
use poorwill_local::failure;

use self::args::Amount;
pub(crate) use self::args::BrokerArgs;

/// Environment variable with the path of the socket.
const SOCKET: &str = "POORWILL_BROKER";

pub(crate) fn run(args: BrokerArgs) -> ExitCode {
    let path = args.socket.unwrap_or_else(|| socket(std::env::var_os(SOCKET)));
    match (args.status, args.give_up, args.device) {
        (true, ..) => failure::finish(args.json, orders::status(&path)),
        (false, Some(amount), Some(device)) => {
            failure::finish(args.json, orders::give_up(&path, device, amount, args.wait_max))
        }
        _ => match serve::run(&path, args.idle) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => failure::report_error(&failure),
        },
    }
}

/// The path in the variable, or the usual one.
fn socket(value: Option<OsString>) -> PathBuf {
    value.filter(|value| !value.is_empty()).map_or_else(default_path, PathBuf::from)
}
