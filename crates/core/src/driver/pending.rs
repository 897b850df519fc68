//! Work that a stream will finish later.

use std::fmt;

use super::Result;

/// The outcome of queued work. Dropping it neither cancels the work nor waits for it.
///
/// ```
/// use poorwill::Pending;
///
/// let work = Pending::new(|| Ok(20)).then(|outcome| Ok(outcome? + 1));
/// assert_eq!(work.wait()?, 21);
/// # Ok::<(), poorwill::DriverError>(())
/// ```
#[must_use = "queued work can fail; wait for its outcome"]
pub struct Pending<T> {
    wait: Box<dyn FnOnce() -> Result<T> + Send>,
    has_ended: Option<HasEnded>,
}

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

    /// The same work; `has_ended` returns, without blocking, whether it has ended.
    pub fn telling(mut self, has_ended: impl Fn() -> bool + Send + 'static) -> Self {
        self.has_ended = Some(Box::new(has_ended));
        self
    }

    /// Whether the work has ended, with success or failure. `None` where only [`Pending::wait`] can find out.
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

    /// The same work with another outcome, computed in [`Pending::wait`].
    pub fn then<U: 'static>(self, f: impl FnOnce(Result<T>) -> Result<U> + Send + 'static) -> Pending<U> {
        let Self { wait, has_ended } = self;
        Pending { wait: Box::new(move || f(wait())), has_ended }
    }
}
