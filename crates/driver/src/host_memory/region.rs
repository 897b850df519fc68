//! Anonymous memory mappings: the `unsafe` code of host memory for buffers (rules A1 to A3 in
//! `docs/unsafe.md`).

use std::ffi::{c_int, c_long, c_uint, c_ulong};
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::thread;

use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

/// Readable and writable addresses with their own memory, which stays for ever unless [`Region::unmap`] is
/// called.
#[derive(Debug)]
pub(crate) struct Region {
    start: usize,
    bytes: usize,
    /// The preferred NUMA node, if the system accepted it.
    node: Option<u32>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct RegionOptions {
    pub(crate) bytes: usize,
    /// Whether to request or to avoid huge pages.
    pub(crate) huge: bool,
    pub(crate) node: Option<u32>,
}

/// Receives the bytes populated since the last call.
pub(crate) type Progress<'a> = dyn Fn(usize) + Sync + 'a;

const HUGE_PAGE: usize = 2 << 20;

const STEP_BYTES: usize = 8 << 20;

/// `MPOL_PREFERRED`: from this node first, then from others.
const PREFERRED: c_int = 1;

/// Enough for any kernel.
const MASK_WORDS: usize = 16;

impl Region {
    /// Memory comes with [`Region::populate`], or on first touch.
    pub(crate) fn map(options: &RegionOptions) -> Result<Self, String> {
        // Huge pages need aligned addresses.
        let slack = if options.bytes >= HUGE_PAGE { HUGE_PAGE - rustix::param::page_size() } else { 0 };
        let len = options.bytes.checked_add(slack).ok_or("it is more than there are addresses")?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that exists.
        let mapped = unsafe { mm::mmap_anonymous(ptr::null_mut(), len, access, MapFlags::PRIVATE) };
        let first = mapped.map_err(|errno| format!("mmap: {errno}"))?.expose_provenance();
        let start = if slack > 0 { first.next_multiple_of(HUGE_PAGE) } else { first };
        let (head, tail) = (start - first, slack - (start - first));
        for (at, len) in [(first, head), (start + options.bytes, tail)] {
            if len > 0 {
                // SAFETY: A1, both ends belong to the mapping just made, and no other code knows them yet. If the
                // kernel refuses, they stay as addresses without memory.
                let _ = unsafe { mm::munmap(ptr::without_provenance_mut(at), len) };
            }
        }
        let mut region = Self { start, bytes: options.bytes, node: None };
        if let Err(errno) = region.advise(Advice::LinuxDontFork) {
            region.unmap();
            return Err(format!("madvise(MADV_DONTFORK): {errno}"));
        }
        if slack > 0 {
            // A kernel without huge pages refuses, and uses none anyway.
            let _ = region.advise(if options.huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage });
        }
        region.node = options.node.filter(|node| region.prefer(*node));
        Ok(region)
    }

    #[cfg(test)]
    pub(super) fn mock(start: usize, bytes: usize) -> Self {
        Self { start, bytes, node: None }
    }

    pub(crate) fn start(&self) -> usize {
        self.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn node(&self) -> Option<u32> {
        self.node
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: A1, advice about pages of ours, of a kind that leaves their contents alone.
        unsafe { mm::madvise(ptr::with_exposed_provenance_mut(self.start), self.bytes, advice) }
    }

    /// Whether the system accepted the preference.
    fn prefer(&self, node: u32) -> bool {
        let mut mask = [0 as c_ulong; MASK_WORDS];
        let word_bits = c_ulong::BITS;
        let Some(word) = mask.get_mut((node / word_bits) as usize) else { return false };
        *word |= 1 << (node % word_bits);
        // The kernel expects the number of bits plus one.
        let bits = MASK_WORDS * word_bits as usize + 1;
        let (no_flags, len) = (0 as c_uint, self.bytes);
        // SAFETY: A1; the mask has as many bits as is said, and outlives the call.
        let set: c_long = unsafe {
            libc::syscall(libc::SYS_mbind, self.start, len, PREFERRED, mask.as_ptr(), bits, no_flags)
        };
        set == 0
    }

    /// No other code knows the region yet.
    pub(crate) fn populate(&self, threads: usize, progress: &Progress) -> Result<(), String> {
        let share = self.bytes.div_ceil(threads.max(1)).next_multiple_of(HUGE_PAGE);
        let failed = Mutex::new(None);
        let work = |offset: usize| {
            if let Err(error) = fault_in(self.start + offset, share.min(self.bytes - offset), progress) {
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        };
        thread::scope(|scope| {
            for offset in (share..self.bytes).step_by(share) {
                let spawned = thread::Builder::new().spawn_scoped(scope, move || work(offset));
                if spawned.is_err() {
                    work(offset); // No thread can be started: this one does its share.
                }
            }
            work(0);
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Consecutive regions. No other code knows this one yet.
    pub(crate) fn split(self, sizes: &[usize]) -> Vec<Self> {
        debug_assert_eq!(sizes.iter().sum::<usize>(), self.bytes, "no byte is lost");
        let mut start = self.start;
        let cut = |bytes: &usize| {
            let region = Self { start, bytes: *bytes, node: self.node };
            start += bytes;
            region
        };
        sizes.iter().map(cut).collect()
    }

    pub(crate) fn unmap(self) {
        let start = ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: A1, the region is ours, and no code uses it any more.
        if unsafe { mm::munmap(start, self.bytes) }.is_err() {
            // The kernel has too many mappings to split one. Release at least the memory.
            // SAFETY: A1, as above.
            let _ = unsafe { mm::madvise(start, self.bytes, Advice::LinuxDontNeed) };
        }
    }
}

/// Step by step: during a step, the kernel blocks threads that map or unmap memory or start a thread.
fn fault_in(start: usize, bytes: usize, progress: &Progress) -> Result<(), String> {
    (0..bytes).step_by(STEP_BYTES).try_for_each(|offset| {
        let step = STEP_BYTES.min(bytes - offset);
        fault_step_in(start + offset, step).map(|()| progress(step))
    })
}

fn fault_step_in(start: usize, bytes: usize) -> Result<(), String> {
    let at: *mut u8 = ptr::with_exposed_provenance_mut(start);
    // SAFETY: A1, the pages are ours, and their contents stay.
    let populated =
        rustix::io::retry_on_intr(|| unsafe { mm::madvise(at.cast(), bytes, Advice::LinuxPopulateWrite) });
    match populated {
        Ok(()) => Ok(()),
        // Linux before 5.14 lacks this advice.
        Err(Errno::INVAL) => {
            for offset in (0..bytes).step_by(rustix::param::page_size()) {
                // SAFETY: A1 and A2, inside the region, which no code reads or writes yet.
                let page = unsafe { at.add(offset) };
                // SAFETY: as above; it holds zeros anyway.
                unsafe { page.write_volatile(0) };
            }
            Ok(())
        }
        Err(errno) => Err(format!("bringing {bytes} bytes of it in failed: {errno}")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn regions_are_exact_and_aligned() {
        for bytes in [4096, HUGE_PAGE, 5 << 20, (3 << 20) + 65536] {
            let bytes = bytes.next_multiple_of(rustix::param::page_size());
            for (huge, threads) in [(true, 1), (false, 3)] {
                let region = Region::map(&RegionOptions { bytes, huge, node: Some(0) }).unwrap();
                let progress = AtomicUsize::new(0);
                let add = |bytes| {
                    progress.fetch_add(bytes, Ordering::Relaxed);
                };
                region.populate(threads, &add).unwrap();
                assert_eq!((region.bytes(), progress.into_inner()), (bytes, bytes));
                assert!(bytes < HUGE_PAGE || region.start().is_multiple_of(HUGE_PAGE));
                let last: *mut u8 = ptr::with_exposed_provenance_mut(region.start() + bytes - 1);
                // SAFETY: the last byte of the region.
                unsafe { last.write(7) };
                region.unmap();
            }
        }
        let none = RegionOptions { bytes: usize::MAX - 4095, huge: true, node: None };
        assert!(Region::map(&none).is_err());
        assert!(Region::map(&RegionOptions { bytes: 1 << 60, ..none }).unwrap_err().contains("mmap"));
    }
}
