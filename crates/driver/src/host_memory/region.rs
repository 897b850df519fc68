//! One mapped piece of anonymous memory: the `unsafe` of host memory for buffers (rules A1 to A3 in
//! `docs/unsafe.md`).

use std::ffi::{c_int, c_long, c_uint, c_ulong};
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::thread;

use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

/// Addresses with memory of their own, readable and writable. Whoever has it gives it back with
/// [`Region::unmap`]; dropped without that, it stays for ever.
#[derive(Debug)]
pub(crate) struct Region {
    start: usize,
    bytes: usize,
    /// The node that it is taken from first.
    node: Option<u32>,
}

/// What a region is to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    pub(crate) bytes: usize,
    /// Whether huge pages are wanted, or unwanted.
    pub(crate) huge: bool,
    pub(crate) node: Option<u32>,
}

/// Is told of bytes that have come, while others are still to come.
pub(crate) type Came<'a> = dyn Fn(usize) + Sync + 'a;

const HUGE_PAGE: usize = 2 << 20;

/// How much is brought in at a time.
const STEP_BYTES: usize = 8 << 20;

/// `MPOL_PREFERRED`: from this node first, then from others.
const PREFERRED: c_int = 1;

/// Words of a mask of nodes, for as many as any kernel has.
const MASK_WORDS: usize = 16;

impl Region {
    /// Addresses only: memory comes with [`Region::populate`], or with the first touch.
    pub(crate) fn map(wish: &Wish) -> Result<Self, String> {
        // Huge pages need addresses to match, which take room to move in.
        let room = if wish.bytes >= HUGE_PAGE { HUGE_PAGE - rustix::param::page_size() } else { 0 };
        let len = wish.bytes.checked_add(room).ok_or("it is more than there are addresses")?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that exists.
        let mapped = unsafe { mm::mmap_anonymous(ptr::null_mut(), len, access, MapFlags::PRIVATE) };
        let first = mapped.map_err(|errno| format!("mmap: {errno}"))?.expose_provenance();
        let start = if room > 0 { first.next_multiple_of(HUGE_PAGE) } else { first };
        let (head, tail) = (start - first, room - (start - first));
        for (at, len) in [(first, head), (start + wish.bytes, tail)] {
            if len > 0 {
                // SAFETY: A1, both ends belong to the mapping just made, and nobody knows them yet. Where the kernel
                // refuses, they are addresses without memory.
                let _ = unsafe { mm::munmap(ptr::without_provenance_mut(at), len) };
            }
        }
        let mut region = Self { start, bytes: wish.bytes, node: None };
        if let Err(errno) = region.advise(Advice::LinuxDontFork) {
            region.unmap();
            return Err(format!("madvise(MADV_DONTFORK): {errno}"));
        }
        if room > 0 {
            // A kernel without huge pages refuses; then there are none either way.
            let _ = region.advise(if wish.huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage });
        }
        region.node = wish.node.filter(|node| region.prefer(*node));
        Ok(region)
    }

    #[cfg(test)]
    pub(super) fn pretended(start: usize, bytes: usize) -> Self {
        Self { start, bytes, node: None }
    }

    /// First address.
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

    /// Has memory taken from a node as long as it has some; whether the system does that.
    fn prefer(&self, node: u32) -> bool {
        let mut mask = [0 as c_ulong; MASK_WORDS];
        let word_bits = c_ulong::BITS;
        let Some(word) = mask.get_mut((node / word_bits) as usize) else { return false };
        *word |= 1 << (node % word_bits);
        // The kernel counts one more than there are.
        let bits = MASK_WORDS * word_bits as usize + 1;
        let (no_flags, len) = (0 as c_uint, self.bytes);
        // SAFETY: A1; the mask has as many bits as is said, and outlives the call.
        let set: c_long = unsafe {
            libc::syscall(libc::SYS_mbind, self.start, len, PREFERRED, mask.as_ptr(), bits, no_flags)
        };
        set == 0
    }

    /// Brings memory in, with so many threads. Nobody else knows the region yet.
    pub(crate) fn populate(&self, threads: usize, came: &Came) -> Result<(), String> {
        let share = self.bytes.div_ceil(threads.max(1)).next_multiple_of(HUGE_PAGE);
        let failed = Mutex::new(None);
        let work = |offset: usize| {
            if let Err(error) = fault_in(self.start + offset, share.min(self.bytes - offset), came) {
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        };
        thread::scope(|scope| {
            for offset in (share..self.bytes).step_by(share) {
                let spawned = thread::Builder::new().spawn_scoped(scope, move || work(offset));
                if spawned.is_err() {
                    work(offset); // Where no thread is to be had, this one does its share.
                }
            }
            work(0);
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Cuts it into regions of these sizes, one after the other. Nobody else knows it yet.
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

    /// Gives addresses and memory back.
    pub(crate) fn unmap(self) {
        let start = ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: A1, the region is ours, and nobody uses it any more.
        if unsafe { mm::munmap(start, self.bytes) }.is_err() {
            // The kernel has too many mappings to cut one. The memory at least goes.
            // SAFETY: A1, as above.
            let _ = unsafe { mm::madvise(start, self.bytes, Advice::LinuxDontNeed) };
        }
    }
}

/// Brings the memory of new pages in, a little at a time: the kernel holds up whoever maps or unmaps something (a
/// thread that is started, say) until a step is done.
fn fault_in(start: usize, bytes: usize, came: &Came) -> Result<(), String> {
    (0..bytes).step_by(STEP_BYTES).try_for_each(|offset| {
        let step = STEP_BYTES.min(bytes - offset);
        fault_step_in(start + offset, step).map(|()| came(step))
    })
}

fn fault_step_in(start: usize, bytes: usize) -> Result<(), String> {
    let at: *mut u8 = ptr::with_exposed_provenance_mut(start);
    // SAFETY: A1, the pages are ours, and what they hold stays.
    let populated =
        rustix::io::retry_on_intr(|| unsafe { mm::madvise(at.cast(), bytes, Advice::LinuxPopulateWrite) });
    match populated {
        Ok(()) => Ok(()),
        // Linux before 5.14 does not know it.
        Err(Errno::INVAL) => {
            for offset in (0..bytes).step_by(rustix::param::page_size()) {
                // SAFETY: A1 and A2, inside the region, which nobody reads or writes yet.
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
                let region = Region::map(&Wish { bytes, huge, node: Some(0) }).unwrap();
                let came = AtomicUsize::new(0);
                let add = |bytes| {
                    came.fetch_add(bytes, Ordering::Relaxed);
                };
                region.populate(threads, &add).unwrap();
                assert_eq!((region.bytes(), came.into_inner()), (bytes, bytes));
                assert!(bytes < HUGE_PAGE || region.start().is_multiple_of(HUGE_PAGE));
                let last: *mut u8 = ptr::with_exposed_provenance_mut(region.start() + bytes - 1);
                // SAFETY: the last byte of the region.
                unsafe { last.write(7) };
                region.unmap();
            }
        }
        let none = Wish { bytes: usize::MAX - 4095, huge: true, node: None };
        assert!(Region::map(&none).is_err());
        assert!(Region::map(&Wish { bytes: 1 << 60, ..none }).unwrap_err().contains("mmap"));
    }
}
