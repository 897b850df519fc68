//! The broker of the service, on a thread of its own until the service ends.

use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use poorwill::broker::{Broker, BrokerError, BrokerOptions, BrokerStop};

/// A broker that runs. Dropping it ends it soon.
#[derive(Debug)]
pub struct ServedBroker {
    stop: Arc<BrokerStop>,
    thread: Option<JoinHandle<()>>,
}

impl ServedBroker {
    /// Serves this path. `None` where another process does, or nothing can be served: the log says which.
    ///
    /// Takes seconds if another broker begins or ends there.
    #[must_use]
    pub fn start(path: &Path) -> Option<Self> {
        let mut options = BrokerOptions::default();
        options.idle = Duration::MAX;
        let shown = path.display().to_string();
        let broker = match Broker::bind(path, options) {
            Ok(broker) => broker,
            Err(BrokerError::AlreadyRunning { .. }) => {
                tracing::info!(
                    path = shown,
                    "another process serves the broker of lent memory, which is used"
                );
                return None;
            }
            Err(error) => {
                warn(&shown, &poorwill::chain(&error));
                return None;
            }
        };
        let stop =
            BrokerStop::new().inspect_err(|error| warn(&shown, &error.to_string())).ok().map(Arc::new)?;
        let thread = thread::Builder::new().name("poorwill-broker".into());
        let (stopped, of_thread) = (Arc::clone(&stop), shown.clone());
        let run = move || {
            if let Err(error) = broker.run(&stopped) {
                tracing::error!(
                    path = of_thread,
                    error = poorwill::chain(&error),
                    "the broker of lent memory ended, and nothing is lent until the service is started again"
                );
            }
        };
        let thread = thread.spawn(run).inspect_err(|error| warn(&shown, &error.to_string())).ok()?;
        tracing::info!(path = shown, "serves the broker of lent memory");
        Some(Self { stop, thread: Some(thread) })
    }

    /// Ends it, and waits for that. All that it holds is free then. Blocks for moments.
    pub fn end(mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            // A panic of it was reported by its hook.
            let _ended = thread.join();
        }
    }
}

impl Drop for ServedBroker {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

fn warn(path: &str, error: &str) {
    tracing::warn!(path, error, "cannot serve the broker of lent memory; engines sleep without lending");
}
