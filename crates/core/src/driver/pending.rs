//! Work that a stream will finish later.

use std::fmt;

use super::Result;

/// The outcome of queued work. Dropping it neither cancels the work nor waits for it.
#[must_use = "queued work can fail; wait for its outcome"]
pub struct Pending<T> {
    wait: Box<dyn FnOnce() -> Result<T> + Send>,
    has_ended: Option<HasEnded>,
}

/// Looks whether work has ended.
type HasEnded = Box<dyn Fn() -> bool + Send>;

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}

impl<T: 'static> Pending<T> {
    /// Work whose outcome `wait` returns after blocking for it.
    pub fn new(wait: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        Self { wait: Box::new(wait), has_ended: None }
    }

    /// The same work; `has_ended` says, without blocking, whether it has ended, well or not.
    pub fn telling(mut self, has_ended: impl Fn() -> bool + Send + 'static) -> Self {
        self.has_ended = Some(Box::new(has_ended));
        self
    }

    /// Whether the work has ended, well or not, where that can be told without waiting for it.
    #[must_use]
    pub fn has_ended(&self) -> Option<bool> {
        self.has_ended.as_ref().map(|has_ended| has_ended())
    }

    /// Blocks until the work has finished.
    ///
    /// # Errors
    /// What the work failed with.
    pub fn wait(self) -> Result<T> {
        (self.wait)()
    }

    /// The same work with another outcome, computed by whoever waits.
    pub fn then<U: 'static>(self, f: impl FnOnce(Result<T>) -> Result<U> + Send + 'static) -> Pending<U> {
        let Self { wait, has_ended } = self;
        Pending { wait: Box::new(move || f(wait())), has_ended }
    }
}
