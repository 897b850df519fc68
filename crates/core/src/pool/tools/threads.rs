//! The threads that work for a pool's callers in the background.

use std::thread::{self, JoinHandle};

use crate::driver::{DriverError, DriverErrorKind, Op};

#[derive(Debug, Default)]
pub(in crate::pool) struct Threads(Vec<JoinHandle<()>>);

impl Threads {
    /// `op` is what the thread is for, in the error when none starts.
    pub(in crate::pool) fn start(
        &mut self,
        name: &str,
        op: Op,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), DriverError> {
        self.0.retain(|thread| !thread.is_finished());
        let thread = thread::Builder::new().name(name.into()).spawn(work);
        self.0.push(thread.map_err(|error| no_thread(op, &error))?);
        Ok(())
    }

    pub(in crate::pool) fn join(&mut self) {
        for thread in self.0.drain(..) {
            // The handle of its work reports a panic.
            let _ = thread.join();
        }
    }

    /// Drops threads that do not exist in this process.
    pub(in crate::pool) fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.0));
    }
}

fn no_thread(op: Op, error: &std::io::Error) -> DriverError {
    let kind = DriverErrorKind::Device {
        code: error.raw_os_error().unwrap_or(0).into(),
        name: "no thread".into(),
        text: error.to_string(),
    };
    DriverError::new(op, kind)
}
