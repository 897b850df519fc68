//! Streams and events that end with whoever made them.

use std::fmt;
use std::sync::Arc;

use poorwill_core::driver::{EventId, Result};
use poorwill_core::{Driver, StreamId};

/// How often something is given back before it is left to the driver, which gives it back when it ends.
const TRIES: usize = 3;

/// Does what must not be left undone because it was refused once. The error is the last.
fn retried<T, E>(action: impl Fn() -> std::result::Result<T, E>) -> std::result::Result<T, E> {
    let mut outcome = action();
    for _ in 1..TRIES {
        if outcome.is_ok() {
            break;
        }
        outcome = action();
    }
    outcome
}

/// A stream of a device. Ended when dropped, after the work queued on it.
pub struct Stream {
    driver: Arc<dyn Driver>,
    id: StreamId,
    is_open: bool,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("id", &self.id).field("is_open", &self.is_open).finish_non_exhaustive()
    }
}

impl Stream {
    /// An ordinary one.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        Ok(Self { id: driver.stream_create()?, driver: Arc::clone(driver), is_open: true })
    }

    /// One whose copies to the device are made by a kernel, where there is one
    /// ([`DeviceInfo::kernel_copies`](poorwill_core::DeviceInfo)).
    ///
    /// # Errors
    /// What the driver says.
    pub fn with_kernel_copies(driver: &Arc<dyn Driver>) -> Result<Self> {
        Ok(Self { id: driver.stream_create_kernel_copies()?, driver: Arc::clone(driver), is_open: true })
    }

    /// What calls of the driver name it by.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// Waits for what is queued. After an error it waits again, so that what is in flight does not meet what comes
    /// next.
    ///
    /// # Errors
    /// What the device said first.
    pub fn wait(&self) -> Result<()> {
        self.wait_all().1
    }

    /// Ends it, once.
    ///
    /// # Errors
    /// What the driver says; it is tried again when this is dropped.
    pub fn close(&mut self) -> Result<()> {
        if self.is_open {
            retried(|| self.driver.stream_destroy(self.id))?;
            self.is_open = false;
        }
        Ok(())
    }

    /// Marks what is queued until now.
    pub(super) fn record_event(&self) -> Result<Event> {
        Ok(Event { id: self.driver.event_record(self.id)?, driver: Arc::clone(&self.driver) })
    }

    /// Lets what is queued from now on wait for a mark.
    pub(super) fn wait_event(&self, mark: &Event) -> Result<()> {
        self.driver.stream_wait_event(self.id, mark.id)
    }

    /// Waits as [`Stream::wait`] does. Whether nothing is in flight any more, and what was said first.
    pub(super) fn wait_all(&self) -> (bool, Result<()>) {
        let first = self.driver.stream_synchronize(self.id);
        let is_complete = first.is_ok() || retried(|| self.driver.stream_synchronize(self.id)).is_ok();
        (is_complete, first)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // There is nobody to tell of what is refused now.
        let _ = self.close();
    }
}

/// A point in a stream. Forgotten when dropped, passed or not; whoever waits for it goes on waiting.
pub(super) struct Event {
    driver: Arc<dyn Driver>,
    id: EventId,
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = retried(|| self.driver.event_destroy(self.id));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use poorwill_core::Op;
    use poorwill_testkit::device::TestDevice;
    use poorwill_testkit::scripted::{ScriptedDriver, Verdict};

    use super::*;

    #[test]
    fn what_is_refused_once_or_twice_is_given_back_all_the_same() {
        for refusals in 0..=3 {
            let left =
                Mutex::new([Op::EventDestroy, Op::StreamDestroy, Op::StreamSynchronize].repeat(refusals));
            let given_back = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&given_back);
            let driver: Arc<dyn Driver> =
                Arc::new(ScriptedDriver::new(TestDevice::open(1).driver(), move |call| {
                    let mut left = left.lock().unwrap();
                    if let Some(at) = left.iter().position(|op| *op == call.op) {
                        left.remove(at);
                        return Verdict::device_failure(call);
                    }
                    let is_giving = matches!(call.op, Op::EventDestroy | Op::StreamDestroy);
                    count.fetch_add(usize::from(is_giving), Ordering::Relaxed);
                    Verdict::Pass
                }));
            let stream = Stream::new(&driver).unwrap();
            drop(stream.record_event().unwrap());
            // The first error is told, and what is in flight is waited for.
            let (is_complete, first) = stream.wait_all();
            assert_eq!((is_complete, first.is_ok()), (true, refusals == 0));
            drop(stream);
            // Three times is as often as it is tried.
            assert_eq!(given_back.load(Ordering::Relaxed), if refusals < 3 { 2 } else { 0 });
        }
    }
}
