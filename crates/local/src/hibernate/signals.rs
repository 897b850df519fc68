//! SIGTERM and SIGINT, which from then on end nothing by themselves.

use std::io;
use std::thread;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use crate::failure::Failure;

/// They wait for the next look, and end nothing.
pub(super) struct HeldSignals {
    signals: Option<Signals>,
    handle: Handle,
}

impl HeldSignals {
    pub(super) fn new() -> Result<Self, Failure> {
        let signals = Signals::new([SIGTERM, SIGINT]).map_err(|error| cannot_wait(&error))?;
        Ok(Self { handle: signals.handle(), signals: Some(signals) })
    }

    /// Calls `ended` on a thread of its own at the first SIGTERM. Later calls do nothing.
    pub(super) fn on_terminate(&mut self, ended: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
        let Some(mut signals) = self.signals.take() else { return Ok(()) };
        let wait = move || {
            if signals.forever().any(|signal| signal == SIGTERM) {
                ended();
            }
        };
        let thread = thread::Builder::new().name("poorwill-signals".into()).spawn(wait);
        thread.map(drop).map_err(|error| cannot_wait(&error))
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        self.handle.close();
    }
}

fn cannot_wait(error: &io::Error) -> Failure {
    Failure::new(format!("cannot wait for signals: {error}"))
}
