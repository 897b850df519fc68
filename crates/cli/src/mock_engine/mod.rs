//! `poorwill mock-engine`: serves a mock engine until SIGTERM, SIGINT or an injected crash.
//!
//! One line on standard output has its address. After an injected crash the exit code is that of an abort in a shell,
//! without any cleanup.

use std::env;
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::process::ExitCode;

use poorwill::chain;
use poorwill::lend::Lending;
use poorwill_mock_engine::{Ended, MockEngine};
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

mod args;

pub(crate) use self::args::MockEngineArgs;

/// The folder in which its process is registered as one that can be taken off its device.
pub(crate) const HOST_PROCESSES: &str = "POORWILL_HOST_PROCESSES";

/// Exit code of a shell for SIGABRT.
const ABORTED: u8 = 128 + 6;

pub(crate) fn run(args: MockEngineArgs) -> ExitCode {
    let ended = match Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            let ended = runtime.block_on(serve(args));
            // Threads that still block have no further use.
            runtime.shutdown_background();
            ended
        }
        Err(error) => Err(format!("cannot start threads: {error}")),
    };
    let (message, code) = match ended {
        Ok(Ended::Shutdown) => return ExitCode::SUCCESS,
        Ok(Ended::Crashed(lie)) => (format!("the mock engine crashes as requested: {lie}"), ABORTED),
        Err(failure) => (failure, 1),
    };
    // Without standard error there is no place for it.
    let _ = writeln!(io::stderr(), "error: {message}");
    ExitCode::from(code)
}

/// Where it lends, as its environment says.
fn lending() -> Option<Lending> {
    let lending = Lending::default().named("mock engine");
    let lending = match env::var_os("POORWILL_BROKER").filter(|path| !path.is_empty()) {
        Some(socket) => lending.at(socket),
        None => lending,
    };
    (env::var_os("POORWILL_LEND")? == "1").then_some(lending)
}

async fn serve(args: MockEngineArgs) -> Result<Ended, String> {
    let MockEngineArgs { listen, model, bytes, residue, device, serves, like, tokens_per_s, faults, seed } =
        args;
    let residue_bytes = residue.map_or(0, NonZeroU64::get);
    let host_processes = env::var_os(HOST_PROCESSES).map(PathBuf::from);
    let no_signals = |error: io::Error| format!("cannot wait for signals: {error}");
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let cannot_listen =
        |error: io::Error| format!("cannot listen on {listen}: {error}; choose another with --listen");
    let listener = TcpListener::bind(listen).await.map_err(cannot_listen)?;
    let address = listener.local_addr().map_err(cannot_listen)?;
    // A parent that ignores the output has chosen the port itself.
    let _ = writeln!(io::stdout(), "listening on http://{address}");
    let options = MockEngine {
        residue_bytes,
        host_processes,
        device,
        lending: lending(),
        serves,
        like,
        tokens_per_s,
        faults,
        seed,
        ..MockEngine::new(model, bytes.get())
    };
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    poorwill_mock_engine::serve(options, listener, shutdown).await.map_err(|error| chain(&error))
}
