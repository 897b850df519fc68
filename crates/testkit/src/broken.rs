//! Drivers that are broken on purpose.
//!
//! Each breaks one promise, as a careless pool or driver would. The fault suite must fail on every one: a
//! suite that never fails proves nothing.

use std::collections::HashSet;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use poorwill_core::digest::Digest;
use poorwill_core::driver::{CodePart, Encoded, HostWork, MovePart, Result, Scratch};
use poorwill_core::{
    BackingId, CopyPart, DeviceInfo, DeviceRange, Driver, EventId, HostBuffer, HostMemory, HostMemoryInfo,
    MemoryInfo, Op, Pending, StreamId,
};

use crate::forward::{forward, forward_codes, forward_figures, forward_streams_and_events};

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Defect {
    /// Mapping a backing again, as an undo does, yields zeros instead of its bytes.
    UndoLosesBytes,
    /// Every other unmap succeeds without unmapping.
    UnmapDoesNothing,
    /// A release succeeds without releasing.
    ReleaseHoards,
    /// Copies to the device drop the last byte of a part.
    CopyIsShort,
    /// A failed `create` keeps the memory.
    FailedCreateKeeps,
    /// Every event is reported as complete, whatever is still queued.
    EventsPassAtOnce,
    /// A part of each host buffer changes after [`BrokenDriver::rot`].
    HostMemoryRots,
}

/// The defects that the fault suite must detect.
pub const DEFECTS: [Defect; 5] = [
    Defect::UndoLosesBytes,
    Defect::UnmapDoesNothing,
    Defect::ReleaseHoards,
    Defect::CopyIsShort,
    Defect::FailedCreateKeeps,
];

/// A driver with one defect.
pub struct BrokenDriver {
    inner: Arc<dyn Driver>,
    defect: Option<Defect>,
    seen: Mutex<HashSet<BackingId>>,
    remapped: Mutex<Vec<DeviceRange>>,
    turn: Mutex<u64>,
    rotten: Arc<OnceLock<Rot>>,
}

/// Changes the bytes of a buffer.
type Rot = Box<dyn Fn(&mut [u8]) + Send + Sync>;

impl fmt::Debug for BrokenDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { inner, defect, .. } = self;
        f.debug_struct("BrokenDriver").field("inner", inner).field("defect", defect).finish_non_exhaustive()
    }
}

impl BrokenDriver {
    /// Wraps `inner`; without a defect as a control.
    #[must_use]
    pub fn new(inner: Arc<dyn Driver>, defect: Option<Defect>) -> Self {
        let (seen, remapped, turn) = Default::default();
        Self { inner, defect, seen, remapped, turn, rotten: Arc::default() }
    }

    /// Flips a bit in the middle of each host buffer, with [`Defect::HostMemoryRots`].
    pub fn rot(&self) {
        self.rot_by(|bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x10;
        });
    }

    /// Changes each host buffer, with [`Defect::HostMemoryRots`].
    ///
    /// # Panics
    /// If it has been changed before.
    pub fn rot_by(&self, change: impl Fn(&mut [u8]) + Send + Sync + 'static) {
        assert!(self.rotten.set(Box::new(change)).is_ok(), "host memory is rotten already");
    }

    fn before(&self, _: Op) -> Result<()> {
        let _ = self;
        Ok(())
    }

    fn every_other(&self) -> bool {
        let mut turn = self.turn.lock().unwrap();
        *turn += 1;
        turn.is_multiple_of(2)
    }
}

impl Driver for BrokenDriver {
    forward_figures!();
    forward_streams_and_events!();
    forward_codes!();

    fn host_memory(&self) -> HostMemoryInfo {
        self.inner.host_memory()
    }

    forward! {
        Capturing: capturing() -> Option<StreamId>;
        Create: create_shared(bytes: u64) -> BackingId;
        Export: export(backing: BackingId) -> OwnedFd;
        Import: import(memory: BorrowedFd<'_>, bytes: u64) -> BackingId;
        CopyToHost: copy_to_host(stream: StreamId, dst: HostBuffer, parts: &[CopyPart]) -> Pending<HostBuffer>;
        CopyWithin: copy_within(stream: StreamId, parts: &[MovePart]) -> Pending<()>;
        Zero: zero(stream: StreamId, range: DeviceRange) -> Pending<()>;
        Digest: digest(stream: StreamId, ranges: &[DeviceRange]) -> Pending<Vec<Digest>>;
    }

    fn event_query(&self, event: EventId) -> Result<bool> {
        let passed = self.inner.event_query(event)?;
        Ok(passed || self.defect == Some(Defect::EventsPassAtOnce))
    }

    fn create(&self, bytes: u64) -> Result<BackingId> {
        let backing = self.inner.create(bytes)?;
        if self.defect == Some(Defect::FailedCreateKeeps) && self.every_other() {
            return self.inner.create(0); // An error, with `backing` taken and forgotten.
        }
        Ok(backing)
    }

    fn release(&self, backing: BackingId) -> Result<()> {
        if self.defect == Some(Defect::ReleaseHoards) {
            return Ok(());
        }
        self.inner.release(backing)
    }

    fn map(&self, range: DeviceRange, backing: BackingId) -> Result<()> {
        self.inner.map(range, backing)?;
        if !self.seen.lock().unwrap().insert(backing) {
            self.remapped.lock().unwrap().push(range);
        }
        Ok(())
    }

    fn set_access(&self, range: DeviceRange) -> Result<()> {
        self.inner.set_access(range)?;
        let remapped = std::mem::take(&mut *self.remapped.lock().unwrap());
        if self.defect == Some(Defect::UndoLosesBytes) {
            remapped.into_iter().try_for_each(|range| self.inner.zero(StreamId::DEFAULT, range)?.wait())?;
        }
        Ok(())
    }

    fn unmap(&self, range: DeviceRange) -> Result<()> {
        if self.defect == Some(Defect::UnmapDoesNothing) && self.every_other() {
            return Ok(());
        }
        self.inner.unmap(range)
    }

    fn copy_to_device(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CopyPart],
    ) -> Result<Pending<()>> {
        let mut parts = parts.to_vec();
        if self.defect == Some(Defect::CopyIsShort) {
            parts.iter_mut().for_each(|part| part.device.bytes -= 1);
        }
        self.inner.copy_to_device(stream, src, &parts)
    }

    fn host_alloc(&self, bytes: u64) -> Result<HostBuffer> {
        let buffer = self.inner.host_alloc(bytes)?;
        if self.defect == Some(Defect::HostMemoryRots) {
            let rotten = Arc::clone(&self.rotten);
            return Ok(HostBuffer::new(RottingMemory { buffer, changed: OnceLock::new(), rotten }));
        }
        Ok(buffer)
    }
}

/// Host memory that reads differently after it rots.
struct RottingMemory {
    buffer: HostBuffer,
    changed: OnceLock<Vec<u8>>,
    rotten: Arc<OnceLock<Rot>>,
}

impl fmt::Debug for RottingMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RottingMemory").field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

impl HostMemory for RottingMemory {
    fn as_slice(&self) -> &[u8] {
        let Some(change) = self.rotten.get() else { return &self.buffer };
        self.changed.get_or_init(|| {
            let mut bytes = self.buffer.to_vec();
            change(&mut bytes);
            bytes
        })
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.buffer
    }
}
