//! Rules about streams of `stream_create_kernel_copies`, and about reporting completion.

use std::sync::Arc;

use poorwill_core::{CopyPart, DeviceRange, Driver, HostBuffer, StreamId};

use super::{Mapped, assert_invalid, assert_not_mapped, assert_unknown, granule, read, sample, write};
use crate::latch::{self, Latch, hold};

/// The driver's memory with these bytes, and plain memory with the same.
fn sources(driver: &dyn Driver, bytes: &[u8]) -> [Arc<HostBuffer>; 2] {
    [latch::source(driver, bytes), Arc::new(bytes.to_vec().into())]
}

/// \[kernel-copies\]: whole granules, odd bytes, several parts, none; from any memory.
pub fn copies_by_kernel_are_copies(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 4);
    let stream = driver.stream_create_kernel_copies().unwrap();
    for (seed, offsets) in [
        &[(0, 4 * g, 0)][..],
        &[(2 * g, 2 * g, 0), (0, g, 2 * g), (g, g, 3 * g + 64)],
        &[(0, g, 1), (g, g, g + 8), (2 * g, g, 2 * g + 16)],
        &[(g - 7, 13, 200), (1, 100, 3), (4 * g - 1, 1, 999), (2 * g + 16, g, 32)],
        &[(g, 0, 5), (3 * g, g - 16, 16)],
        &[],
    ]
    .into_iter()
    .enumerate()
    {
        let part = |(to, bytes, from): &(u64, u64, u64)| CopyPart {
            device: DeviceRange::new(mapped.range.addr + to, *bytes),
            host_offset: *from,
        };
        let parts: Vec<CopyPart> = offsets.iter().map(part).collect();
        let bytes = sample(seed as u64, 4 * g + 128);
        for source in sources(driver, &bytes) {
            let mut expected = sample(99, 4 * g);
            write(driver, mapped.range, expected.clone());
            driver.copy_to_device(stream, Arc::clone(&source), &parts).unwrap().wait().unwrap();
            assert_eq!(Arc::strong_count(&source), 1, "the buffer is free after the wait");
            for (to, bytes_copied, from) in offsets {
                let [to, len, from] =
                    [*to, *bytes_copied, *from].map(|bytes| usize::try_from(bytes).unwrap());
                expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
            }
            assert!(read(driver, mapped.range) == expected, "{offsets:?}");
        }
    }
    driver.stream_destroy(stream).unwrap();
    mapped.end();
}

/// \[kernel-copies\], \[order\], \[owned\]: among work of all kinds, and after an event of another stream.
pub fn copies_by_kernel_keep_the_order_of_their_stream(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 2);
    let stream = driver.stream_create_kernel_copies().unwrap();
    let whole = [CopyPart { device: mapped.range, host_offset: 0 }];
    // Allocated before the stream is held: allocating it, and queuing copies of other memory, may wait for
    // work on the device.
    let buffer = || driver.host_alloc(2 * g).unwrap();
    let buffers: Vec<_> =
        (0..6).map(|seed| (latch::source(driver, &sample(seed, 2 * g)), buffer())).collect();
    let (last, read_back) = (latch::source(driver, &sample(77, 2 * g)), buffer());
    let latch = Arc::new(Latch::default());
    hold(driver, stream, &latch);
    let mut saves = Vec::new();
    for (source, buffer) in buffers {
        // Neither kept nor waited for: the work is still done.
        drop(driver.copy_to_device(stream, source, &whole).unwrap());
        saves.push(driver.save(stream, buffer, &whole).unwrap());
        drop(driver.zero(stream, mapped.range).unwrap());
    }
    let copy = driver.copy_to_device(stream, Arc::clone(&last), &whole).unwrap();
    let event = driver.event_record(stream).unwrap();
    driver.stream_wait_event(StreamId::DEFAULT, event).unwrap();
    let after = driver.copy_to_host(StreamId::DEFAULT, read_back, &whole).unwrap();
    assert!(!driver.event_query(event).unwrap(), "the stream is held");
    assert_eq!(Arc::strong_count(&last), 2, "a copy holds its buffer until it has finished");
    latch.open();
    copy.wait().unwrap();
    assert_eq!(Arc::strong_count(&last), 1);
    assert!(*after.wait().unwrap() == *sample(77, 2 * g));
    for (seed, save) in saves.into_iter().enumerate() {
        assert!(*save.wait().unwrap().0 == *sample(seed as u64, 2 * g), "seed {seed}");
    }
    driver.event_destroy(event).unwrap();
    driver.stream_destroy(stream).unwrap();
    mapped.end();
}

/// \[kernel-copies\], \[validate\], \[ranges\]
pub fn copies_by_kernel_check_their_ranges(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 2);
    let stream = driver.stream_create_kernel_copies().unwrap();
    let bytes = sample(5, 2 * g);
    write(driver, mapped.range, bytes.clone());
    let gone = Mapped::new(driver, 1);
    driver.unmap(gone.range).unwrap();
    let at = |offset, bytes| DeviceRange::new(mapped.range.addr + offset, bytes);
    let copy = |stream, device, host_offset| {
        let parts = [CopyPart { device, host_offset }];
        driver.copy_to_device(stream, latch::source(driver, &sample(6, 2 * g)), &parts)
    };
    assert_invalid(copy(stream, at(0, 2 * g), 1));
    assert_invalid(copy(stream, at(0, g), u64::MAX - g + 1));
    assert_not_mapped(copy(stream, at(g, 2 * g), 0));
    assert_not_mapped(copy(stream, gone.range, 0));
    driver.map(gone.range, gone.backing).unwrap();
    assert_not_mapped(copy(stream, gone.range, 0)); // Mapped, but without access.
    driver.synchronize().unwrap();
    assert!(read(driver, mapped.range) == bytes, "a refused copy changed something");
    driver.stream_destroy(stream).unwrap();
    assert_unknown(copy(stream, at(0, g), 0));
    mapped.end();
    gone.end();
}

/// \[ended\]
pub fn has_ended_reports_completion(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 1);
    let whole = [CopyPart { device: mapped.range, host_offset: 0 }];
    let streams = [driver.stream_create().unwrap(), driver.stream_create_kernel_copies().unwrap()];
    for stream in streams {
        let (latch, source) = (Arc::new(Latch::default()), latch::source(driver, &sample(8, g)));
        hold(driver, stream, &latch);
        let copy = driver.copy_to_device(stream, source, &whole).unwrap().then(|copied| copied);
        let ended = copy.has_ended();
        latch.open();
        if driver.info().kernel_copies || ended.is_some() {
            assert_eq!(ended, Some(false), "it cannot have begun");
            driver.stream_synchronize(stream).unwrap();
            // A device may find the stream complete a moment before it reports so.
            while copy.has_ended() == Some(false) {
                std::thread::yield_now();
            }
            assert_eq!(copy.has_ended(), Some(true));
        }
        copy.wait().unwrap();
        driver.stream_destroy(stream).unwrap();
    }
    mapped.end();
}
