//! Runs a router, or a controller, until a signal ends it.

use std::path::Path;
use std::time::Duration;

use poorwill_net::descriptors;
use poorwill_router as router;
use poorwill_router::RouterConfig;

use super::args::{RouteArgs, RouterPart};
use crate::rotate::{ServiceSignal, Signals, config_failure, logged, runtime};
use poorwill_local::failure::Failure;

/// How long requests may finish after the first signal.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn read(path: &Path) -> Result<RouterConfig, Failure> {
    RouterConfig::read(path).map_err(|error| config_failure(path, &error))
}

pub(super) fn run(args: &RouteArgs) -> Result<(), Failure> {
    let config = logged(args.json, || read(&args.config))?;
    if let Err(error) = descriptors::raise() {
        tracing::warn!(%error, "cannot raise the limit of file descriptors");
    }
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let (routes, controls) =
            (args.only != Some(RouterPart::Controller), args.only != Some(RouterPart::Front));
        let mut running = router::begin(&config, routes, controls).await?;
        loop {
            tokio::select! {
                ended = running.wait() => {
                    running.end(DRAIN_TIMEOUT).await;
                    return Err(ended.into());
                }
                signal = signals.next() => match signal {
                    ServiceSignal::Stop => break,
                    ServiceSignal::Reload => tracing::warn!("the router reads its configuration at its start only"),
                },
            }
        }
        tracing::info!("shutting down; finishing running requests first");
        tokio::select! {
            () = running.end(DRAIN_TIMEOUT) => Ok(()),
            () = signals.end() => Err(Failure::new("ended at once, at the second signal")),
        }
    });
    runtime.shutdown_background();
    outcome
}
