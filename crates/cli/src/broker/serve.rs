//! Runs a broker until a signal ends it, or until it has had no connection for a while.
//!
//! One line on standard output says that clients can connect. Where another broker serves the path already, there is
//! nothing to do: of two processes that start a broker at once, neither has failed.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use poorwill_broker::{Broker, BrokerEnd, BrokerError, BrokerOptions, BrokerStop, raise_descriptor_limit};
use poorwill_local::failure::Failure;
use tokio::runtime::Builder;

use crate::rotate::Signals;

pub(super) fn run(path: &Path, idle: Duration) -> Result<(), Failure> {
    raise_descriptor_limit();
    let stop = Arc::new(BrokerStop::new()?);
    stop_on_signals(Arc::clone(&stop))?;
    let mut options = BrokerOptions::default();
    options.idle = idle;
    let broker = match Broker::bind(path, options) {
        Err(other @ BrokerError::AlreadyRunning { .. }) => {
            say(&other.to_string());
            return Ok(());
        }
        bound => bound?,
    };
    say(&format!("serving at {}", path.display()));
    if broker.run(&stop)? == BrokerEnd::Idle {
        say(&format!("ended: there was no connection for {idle:?}"));
    }
    Ok(())
}

/// From now on SIGTERM and SIGINT stop the broker, and SIGHUP does nothing.
fn stop_on_signals(stop: Arc<BrokerStop>) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::new(format!("cannot wait for signals: {error}"));
    let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let mut signals = runtime.block_on(async { Signals::new() })?;
    let wait = move || {
        runtime.block_on(signals.end());
        stop.stop();
    };
    // The process ends with the broker, whether it still waits or not.
    thread::Builder::new().name("poorwill-signals".into()).spawn(wait).map(drop).map_err(failed)
}

fn say(message: &str) {
    // Who started it may not listen.
    let _ = writeln!(io::stdout(), "{message}");
}
