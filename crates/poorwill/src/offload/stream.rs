//! Streams and events that are destroyed on drop.

use std::fmt;
use std::sync::Arc;

use poorwill_core::driver::{EventId, Result};
use poorwill_core::{Driver, StreamId};

/// Attempts to destroy; after them the driver keeps the object to its own end.
const TRIES: usize = 3;

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

/// A stream, destroyed on drop after its queued work.
///
/// ```
/// use poorwill::offload::Stream;
/// use poorwill::{Arena, Config};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let stream = Stream::new(arena.driver())?;
/// let digest = arena.driver().digest(stream.id(), &[])?;
/// stream.wait()?;
/// assert!(digest.wait()?.is_empty());
/// # Ok(())
/// # }
/// ```
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
    /// An ordinary stream.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        Ok(Self { id: driver.stream_create()?, driver: Arc::clone(driver), is_open: true })
    }

    /// A stream with [kernel copies](poorwill_core::DeviceInfo) to the device, where supported.
    ///
    /// # Errors
    /// The driver's error.
    pub fn with_kernel_copies(driver: &Arc<dyn Driver>) -> Result<Self> {
        Ok(Self { id: driver.stream_create_kernel_copies()?, driver: Arc::clone(driver), is_open: true })
    }

    /// Its name in driver calls.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// Waits for queued work, and again after an error, so that later calls meet no work in flight.
    ///
    /// # Errors
    /// The first device error.
    pub fn wait(&self) -> Result<()> {
        self.wait_all().1
    }

    /// Destroys the stream, once.
    ///
    /// # Errors
    /// The driver's error; the drop tries again.
    pub fn close(&mut self) -> Result<()> {
        if self.is_open {
            retried(|| self.driver.stream_destroy(self.id))?;
            self.is_open = false;
        }
        Ok(())
    }

    pub(super) fn record_event(&self) -> Result<Event> {
        Ok(Event { id: self.driver.event_record(self.id)?, driver: Arc::clone(&self.driver) })
    }

    pub(super) fn wait_event(&self, mark: &Event) -> Result<()> {
        self.driver.stream_wait_event(self.id, mark.id)
    }

    /// Whether all work is complete, and the first error.
    pub(super) fn wait_all(&self) -> (bool, Result<()>) {
        let first = self.driver.stream_synchronize(self.id);
        let is_complete = first.is_ok() || retried(|| self.driver.stream_synchronize(self.id)).is_ok();
        (is_complete, first)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

/// A point in a stream. Dropping it early leaves waiting streams waiting.
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
            let (is_complete, first) = stream.wait_all();
            assert_eq!((is_complete, first.is_ok()), (true, refusals == 0));
            drop(stream);
            assert_eq!(given_back.load(Ordering::Relaxed), if refusals < 3 { 2 } else { 0 });
        }
    }
}
