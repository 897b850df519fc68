//! A forked child that drops work does not wait for locks that threads of its parent held at the fork.

use std::sync::Arc;
use std::time::Duration;
use std::{ptr, thread};

use poorwill_core::{Driver, StreamId};
use poorwill_driver::{CudaConfig, CudaDevice};
use poorwill_testkit::child;
use poorwill_testkit::gated::{self, Gate};

#[test]
fn a_forked_child_drops_work_while_a_thread_of_the_parent_sweeps() {
    if !child::in_a_child(&[("POORWILL_FAKE_CUDA_DELAY", "cuEventQuery:3000000")]) {
        return;
    }
    let config = CudaConfig { library: Some(poorwill_fake_libcuda::path()), ..CudaConfig::default() };
    let device = Arc::new(CudaDevice::open(&config).unwrap());
    let stream = device.stream_create().unwrap();
    let gate = Arc::new(Gate::default());
    let kept = device.launch_host(StreamId::DEFAULT, Box::new(|| ())).unwrap();
    gated::hold(&*device, stream, &gate); // Work that nobody waits for.
    let sweeping = {
        let device = Arc::clone(&device);
        thread::spawn(move || device.memory_info().unwrap())
    };
    thread::sleep(Duration::from_millis(500));
    // SAFETY: the child drops work and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(kept);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let mut ended = 0;
    for _ in 0..50 {
        // SAFETY: our own child.
        ended = unsafe { libc::waitpid(child, ptr::null_mut(), libc::WNOHANG) };
        if ended != 0 {
            break;
        }
        thread::sleep(Duration::from_millis(100));
    }
    if ended == 0 {
        // SAFETY: our own child.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: likewise.
        unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
    }
    gate.open();
    sweeping.join().unwrap();
    assert_eq!(ended, child, "the child waits for a lock that nobody will open");
}
