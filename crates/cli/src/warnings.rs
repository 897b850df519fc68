//! What libraries warn of while a command runs that is no service: a line each, on standard error.
//!
//! A service logs by its own filter and format instead.

use std::io::{self, IsTerminal};

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Shows them from now on.
pub(crate) fn show() {
    let lines = lines(io::stderr, io::stderr().is_terminal());
    // A subscriber that is set already stays.
    let _already = tracing::subscriber::set_global_default(lines);
}

fn lines<W>(writer: W, is_terminal: bool) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::WARN)
        .without_time()
        .with_target(false)
        .with_ansi(is_terminal)
        .with_writer(writer)
        .finish()
}
