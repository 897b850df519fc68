//! Copies by the kernel and without it: which ones it makes, what happens where the driver refuses it, or fails anywhere
//! else.

use std::sync::Arc;

use poorwill_core::{CopyPart, DeviceRange, Driver, HostBuffer, Pending, StreamId};
use poorwill_driver::{CudaDevice, HostMemoryConfig, Pin};
use poorwill_testkit::child;
use poorwill_testkit::latch::source;
use poorwill_testkit::pattern;

use super::fake::{Fake, alone, config, mapped, open};

fn bytes(range: DeviceRange, seed: u64) -> Vec<u8> {
    pattern::bytes(seed, usize::try_from(range.bytes).unwrap())
}

fn plain(range: DeviceRange, seed: u64) -> Arc<HostBuffer> {
    Arc::new(HostBuffer::from(bytes(range, seed)))
}

fn read(device: &CudaDevice, range: DeviceRange) -> Vec<u8> {
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let buffer = device.host_alloc(range.bytes).unwrap();
    device.copy_to_host(StreamId::DEFAULT, buffer, &parts).unwrap().wait().unwrap().to_vec()
}

#[test]
fn where_copy_engines_refuse_everything_the_kernel_copies_what_it_can() {
    if !child::in_a_child(&[("POORWILL_FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:1:100:999")]) {
        return;
    }
    for ordinal in [0, 1] {
        let device = open(ordinal);
        assert_eq!((device.copy_kernel(), device.info().kernel_copies), (Ok(()), true));
        let (range, granule) = (mapped(&device, 3), device.info().granule_bytes);
        let by_kernel = device.stream_create_kernel_copies().unwrap();
        let copy = |stream, source: Arc<HostBuffer>, from: u64, bytes: u64| {
            let part = CopyPart { device: DeviceRange::new(range.addr + from, bytes), host_offset: from };
            device.copy_to_device(stream, source, &[part]).and_then(Pending::wait)
        };
        let pinned = |seed| source(&device, &bytes(range, seed));
        copy(by_kernel, pinned(1), 0, range.bytes).unwrap();
        assert!(read(&device, range) == bytes(range, 1));
        // Other streams, other memory, bytes that are no pages, and places that are not aligned.
        copy(StreamId::DEFAULT, pinned(2), 0, range.bytes).unwrap_err();
        copy(by_kernel, plain(range, 2), 0, range.bytes).unwrap_err();
        copy(by_kernel, pinned(2), 0, granule + 16).unwrap_err();
        copy(by_kernel, pinned(2), 8, granule).unwrap_err();
        assert!(read(&device, range) == bytes(range, 1));
        copy(by_kernel, pinned(3), 16, granule).unwrap();
        let expected = [&bytes(range, 1)[..16], &bytes(range, 3)[16..]].concat();
        let end = usize::try_from(granule + 16).unwrap();
        assert!(read(&device, range)[..end] == expected[..end]);
        device.stream_destroy(by_kernel).unwrap();
    }
}

#[test]
fn without_the_kernel_copy_engines_copy_on_its_streams() {
    // The third module is the one that copies.
    if !child::in_a_child(&[("POORWILL_FAKE_CUDA_FAIL", "cuModuleLoadData:3:1:218")]) {
        return;
    }
    let refused = open(0);
    let why = refused.copy_kernel().unwrap_err();
    assert!(why.contains("does not take it") && why.contains("CUDA_ERROR_INVALID_PTX (218)"), "{why}");
    assert!(!refused.info().kernel_copies);
    assert_eq!(refused.digest_kernel(), Ok(()), "the other kernel does not depend on it");
    expect_right_copies(&refused, 1);
    let taken = open(0);
    assert_eq!((taken.copy_kernel(), taken.info().kernel_copies), (Ok(()), true));
    expect_right_copies(&taken, 2);
}

#[test]
fn where_nothing_is_page_locked_there_is_nothing_for_the_kernel() {
    let _turn = alone();
    let host_memory = HostMemoryConfig::default().pinning(Pin::Never);
    let device = CudaDevice::open(&config(0).backing_up_in(host_memory)).unwrap();
    let why = device.copy_kernel().unwrap_err();
    assert!(why.starts_with("host memory is not page-locked: "), "{why}");
    assert!(!device.info().kernel_copies);
    expect_right_copies(&device, 3);
}

fn expect_right_copies(device: &CudaDevice, seed: u64) {
    let range = mapped(device, 3);
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let stream = device.stream_create_kernel_copies().unwrap();
    for (nth, source) in [source(device, &bytes(range, seed)), plain(range, seed + 1)].into_iter().enumerate()
    {
        device.copy_to_device(stream, source, &parts).unwrap().wait().unwrap();
        assert!(read(device, range) == bytes(range, seed + nth as u64));
    }
    device.stream_destroy(stream).unwrap();
    device.unmap(range).unwrap();
    device.unreserve(range).unwrap();
}

/// Every call of the library, in turn, while copies are made.
#[test]
fn whatever_fails_copies_are_whole_or_refused() {
    let _turn = alone();
    let fake = Fake::load();
    let device = open(1);
    let range = mapped(&device, 4);
    let half = range.bytes / 2;
    let parts =
        [half, 0].map(|at| CopyPart { device: DeviceRange::new(range.addr + at, half), host_offset: at });
    let stream = device.stream_create_kernel_copies().unwrap();
    let (mut failed, mut done) = (0, 0);
    for nth in 0.. {
        let source = source(&device, &bytes(range, nth));
        fake.arm(nth, 1);
        let copied = device.copy_to_device(stream, Arc::clone(&source), &parts).and_then(|copy| {
            let _ = copy.has_ended();
            copy.wait()
        });
        let calls = fake.disarm();
        device.synchronize().unwrap();
        device.memory_info().unwrap(); // Drops what abandoned work kept.
        assert_eq!(Arc::strong_count(&source), 1, "call {nth}: the buffer is held for ever");
        match copied {
            Ok(()) => {
                assert!(read(&device, range) == bytes(range, nth), "call {nth}");
                done += 1;
            }
            Err(_) => failed += 1,
        }
        if nth >= calls {
            break;
        }
    }
    assert!(failed > 4 && done > 0, "{failed} failed, {done} done");
    device.stream_destroy(stream).unwrap();
}
