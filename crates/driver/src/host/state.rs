//! The host device's memory: files for physical memory, regions for addresses, and a ledger.
//!
//! One lock guards it, also during system calls that must agree with the ledger. A failed function changes
//! nothing.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use poorwill_core::{BackingId, DeviceRange, DriverErrorKind};

use super::file::{DeviceFile, Extent};
use super::shared::{InUse, SharedFile};
use super::stream::system;
use super::vm::VmRegion;
use crate::ledger::{Ledger, MappingKey, Result, invalid};
use crate::process::Owner;

#[derive(Debug)]
pub(super) struct HostState {
    owner: Owner,
    file: Arc<DeviceFile>,
    in_use: InUse,
    /// Released and unmapped, but the system refused to punch the hole. Counts as held.
    unpunched: Vec<Extent>,
    /// All bytes, while they are off the device, and how much was held.
    taken_off: Option<(DeviceFile, u64)>,
    ledger: Ledger<Arc<VmRegion>, BackingMemory>,
}

/// The physical memory of a backing.
#[derive(Debug, Clone)]
pub(super) enum BackingMemory {
    Extent(Extent),
    Shared(Arc<SharedFile>),
}

/// The part of a device range in one mapping.
#[derive(Debug, Clone)]
pub(super) struct Span {
    pub(super) region: Arc<VmRegion>,
    pub(super) region_offset: usize,
    pub(super) memory: BackingMemory,
    /// In its file.
    pub(super) file_offset: u64,
    pub(super) bytes: usize,
    key: MappingKey,
}

impl BackingMemory {
    fn extent(&self) -> Option<Extent> {
        if let Self::Extent(extent) = self { Some(*extent) } else { None }
    }

    fn shared(&self) -> Option<&SharedFile> {
        if let Self::Shared(file) = self { Some(file) } else { None }
    }
}

impl HostState {
    pub(super) fn new(
        owner: Owner,
        capacity_bytes: u64,
        granule_bytes: u64,
        folder: Option<&Path>,
    ) -> io::Result<Self> {
        Ok(Self {
            owner,
            file: DeviceFile::share()?,
            in_use: InUse::open(capacity_bytes, folder)?,
            unpunched: Vec::new(),
            taken_off: None,
            ledger: Ledger::new(granule_bytes),
        })
    }

    /// What the device's capacity is counted by.
    pub(super) fn in_use(&self) -> &InUse {
        &self.in_use
    }

    /// All that the device has of the file.
    fn extents(&self) -> impl Iterator<Item = Extent> {
        self.ledger.backings().filter_map(BackingMemory::extent).chain(self.unpunched.iter().copied())
    }

    fn shared_files(&self) -> impl Iterator<Item = &SharedFile> {
        self.ledger.backings().filter_map(BackingMemory::shared)
    }

    fn punch_all(&self) -> io::Result<()> {
        self.extents().try_for_each(|extent| self.file.punch(extent.offset, extent.bytes))
    }

    /// Moves all bytes to a file beside the device's. Mappings keep their addresses, and show zeros meanwhile.
    pub(super) fn take_off(&mut self) -> io::Result<()> {
        if self.shared_files().next().is_some() {
            let reason = "the process holds memory that others can have: release or lend it first";
            return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
        }
        if self.taken_off.is_none() {
            let aside = DeviceFile::aside()?;
            self.file.copy_to(&aside, self.extents())?;
            if let Err(error) = self.punch_all() {
                aside.copy_to(&self.file, self.extents())?;
                return Err(error);
            }
            let bytes = self.in_use.unshared_bytes();
            self.in_use.give_back(bytes)?;
            self.taken_off = Some((aside, bytes));
        }
        Ok(())
    }

    pub(super) fn taken_off_bytes(&self) -> u64 {
        self.taken_off.as_ref().map_or(0, |(_, held_bytes)| *held_bytes)
    }

    /// Puts them back.
    pub(super) fn put_back(&mut self) -> io::Result<()> {
        let Some((aside, bytes)) = &self.taken_off else { return Ok(()) };
        if let Err(free_bytes) = self.in_use.take(*bytes)? {
            let reason = format!("the device has {free_bytes} bytes free of the {bytes} that were taken off");
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, reason));
        }
        if let Err(error) = aside.copy_to(&self.file, self.extents()) {
            self.punch_all()?;
            self.in_use.give_back(*bytes)?;
            return Err(error);
        }
        self.taken_off = None;
        Ok(())
    }

    pub(super) fn file(&self) -> &Arc<DeviceFile> {
        &self.file
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        self.in_use.capacity_bytes()
    }

    /// By this process, which may share some of it.
    pub(super) fn held_bytes(&self) -> u64 {
        let shared_bytes: u64 = self.shared_files().map(|file| file.bytes).sum();
        self.in_use.unshared_bytes() + shared_bytes
    }

    pub(super) fn free_bytes(&mut self) -> Result<u64> {
        self.in_use.free_bytes().map_err(|error| system("look for free memory", &error))
    }

    pub(super) fn resident_bytes(&self) -> io::Result<u64> {
        self.file.resident_bytes(self.extents())
    }

    pub(super) fn reserve(&mut self, bytes: u64, owner: Owner) -> Result<DeviceRange> {
        self.ledger.check_size(bytes)?;
        let exhausted = |reason: String| DriverErrorKind::OutOfAddressSpace { asked_bytes: bytes, reason };
        let len = usize::try_from(bytes).map_err(|error| exhausted(error.to_string()))?;
        let align =
            usize::try_from(self.ledger.granule_bytes()).map_err(|error| exhausted(error.to_string()))?;
        let region = VmRegion::reserve(len, align, owner).map_err(|error| exhausted(error.to_string()))?;
        let range = DeviceRange::new(region.addr(), bytes);
        self.ledger.reserved(range, Arc::new(region));
        Ok(range)
    }

    /// The region is unmapped once no job uses it.
    pub(super) fn unreserve(&mut self, range: DeviceRange) -> Result<Arc<VmRegion>> {
        self.ledger.unreserve(range, |_| Ok(()))
    }

    pub(super) fn create(&mut self, bytes: u64) -> Result<BackingId> {
        self.ledger.check_size(bytes)?;
        for extent in std::mem::take(&mut self.unpunched) {
            self.release_extent(extent);
        }
        let full = |free_bytes| DriverErrorKind::OutOfMemory { asked_bytes: bytes, free_bytes };
        self.in_use.take(bytes).map_err(|error| system("take device memory", &error))?.map_err(full)?;
        let Some(extent) = self.file.take(bytes) else {
            self.in_use.give_back(bytes).map_err(|error| system("take device memory", &error))?;
            return Err(full(self.free_bytes()?));
        };
        Ok(self.ledger.created(bytes, BackingMemory::Extent(extent)))
    }

    pub(super) fn create_shared(&mut self, bytes: u64) -> Result<BackingId> {
        self.ledger.check_size(bytes)?;
        let created = self.in_use.create(bytes).map_err(|error| system("create shared memory", &error))?;
        let full = |free_bytes| DriverErrorKind::OutOfMemory { asked_bytes: bytes, free_bytes };
        Ok(self.ledger.created(bytes, BackingMemory::Shared(Arc::new(created.map_err(full)?))))
    }

    pub(super) fn export(&self, id: BackingId) -> Result<OwnedFd> {
        match self.ledger.backing(id)? {
            BackingMemory::Shared(file) => file.export().map_err(|error| system("export a backing", &error)),
            BackingMemory::Extent(_) => Err(invalid(format!("{id} was not created as shared memory"))),
        }
    }

    pub(super) fn import(&mut self, memory: BorrowedFd<'_>, bytes: u64) -> Result<BackingId> {
        self.ledger.check_size(bytes)?;
        let file = SharedFile::import(memory, bytes).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => invalid(error.to_string()),
            _ => system("import a backing", &error),
        })?;
        Ok(self.ledger.created(bytes, BackingMemory::Shared(Arc::new(file))))
    }

    pub(super) fn release(&mut self, id: BackingId) -> Result<()> {
        let (file, in_use) = (&self.file, &mut self.in_use);
        self.ledger.release(id, |memory, mapped| {
            if let Some(extent) = memory.extent().filter(|_| !mapped) {
                file.punch(extent.offset, extent.bytes)
                    .and_then(|()| in_use.give_back(extent.bytes))
                    .map_err(|error| system("release device memory", &error))?;
            }
            Ok(())
        })
    }

    pub(super) fn map(&mut self, range: DeviceRange, id: BackingId) -> Result<()> {
        let file = self.file.as_fd();
        self.ledger.map(range, id, |region, memory| {
            let (at, len) = offset_and_len(region, range)?;
            let (file, offset) = match memory {
                BackingMemory::Extent(extent) => (file, extent.offset),
                BackingMemory::Shared(shared) => (shared.as_fd(), 0),
            };
            region.map(at, len, file, offset).map_err(|error| map_error(&error, range.bytes))
        })
    }

    pub(super) fn set_access(&mut self, range: DeviceRange) -> Result<()> {
        self.ledger.set_access(range, |region, closed| {
            for (done, run) in closed.iter().enumerate() {
                let (at, len) = offset_and_len(region, *run)?;
                if let Err(error) = region.open(at, len) {
                    for run in &closed[..=done] {
                        let (at, len) = offset_and_len(region, *run)?;
                        // Already failing. Our memory stays open, and nothing uses it.
                        let _ = region.close(at, len);
                    }
                    return Err(system("open a range with mprotect", &error));
                }
            }
            Ok(())
        })
    }

    pub(super) fn unmap(&mut self, range: DeviceRange) -> Result<()> {
        let gone = self.ledger.unmap(range, |region| {
            let (at, len) = offset_and_len(region, range)?;
            region.unmap(at, len).map_err(|error| system("unmap a range", &error))
        })?;
        // The unmap has succeeded. If punching fails, the next create tries again.
        gone.iter().filter_map(BackingMemory::extent).for_each(|extent| self.release_extent(extent));
        Ok(())
    }

    /// Marks work in flight on each mapping of an open range.
    pub(super) fn begin_work(&mut self, range: DeviceRange) -> Result<Vec<Span>> {
        let located = self.ledger.locate(range)?.into_iter().map(|found| {
            Ok(Span {
                region: Arc::clone(found.reservation),
                region_offset: to_usize(found.in_reservation)?,
                memory: found.backing.clone(),
                file_offset: found.backing.extent().map_or(0, |extent| extent.offset) + found.in_backing,
                bytes: to_usize(found.bytes)?,
                key: found.key,
            })
        });
        let spans = located.collect::<Result<Vec<Span>>>()?;
        spans.iter().for_each(|span| self.ledger.begin_work(span.key));
        Ok(spans)
    }

    pub(super) fn end_work(&mut self, spans: &[Span]) {
        spans.iter().for_each(|span| self.ledger.end_work(span.key));
    }

    fn release_extent(&mut self, extent: Extent) {
        match self.file.punch(extent.offset, extent.bytes) {
            Ok(()) if self.in_use.give_back(extent.bytes).is_ok() => {}
            _ => self.unpunched.push(extent),
        }
    }
}

impl Drop for HostState {
    /// What is left of its memory must not outlive it in the file of the other devices.
    fn drop(&mut self) {
        if self.owner.is_here() {
            for extent in self.extents() {
                // Refused: it goes with the last device.
                let _ = self.file.punch(extent.offset, extent.bytes);
            }
        }
    }
}

fn offset_and_len(region: &VmRegion, range: DeviceRange) -> Result<(usize, usize)> {
    Ok((to_usize(range.addr - region.addr())?, to_usize(range.bytes)?))
}

fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| invalid(format!("{bytes} bytes do not fit this machine's addresses")))
}

fn map_error(error: &io::Error, bytes: u64) -> DriverErrorKind {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => DriverErrorKind::OutOfHostMemory {
            asked_bytes: bytes,
            reason: format!("{error}; the limit vm.max_map_count on mappings may be reached"),
        },
        _ => system("map a range", error),
    }
}
