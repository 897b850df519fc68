//! A disk in memory, whose calls fail where a script decides, and whose bytes can be spoiled or torn off.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use poorwill_core::backup::{Disk, DiskInfo, OnDisk};
use poorwill_core::{DriverError, DriverErrorKind, HostBuffer, Op, Pending};

/// A call that a script can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskCall {
    /// The wait for a write.
    Written,
    /// The wait for a read.
    Read,
}

type FailsDisk = dyn Fn(DiskCall) -> bool + Send + Sync;

/// The disk.
#[derive(Debug, Clone)]
pub struct TestDisk(Arc<Inner>);

struct Inner {
    limit_bytes: u64,
    used_bytes: AtomicU64,
    stored: Mutex<Vec<Weak<Mutex<Vec<u8>>>>>,
    garbled: AtomicU64,
    fails: Box<FailsDisk>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestDisk").field("used_bytes", &self.used_bytes).finish_non_exhaustive()
    }
}

impl TestDisk {
    /// A disk of this size. A call fails if `fails` returns true.
    #[must_use]
    pub fn new(limit_bytes: u64, fails: impl Fn(DiskCall) -> bool + Send + Sync + 'static) -> Self {
        let (used_bytes, stored, garbled) = Default::default();
        Self(Arc::new(Inner { limit_bytes, used_bytes, stored, garbled, fails: Box::new(fails) }))
    }

    /// Bytes in use.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.0.used_bytes.load(Ordering::Relaxed)
    }

    /// So many reads from now on have a wrong first byte. What is stored stays right.
    pub fn garble_reads(&self, reads: u64) {
        self.0.garbled.store(reads, Ordering::Relaxed);
    }

    /// Changes what is stored, one range of bytes after the other.
    ///
    /// # Panics
    /// After another panic.
    pub fn change(&self, mut change: impl FnMut(&mut Vec<u8>)) {
        let stored = self.0.stored.lock().unwrap();
        stored.iter().filter_map(Weak::upgrade).for_each(|bytes| change(&mut bytes.lock().unwrap()));
    }
}

impl Inner {
    fn check(&self, call: DiskCall, op: Op) -> Result<(), DriverError> {
        let text = format!("{call:?} was made to fail by the test");
        let injected = DriverErrorKind::Device { code: 997, name: "DISK".into(), text };
        if (self.fails)(call) { Err(DriverError::new(op, injected)) } else { Ok(()) }
    }
}

impl Disk for TestDisk {
    fn write(&self, bytes: Arc<HostBuffer>) -> Pending<Arc<dyn OnDisk>> {
        let disk = Arc::clone(&self.0);
        Pending::new(move || {
            disk.check(DiskCall::Written, Op::DiskWrite)?;
            let len = bytes.len() as u64;
            let take = |used: u64| used.checked_add(len).filter(|sum| *sum <= disk.limit_bytes);
            let taken = disk.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
            taken.map_err(|used| {
                let reason = format!("{used} of {} bytes are in use", disk.limit_bytes);
                DriverError::new(Op::DiskWrite, DriverErrorKind::OutOfDisk { asked_bytes: len, reason })
            })?;
            let stored = Arc::new(Mutex::new(bytes.to_vec()));
            disk.stored.lock().unwrap().push(Arc::downgrade(&stored));
            Ok(Arc::new(TestBytes { disk, stored, len }) as Arc<dyn OnDisk>)
        })
    }

    fn info(&self) -> DiskInfo {
        let mut info = DiskInfo::new("memory");
        (info.used_bytes, info.limit_bytes) = (self.used_bytes(), Some(self.0.limit_bytes));
        info
    }
}

#[derive(Debug)]
struct TestBytes {
    disk: Arc<Inner>,
    stored: Arc<Mutex<Vec<u8>>>,
    len: u64,
}

impl OnDisk for TestBytes {
    fn bytes(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, mut into: HostBuffer) -> Pending<HostBuffer> {
        let (disk, stored) = (Arc::clone(&self.disk), Arc::clone(&self.stored));
        Pending::new(move || {
            disk.check(DiskCall::Read, Op::DiskRead)?;
            let (stored, start) = (stored.lock().unwrap(), usize::try_from(offset).unwrap());
            let torn = || DriverError::invalid(Op::DiskRead, "the file ends too early");
            let len = into.len();
            into.copy_from_slice(stored.get(start..start + len).ok_or_else(torn)?);
            let one_less = |left: u64| left.checked_sub(1);
            if disk.garbled.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok() {
                into[0] ^= 1;
            }
            Ok(into)
        })
    }
}

impl Drop for TestBytes {
    fn drop(&mut self) {
        self.disk.used_bytes.fetch_sub(self.len, Ordering::Relaxed);
    }
}
