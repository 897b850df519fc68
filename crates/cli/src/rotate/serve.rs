//! A rotation, until a signal ends it.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use poorwill::chain;
use poorwill_rotate::run::{self, Running};
use poorwill_rotate::service::Service;
use tokio::sync::Notify;
use tracing_subscriber::EnvFilter;

use super::signals::{Signals, Told};
use super::{read, runtime};
use crate::failure::Failure;

/// How long running answers may take when the service ends, until a second signal.
const PATIENCE: Duration = Duration::from_secs(60);

/// Serves. Log lines go to standard error, as JSON if that is wanted.
pub(super) fn run(path: &Path, keeps_engines: bool, json: bool) -> Result<(), Failure> {
    let config = read(path)?;
    log(json);
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let running = run::begin(config, Some(path.to_path_buf())).await?;
        serve(running, &mut signals, path, keeps_engines).await
    });
    // What blocks a thread yet is of no use to anybody.
    runtime.shutdown_background();
    outcome
}

async fn serve(
    mut running: Running,
    signals: &mut Signals,
    path: &Path,
    keeps_engines: bool,
) -> Result<(), Failure> {
    let again = Arc::new(Notify::new());
    let reading = tokio::spawn(reload_each(running.service.clone(), path.to_path_buf(), Arc::clone(&again)));
    loop {
        tokio::select! {
            ended = running.ended() => {
                running.end(PATIENCE, !keeps_engines).await;
                return Err(ended.into());
            }
            told = signals.next() => match told {
                Told::End => break,
                Told::Reload => again.notify_one(),
            },
        }
    }
    reading.abort();
    tracing::info!("ending: running answers come to their end");
    tokio::select! {
        () = running.end(PATIENCE, !keeps_engines) => Ok(()),
        () = signals.end() => Err(Failure::new("ended at once, at the second signal: engines may be left running")),
    }
}

/// Reads the configuration each time that it is told to, as often as there is something new.
async fn reload_each(service: Service, path: PathBuf, again: Arc<Notify>) {
    loop {
        again.notified().await;
        let path = path.clone();
        let config = tokio::task::spawn_blocking(move || read(&path)).await;
        let reloaded = match config {
            Ok(Ok(config)) => service.reload(config).await.map_err(|error| chain(&error)),
            Ok(Err(failure)) => Err(failure.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match reloaded {
            Ok(()) => tracing::info!("the configuration was read again"),
            Err(error) => tracing::error!(%error, "the configuration stays as it was"),
        }
    }
}

/// Log lines of this level and above, unless `POORWILL_LOG` says otherwise.
fn log(json: bool) {
    let filter = EnvFilter::try_from_env("POORWILL_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    // Somebody else's subscriber is as good.
    let _already =
        if json { lines.json().try_init() } else { lines.with_ansi(io::stderr().is_terminal()).try_init() };
}
