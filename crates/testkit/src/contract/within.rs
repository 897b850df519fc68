//! Copies from device memory to device memory: \[within\].

use std::sync::Arc;

use poorwill_core::driver::MovePart;
use poorwill_core::{DeviceRange, Driver, StreamId};

use super::{Mapped, assert_invalid, assert_not_mapped, assert_unknown, granule, read, sample, write};
use crate::latch::{Latch, hold};

/// \[within\]: any bytes that do not overlap, also across mappings.
pub fn copies_within_are_copies(driver: &dyn Driver) {
    let g = granule(driver);
    let bytes = 6 * g;
    let range = driver.reserve(bytes).unwrap();
    let backings = [2, 1, 3].map(|granules| driver.create(granules * g).unwrap());
    let mut at = range.addr;
    for (backing, granules) in backings.iter().zip([2, 1, 3]) {
        driver.map(DeviceRange::new(at, granules * g), *backing).unwrap();
        at += granules * g;
    }
    driver.set_access(range).unwrap();
    let stream = driver.stream_create().unwrap();
    for parts in [
        &[(3 * g, 3 * g, 0)][..],
        &[(0, g, 5 * g), (g, 2 * g, 3 * g)],
        &[(g - 7, 13, 3 * g - 5), (5 * g, 1, 4 * g + 3)],
        &[(0, 0, 0)],
        &[],
    ] {
        let mut expected = sample(7, bytes);
        write(driver, range, expected.clone());
        let part = |(to, len, from): &(u64, u64, u64)| MovePart {
            to: DeviceRange::new(range.addr + to, *len),
            from: range.addr + from,
        };
        let moves: Vec<MovePart> = parts.iter().map(part).collect();
        driver.copy_within(stream, &moves).unwrap().wait().unwrap();
        for (to, len, from) in parts {
            let [to, len, from] = [to, len, from].map(|bytes| usize::try_from(*bytes).unwrap());
            expected.copy_within(from..from + len, to);
        }
        assert!(read(driver, range) == expected, "{parts:?}");
    }
    driver.stream_destroy(stream).unwrap();
    driver.unmap(range).unwrap();
    backings.into_iter().for_each(|backing| driver.release(backing).unwrap());
    driver.unreserve(range).unwrap();
}

/// \[within\], \[order\], \[ranges\], \[validate\]
pub fn copies_within_keep_their_order_and_check_their_ranges(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 2);
    let (first, second) = (mapped.range.addr, mapped.range.addr + g);
    let stream = driver.stream_create().unwrap();
    let latch = Arc::new(Latch::default());
    write(driver, mapped.range, sample(3, 2 * g));
    hold(driver, stream, &latch);
    let zeros = driver.zero(stream, DeviceRange::new(first, g)).unwrap();
    let copy =
        driver.copy_within(stream, &[MovePart { to: DeviceRange::new(second, g), from: first }]).unwrap();
    assert_ne!(copy.has_ended(), Some(true));
    latch.open();
    copy.wait().unwrap();
    zeros.wait().unwrap();
    assert!(read(driver, mapped.range).iter().all(|byte| *byte == 0), "in the order queued");
    let refused = |to, bytes, from| {
        let part = MovePart { to: DeviceRange::new(to, bytes), from };
        driver.copy_within(StreamId::DEFAULT, &[part])
    };
    assert_invalid(refused(first, g, first + 1));
    assert_invalid(refused(first, g, first));
    assert_not_mapped(refused(first, g, second + 1));
    assert_not_mapped(refused(second + 1, g, first));
    driver.stream_destroy(stream).unwrap();
    let part = MovePart { to: DeviceRange::new(second, g), from: first };
    assert_unknown(driver.copy_within(stream, &[part]));
    mapped.end();
}
