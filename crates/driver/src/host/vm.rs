//! Virtual memory calls, the only `unsafe` code of the host device.
//!
//! A [`VmRegion`] owns a range of addresses until it is dropped. Replacing mappings inside it affects nothing
//! else, so every function here is safe. Rules H1 to H4 are in `docs/unsafe.md`.

use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::{Condvar, Mutex, PoisonError};

use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::process::Owner;

/// Populated before each write.
const POPULATE_BYTES: usize = 256 << 10;

/// Addresses that belong to a device, inaccessible until mapped and opened.
#[derive(Debug)]
pub(super) struct VmRegion {
    addr: usize,
    bytes: usize,
    owner: Owner,
    writing: RangeLock,
}

impl VmRegion {
    /// `align` is a power of two no smaller than a page.
    pub(super) fn reserve(bytes: usize, align: usize, owner: Owner) -> io::Result<Self> {
        let padded = bytes.checked_add(align).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that exists.
        let start =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), padded, ProtFlags::empty(), reserve_flags()) }?;
        let start = start.addr();
        let addr = start.next_multiple_of(align);
        let region = Self { addr, bytes, owner, writing: RangeLock::default() };
        let (head, tail) = (addr - start, padded - (addr - start) - bytes);
        for (at, len) in [(start, head), (addr + bytes, tail)] {
            if len > 0 {
                // SAFETY: both ends belong to the mapping just made, and no other code knows them yet.
                unsafe { mm::munmap(ptr::without_provenance_mut(at), len) }?;
            }
        }
        region.keep_from_children(0, bytes)?;
        Ok(region)
    }

    pub(super) fn addr(&self) -> u64 {
        self.addr as u64
    }

    /// Maps a part of `file` at `offset`, without access.
    pub(super) fn map(
        &self,
        offset: usize,
        bytes: usize,
        file: BorrowedFd<'_>,
        file_offset: u64,
    ) -> io::Result<()> {
        let at = self.pointer(offset, bytes)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: H1, the range lies inside this region, which owns its addresses.
        unsafe { mm::mmap(at, bytes, ProtFlags::empty(), flags, file, file_offset) }?;
        self.keep_from_children(offset, bytes).inspect_err(|_| {
            // If this fails too, the range stays without access, and faults as required.
            let _ = self.unmap(offset, bytes);
        })
    }

    pub(super) fn open(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let at = self.pointer(offset, bytes)?;
        // SAFETY: H1; giving more access to addresses that no Rust object lives at breaks no reference.
        Ok(unsafe { mm::mprotect(at, bytes, MprotectFlags::READ | MprotectFlags::WRITE) }?)
    }

    pub(super) fn close(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let at = self.pointer(offset, bytes)?;
        // SAFETY: H1 and H2, no Rust reference points into a region.
        Ok(unsafe { mm::mprotect(at, bytes, MprotectFlags::empty()) }?)
    }

    /// Makes the range inaccessible in one step.
    pub(super) fn unmap(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let at = self.pointer(offset, bytes)?;
        let flags = reserve_flags() | MapFlags::FIXED;
        // SAFETY: H1 and H2, the addresses are ours and no Rust reference points at them.
        unsafe { mm::mmap_anonymous(at, bytes, ProtFlags::empty(), flags) }?;
        // The new mapping is private and inaccessible, so a child that inherits it can damage nothing.
        let _ = self.keep_from_children(offset, bytes);
        Ok(())
    }

    /// The range must be mapped and open. Otherwise this fails, or faults if another thread unmaps the range
    /// meanwhile.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.pointer(offset, bytes.len())?;
        let _lock = self.writing.lock(offset, bytes.len());
        // In windows that stay in a core's cache between the kernel's zeroing and our write.
        for (nth, window) in bytes.chunks(POPULATE_BYTES).enumerate() {
            let at = offset + nth * POPULATE_BYTES;
            self.populate(at, window.len())?;
            let to = self.pointer(at, window.len())?;
            // SAFETY: H1 and H3: `to` is inside this region and was just populated for writing. The source is a
            // Rust slice, which can never overlap a region (H2). The range lock keeps other writers away.
            unsafe { ptr::copy_nonoverlapping(window.as_ptr(), to.cast::<u8>(), window.len()) };
        }
        Ok(())
    }

    /// Makes a memory shortage an error here, not a signal later.
    fn populate(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let page = rustix::param::page_size();
        let start = offset / page * page;
        let len = (offset + bytes).next_multiple_of(page) - start;
        let at = self.pointer(start, len)?;
        // SAFETY: H1; populating changes no bytes.
        match unsafe { mm::madvise(at, len, Advice::LinuxPopulateWrite) } {
            Ok(()) => Ok(()),
            // Linux before 5.14 lacks this advice; there, the first touch populates.
            Err(rustix::io::Errno::INVAL) if !Self::populate_is_known(at) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Advice on zero bytes fails only if the advice is unknown.
    fn populate_is_known(at: *mut c_void) -> bool {
        // SAFETY: no byte is concerned.
        unsafe { mm::madvise(at, 0, Advice::LinuxPopulateWrite) }.is_ok()
    }

    /// Forked children could otherwise write to memory they share with us.
    fn keep_from_children(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let at = self.pointer(offset, bytes)?;
        // SAFETY: H1; the advice changes what a fork copies and nothing in this process.
        Ok(unsafe { mm::madvise(at, bytes, Advice::LinuxDontFork) }?)
    }

    fn pointer(&self, offset: usize, bytes: usize) -> io::Result<*mut c_void> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(ptr::without_provenance_mut(self.addr + offset)),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{bytes} bytes at {offset} leave a region of {} bytes", self.bytes),
            )),
        }
    }
}

impl Drop for VmRegion {
    fn drop(&mut self) {
        if self.owner.is_here() {
            // SAFETY: H1 and H2; no code can reach the region any more. H4: not in a forked child, where
            // something else may be at these addresses.
            let unmapped = unsafe { mm::munmap(ptr::without_provenance_mut(self.addr), self.bytes) };
            debug_assert!(unmapped.is_ok(), "munmap of a region failed: {unmapped:?}");
        }
    }
}

fn reserve_flags() -> MapFlags {
    MapFlags::PRIVATE | MapFlags::NORESERVE
}

/// Prevents concurrent writes to overlapping ranges. Their order is unspecified, as on a GPU.
#[derive(Debug, Default)]
struct RangeLock {
    held: Mutex<Vec<(usize, usize)>>,
    released: Condvar,
}

impl RangeLock {
    fn lock(&self, offset: usize, bytes: usize) -> RangeGuard<'_> {
        let range = (offset, offset + bytes);
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        while held.iter().any(|(start, end)| *start < range.1 && range.0 < *end) {
            held = self.released.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        held.push(range);
        RangeGuard { lock: self, range }
    }
}

struct RangeGuard<'a> {
    lock: &'a RangeLock,
    range: (usize, usize),
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut held = self.lock.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = held.iter().position(|range| *range == self.range) {
            held.swap_remove(at);
        }
        self.lock.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_aligned_and_guards_its_bounds() {
        let align = 2 << 20;
        let region = VmRegion::reserve(3 * align, align, Owner::this().unwrap()).unwrap();
        assert_eq!(region.addr() % align as u64, 0);
        assert!(region.unmap(2 * align, 2 * align).is_err());
        assert!(region.open(usize::MAX, 2).is_err());
        assert!(region.write(0, &[1]).is_err(), "writing to a reservation is an error, not a signal");
    }

    #[test]
    fn overlapping_writers_take_turns() {
        let lock = RangeLock::default();
        let first = lock.lock(0, 10);
        let apart = lock.lock(10, 10);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| drop(lock.lock(5, 10)));
            drop(first);
            drop(apart);
            waiting.join().unwrap();
        });
        assert!(lock.held.lock().unwrap().is_empty());
    }
}
