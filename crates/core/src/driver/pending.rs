//! Work that a stream will finish later.

use std::fmt;

use super::Result;

/// The outcome of queued work. Dropping it neither cancels the work nor waits for it.
#[must_use = "queued work can fail; wait for its outcome"]
pub struct Pending<T>(Box<dyn FnOnce() -> Result<T> + Send>);

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}

impl<T: 'static> Pending<T> {
    /// Work whose outcome `wait` returns after blocking for it.
    pub fn new(wait: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// Blocks until the work has finished.
    ///
    /// # Errors
    /// What the work failed with.
    pub fn wait(self) -> Result<T> {
        (self.0)()
    }

    /// The same work with another outcome, computed by whoever waits.
    pub fn then<U: 'static>(self, f: impl FnOnce(Result<T>) -> Result<U> + Send + 'static) -> Pending<U> {
        Pending(Box::new(move || f((self.0)())))
    }
}
