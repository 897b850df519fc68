//! Descriptors that a forked child does not have: there each is one of `/dev/null`.
//!
//! A child keeps what its parent's descriptors keep, until it ends or becomes another program. So memory of a device would
//! stay in use after all who know of it have given it up. Worker processes of a data loader live that long.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

const NONE: c_int = -1;
/// Of a parent's value, in a child: it is replaced once, and its slot is no other's.
const REPLACED: c_int = -2;
const SLOTS: usize = 512;

/// Numbers of descriptors; children read them. There is another block where one is full.
struct Block {
    slots: [AtomicI32; SLOTS],
    next: OnceLock<Box<Block>>,
}

impl Block {
    const fn new() -> Self {
        Self { slots: [const { AtomicI32::new(NONE) }; SLOTS], next: OnceLock::new() }
    }
}

static FIRST: Block = Block::new();
static NOTHING: OnceLock<File> = OnceLock::new();

/// A descriptor of this process alone.
#[derive(Debug)]
pub(crate) struct ParentsOnly {
    fd: OwnedFd,
    slot: &'static AtomicI32,
}

impl ParentsOnly {
    /// The process has to have an [`Owner`](crate::process::Owner).
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        if NOTHING.get().is_none() {
            // Another thread may have been sooner.
            let _ = NOTHING.set(File::options().read(true).write(true).open("/dev/null")?);
        }
        let number = fd.as_raw_fd();
        let mut block = &FIRST;
        loop {
            let take = |slot: &&AtomicI32| {
                slot.compare_exchange(NONE, number, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            };
            if let Some(slot) = block.slots.iter().find(take) {
                return Ok(Self { fd, slot });
            }
            block = block.next.get_or_init(|| Box::new(Block::new()));
        }
    }
}

impl AsFd for ParentsOnly {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for ParentsOnly {
    /// The number may be another descriptor's as soon as this one is closed.
    fn drop(&mut self) {
        self.slot.store(NONE, Ordering::Relaxed);
    }
}

/// In a forked child, between `fork` and its return: only atomics and system calls.
pub(crate) fn replace_in_child() {
    let Some(nothing) = NOTHING.get() else { return };
    let mut block = Some(&FIRST);
    while let Some(Block { slots, next }) = block {
        for slot in slots {
            let number = slot.load(Ordering::Relaxed);
            if number >= 0 {
                slot.store(REPLACED, Ordering::Relaxed);
                // SAFETY: it replaces a descriptor that the child has by the fork, and that only its parent's value
                // uses. Where that fails, the child keeps it.
                let _ = unsafe { libc::dup3(nothing.as_raw_fd(), number, libc::O_CLOEXEC) };
            }
        }
        block = next.get().map(|next| &**next);
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::process::Owner;
    use crate::system::proc;

    /// What the descriptors of a forked child lead to.
    fn of_a_child() -> Vec<PathBuf> {
        let (mut ready, child_is_ready) = io::pipe().unwrap();
        let written = child_is_ready.as_raw_fd();
        // SAFETY: the child only says that it is there, and waits to be killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a letter of a constant, to a descriptor that the child has.
            unsafe { libc::write(written, b"x".as_ptr().cast(), 1) };
            loop {
                // SAFETY: it takes nothing.
                unsafe { libc::pause() };
            }
        }
        // Its parent may be sooner.
        io::Read::read_exact(&mut ready, &mut [0]).unwrap();
        let links = proc::descriptors(u32::try_from(child).unwrap()).unwrap();
        // SAFETY: a child of this test, which is there until it is waited for.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
        // SAFETY: the status may be ignored.
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
        links
    }

    #[test]
    fn a_child_has_none_of_them_and_all_others() {
        Owner::this().unwrap();
        let file = |name: &str| memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
        let count = |links: &[PathBuf], name: &str| {
            links.iter().filter(|link| link.to_string_lossy().contains(name)).count()
        };
        let usual = file("poorwill-usual");
        // More than a block has.
        let kept: Vec<ParentsOnly> =
            (0..SLOTS + 9).map(|_| ParentsOnly::new(file("poorwill-kept")).unwrap()).collect();
        let here = proc::descriptors(std::process::id()).unwrap();
        assert_eq!((count(&here, "poorwill-kept"), count(&here, "poorwill-usual")), (SLOTS + 9, 1));
        let links = of_a_child();
        assert_eq!((count(&links, "poorwill-kept"), count(&links, "poorwill-usual")), (0, 1));
        // Their numbers are free for others.
        drop(kept);
        let others: Vec<OwnedFd> = (0..SLOTS).map(|_| file("poorwill-other")).collect();
        assert_eq!(count(&of_a_child(), "poorwill-other"), SLOTS);
        drop((usual, others));
    }
}
