//! Runs the rotation service until a signal ends it.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use poorwill::chain;
use poorwill_net::descriptors;
use poorwill_rotate::run::{self, Running};
use poorwill_rotate::service::Service;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::opening::{read, runtime};
use super::signals::{ServiceSignal, Signals};
use super::watched::Watched;
use poorwill_local::failure::Failure;

/// How long requests may finish after the first signal.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Environment variable with the log filter.
const LOG: &str = "POORWILL_LOG";
const LOG_DEFAULT: &str = "info";
const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Log lines are JSON if `json` is set.
pub(super) fn run(path: &Path, keeps_engines: bool, watches: bool, json: bool) -> Result<(), Failure> {
    let watched = watches.then(|| Watched::new(path.to_path_buf()));
    let config = logged(json, || read(path))?;
    if let Err(error) = descriptors::raise() {
        tracing::warn!(%error, "cannot raise the limit of file descriptors");
    }
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let running = run::begin(config, Some(path.to_path_buf())).await?;
        serve(running, &mut signals, path, keeps_engines, watched).await
    });
    // Threads that still block have no further use.
    runtime.shutdown_background();
    outcome
}

async fn serve(
    mut running: Running,
    signals: &mut Signals,
    path: &Path,
    keeps_engines: bool,
    watched: Option<Watched>,
) -> Result<(), Failure> {
    let reload = Arc::new(Notify::new());
    let watching = watched.map(|watched| tokio::spawn(watched.notify(Arc::clone(&reload))));
    let reading =
        tokio::spawn(reload_on_notify(running.service().clone(), path.to_path_buf(), Arc::clone(&reload)));
    loop {
        tokio::select! {
            ended = running.wait() => {
                running.end(DRAIN_TIMEOUT, !keeps_engines).await;
                return Err(ended.into());
            }
            signal = signals.next() => match signal {
                ServiceSignal::Stop => break,
                ServiceSignal::Reload => reload.notify_one(),
            },
        }
    }
    reading.abort();
    watching.inspect(JoinHandle::abort);
    tracing::info!("shutting down; finishing running requests first");
    tokio::select! {
        () = running.end(DRAIN_TIMEOUT, !keeps_engines) => Ok(()),
        () = signals.end() => Err(Failure::new("ended at once, at the second signal: engines may be left running")),
    }
}

async fn reload_on_notify(service: Service, path: PathBuf, reload: Arc<Notify>) {
    loop {
        reload.notified().await;
        let path = path.clone();
        let config = tokio::task::spawn_blocking(move || read(&path)).await;
        let reloaded = match config {
            Ok(Ok(config)) => service.reload(config).await.map_err(|error| chain(&error)),
            Ok(Err(failure)) => Err(failure.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match reloaded {
            Ok(()) => tracing::info!("reloaded the configuration"),
            Err(error) => tracing::error!(%error, "cannot reload the configuration; keeping the last one"),
        }
    }
}

/// What `read` returns, with log lines from then on: to standard error, as JSON if `json` is set.
pub(crate) fn logged<T>(json: bool, read: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let filter = log_filter(std::env::var_os(LOG))?;
    let config = read()?;
    init_log(filter, json);
    Ok(config)
}

/// What to log, by the variable's value.
fn log_filter(value: Option<OsString>) -> Result<EnvFilter, Failure> {
    let value = value.filter(|value| !value.to_string_lossy().trim().is_empty());
    let value = value.unwrap_or_else(|| LOG_DEFAULT.into());
    let refused = |why: &str| {
        Failure::new(format!(
            "{LOG} is `{}`, {why}; set it to a level ({}), to TARGET=LEVEL, or to several with commas, like \
             poorwill_rotate=debug,info",
            value.to_string_lossy().escape_debug(),
            LOG_LEVELS.join(", "),
        ))
    };
    let text = value.to_str().ok_or_else(|| refused("which is not Unicode"))?;
    // A word alone would be a target, and nothing else were logged. Not checked with spans, whose filters have
    // commas of their own.
    let mut words = text.split(',').map(str::trim).filter(|_| !text.contains('['));
    let is_known = |word: &str| word.contains('=') || word.parse::<LevelFilter>().is_ok();
    if let Some(word) = words.find(|word| !is_known(word)) {
        return Err(refused(&format!("and `{}` is no level", word.escape_debug())));
    }
    text.parse().map_err(|error| refused(&format!("which is no log filter ({error})")))
}

fn init_log(filter: EnvFilter, json: bool) {
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    // A subscriber that is set already stays.
    let _already =
        if json { lines.json().try_init() } else { lines.with_ansi(io::stderr().is_terminal()).try_init() };
}
