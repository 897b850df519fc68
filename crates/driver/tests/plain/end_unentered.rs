//! A device that ends where its context cannot be entered frees nothing that copies still read.
//!
//! Each call of `cuCtxGetCurrent` fails in turn, in a process of its own; among them is that of the end.

use std::sync::{Arc, Mutex};

use poorwill_core::{CopyPart, Driver, HostBuffer};
use poorwill_driver::{CudaConfig, CudaDevice};
use poorwill_testkit::child;
use poorwill_testkit::gated::{self, Gate};
use poorwill_testkit::pattern;

#[test]
fn left_work_keeps_its_memory_when_the_end_cannot_enter() {
    if child::role().is_none() {
        // Whichever call it is with which failing begins.
        for first in 1..40 {
            let fail = format!("cuCtxGetCurrent:{first}:1");
            let child = child::command("device", &[("POORWILL_FAKE_CUDA_FAIL", &fail)]).output().unwrap();
            let said = String::from_utf8_lossy(&child.stderr).into_owned();
            assert!(!said.contains("FREED"), "with call {first} failing: {said}");
        }
        return;
    }
    let device = CudaDevice::open(&CudaConfig {
        library: Some(poorwill_fake_libcuda::path()),
        ..CudaConfig::default()
    })
    .unwrap();
    let range = device.reserve(device.info().granule_bytes).unwrap();
    let backing = device.create(range.bytes).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    let stream = device.stream_create().unwrap();
    let gate = Arc::new(Gate::default());
    // If the end waits for the work, it passes after a while.
    let watched: Arc<Mutex<Option<Arc<HostBuffer>>>> = Arc::default();
    let opener = {
        let (gate, watched) = (Arc::clone(&gate), Arc::clone(&watched));
        std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(300));
            // One here, one with whoever runs the copy.
            if watched.lock().unwrap().as_ref().is_some_and(|source| Arc::strong_count(source) < 2) {
                eprintln!("FREED while the copy is in flight");
            }
            gate.open();
        })
    };
    gated::hold(&device, stream, &gate);
    let source = gated::source(&device, &pattern::bytes(1, usize::try_from(range.bytes).unwrap()));
    let parts = [CopyPart { device: range, host_offset: 0 }];
    drop(device.copy_to_device(stream, Arc::clone(&source), &parts).unwrap());
    *watched.lock().unwrap() = Some(source);
    drop(device);
    opener.join().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
}
