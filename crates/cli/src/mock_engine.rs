//! `poorwill mock-engine`: a process that is a mock engine, until it is told to end or a lie ends it.
//!
//! It says on standard output where it listens, in one line, and ends on SIGTERM and SIGINT. Where a lie ends it, its
//! exit code is that of an abort as shells tell it, and nothing that it holds is put in order before.

use std::io::{self, Write};
use std::process::ExitCode;

use poorwill::chain;
use poorwill_mock_engine::{Ended, MockEngine};
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::MockEngineArgs;

/// What a shell says of a process that was ended by SIGABRT.
const ABORTED: u8 = 128 + 6;

/// The command.
pub(crate) fn run(args: MockEngineArgs) -> ExitCode {
    let ended = match Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            let ended = runtime.block_on(serve(args));
            // What blocks a thread yet is of no use to anybody.
            runtime.shutdown_background();
            ended
        }
        Err(error) => Err(format!("cannot start threads: {error}")),
    };
    let (message, code) = match ended {
        Ok(Ended::Told) => return ExitCode::SUCCESS,
        Ok(Ended::Crashed(lie)) => (format!("the mock engine ends as it was told to: {lie}"), ABORTED),
        Err(failure) => (failure, 1),
    };
    // Standard error is the last place to complain to.
    let _ = writeln!(io::stderr(), "error: {message}");
    ExitCode::from(code)
}

async fn serve(args: MockEngineArgs) -> Result<Ended, String> {
    let MockEngineArgs { listen, model, bytes, tokens_per_s, lies, seed } = args;
    let deaf = |error: io::Error| format!("cannot wait for signals: {error}");
    let mut terminate = signal(SignalKind::terminate()).map_err(deaf)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(deaf)?;
    let taken =
        |error: io::Error| format!("cannot listen on {listen}: {error}; choose another with --listen");
    let listener = TcpListener::bind(listen).await.map_err(taken)?;
    let address = listener.local_addr().map_err(taken)?;
    // Whoever started it without caring for its output gave it the port.
    let _ = writeln!(io::stdout(), "listening on http://{address}");
    let options = MockEngine { tokens_per_s, lies, seed, ..MockEngine::new(model, bytes.get()) };
    let told = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    poorwill_mock_engine::serve(options, listener, told).await.map_err(|error| chain(&error))
}
