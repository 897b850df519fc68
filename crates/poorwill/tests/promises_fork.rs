//! A fork of a process with owned blocks: the child drops its parent's blocks without hanging, and the parent
//! loses nothing.
//!
//! A program of its own: a process that forks must not have threads of other tests.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

use std::time::{Duration, Instant};
use std::{ptr, thread};

use poorwill::{AllocRequest, Arena, PoolConfig, PoolError, Tag};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::watchdog::TEST_TIMEOUT;

#[test]
fn a_forked_child_drops_blocks_of_its_parent() {
    let arena = Arena::over(TestDevice::open(16).driver(), PoolConfig::default()).unwrap();
    let blocks = [0; 3].map(|_| arena.alloc_owned(&AllocRequest::new(1000, Tag::weights())).unwrap());
    arena.write_all(blocks[0].id, 0, &[7; 10]).unwrap();
    // SAFETY: the only test of this program; the child drops, asks and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let [dropped, freed, last] = blocks;
        drop(dropped);
        let refused = matches!(freed.free(), Err(PoolError::WrongProcess(_)));
        drop(arena);
        drop(last); // With it the arena goes.
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if refused { 7 } else { 8 }) };
    }
    let (mut ended, mut status, started) = (0, 0, Instant::now());
    while ended == 0 && started.elapsed() < TEST_TIMEOUT {
        // SAFETY: our own child, and `status` outlives the call.
        ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        thread::sleep(Duration::from_millis(5));
    }
    if ended == 0 {
        // SAFETY: our own child.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: likewise.
        unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
    }
    assert_eq!(ended, child, "the child waits for a thread that does not exist there");
    assert_eq!(libc::WEXITSTATUS(status), 7, "the child's verdict, of status {status}");
    assert_eq!(arena.stats().unwrap().live_blocks, 3);
    assert_eq!(arena.read_vec(blocks[0].id, 0, 10).unwrap(), [7; 10]);
    drop(blocks);
    assert_eq!(arena.stats().unwrap().live_blocks, 0);
}
