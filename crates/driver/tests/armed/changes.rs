//! What is mapped changes: what is known of it while a call of the library's is under way, and when one fails.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use poorwill_core::driver::Result;
use poorwill_core::{CopyPart, DeviceRange, Driver, DriverErrorKind, StreamId};
use poorwill_driver::CudaDevice;
use poorwill_testkit::watchdog::eventually;

use super::fake::{Fake, alone, mapped, open};

fn read(device: &CudaDevice, range: DeviceRange) -> Result<()> {
    let part = CopyPart { device: range, host_offset: 0 };
    let buffer = device.host_alloc(range.bytes)?;
    device.copy_to_host(StreamId::DEFAULT, buffer, &[part])?.wait().map(drop)
}

fn is_not_open(read: &Result<()>) -> bool {
    matches!(read, Err(error) if matches!(error.kind, DriverErrorKind::NotMapped { .. }))
}

/// Does `act` while a call of `symbol` that `change` makes is under way.
fn during(fake: &Fake, symbol: &CStr, change: impl FnOnce() + Send, act: impl FnOnce()) {
    thread::scope(|scope| {
        let held = fake.hold(symbol);
        let changing = scope.spawn(change);
        eventually("the call has begun", || fake.held() == 1);
        act();
        assert!(!changing.is_finished());
        drop(held);
        changing.join().unwrap();
    });
}

#[test]
fn copies_are_queued_while_the_driver_maps_and_unmaps() {
    let _turn = alone();
    let (fake, device) = (Fake::load(), open(1));
    let (other, granule) = (mapped(&device, 1), device.info().granule_bytes);
    let range = device.reserve(granule).unwrap();
    let backing = device.create(granule).unwrap();
    // On a thread of its own: one that waits fails the test instead of hanging it.
    let goes_on = || {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                read(&device, other).unwrap();
                done.store(true, Ordering::Release);
            });
            eventually("a copy from other memory is queued", || done.load(Ordering::Acquire));
        });
        assert!(is_not_open(&read(&device, range)), "neither before it is open nor when it may be gone");
    };
    during(&fake, c"cuMemMap", || device.map(range, backing).unwrap(), goes_on);
    during(&fake, c"cuMemSetAccess", || device.set_access(range).unwrap(), goes_on);
    read(&device, range).unwrap();
    during(&fake, c"cuMemUnmap", || device.unmap(range).unwrap(), goes_on);
    during(&fake, c"cuMemRelease", || device.release(backing).unwrap(), goes_on);
    during(&fake, c"cuMemAddressFree", || device.unreserve(range).unwrap(), goes_on);
}

#[test]
fn what_the_driver_does_not_unmap_stays_as_it_was() {
    let _turn = alone();
    let (fake, device) = (Fake::load(), open(1));
    let granule = device.info().granule_bytes;
    let range = device.reserve(2 * granule).unwrap();
    let (open, closed) =
        (DeviceRange::new(range.addr, granule), DeviceRange::new(range.addr + granule, granule));
    for part in [open, closed] {
        let backing = device.create(granule).unwrap();
        device.map(part, backing).unwrap();
        device.release(backing).unwrap();
    }
    device.set_access(open).unwrap();
    fake.arm_all();
    device.unmap(range).unwrap_err();
    fake.disarm();
    read(&device, open).unwrap();
    assert!(is_not_open(&read(&device, closed)));
    device.unmap(range).unwrap();
    assert!(is_not_open(&read(&device, open)));
    device.unreserve(range).unwrap();
}
