//! Work held back until a test releases it.
//!
//! [`hold`] holds any stream of any driver. Work queued after it, as by [`write()`], is in flight until the
//! test opens the latch; [`source`] is host memory for such copies. [`watched`] runs code when a buffer is
//! read: drivers differ in when they read it.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use poorwill_core::{Block, Driver, HostBuffer, HostMemory, Pending, Pool, StreamId};

/// Closed until it is opened, once.
#[derive(Debug, Default)]
pub struct Latch {
    open: Mutex<bool>,
    changed: Condvar,
}

impl Latch {
    /// Releases all waiting threads, now and later.
    pub fn open(&self) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Whether it is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it is open.
    pub fn pass(&self) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(open, |open| !*open).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Host memory that runs code when its slice is taken. The call that queues a copy takes it first, for its
/// length; the copy takes it second.
struct Watched {
    bytes: Vec<u8>,
    looks: AtomicUsize,
    on_look: Box<dyn Fn(usize) + Send + Sync>,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watched")
    }
}

impl HostMemory for Watched {
    fn as_slice(&self) -> &[u8] {
        (self.on_look)(self.looks.fetch_add(1, Ordering::Relaxed));
        &self.bytes
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

/// A buffer of `bytes`; `on_look` gets 0 from the call that queues a copy, and more from the copy.
pub fn watched(bytes: Vec<u8>, on_look: impl Fn(usize) + Send + Sync + 'static) -> Arc<HostBuffer> {
    Arc::new(HostBuffer::new(Watched { bytes, looks: AtomicUsize::new(0), on_look: Box::new(on_look) }))
}

/// A buffer of `bytes` from the driver, which no driver reads early. Queuing a copy of it returns at once,
/// even on a held stream.
///
/// # Panics
/// If the driver refuses.
#[must_use]
pub fn source(driver: &dyn Driver, bytes: &[u8]) -> Arc<HostBuffer> {
    let mut buffer = driver.host_alloc(bytes.len() as u64).unwrap();
    buffer.copy_from_slice(bytes);
    Arc::new(buffer)
}

/// Holds a stream: work queued from now on waits until the latch is open.
///
/// # Panics
/// If the driver refuses.
pub fn hold(driver: &dyn Driver, stream: StreamId, latch: &Arc<Latch>) {
    let latch = Arc::clone(latch);
    drop(driver.launch_host(stream, Box::new(move || latch.pass())).unwrap());
}

/// Holds a stream as by [`hold`], then queues a write of `bytes` to the start of a block.
///
/// # Panics
/// If the pool or its driver refuses.
pub fn write(pool: &Pool, stream: StreamId, block: &Block, latch: &Arc<Latch>, bytes: &[u8]) -> Pending<()> {
    let src = source(&**pool.driver(), bytes);
    hold(&**pool.driver(), stream, latch);
    pool.write(stream, block.id, 0, src, 0, bytes.len() as u64).unwrap()
}
