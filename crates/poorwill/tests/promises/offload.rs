//! Weights in host memory: exact buffers, aliasing views, and memory that is released only after the device's
//! work. On the host device, the CUDA driver over the fake library, and a GPU.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use poorwill::offload::{Buffer, BufferPin, DISABLE_PIN, DISABLE_UVA, Switches, View};
use poorwill::{CopyPart, Device, DeviceRange, DriverErrorKind, StreamId};
use poorwill_driver::system::System;
use poorwill_driver::{CudaConfig, CudaDevice, HostConfig, HostDevice, HostMemoryConfig, Pin};
use poorwill_testkit::child;
use poorwill_testkit::device::{DeviceKind, cuda_config, skipped_unless};
use poorwill_testkit::latch::{Latch, hold};
use poorwill_testkit::pattern;

const MIB: u64 = 1 << 20;

/// Nothing is turned off.
fn on() -> Switches {
    Switches::default()
}

fn open_with(host_memory: HostMemoryConfig) -> Device {
    match DeviceKind::of_this_run() {
        DeviceKind::Host => {
            let config = HostConfig::with_capacity(64 * MIB).backing_up_in(host_memory);
            Device::from_host(Arc::new(HostDevice::open(&config).unwrap()))
        }
        DeviceKind::Fake | DeviceKind::Cuda(_) => {
            let config = cuda_config().backing_up_in(host_memory);
            Device::from_cuda(Arc::new(CudaDevice::open(&config).unwrap()))
        }
    }
}

fn open() -> Device {
    open_with(HostMemoryConfig::default())
}

/// Whether page-locking means anything.
fn is_gpu() -> bool {
    DeviceKind::of_this_run() != DeviceKind::Host
}

fn used(device: &Device) -> u64 {
    device.driver().host_memory().used_bytes
}

fn buffer(device: &Device, bytes: u64, pin: BufferPin) -> Arc<Buffer> {
    Arc::new(Buffer::new(device, bytes, pin, on()).unwrap())
}

fn range_of(bytes: &[u8]) -> Range<usize> {
    let start = bytes.as_ptr().expose_provenance();
    start..start + bytes.len()
}

/// Tests that measure waits for the whole device take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_buffer_takes_what_was_asked_for_and_gives_it_back() {
    let device = open();
    let sizes = [1, 4095, 4096, 4097, 3 * MIB, 65 * MIB + 1, (2 * MIB) - 1];
    let page = 1 << 16;
    for pin in [BufferPin::Auto, BufferPin::Never] {
        let mut total = 0;
        let mut live = Vec::new();
        for bytes in sizes {
            let made = buffer(&device, bytes, pin);
            assert_eq!((made.bytes(), made.addr() % 64), (bytes, 0));
            assert_eq!(made.is_pinned(), is_gpu() && pin == BufferPin::Auto);
            assert_eq!(
                made.pageable_because().is_none(),
                made.is_pinned(),
                "a reason where there is need of one"
            );
            total += bytes;
            assert_eq!(used(&device), total);
            live.push(made);
        }
        let held = device.driver().host_memory().held_bytes;
        assert!(held <= total + sizes.len() as u64 * page, "{held} for {total}");
        drop(live);
        assert_eq!(used(&device), 0);
        device.driver().host_trim().unwrap();
        assert_eq!(device.driver().host_memory().held_bytes, 0);
    }
}

#[test]
fn refusals_say_what_was_asked_held_and_allowed() {
    let device = open_with(HostMemoryConfig::default().limited_to(10 * MIB));
    let held = buffer(&device, 6 * MIB, BufferPin::Auto);
    let error = Buffer::new(&device, 6 * MIB, BufferPin::Auto, on()).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::OutOfHostMemory { .. }), "{error}");
    for word in ["6 MiB", "10 MiB", "12 MiB", "raise the limit"] {
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
    drop(held);
    drop(buffer(&device, 10 * MIB, BufferPin::Auto));
    let error = Buffer::new(&device, 0, BufferPin::Auto, on()).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::InvalidArgument { .. }), "{error}");
}

#[test]
fn who_wants_it_locked_gets_it_locked_or_an_error() {
    assert_eq!(buffer(&open(), MIB, BufferPin::Always).is_pinned(), is_gpu());
    let pageable = open_with(HostMemoryConfig::default().pinning(Pin::Never));
    if is_gpu() {
        let error = Buffer::new(&pageable, MIB, BufferPin::Always, on()).unwrap_err();
        assert!(matches!(error.kind, DriverErrorKind::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("Pin::Never") && error.to_string().contains("1 MiB"), "{error}");
    }
    let made = buffer(&pageable, MIB, BufferPin::Auto);
    assert!(!made.is_pinned() && made.pageable_because().is_some());
    assert_eq!(used(&pageable), MIB);
}

#[test]
fn switches_win_on_every_path() {
    let device = open();
    for name in DISABLE_PIN {
        let off = Switches::default().without_pins(name);
        for pin in [BufferPin::Auto, BufferPin::Always] {
            let made = Buffer::new(&device, MIB, pin, off).unwrap();
            assert_eq!(
                (made.is_pinned(), made.pageable_because()),
                (false, Some(&*format!("{name}=1 is set")))
            );
        }
        // Locked memory may be viewed; memory that would need locking may not.
        let locked = buffer(&device, MIB, BufferPin::Auto);
        View::of(&locked, off).unwrap();
        let bytes = vec![0u8; 3 * usize::try_from(MIB).unwrap()];
        let seen = View::over(&device, range_of(&bytes), Box::new(()), off);
        if is_gpu() {
            let error = seen.unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("3 MiB") && error.contains("stage_in"), "{error}");
        } else {
            drop(seen.unwrap());
        }
    }
    let off = Switches::default().without_views(DISABLE_UVA);
    let made = Arc::new(Buffer::new(&device, MIB, BufferPin::Auto, off).unwrap());
    assert_eq!(made.is_pinned(), is_gpu(), "locked for copies all the same");
    let bytes = vec![0u8; 100];
    for error in [
        View::of(&made, off).unwrap_err(),
        View::over(&device, range_of(&bytes), Box::new(()), off).unwrap_err(),
    ] {
        assert!(matches!(error.kind, DriverErrorKind::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(DISABLE_UVA) && error.to_string().contains("stage_in"), "{error}");
    }
}

#[test]
fn a_pageable_buffer_of_a_gpu_has_no_view() {
    let device = open();
    let made = buffer(&device, MIB, BufferPin::Never);
    match View::of(&made, on()) {
        Ok(view) => assert!(!is_gpu() && view.device_addr() == made.addr() as u64),
        Err(error) => {
            assert!(is_gpu() && matches!(error.kind, DriverErrorKind::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains("1 MiB") && error.to_string().contains("stage_in"), "{error}");
        }
    }
}

#[test]
fn a_view_keeps_its_buffer_and_the_last_gives_it_back() {
    let device = open();
    let made = buffer(&device, 5 * MIB, BufferPin::Auto);
    let (first, second) = (View::of(&made, on()).unwrap(), View::of(&made, on()).unwrap());
    assert_eq!((first.device_addr(), first.bytes()), (second.device_addr(), 5 * MIB));
    drop(made);
    drop(first);
    assert_eq!(used(&device), 5 * MIB);
    drop(second);
    assert_eq!(used(&device), 0);
    // In either order of drops, with no other handle of the device.
    let (made, driver) = (buffer(&device, MIB, BufferPin::Auto), device.driver());
    let view = View::of(&made, on()).unwrap();
    drop((device, made));
    assert_eq!(driver.host_memory().used_bytes, MIB);
    drop(view);
    assert_eq!(driver.host_memory().used_bytes, 0);
}

#[test]
fn memory_of_others_is_kept_as_long_as_it_is_seen() {
    let device = open();
    let bytes = Arc::new(pattern::bytes(3, 300_000));
    let see = || View::over(&device, range_of(&bytes), Box::new(Arc::clone(&bytes)), on()).unwrap();
    let (first, second) = (see(), see());
    assert_eq!((first.device_addr(), Arc::strong_count(&bytes)), (second.device_addr(), 3));
    drop(first);
    assert_eq!(Arc::strong_count(&bytes), 2);
    drop(second);
    assert_eq!(Arc::strong_count(&bytes), 1);
    assert_eq!(*bytes, pattern::bytes(3, 300_000), "and left as it was");
    let nothing = View::over(&device, range_of(&[]), Box::new(Arc::clone(&bytes)), on()).unwrap_err();
    assert!(matches!(nothing.kind, DriverErrorKind::InvalidArgument { .. }), "{nothing}");
    assert_eq!(Arc::strong_count(&bytes), 1, "a refusal keeps nothing");
}

#[test]
fn the_last_to_go_waits_for_the_device() {
    let _turn = alone();
    let device = open();
    let driver = device.driver();
    let stream = driver.stream_create().unwrap();
    let bytes = Arc::new(vec![1u8; 1 << 20]);
    let made = buffer(&device, MIB, BufferPin::Auto);
    let of_buffer = View::of(&made, on()).unwrap();
    let of_others = View::over(&device, range_of(&bytes), Box::new(Arc::clone(&bytes)), on()).unwrap();
    drop(made);
    let mut waits: Vec<Box<dyn Send>> = vec![Box::new(of_buffer), Box::new(of_others)];
    if is_gpu() {
        // Code with the address may have had the GPU copy from it.
        let lent = buffer(&device, MIB, BufferPin::Auto);
        assert_eq!(lent.lend(), lent.addr());
        waits.push(Box::new(lent));
    }
    for held in waits {
        let (latch, is_open) = (Arc::new(Latch::default()), Arc::new(AtomicBool::new(false)));
        hold(&*driver, stream, &latch);
        thread::scope(|scope| {
            let (begins, begun) = mpsc::channel();
            let is_open = &is_open;
            let letting_go = scope.spawn(move || {
                begins.send(()).unwrap();
                drop(held);
                is_open.load(Ordering::SeqCst)
            });
            begun.recv().unwrap();
            // Time for it to go wrong; it cannot go right sooner.
            thread::sleep(Duration::from_millis(50));
            is_open.store(true, Ordering::SeqCst);
            latch.open();
            assert!(letting_go.join().unwrap(), "it had gone before the work had ended");
        });
    }
    assert_eq!((used(&device), Arc::strong_count(&bytes)), (0, 1));
    driver.stream_destroy(stream).unwrap();
}

#[test]
fn what_was_never_seen_waits_for_nothing() {
    let _turn = alone();
    let device = open();
    let driver = device.driver();
    let stream = driver.stream_create().unwrap();
    let latch = Arc::new(Latch::default());
    hold(&*driver, stream, &latch);
    // If the drop waited, no thread would open the latch.
    drop(buffer(&device, MIB, BufferPin::Auto));
    latch.open();
    driver.stream_destroy(stream).unwrap();
}

#[test]
fn bytes_reach_the_device_and_are_theirs_while_they_do() {
    let device = open();
    let driver = device.driver();
    let granule = driver.info().granule_bytes;
    let range: DeviceRange = driver.reserve(granule).unwrap();
    let backing = driver.create(granule).unwrap();
    driver.map(range, backing).unwrap();
    driver.set_access(range).unwrap();
    let expected = pattern::bytes(9, usize::try_from(granule).unwrap());
    for pin in [BufferPin::Auto, BufferPin::Never] {
        let mut made = Buffer::new(&device, granule, pin, on()).unwrap();
        made.as_mut_slice().unwrap().copy_from_slice(&expected);
        let memory = made.memory().unwrap();
        assert!(made.as_mut_slice().is_none(), "a copy has it");
        let parts = [CopyPart { device: range, host_offset: 0 }];
        driver.zero(StreamId::DEFAULT, range).unwrap().wait().unwrap();
        let copy = driver.copy_to_device(StreamId::DEFAULT, memory, &parts).unwrap();
        drop(made);
        copy.wait().unwrap();
        let back = driver.host_alloc(granule).unwrap();
        let back = driver.copy_to_host(StreamId::DEFAULT, back, &parts).unwrap().wait().unwrap();
        assert!(*back == *expected, "{pin:?}");
    }
    assert_eq!(used(&device), 0);
    driver.unmap(range).unwrap();
    driver.unreserve(range).unwrap();
    driver.release(backing).unwrap();
}

#[test]
fn threads_make_and_drop_views() {
    let device = open();
    let made = buffer(&device, 3 * MIB, BufferPin::Auto);
    let bytes = Arc::new(vec![0u8; 1 << 20]);
    thread::scope(|scope| {
        for nth in 0..4usize {
            let (device, made, bytes) = (&device, &made, &bytes);
            scope.spawn(move || {
                for turn in 0..50 {
                    // For the whole range, or the part that is locked by now.
                    let keep = || Box::new(Arc::clone(bytes));
                    let view = View::over(device, range_of(bytes), keep(), on()).unwrap();
                    let from = (nth * 131 + turn * 977) % 500_000;
                    drop(View::over(device, range_of(&bytes[from..from + 100_000]), keep(), on()).unwrap());
                    let own =
                        View::of(&buffer(device, MIB / 2 + turn as u64, BufferPin::Auto), on()).unwrap();
                    drop(View::of(made, on()).unwrap());
                    drop((view, own));
                }
            });
        }
    });
    assert_eq!((used(&device), Arc::strong_count(&bytes)), (3 * MIB, 1));
}

#[test]
fn what_is_gone_is_not_held_beyond_a_gibibyte() {
    const BYTES: u64 = 600 * MIB;
    let available = System::here().available_bytes().unwrap_or(u64::MAX);
    if skipped_unless(|_| available > 8 * BYTES, "it takes 1.2 GiB of host memory") {
        return;
    }
    // Where nothing is page-locked they are the same.
    let pins = [BufferPin::Auto, BufferPin::Never];
    for pin in pins.into_iter().take(if is_gpu() { 2 } else { 1 }) {
        let device = open();
        let held = || device.driver().host_memory().held_bytes;
        let made = [(); 2].map(|()| buffer(&device, BYTES, pin));
        let views = made.each_ref().map(|made| View::of(made, on()));
        drop((made, views));
        assert_eq!((used(&device), held()), (0, BYTES), "{pin:?}");
    }
}

#[test]
fn a_dropped_view_is_released_while_others_wait() {
    let device = open();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let bytes = Arc::new(vec![0u8; 1 << 20]);
                for _ in 0..if is_gpu() { 300 } else { 5000 } {
                    drop(View::over(&device, range_of(&bytes), Box::new(Arc::clone(&bytes)), on()).unwrap());
                    assert_eq!(Arc::strong_count(&bytes), 1, "somebody else has it");
                }
            });
        }
    });
}

#[test]
fn what_cannot_be_waited_for_is_kept_until_it_can_be() {
    if !child::in_a_child(&[("POORWILL_FAKE_CUDA_FAIL", "cuMemHostUnregister:1:3:999")]) {
        return;
    }
    let library = Some(poorwill_fake_libcuda::path());
    let open = || {
        let config = CudaConfig::gpu(0).through(library.clone());
        Device::from_cuda(Arc::new(CudaDevice::open(&config).unwrap()))
    };
    let seen = |device: &Device, bytes: &Arc<Vec<u8>>| {
        View::over(device, range_of(bytes), Box::new(Arc::clone(bytes)), on()).unwrap()
    };
    let (device, bytes) = (open(), Arc::new(vec![1u8; 1 << 20]));
    let view = seen(&device, &bytes);
    let made = buffer(&device, MIB, BufferPin::Auto);
    drop(View::of(&made, on()).unwrap());
    // Neither can be waited for; the next drop tries both.
    drop(view);
    drop(made);
    assert_eq!((Arc::strong_count(&bytes), used(&device)), (2, MIB));
    // Nor at the device's end: its work may still run.
    let (ended, kept) = (open(), Arc::new(vec![1u8; 1 << 20]));
    drop(seen(&ended, &kept));
    drop(ended);
    assert_eq!(Arc::strong_count(&kept), 2, "the device may read it still");
    // Now it can be.
    drop(buffer(&device, MIB, BufferPin::Auto));
    assert_eq!((Arc::strong_count(&bytes), used(&device)), (1, 0));
}
