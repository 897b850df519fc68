//! A slice of a device keeps the contract, and its figures are its own.

use std::sync::Arc;

use poorwill_core::{BackingId, DeviceRange, Driver, DriverErrorKind, Op};
use poorwill_driver::{HostConfig, HostDevice};
use poorwill_testkit::contract::GRANULES_MIN;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::slice::Slice;

fn machine(granules: u64) -> Arc<dyn Driver> {
    Arc::new(HostDevice::open(&HostConfig::of_pages(granules)).unwrap())
}

/// What the device and the slice itself count as held, in granules.
fn held(slice: &Slice) -> u64 {
    let info = slice.memory_info().unwrap();
    assert_eq!(info.total_bytes, slice.info().total_bytes);
    assert_eq!(info.free_bytes, info.total_bytes - slice.held_bytes());
    let process = info.process.unwrap();
    assert_eq!((process.used_bytes, process.context_bytes), (slice.held_bytes(), 0));
    slice.held_bytes() / slice.info().granule_bytes
}

mod the_contract {
    poorwill_testkit::driver_contract!(|| {
        let machine = super::machine(2 * super::GRANULES_MIN);
        machine.create(5 * machine.info().granule_bytes).unwrap(); // Of another user.
        std::sync::Arc::new(super::Slice::new(machine, super::GRANULES_MIN))
    });
}

#[test]
fn slices_of_one_device_know_nothing_of_each_other() {
    let machine = machine(20);
    let slices = [8, 8].map(|granules| Slice::new(Arc::clone(&machine), granules));
    let granule = machine.info().granule_bytes;
    assert_eq!(slices[0].info().total_bytes, 8 * granule);
    assert!(slices[0].info().name.ends_with(&machine.info().name), "{}", slices[0].info().name);
    let six = slices[0].create(6 * granule).unwrap();
    assert_eq!(slices.each_ref().map(held), [6, 0]);
    let full = slices[0].create(3 * granule).unwrap_err().kind;
    assert_eq!(
        full,
        DriverErrorKind::OutOfMemory { asked_bytes: 3 * granule, free_bytes: 2 * granule },
        "the machine has 14 more"
    );
    let range = slices[1].reserve(6 * granule).unwrap();
    for error in [slices[1].release(six), slices[1].map(range, six)] {
        assert!(matches!(error.unwrap_err().kind, DriverErrorKind::UnknownHandle { .. }));
    }
    slices[0].release(six).unwrap();
    assert_eq!(slices.each_ref().map(held), [0, 0]);
    assert!(matches!(slices[0].release(six).unwrap_err().kind, DriverErrorKind::UnknownHandle { .. }));
    let [mine, theirs] = slices.each_ref().map(|slice| slice.host_alloc(100).unwrap());
    assert_eq!(slices.each_ref().map(Slice::host_bytes), [100, 100]);
    drop(theirs);
    assert_eq!((slices.each_ref().map(Slice::host_bytes), mine.len()), ([100, 0], 100));
}

#[test]
fn a_released_backing_counts_until_its_last_unmap() {
    let slice = Slice::new(machine(16), 8);
    let granule = slice.info().granule_bytes;
    let range = slice.reserve(4 * granule).unwrap();
    let at = |n: u64| DeviceRange::new(range.addr + n * granule, granule);
    let [twice, once] = [(); 2].map(|()| slice.create(granule).unwrap());
    for (n, backing) in [(0, twice), (1, once), (2, twice)] {
        slice.map(at(n), backing).unwrap();
    }
    [twice, once].into_iter().for_each(|backing| slice.release(backing).unwrap());
    assert_eq!(held(&slice), 2);
    slice.unmap(DeviceRange::new(range.addr, 2 * granule)).unwrap();
    assert_eq!(held(&slice), 1, "one is still mapped elsewhere");
    slice.unmap(at(2)).unwrap();
    assert_eq!(held(&slice), 0);
}

#[test]
fn refused_calls_are_not_counted() {
    let refusing = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let refuses = Arc::clone(&refusing);
    let driver = ScriptedDriver::new(machine(16), move |call| {
        let moves = matches!(call.op, Op::Create | Op::Release | Op::Map | Op::Unmap | Op::HostAlloc);
        let fails = moves && refuses.load(std::sync::atomic::Ordering::Relaxed);
        if fails { Verdict::device_failure(call) } else { Verdict::Pass }
    });
    let slice = Slice::new(Arc::new(driver), 8);
    let granule = slice.info().granule_bytes;
    let range = slice.reserve(2 * granule).unwrap();
    let at = |n: u64| DeviceRange::new(range.addr + n * granule, granule);
    let [mapped, unmapped]: [BackingId; 2] = [(); 2].map(|()| slice.create(granule).unwrap());
    slice.map(at(0), mapped).unwrap();
    let refuse = |refused| refusing.store(refused, std::sync::atomic::Ordering::Relaxed);
    refuse(true);
    slice.create(granule).unwrap_err();
    slice.map(at(1), unmapped).unwrap_err();
    slice.unmap(at(0)).unwrap_err();
    slice.release(unmapped).unwrap_err();
    slice.host_alloc(7).unwrap_err();
    assert_eq!((held(&slice), slice.host_bytes()), (2, 0));
    refuse(false);
    slice.release(mapped).unwrap();
    assert_eq!(held(&slice), 2, "it is mapped, as before the refusals");
    slice.unmap(at(0)).unwrap();
    slice.release(unmapped).unwrap();
    assert_eq!(held(&slice), 0);
}

#[test]
#[should_panic(expected = "and the test needs")]
fn a_slice_is_no_larger_than_its_device() {
    drop(Slice::new(machine(16), 17));
}
