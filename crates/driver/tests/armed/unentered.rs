//! A device that ends where its context cannot be entered frees nothing that copies still read.
//!
//! Each call of `cuCtxGetCurrent` fails in turn, in a process of its own; among them is that of the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use poorwill_core::{CopyPart, Driver};
use poorwill_driver::CudaDevice;
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::{child, pattern};

use super::fake::{Fake, config, mapped, open};

/// Calls before the end, and of the end.
const CALLS_MAX: u32 = 40;

#[test]
fn left_work_keeps_its_memory_when_the_end_cannot_enter() {
    if child::role().is_some() {
        return end_with_a_copy_in_flight();
    }
    let (mut waited, mut did_not) = (0, 0);
    for first in 1..CALLS_MAX {
        let fail = format!("cuCtxGetCurrent:{first}:1");
        let child = child::command("device", &[("POORWILL_FAKE_CUDA_FAIL", &fail)]).output().unwrap();
        let said =
            [child.stdout, child.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
        assert!(!said.contains("FREED"), "with call {first} failing: {said}");
        waited += u32::from(said.contains("the end waited for the copy"));
        did_not += u32::from(said.contains("the end did not wait"));
    }
    // The others failed before there was a copy.
    assert!(waited > 0 && did_not > 0, "{waited} waited, {did_not} did not");
}

/// Also where a call before the end fails: the device would wait for ever.
struct OpenedAtLast(Arc<Latch>);

impl Drop for OpenedAtLast {
    fn drop(&mut self) {
        self.0.open();
    }
}

fn end_with_a_copy_in_flight() {
    let fake = Fake::load();
    let device = open(0);
    let range = mapped(&device, 1);
    let stream = device.stream_create().unwrap();
    let latch = OpenedAtLast(Arc::default());
    latch::hold(&device, stream, &latch.0);
    let source = latch::source(&device, &pattern::bytes(1, usize::try_from(range.bytes).unwrap()));
    let parts = [CopyPart { device: range, host_offset: 0 }];
    drop(device.copy_to_device(stream, Arc::clone(&source), &parts).unwrap());
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(device);
            has_ended.store(true, Ordering::Release);
        });
        // Either it waits for the device, which cannot be done before the latch is open, or it ends without that.
        let waits = loop {
            if has_ended.load(Ordering::Acquire) {
                break false;
            }
            if fake.census(0).calls_that_wait > 0 {
                break true;
            }
            thread::yield_now();
        };
        // One here, one held by the copy.
        if Arc::strong_count(&source) < 2 {
            println!("FREED while the copy is in flight");
        }
        println!("{}", if waits { "the end waited for the copy" } else { "the end did not wait" });
        latch.0.open();
    });
    // Has the copy run with the memory that is there; the call that fails may be one of these.
    let _ = CudaDevice::open(&config(0)).map(|device| device.synchronize());
}
