//! Host memory of the host device: anonymous pages, counted while they live.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{Advice, MmapMut};
use poorwill_core::{DriverError, DriverErrorKind, HostBuffer, HostMemory, Op};

/// Exactly sized anonymous memory; returned to the system when dropped.
#[derive(Debug)]
struct Anonymous {
    pages: MmapMut,
    counted: Arc<AtomicU64>,
}

/// `bytes` of zeroed memory, added to `counted` until it is dropped.
pub(super) fn allocate(bytes: u64, counted: &Arc<AtomicU64>) -> Result<HostBuffer, DriverError> {
    let fail = |reason: String| {
        DriverError::new(Op::HostAlloc, DriverErrorKind::OutOfHostMemory { asked_bytes: bytes, reason })
    };
    if bytes == 0 {
        return Err(DriverError::invalid(Op::HostAlloc, "0 bytes of host memory were asked for"));
    }
    let len = usize::try_from(bytes).map_err(|error| fail(error.to_string()))?;
    let pages = MmapMut::map_anon(len).map_err(|error| fail(error.to_string()))?;
    // Huge pages make the first touch faster where the system grants them; without them nothing changes.
    let _ = pages.advise(Advice::HugePage);
    counted.fetch_add(bytes, Ordering::Relaxed);
    Ok(HostBuffer::new(Anonymous { pages, counted: Arc::clone(counted) }))
}

impl HostMemory for Anonymous {
    fn as_slice(&self) -> &[u8] {
        &self.pages
    }
    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.pages
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        self.counted.fetch_sub(self.pages.len() as u64, Ordering::Relaxed);
    }
}
