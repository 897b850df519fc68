//! Signals to the service.

use tokio::signal::unix::{Signal, SignalKind, signal};

use poorwill_local::failure::Failure;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServiceSignal {
    Stop,
    Reload,
}

/// SIGTERM and SIGINT stop the service; SIGHUP reloads its configuration.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Self, Failure> {
        let listen =
            |kind| signal(kind).map_err(|error| Failure::new(format!("cannot wait for signals: {error}")));
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    pub(crate) async fn next(&mut self) -> ServiceSignal {
        tokio::select! {
            _ = self.terminate.recv() => ServiceSignal::Stop,
            _ = self.interrupt.recv() => ServiceSignal::Stop,
            _ = self.hangup.recv() => ServiceSignal::Reload,
        }
    }

    pub(crate) async fn end(&mut self) {
        while self.next().await != ServiceSignal::Stop {}
    }
}
