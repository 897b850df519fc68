//! What a failure on the GPU whose link carries copies leaves: the error of those copies, and nothing else.

use std::sync::Arc;

use poorwill_core::{CopyPart, Driver, DriverErrorKind, StreamId};
use poorwill_driver::link::Scratch;
use poorwill_driver::{CudaDevice, cuda};
use poorwill_testkit::device::{DeviceKind, cuda_config, skipped_unless};
use poorwill_testkit::latch::{Latch, hold, source};
use poorwill_testkit::watchdog::eventually;

use crate::turn;

#[test]
fn a_link_whose_gpu_fails_leaves_the_own_one_as_it_was() {
    let _turn = turn();
    if skipped_unless(|kind| !matches!(kind, DeviceKind::Cuda(_)), "no GPU is made to fail") {
        return;
    }
    let device = CudaDevice::open(&cuda_config().linking_over(cuda::Links::Reachable)).unwrap();
    let granule = device.info().granule_bytes;
    let bytes = vec![7; usize::try_from(granule).unwrap()];
    let mapped = || {
        let mut mapped = Scratch::reserve(&device, granule).unwrap();
        mapped.map_backings(&[granule]).unwrap();
        mapped
    };
    let (kept, mut lost) = (mapped(), mapped());
    let part = |mapped: &Scratch<'_>| [CopyPart { device: mapped.range(), host_offset: 0 }];
    let (own, link) = (device.stream_create().unwrap(), device.stream_create_over_link(0).unwrap());
    let (latch, buffer) = (Arc::new(Latch::default()), source(&device, &bytes));
    hold(&device, own, &latch);
    let held = device.event_record(own).unwrap();
    device.stream_wait_event(link, held).unwrap();
    let copied = device.copy_to_device(link, Arc::clone(&buffer), &part(&lost)).unwrap();
    let unawaited = device.copy_to_device(link, Arc::clone(&buffer), &part(&lost)).unwrap();
    // That GPU meets an address without memory.
    lost.unmap_all().unwrap();
    latch.open();
    let failed = copied.wait().unwrap_err();
    assert!(matches!(failed.kind, DriverErrorKind::Device { .. }), "{failed}");
    drop(unawaited);
    device.stream_synchronize(link).unwrap();
    device.synchronize().unwrap();
    device.copy_to_device(own, Arc::clone(&buffer), &part(&kept)).unwrap().wait().unwrap();
    device.zero(StreamId::DEFAULT, kept.range()).unwrap().wait().unwrap();
    device.event_destroy(held).unwrap();
    device.stream_destroy(link).unwrap();
    eventually("nothing holds the buffer", || {
        device.memory_info().unwrap();
        Arc::strong_count(&buffer) == 1
    });
    device.stream_destroy(own).unwrap();
}
