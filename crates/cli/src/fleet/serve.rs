//! Runs a router, or a controller, until a signal ends it.

use std::path::Path;
use std::time::Duration;

use poorwill_net::descriptors;
use poorwill_router as router;
use poorwill_router::{Checked, RouterConfig};

use super::args::{RouteArgs, RouterPart};
use crate::rotate::{ServiceSignal, Signals, config_failure, logged, runtime};
use poorwill_local::failure::Failure;

/// How long requests may finish after the first signal.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn read(path: &Path) -> Result<RouterConfig, Failure> {
    RouterConfig::read(path).map_err(|error| config_failure(path, &error))
}

/// Whether it routes, and whether it is a candidate for the controller.
fn parts(args: &RouteArgs) -> (bool, bool) {
    (args.only != Some(RouterPart::Controller), args.only != Some(RouterPart::Front))
}

/// What a router would have with this file.
pub(super) fn check(args: &RouteArgs) -> Result<String, Failure> {
    let config = read(&args.config)?;
    let (routes, controls) = parts(args);
    let Checked { status, warnings } = runtime()?.block_on(router::check(&config, routes, controls))?;
    let warnings: String = warnings.iter().map(|warning| format!("warning: {warning}\n")).collect();
    Ok(format!(
        "fleet {}: nodes {}, models {}\nfront: {}\n{warnings}",
        status.fleet,
        status.nodes.len(),
        status.models.len(),
        config.front.listen,
    ))
}

pub(super) fn run(args: &RouteArgs) -> Result<(), Failure> {
    let config = logged(args.json, || read(&args.config))?;
    if let Err(error) = descriptors::raise() {
        tracing::warn!(%error, "cannot raise the limit of file descriptors");
    }
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let (routes, controls) = parts(args);
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
