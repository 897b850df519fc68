//! Another device, in whose memory copies are kept.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use poorwill_core::driver::Result;
use poorwill_core::peer::PeerMemory;
use poorwill_core::{Driver, DriverError, DriverErrorKind, Op};

/// Memory of `driver`'s device, which others import.
#[derive(Debug)]
pub struct TestPeer {
    driver: Arc<dyn Driver>,
    idle_bytes: AtomicU64,
    fails: AtomicBool,
}

impl TestPeer {
    /// All of the device is idle.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, idle_bytes: AtomicU64::new(u64::MAX), fails: AtomicBool::default() }
    }

    /// How much it says to be idle.
    pub fn set_idle(&self, bytes: u64) {
        self.idle_bytes.store(bytes, Ordering::SeqCst);
    }

    /// Whether it refuses memory, whatever it says.
    pub fn set_failing(&self, fails: bool) {
        self.fails.store(fails, Ordering::SeqCst);
    }
}

impl PeerMemory for TestPeer {
    fn memory_name(&self) -> &str {
        self.driver.info().memory_name.as_deref().unwrap_or_default()
    }

    fn idle_bytes(&self) -> Result<u64> {
        Ok(self.idle_bytes.load(Ordering::SeqCst))
    }

    fn create(&self, bytes: u64) -> Result<OwnedFd> {
        if self.fails.load(Ordering::SeqCst) {
            let full = DriverErrorKind::OutOfMemory { asked_bytes: bytes, free_bytes: 0 };
            return Err(DriverError::new(Op::Create, full));
        }
        let backing = self.driver.create_shared(bytes)?;
        let descriptor = self.driver.export(backing);
        self.driver.release(backing)?;
        descriptor
    }
}
