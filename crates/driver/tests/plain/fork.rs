//! A forked child that drops work does not wait for locks that threads of its parent held at the fork.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{ptr, thread};

use libloading::os::unix::{Library, Symbol};
use poorwill_core::{Driver, StreamId};
use poorwill_driver::{CudaConfig, CudaDevice};
use poorwill_testkit::child;
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::watchdog::{TEST_TIMEOUT, eventually};

#[test]
fn a_forked_child_drops_work_while_a_thread_of_the_parent_sweeps() {
    if !child::in_a_child(&[("POORWILL_FAKE_CUDA_DELAY", "cuEventQuery:1000000")]) {
        return;
    }
    let config = CudaConfig::default().through(Some(poorwill_fake_libcuda::path()));
    let device = Arc::new(CudaDevice::open(&config).unwrap());
    let stream = device.stream_create().unwrap();
    let latch = Arc::new(Latch::default());
    let kept = device.launch_host(StreamId::DEFAULT, Box::new(|| ())).unwrap();
    latch::hold(&*device, stream, &latch); // Work without a waiter.
    // SAFETY: a library of ours, which the driver under test loads as well.
    let library = unsafe { Library::new(poorwill_fake_libcuda::path()) }.unwrap();
    // SAFETY: the type that the symbol has there.
    let arm: Symbol<extern "C" fn(u64, u64)> = unsafe { library.get(b"poorwillFakeArm") }.unwrap();
    arm(u64::MAX, 0); // Counts from here on.
    let sweeping = {
        let device = Arc::clone(&device);
        thread::spawn(move || device.memory_info().unwrap())
    };
    // The query is in progress, for as long as the fake makes it take: longer than a fork.
    // SAFETY: the type that the symbol has there.
    let called: Symbol<unsafe extern "C" fn(u64, *mut [u8; 64]) -> c_int> =
        unsafe { library.get(b"poorwillFakeCalled") }.unwrap();
    eventually("it asks whether the work has passed", || {
        let names = (0..).map_while(|number| {
            let mut name = [0u8; 64];
            // SAFETY: `name` outlives the call.
            (unsafe { called(number, &raw mut name) } == 0).then_some(name)
        });
        names.into_iter().any(|name| name.starts_with(b"cuEventQuery\0"))
    });
    // SAFETY: the child drops work and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(kept);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let (mut ended, started) = (0, Instant::now());
    while ended == 0 && started.elapsed() < TEST_TIMEOUT {
        // SAFETY: our own child.
        ended = unsafe { libc::waitpid(child, ptr::null_mut(), libc::WNOHANG) };
        thread::sleep(Duration::from_millis(5));
    }
    if ended == 0 {
        // SAFETY: our own child.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: likewise.
        unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
    }
    latch.open();
    sweeping.join().unwrap();
    assert_eq!(ended, child, "the child waits for a lock that nobody will open");
}
