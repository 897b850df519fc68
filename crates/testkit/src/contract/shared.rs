//! Memory that other processes can have: \[shared-memory\].

use std::fs::File;
use std::os::fd::AsFd;

use poorwill_core::{Driver, DriverErrorKind};

use super::{assert_invalid, assert_unknown, free, granule, kind, read, sample, write};

/// Whether the device has such memory; if not, it says so.
fn has_shared_memory(driver: &dyn Driver) -> bool {
    let bytes = granule(driver);
    if driver.info().memory_name.is_some() {
        return true;
    }
    let backing = driver.create(bytes).unwrap();
    let file = File::open("/dev/null").unwrap();
    for refused in [
        kind(driver.create_shared(bytes)),
        kind(driver.export(backing)),
        kind(driver.import(file.as_fd(), bytes)),
    ] {
        assert!(matches!(refused, DriverErrorKind::Unsupported { .. }), "{refused:?}");
    }
    driver.release(backing).unwrap();
    false
}

/// \[shared-memory\]
pub fn shared_memory_keeps_its_bytes(driver: &dyn Driver) {
    if !has_shared_memory(driver) {
        return;
    }
    let (free_bytes, bytes) = (free(driver), 3 * granule(driver));
    let range = driver.reserve(bytes).unwrap();
    let expected = sample(5, bytes);
    let first = driver.create_shared(bytes).unwrap();
    assert_eq!(free(driver), free_bytes - bytes);
    let put = |backing| {
        driver.map(range, backing).unwrap();
        driver.set_access(range).unwrap();
    };
    let take_out = |backing| {
        driver.unmap(range).unwrap();
        driver.release(backing).unwrap();
    };
    put(first);
    write(driver, range, expected.clone());
    let mut descriptor = driver.export(first).unwrap();
    take_out(first);
    // Again and again, as an owner does that lends and takes back.
    for round in 0..3 {
        let taken = driver.import(descriptor.as_fd(), bytes).unwrap();
        put(taken);
        assert!(read(driver, range) == expected, "round {round}");
        descriptor = driver.export(taken).unwrap();
        take_out(taken);
    }
    // A backing keeps the memory without its descriptor.
    let last = driver.import(descriptor.as_fd(), bytes).unwrap();
    drop(descriptor);
    put(last);
    assert!(read(driver, range) == expected);
    take_out(last);
    assert_eq!(free(driver), free_bytes, "the last of it is gone");
    driver.unreserve(range).unwrap();
}

/// \[shared-memory\]: two backings are one memory.
pub fn shared_memory_is_seen_by_both(driver: &dyn Driver) {
    if !has_shared_memory(driver) {
        return;
    }
    let bytes = 2 * granule(driver);
    let ranges = [driver.reserve(bytes).unwrap(), driver.reserve(bytes).unwrap()];
    let first = driver.create_shared(bytes).unwrap();
    let second = driver.import(driver.export(first).unwrap().as_fd(), bytes).unwrap();
    for (range, backing) in ranges.into_iter().zip([first, second]) {
        driver.map(range, backing).unwrap();
        driver.set_access(range).unwrap();
    }
    for (from, to) in [(0, 1), (1, 0)] {
        let expected = sample(from as u64, bytes);
        write(driver, ranges[from], expected.clone());
        assert!(read(driver, ranges[to]) == expected, "written at {from}");
    }
    let halves = driver.digest(poorwill_core::StreamId::DEFAULT, &ranges).unwrap().wait().unwrap();
    assert_eq!(halves[..2], halves[2..], "digests are of the memory, not of the mapping");
    driver.zero(poorwill_core::StreamId::DEFAULT, ranges[0]).unwrap().wait().unwrap();
    assert!(read(driver, ranges[1]).iter().all(|byte| *byte == 0));
    for (range, backing) in ranges.into_iter().zip([first, second]) {
        driver.unmap(range).unwrap();
        driver.release(backing).unwrap();
        driver.unreserve(range).unwrap();
    }
}

/// \[shared-memory\], \[validate\]
pub fn what_is_no_shared_memory_is_refused(driver: &dyn Driver) {
    if !has_shared_memory(driver) {
        return;
    }
    let (free_bytes, bytes) = (free(driver), 2 * granule(driver));
    let plain = driver.create(bytes).unwrap();
    assert_invalid(driver.export(plain));
    driver.release(plain).unwrap();
    assert_unknown(driver.export(plain));
    for wrong in [0, bytes + 1] {
        assert_invalid(driver.create_shared(wrong));
    }
    let shared = driver.create_shared(bytes).unwrap();
    let descriptor = driver.export(shared).unwrap();
    assert_invalid(driver.import(descriptor.as_fd(), 0));
    assert_invalid(driver.import(File::open("/dev/null").unwrap().as_fd(), bytes));
    // Another size than its own is an error of the import or of the map.
    let range = driver.reserve(2 * bytes).unwrap();
    if let Ok(wrong) = driver.import(descriptor.as_fd(), 2 * bytes) {
        driver.map(range, wrong).expect_err("it is smaller");
        driver.release(wrong).unwrap();
    }
    driver.unreserve(range).unwrap();
    driver.release(shared).unwrap();
    assert_unknown(driver.export(shared));
    drop(descriptor);
    assert_eq!(free(driver), free_bytes);
}
