//! Rules about `save`, and about digests of several ranges.

use poorwill_core::{CopyPart, DeviceRange, Digest, Driver, StreamId};

use super::{Mapped, assert_invalid, assert_not_mapped, assert_unknown, granule, read, sample, write};
use crate::latch;

/// Parts of a copy, in granules of the device and bytes of the buffer.
fn parts(mapped: &Mapped<'_>, offsets: &[(u64, u64, u64)]) -> Vec<CopyPart> {
    let g = granule(mapped.driver);
    let part = |(first, granules, host_offset): &(u64, u64, u64)| {
        let device = DeviceRange::new(mapped.range.addr + first * g, granules * g);
        CopyPart { device, host_offset: *host_offset }
    };
    offsets.iter().map(part).collect()
}

fn digests_of(bytes: &[u8], granule: u64) -> Vec<Digest> {
    bytes.chunks(usize::try_from(granule).unwrap()).map(Digest::of).collect()
}

/// `save`: returns the buffer with the digests of its bytes, in the order of the parts.
pub fn saves_digest_what_they_store(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 4);
    let held = sample(21, 4 * g);
    write(driver, mapped.range, held.clone());
    let stream = driver.stream_create().unwrap();
    for offsets in [
        &[(0, 4, 0)][..],
        &[(2, 2, 0), (0, 1, 2 * g), (1, 1, 3 * g + 64)],
        &[(3, 1, g + 16), (3, 1, 3)],
        &[(1, 1, 1)],
        &[(0, 0, 7), (2, 1, 0)],
        &[],
    ] {
        let parts = parts(&mapped, offsets);
        let mut pinned = driver.host_alloc(4 * g + 128).unwrap();
        pinned.fill(0xEE);
        for buffer in [pinned, vec![0xEE; usize::try_from(4 * g + 128).unwrap()].into()] {
            let (stored, digests) = driver.save(stream, buffer, &parts).unwrap().wait().unwrap();
            let mut expected = vec![0xEE; stored.len()];
            let mut expected_digests = Vec::new();
            for (first, granules, at) in offsets {
                let [from, bytes, at] =
                    [first * g, granules * g, *at].map(|bytes| usize::try_from(bytes).unwrap());
                expected[at..at + bytes].copy_from_slice(&held[from..from + bytes]);
                expected_digests.extend(digests_of(&held[from..from + bytes], g));
            }
            assert!(*stored == *expected, "{offsets:?}");
            assert_eq!(digests, expected_digests, "{offsets:?}");
        }
    }
    driver.stream_destroy(stream).unwrap();
    mapped.end();
}

/// `save`, \[order\], \[owned\]
pub fn saves_keep_the_order_of_their_stream(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 2);
    let stream = driver.stream_create_background().unwrap();
    let whole = [CopyPart { device: mapped.range, host_offset: 0 }];
    let mut saves = Vec::new();
    for seed in 0..10 {
        drop(driver.copy_to_device(stream, latch::source(driver, &sample(seed, 2 * g)), &whole).unwrap());
        let save = driver.save(stream, driver.host_alloc(2 * g).unwrap(), &whole).unwrap();
        let digests = driver.digest(stream, &[mapped.range]).unwrap();
        if seed % 3 == 2 {
            drop(save); // It is still done, and its memory is kept.
            drop(digests);
        } else {
            saves.push((seed, save, digests));
        }
    }
    drop(driver.zero(stream, mapped.range).unwrap());
    for (seed, save, digests) in saves {
        let (bytes, expected) = (sample(seed, 2 * g), digests_of(&sample(seed, 2 * g), g));
        assert_eq!(digests.wait().unwrap(), expected, "seed {seed}");
        let (stored, digests) = save.wait().unwrap();
        assert!(*stored == *bytes && digests == expected, "seed {seed}");
    }
    driver.stream_synchronize(stream).unwrap();
    assert!(read(driver, mapped.range).iter().all(|byte| *byte == 0));
    driver.stream_destroy(stream).unwrap();
    mapped.end();
}

/// `save`, \[validate\], \[ranges\]
pub fn saves_check_their_ranges(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 2);
    let at = |offset, bytes| DeviceRange::new(mapped.range.addr + offset, bytes);
    let save = |device, host_offset, bytes: u64| {
        let good = CopyPart { device: at(0, g), host_offset: 0 };
        let buffer = driver.host_alloc(bytes).unwrap();
        driver.save(StreamId::DEFAULT, buffer, &[good, CopyPart { device, host_offset }])
    };
    for wrong in [at(1, g), at(0, g - 1), at(0, 1), at(g / 2, g / 2)] {
        assert_invalid(save(wrong, g, 3 * g));
    }
    for (host_offset, bytes) in [(g, 2 * g - 1), (u64::MAX, 2 * g), (g + 1, 2 * g)] {
        assert_invalid(save(at(0, g), host_offset, bytes));
    }
    let gone = Mapped::new(driver, 1);
    driver.unmap(gone.range).unwrap();
    assert_not_mapped(save(gone.range, g, 2 * g));
    driver.map(gone.range, gone.backing).unwrap();
    assert_not_mapped(save(gone.range, g, 2 * g)); // Mapped, but without access.
    assert_not_mapped(save(at(g, 2 * g), g, 3 * g));
    let buffer = driver.host_alloc(g).unwrap();
    let parts = [CopyPart { device: at(0, g), host_offset: 0 }];
    assert_unknown(driver.save(StreamId(u64::MAX), buffer, &parts));
    save(at(g, g), g, 2 * g).expect("an error is not remembered").wait().unwrap();
    mapped.end();
    gone.end();
}

/// `digest`, of several ranges.
pub fn digests_are_in_the_order_of_their_ranges(driver: &dyn Driver) {
    let g = granule(driver);
    let [first, second] = [Mapped::new(driver, 3), Mapped::new(driver, 2)];
    let (a, b) = (digests_of(&sample(31, 3 * g), g), digests_of(&sample(32, 2 * g), g));
    write(driver, first.range, sample(31, 3 * g));
    write(driver, second.range, sample(32, 2 * g));
    let in_first = |granule: u64, granules| DeviceRange::new(first.range.addr + granule * g, granules * g);
    let digest = |ranges: &[DeviceRange]| driver.digest(StreamId::DEFAULT, ranges);
    let ranges = [second.range, in_first(2, 1), in_first(1, 0), in_first(0, 2), second.range];
    let expected = [&b[..], &a[2..], &a[..2], &b[..]].concat();
    assert_eq!(digest(&ranges).unwrap().wait().unwrap(), expected);
    assert!(digest(&[]).unwrap().wait().unwrap().is_empty());
    assert_invalid(digest(&[first.range, DeviceRange::new(second.range.addr, g - 1)]));
    assert_invalid(digest(&[first.range, DeviceRange::new(second.range.addr + 1, g)]));
    driver.unmap(second.range).unwrap();
    assert_not_mapped(digest(&[first.range, second.range]));
    driver.map(second.range, second.backing).unwrap();
    driver.set_access(second.range).unwrap();
    assert_eq!(digest(&[second.range, first.range]).unwrap().wait().unwrap(), [b, a].concat());
    first.end();
    second.end();
}
