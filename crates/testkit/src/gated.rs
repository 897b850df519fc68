//! Work that is held back, so that a test decides when it has passed.
//!
//! [`hold`] holds any stream of any driver, and what is queued behind it is in flight until the test opens the
//! gate, as a [`write()`] is; [`source`] is host memory for such copies. [`watched`] runs the test's own code when
//! a buffer is looked at: drivers differ in when they do that.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use poorwill_core::{Block, Driver, HostBuffer, HostMemory, Pending, Pool, StreamId};

/// Closed until it is opened, once and for all.
#[derive(Debug, Default)]
pub struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    /// Lets everybody through from now on.
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

/// Host memory that does something when it is looked at for the n-th time. Its length comes first, asked by
/// whoever queues a copy; its bytes second, asked by the copy.
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

/// A buffer of `bytes`; `on_look` is called with 0 by whoever queues a copy of it, with more by the copy.
pub fn watched(bytes: Vec<u8>, on_look: impl Fn(usize) + Send + Sync + 'static) -> Arc<HostBuffer> {
    Arc::new(HostBuffer::new(Watched { bytes, looks: AtomicUsize::new(0), on_look: Box::new(on_look) }))
}

/// A buffer of `bytes` from the driver: no machine has to look at it before the copy's turn comes, so
/// queuing a copy of it returns at once whatever its stream is held by.
///
/// # Panics
/// When the driver refuses.
#[must_use]
pub fn source(driver: &dyn Driver, bytes: &[u8]) -> Arc<HostBuffer> {
    let mut buffer = driver.host_alloc(bytes.len() as u64).unwrap();
    buffer.copy_from_slice(bytes);
    Arc::new(buffer)
}

/// Holds a stream: what is queued on it from now on waits until the gate is open.
///
/// # Panics
/// When the driver refuses.
pub fn hold(driver: &dyn Driver, stream: StreamId, gate: &Arc<Gate>) {
    let gate = Arc::clone(gate);
    drop(driver.launch_host(stream, Box::new(move || gate.pass())).unwrap());
}

/// Writes `bytes` to the beginning of a block, which does not happen before the gate is open. The stream is
/// held as by [`hold`]; the write behind it is what is in flight on the block.
///
/// # Panics
/// When the pool or its driver refuses.
pub fn write(pool: &Pool, stream: StreamId, block: &Block, gate: &Arc<Gate>, bytes: &[u8]) -> Pending<()> {
    let src = source(&**pool.driver(), bytes);
    hold(&**pool.driver(), stream, gate);
    pool.write(stream, block.id, 0, src, 0, bytes.len() as u64).unwrap()
}
