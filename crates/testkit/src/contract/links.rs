//! Rules about streams of `stream_create_over_link`. Devices without links of others have one only.

use std::sync::Arc;

use poorwill_core::{CopyPart, DeviceRange, Driver, DriverErrorKind, HostBuffer, StreamId};

use super::{Mapped, assert_invalid, assert_unknown, granule, read, sample, write};
use crate::latch::{self, Latch, hold};

fn over_links(driver: &dyn Driver) -> Vec<StreamId> {
    (0..driver.info().links).map(|link| driver.stream_create_over_link(link).unwrap()).collect()
}

/// \[links\]: any bytes from any memory, in both directions, over all links at once.
pub fn copies_over_links_are_copies(driver: &dyn Driver) {
    let g = granule(driver);
    assert_invalid(driver.stream_create_over_link(driver.info().links).map(drop));
    let mapped = Mapped::new(driver, 4);
    for streams in [over_links(driver), over_links(driver)] {
        for (seed, parts) in
            [&[(0, 4 * g, 0)][..], &[(2 * g, 2 * g, 0), (0, g, 2 * g)], &[(g - 7, 13, 200), (1, 100, 3)], &[]]
                .into_iter()
                .enumerate()
        {
            let part = |(to, bytes, from): &(u64, u64, u64)| CopyPart {
                device: DeviceRange::new(mapped.range.addr + to, *bytes),
                host_offset: *from,
            };
            let parts: Vec<CopyPart> = parts.iter().map(part).collect();
            let bytes = sample(seed as u64, 4 * g);
            for (source, stream) in [latch::source(driver, &bytes), Arc::new(bytes.clone().into())]
                .iter()
                .flat_map(|source| streams.iter().map(move |stream| (source, *stream)))
            {
                let mut expected = sample(99, 4 * g);
                write(driver, mapped.range, expected.clone());
                driver.copy_to_device(stream, Arc::clone(source), &parts).unwrap().wait().unwrap();
                assert_eq!(Arc::strong_count(source), 1, "the buffer is free after the wait");
                for part in &parts {
                    let [to, len, from] =
                        [part.device.addr - mapped.range.addr, part.device.bytes, part.host_offset]
                            .map(|bytes| usize::try_from(bytes).unwrap());
                    expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
                }
                assert!(read(driver, mapped.range) == expected, "{parts:?}");
                let whole = [CopyPart { device: mapped.range, host_offset: 0 }];
                let back: HostBuffer = vec![0; expected.len()].into();
                let back = driver.copy_to_host(stream, back, &whole).unwrap().wait().unwrap();
                assert!(back[..] == expected[..], "{parts:?}");
            }
        }
        for stream in streams {
            driver.stream_destroy(stream).unwrap();
            assert_unknown(driver.stream_synchronize(stream));
        }
    }
    mapped.end();
}

/// \[links\], \[order\], \[owned\]: events order them among others, and a copy that is not waited for is still done.
pub fn copies_over_links_keep_the_order_of_their_stream(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 1);
    let whole = [CopyPart { device: mapped.range, host_offset: 0 }];
    for stream in over_links(driver) {
        let own = driver.stream_create().unwrap();
        let (first, last) = (latch::source(driver, &sample(1, g)), latch::source(driver, &sample(2, g)));
        let latch = Arc::new(Latch::default());
        hold(driver, own, &latch);
        let zeros = driver.zero(own, mapped.range).unwrap();
        let zeroed = driver.event_record(own).unwrap();
        driver.stream_wait_event(stream, zeroed).unwrap();
        let copied = driver.copy_to_device(stream, first, &whole).unwrap();
        drop(driver.copy_to_device(stream, Arc::clone(&last), &whole).unwrap());
        let event = driver.event_record(stream).unwrap();
        driver.stream_wait_event(own, event).unwrap();
        assert!(!driver.event_query(event).unwrap(), "it waits for the other stream");
        assert_ne!(copied.has_ended(), Some(true));
        latch.open();
        zeros.wait().unwrap();
        copied.wait().unwrap();
        driver.stream_synchronize(own).unwrap();
        assert!(driver.event_query(event).unwrap());
        assert!(read(driver, mapped.range) == last[..]);
        for event in [zeroed, event] {
            driver.event_destroy(event).unwrap();
        }
        // On a GPU no kernel could run there.
        let refused = driver.zero(stream, mapped.range).and_then(poorwill_core::Pending::wait);
        let is_known =
            |error: &poorwill_core::DriverError| matches!(error.kind, DriverErrorKind::Unsupported { .. });
        assert!(refused.as_ref().err().is_none_or(is_known), "{refused:?}");
        driver.synchronize().unwrap();
        driver.stream_destroy(stream).unwrap();
        driver.stream_destroy(own).unwrap();
    }
    mapped.end();
}
