//! The rules of the driver contract.
//!
//! `driver_contract!(open)` makes a test of every function here. `open` returns a fresh `Arc<dyn Driver>`
//! with at least [`GRANULES_MIN`] free granules. The names in brackets are the rules' names in
//! [`poorwill_core::driver`].

mod captures;
mod codes;
mod kernel_copies;
mod links;
mod saves;
mod shared;
mod within;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use poorwill_core::{
    BackingId, CopyPart, DeviceRange, Digest, Driver, DriverErrorKind, EventId, HostBuffer, StreamId,
};

pub use captures::{Capturer, a_capture_is_reported_and_stays_valid, nothing_is_captured_unasked};
pub use codes::{
    codes_are_those_of_the_codec, codes_check_their_ranges, codes_keep_the_order_of_their_stream,
    codes_that_do_not_fit_are_left_out, decoding_brings_every_byte_back, spoiled_codes_decode_to_something,
};
pub use kernel_copies::{
    copies_by_kernel_are_copies, copies_by_kernel_check_their_ranges,
    copies_by_kernel_keep_the_order_of_their_stream, has_ended_reports_completion,
};
pub use links::{copies_over_links_are_copies, copies_over_links_keep_the_order_of_their_stream};
pub use saves::{
    digests_are_in_the_order_of_their_ranges, saves_check_their_ranges, saves_digest_what_they_store,
    saves_keep_the_order_of_their_stream,
};

pub use shared::{
    shared_memory_is_seen_by_both, shared_memory_keeps_its_bytes, what_is_no_shared_memory_is_refused,
};

pub use within::{copies_within_are_copies, copies_within_keep_their_order_and_check_their_ranges};

use crate::latch::Latch;
use crate::pattern;

/// Free granules that the suite needs.
pub const GRANULES_MIN: u64 = 96;

/// Makes a test of every rule, for the driver that the expression opens.
#[macro_export]
macro_rules! driver_contract {
    ($open:expr) => {
        $crate::driver_contract!($open;
            sizes_are_validated, reservations_are_aligned_and_exclusive,
            reservations_of_several_threads_are_each_their_own, creation_is_counted_exactly,
            too_much_is_refused_and_forgotten, mapping_is_exact, access_comes_with_set_access,
            bytes_stay_in_their_backing, unmap_takes_exact_runs, release_waits_for_the_last_unmap,
            handles_are_spent_once, copies_take_any_bytes, copies_check_their_ranges,
            buffers_are_free_after_wait, dropped_work_is_still_done, a_stream_keeps_its_order,
            events_order_streams, unknown_streams_and_events_are_refused, streams_are_known_until_they_end, zeros_and_digests, host_work_keeps_the_order,
            saves_digest_what_they_store, saves_keep_the_order_of_their_stream, saves_check_their_ranges,
            digests_are_in_the_order_of_their_ranges, nothing_is_captured_unasked,
            copies_by_kernel_are_copies, copies_by_kernel_keep_the_order_of_their_stream,
            copies_by_kernel_check_their_ranges, has_ended_reports_completion,
            copies_over_links_are_copies, copies_over_links_keep_the_order_of_their_stream,
            copies_within_are_copies, copies_within_keep_their_order_and_check_their_ranges,
            codes_are_those_of_the_codec, codes_that_do_not_fit_are_left_out, decoding_brings_every_byte_back,
            spoiled_codes_decode_to_something, codes_keep_the_order_of_their_stream, codes_check_their_ranges,
            shared_memory_keeps_its_bytes, shared_memory_is_seen_by_both, what_is_no_shared_memory_is_refused,
            host_memory_is_exact, threads_may_call_anything, rounds_leave_nothing);
    };
    ($open:expr; $($rule:ident),+) => {
        $(#[test]
        fn $rule() {
            $crate::contract::$rule(&*($open)());
        })+
    };
}

fn granule(driver: &dyn Driver) -> u64 {
    driver.info().granule_bytes
}

fn free(driver: &dyn Driver) -> u64 {
    driver.memory_info().unwrap().free_bytes
}

fn kind<T: std::fmt::Debug>(result: poorwill_core::driver::Result<T>) -> DriverErrorKind {
    result.expect_err("the call must fail").kind
}

fn assert_invalid<T: std::fmt::Debug>(result: poorwill_core::driver::Result<T>) {
    let kind = kind(result);
    assert!(matches!(kind, DriverErrorKind::InvalidArgument { .. }), "{kind:?}");
}

fn assert_unknown<T: std::fmt::Debug>(result: poorwill_core::driver::Result<T>) {
    let kind = kind(result);
    assert!(matches!(kind, DriverErrorKind::UnknownHandle { .. }), "{kind:?}");
}

fn assert_not_mapped<T: std::fmt::Debug>(result: poorwill_core::driver::Result<T>) {
    let kind = kind(result);
    assert!(matches!(kind, DriverErrorKind::NotMapped { .. }), "{kind:?}");
}

fn assert_already_mapped<T: std::fmt::Debug>(result: poorwill_core::driver::Result<T>) {
    let kind = kind(result);
    assert!(matches!(kind, DriverErrorKind::AlreadyMapped { .. }), "{kind:?}");
}

/// A reservation with one open mapping over all of it.
struct Mapped<'a> {
    driver: &'a dyn Driver,
    range: DeviceRange,
    backing: BackingId,
}

impl<'a> Mapped<'a> {
    fn new(driver: &'a dyn Driver, granules: u64) -> Self {
        let bytes = granules * granule(driver);
        let range = driver.reserve(bytes).unwrap();
        let backing = driver.create(bytes).unwrap();
        driver.map(range, backing).unwrap();
        driver.set_access(range).unwrap();
        Self { driver, range, backing }
    }

    fn end(self) {
        self.driver.synchronize().unwrap();
        self.driver.unmap(self.range).unwrap();
        self.driver.release(self.backing).unwrap();
        self.driver.unreserve(self.range).unwrap();
    }
}

fn write(driver: &dyn Driver, at: DeviceRange, bytes: Vec<u8>) {
    let parts = [CopyPart { device: at, host_offset: 0 }];
    driver.copy_to_device(StreamId::DEFAULT, Arc::new(bytes.into()), &parts).unwrap().wait().unwrap();
}

fn read(driver: &dyn Driver, at: DeviceRange) -> Vec<u8> {
    let buffer = HostBuffer::from(vec![0xEE; usize::try_from(at.bytes).unwrap()]);
    let parts = [CopyPart { device: at, host_offset: 0 }];
    driver.copy_to_host(StreamId::DEFAULT, buffer, &parts).unwrap().wait().unwrap().to_vec()
}

fn sample(seed: u64, bytes: u64) -> Vec<u8> {
    pattern::bytes(seed, usize::try_from(bytes).unwrap())
}

/// \[validate\]
pub fn sizes_are_validated(driver: &dyn Driver) {
    let g = granule(driver);
    assert!(g.is_power_of_two());
    for bytes in [0, 1, g - 1, g + 1] {
        assert_invalid(driver.reserve(bytes));
        assert_invalid(driver.create(bytes));
    }
    assert!(driver.reserve(u64::MAX / g * g).is_err());
    let range = driver.reserve(2 * g).unwrap();
    let backing = driver.create(g).unwrap();
    for wrong in [
        DeviceRange::new(range.addr + 1, g),
        DeviceRange::new(range.addr, g - 1),
        DeviceRange::new(u64::MAX - g + 1, 2 * g),
    ] {
        assert_invalid(driver.map(wrong, backing));
        assert_invalid(driver.set_access(wrong));
        assert_invalid(driver.unmap(wrong));
    }
    assert_invalid(driver.stream_destroy(StreamId::DEFAULT));
    driver.release(backing).unwrap();
    driver.unreserve(range).unwrap();
}

/// \[reserve\]
pub fn reservations_are_aligned_and_exclusive(driver: &dyn Driver) {
    let g = granule(driver);
    let ranges: Vec<DeviceRange> = (1..=8).map(|n| driver.reserve(n * g).unwrap()).collect();
    for (i, range) in ranges.iter().enumerate() {
        assert_eq!(range.addr % g, 0);
        assert!(ranges[..i].iter().all(|other| !other.overlaps(range)));
    }
    let last = ranges[7];
    assert_invalid(driver.unreserve(DeviceRange::new(last.addr, 7 * g)));
    assert_invalid(driver.unreserve(DeviceRange::new(last.addr + g, 7 * g)));
    for range in &ranges {
        driver.unreserve(*range).unwrap();
    }
    assert_invalid(driver.unreserve(last));
    let mapped = Mapped::new(driver, 1);
    assert_already_mapped(driver.unreserve(mapped.range));
    mapped.end();
}

/// \[reserve\], \[threads\]: also addresses that another thread is releasing.
pub fn reservations_of_several_threads_are_each_their_own(driver: &dyn Driver) {
    let bytes = granule(driver);
    let reserve = || {
        for _ in 0..3000 {
            let range = driver.reserve(bytes).unwrap();
            driver.unreserve(range).unwrap();
        }
    };
    thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(reserve))));
}

/// \[create\]
pub fn creation_is_counted_exactly(driver: &dyn Driver) {
    let (g, before) = (granule(driver), free(driver));
    let one = driver.create(g).unwrap();
    let five = driver.create(5 * g).unwrap();
    assert_ne!(one, five);
    assert_eq!(free(driver), before - 6 * g);
    let info = driver.memory_info().unwrap();
    assert!(info.free_bytes <= info.total_bytes && info.total_bytes == driver.info().total_bytes);
    driver.release(one).unwrap();
    assert_eq!(free(driver), before - 5 * g);
    driver.release(five).unwrap();
    assert_eq!(free(driver), before);
}

/// \[create\], \[atomic\], \[no-memory\]
pub fn too_much_is_refused_and_forgotten(driver: &dyn Driver) {
    let (g, before) = (granule(driver), free(driver));
    let requested = driver.info().total_bytes / g * g + g;
    match kind(driver.create(requested)) {
        DriverErrorKind::OutOfMemory { asked_bytes, free_bytes } => {
            assert_eq!((asked_bytes, free_bytes), (requested, before));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(free(driver), before);
    let backing = driver.create(g).expect("an error is not remembered");
    driver.release(backing).unwrap();
}

/// \[map\], \[atomic\]
pub fn mapping_is_exact(driver: &dyn Driver) {
    let g = granule(driver);
    let range = driver.reserve(4 * g).unwrap();
    let at = |i: u64, n: u64| DeviceRange::new(range.addr + i * g, n * g);
    let two = driver.create(2 * g).unwrap();
    let other = driver.create(2 * g).unwrap();
    assert_invalid(driver.map(at(0, 1), two));
    assert_invalid(driver.map(at(0, 3), two));
    assert_invalid(driver.map(at(3, 2), two));
    assert_unknown(driver.map(at(0, 2), BackingId(u64::MAX)));
    driver.map(at(1, 2), two).unwrap();
    for start in 0..3 {
        assert_already_mapped(driver.map(at(start, 2), other));
    }
    driver.unmap(at(1, 2)).unwrap();
    driver.map(at(0, 2), two).unwrap();
    driver.map(at(2, 2), other).unwrap();
    driver.unmap(at(0, 4)).unwrap();
    driver.release(two).unwrap();
    assert_unknown(driver.map(at(0, 2), two));
    driver.release(other).unwrap();
    driver.unreserve(range).unwrap();
}

/// \[access\], \[ranges\]
pub fn access_comes_with_set_access(driver: &dyn Driver) {
    let g = granule(driver);
    let range = driver.reserve(3 * g).unwrap();
    let at = |i: u64, n: u64| DeviceRange::new(range.addr + i * g, n * g);
    assert_not_mapped(driver.set_access(at(0, 1)));
    let backings: Vec<BackingId> = (0..3).map(|_| driver.create(g).unwrap()).collect();
    driver.map(at(0, 1), backings[0]).unwrap();
    driver.map(at(1, 1), backings[1]).unwrap();
    assert_not_mapped(driver.set_access(at(0, 3)));
    assert_not_mapped(driver.zero(StreamId::DEFAULT, at(0, 1)));
    assert_not_mapped(driver.digest(StreamId::DEFAULT, &[at(0, 1)]));
    driver.set_access(at(0, 1)).unwrap();
    driver.set_access(at(0, 2)).expect("opening twice does nothing");
    write(driver, at(0, 2), sample(1, 2 * g));
    assert_not_mapped(driver.zero(StreamId::DEFAULT, at(1, 2)));
    driver.map(at(2, 1), backings[2]).unwrap();
    assert_not_mapped(driver.zero(StreamId::DEFAULT, at(1, 2)));
    assert_eq!(read(driver, at(0, 2)), sample(1, 2 * g));
    driver.unmap(range).unwrap();
    assert_not_mapped(driver.digest(StreamId::DEFAULT, &[at(0, 1)]));
    backings.into_iter().for_each(|backing| driver.release(backing).unwrap());
    driver.unreserve(range).unwrap();
}

/// \[unmap\]: bytes stay in the backing.
pub fn bytes_stay_in_their_backing(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 2);
    write(driver, mapped.range, sample(2, 2 * g));
    driver.unmap(mapped.range).unwrap();
    let elsewhere = driver.reserve(6 * g).unwrap();
    let moved = DeviceRange::new(elsewhere.addr + 3 * g, 2 * g);
    driver.map(moved, mapped.backing).unwrap();
    driver.set_access(moved).unwrap();
    assert_eq!(read(driver, moved), sample(2, 2 * g));
    driver.unmap(moved).unwrap();
    driver.unreserve(elsewhere).unwrap();
    driver.map(mapped.range, mapped.backing).unwrap();
    assert_not_mapped(driver.zero(StreamId::DEFAULT, mapped.range));
    driver.set_access(mapped.range).unwrap();
    assert_eq!(read(driver, mapped.range), sample(2, 2 * g));
    mapped.end();
}

/// \[unmap\], \[atomic\]
pub fn unmap_takes_exact_runs(driver: &dyn Driver) {
    let g = granule(driver);
    let range = driver.reserve(6 * g).unwrap();
    let at = |i: u64, n: u64| DeviceRange::new(range.addr + i * g, n * g);
    let backings: Vec<BackingId> = [2, 1, 2].iter().map(|n| driver.create(n * g).unwrap()).collect();
    for (mapping, backing) in [at(0, 2), at(2, 1), at(4, 2)].into_iter().zip(&backings) {
        driver.map(mapping, *backing).unwrap();
        driver.set_access(mapping).unwrap();
        write(driver, mapping, sample(mapping.addr, mapping.bytes));
    }
    for wrong in [at(0, 1), at(1, 1), at(1, 2), at(0, 4), at(0, 6), at(3, 1), at(2, 2)] {
        assert_not_mapped(driver.unmap(wrong));
    }
    for mapping in [at(0, 2), at(2, 1), at(4, 2)] {
        assert_eq!(
            read(driver, mapping),
            sample(mapping.addr, mapping.bytes),
            "a refused unmap changed something"
        );
    }
    driver.unmap(at(0, 3)).expect("one call for a run of mappings");
    driver.unmap(at(4, 2)).unwrap();
    backings.into_iter().for_each(|backing| driver.release(backing).unwrap());
    driver.unreserve(range).unwrap();
}

/// \[release\]
pub fn release_waits_for_the_last_unmap(driver: &dyn Driver) {
    let (g, before) = (granule(driver), free(driver));
    let mapped = Mapped::new(driver, 3);
    write(driver, mapped.range, sample(3, 3 * g));
    driver.release(mapped.backing).unwrap();
    assert_eq!(free(driver), before - 3 * g, "a mapped backing is not gone");
    assert_eq!(read(driver, mapped.range), sample(3, 3 * g));
    assert_unknown(driver.release(mapped.backing));
    driver.unmap(mapped.range).unwrap();
    assert_eq!(free(driver), before);
    assert_unknown(driver.map(mapped.range, mapped.backing));
    driver.unreserve(mapped.range).unwrap();
}

/// \[release\], \[validate\]
pub fn handles_are_spent_once(driver: &dyn Driver) {
    let g = granule(driver);
    let backing = driver.create(g).unwrap();
    driver.release(backing).unwrap();
    assert_unknown(driver.release(backing));
    assert_unknown(driver.release(BackingId(u64::MAX)));
    let next = driver.create(g).unwrap();
    assert_unknown(driver.release(backing));
    driver.release(next).unwrap();
}

/// \[ranges\]
pub fn copies_take_any_bytes(driver: &dyn Driver) {
    let g = granule(driver);
    let range = driver.reserve(2 * g).unwrap();
    let backings = [driver.create(g).unwrap(), driver.create(g).unwrap()];
    driver.map(DeviceRange::new(range.addr, g), backings[0]).unwrap();
    driver.map(DeviceRange::new(range.addr + g, g), backings[1]).unwrap();
    driver.set_access(range).unwrap();
    let mut expected = sample(4, 2 * g);
    write(driver, range, expected.clone());
    let at = |offset: u64, bytes: u64| DeviceRange::new(range.addr + offset, bytes);
    // Odd addresses, one across two mappings, from one buffer.
    let buffer = sample(5, 1 << 10);
    let parts_at = [(1, 3, 100), (g - 7, 200, 13), (2 * g - 1, 999, 1)];
    let parts: Vec<CopyPart> =
        parts_at.iter().map(|(to, from, n)| CopyPart { device: at(*to, *n), host_offset: *from }).collect();
    driver
        .copy_to_device(StreamId::DEFAULT, Arc::new(buffer.clone().into()), &parts)
        .unwrap()
        .wait()
        .unwrap();
    for (to, from, n) in parts_at
        .map(|(to, from, n)| [to, from, n].map(|x| usize::try_from(x).unwrap()))
        .map(|[a, b, c]| (a, b, c))
    {
        expected[to..to + n].copy_from_slice(&buffer[from..from + n]);
    }
    assert_eq!(read(driver, range), expected);
    let gathered =
        driver.copy_to_host(StreamId::DEFAULT, vec![0; 1 << 10].into(), &parts).unwrap().wait().unwrap();
    for (_, from, n) in parts_at
        .map(|(to, from, n)| [to, from, n].map(|x| usize::try_from(x).unwrap()))
        .map(|[a, b, c]| (a, b, c))
    {
        assert_eq!(gathered[from..from + n], buffer[from..from + n]);
    }
    assert_eq!((gathered[2], gathered[103]), (0, 0), "bytes beside the parts are left alone");
    driver.unmap(range).unwrap();
    backings.into_iter().for_each(|backing| driver.release(backing).unwrap());
    driver.unreserve(range).unwrap();
}

/// \[validate\], \[ranges\]
pub fn copies_check_their_ranges(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 1);
    let part = |offset, bytes, host_offset| CopyPart {
        device: DeviceRange::new(mapped.range.addr + offset, bytes),
        host_offset,
    };
    let to_device = |part| driver.copy_to_device(StreamId::DEFAULT, Arc::new(vec![0; 64].into()), &[part]);
    let to_host = |part| driver.copy_to_host(StreamId::DEFAULT, vec![0; 64].into(), &[part]);
    for wrong in [part(0, 65, 0), part(0, 1, 64), part(0, 2, u64::MAX)] {
        assert_invalid(to_device(wrong));
        assert_invalid(to_host(wrong));
    }
    for wrong in [part(g, 1, 0), part(g - 1, 2, 0)] {
        assert_not_mapped(to_device(wrong));
        assert_not_mapped(to_host(wrong));
    }
    assert_invalid(driver.digest(StreamId::DEFAULT, &[DeviceRange::new(mapped.range.addr, g - 1)]));
    let good = CopyPart { device: DeviceRange::new(mapped.range.addr, 1), host_offset: 0 };
    let bad = part(g, 1, 0);
    assert_not_mapped(driver.copy_to_host(StreamId::DEFAULT, vec![0; 64].into(), &[good, bad]));
    mapped.end();
}

/// \[owned\]
pub fn buffers_are_free_after_wait(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1);
    let buffer = Arc::new(HostBuffer::from(vec![7; 4096]));
    for _ in 0..100 {
        let parts = [CopyPart { device: DeviceRange::new(mapped.range.addr, 4096), host_offset: 0 }];
        driver.copy_to_device(StreamId::DEFAULT, Arc::clone(&buffer), &parts).unwrap().wait().unwrap();
        assert_eq!(Arc::strong_count(&buffer), 1);
    }
    mapped.end();
}

/// \[owned\]
pub fn dropped_work_is_still_done(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 1);
    let parts = [CopyPart { device: mapped.range, host_offset: 0 }];
    drop(driver.copy_to_device(StreamId::DEFAULT, Arc::new(sample(6, g).into()), &parts).unwrap());
    drop(driver.copy_to_host(StreamId::DEFAULT, sample(7, g).into(), &parts).unwrap());
    driver.synchronize().unwrap();
    assert_eq!(read(driver, mapped.range), sample(6, g));
    mapped.end();
}

/// \[order\]
pub fn a_stream_keeps_its_order(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 2);
    let stream = driver.stream_create().unwrap();
    let parts = [CopyPart { device: mapped.range, host_offset: 0 }];
    for seed in 0..20 {
        drop(driver.copy_to_device(stream, Arc::new(sample(seed, 2 * g).into()), &parts).unwrap());
    }
    let digests = driver.digest(stream, &[mapped.range]).unwrap();
    drop(driver.zero(stream, mapped.range).unwrap());
    let last = sample(19, 2 * g);
    let expected: Vec<Digest> = last.chunks(last.len() / 2).map(Digest::of).collect();
    assert_eq!(digests.wait().unwrap(), expected);
    driver.stream_synchronize(stream).unwrap();
    assert!(read(driver, mapped.range).iter().all(|byte| *byte == 0));
    driver.stream_destroy(stream).unwrap();
    mapped.end();
}

/// \[events\], \[order\]
pub fn events_order_streams(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 4);
    let parts = [CopyPart { device: mapped.range, host_offset: 0 }];
    let [first, second] = [driver.stream_create().unwrap(), driver.stream_create().unwrap()];
    for round in 0..20 {
        drop(driver.copy_to_device(first, Arc::new(sample(round, 4 * g).into()), &parts).unwrap());
        let event = driver.event_record(first).unwrap();
        driver.stream_wait_event(second, event).unwrap();
        let digests = driver.digest(second, &[mapped.range]).unwrap();
        driver.event_synchronize(event).unwrap();
        assert!(driver.event_query(event).unwrap(), "an event that was waited for has passed");
        let bytes = sample(round, 4 * g);
        assert_eq!(
            digests.wait().unwrap(),
            bytes.chunks(bytes.len() / 4).map(Digest::of).collect::<Vec<_>>()
        );
        driver.event_destroy(event).unwrap();
    }
    driver.stream_destroy(first).unwrap();
    driver.stream_destroy(second).unwrap();
    mapped.end();
}

/// \[validate\]
pub fn unknown_streams_and_events_are_refused(driver: &dyn Driver) {
    let stream = driver.stream_create().unwrap();
    let event = driver.event_record(stream).unwrap();
    driver.stream_destroy(stream).unwrap();
    driver.event_destroy(event).unwrap();
    let mapped = Mapped::new(driver, 1);
    for stream in [stream, StreamId(u64::MAX)] {
        assert_unknown(driver.stream_destroy(stream));
        assert_unknown(driver.stream_synchronize(stream));
        assert_unknown(driver.event_record(stream));
        assert_unknown(driver.zero(stream, mapped.range));
        assert_unknown(driver.digest(stream, &[mapped.range]));
    }
    for event in [event, EventId(u64::MAX)] {
        assert_unknown(driver.event_query(event));
        assert_unknown(driver.event_synchronize(event));
        assert_unknown(driver.event_destroy(event));
        assert_unknown(driver.stream_wait_event(StreamId::DEFAULT, event));
    }
    mapped.end();
}

/// \[streams\]
pub fn streams_are_known_until_they_end(driver: &dyn Driver) {
    driver.check_stream(StreamId::DEFAULT).unwrap();
    for never in [StreamId(u64::MAX), StreamId(0x55d0_c0de_beef)] {
        assert_unknown(driver.check_stream(never));
    }
    let mut seen = vec![StreamId::DEFAULT];
    for make in [Driver::stream_create, Driver::stream_create_background, Driver::stream_create_kernel_copies]
    {
        for _ in 0..3 {
            let stream = make(driver).unwrap();
            assert!(!seen.contains(&stream), "{stream} was another one's number");
            seen.push(stream);
            driver.check_stream(stream).unwrap();
            let latch = Arc::new(Latch::default());
            let held = Arc::clone(&latch);
            let work = driver.launch_host(stream, Box::new(move || held.pass())).unwrap();
            thread::scope(|scope| {
                let ending = scope.spawn(|| driver.stream_destroy(stream));
                // The stream stays known until its work has ended.
                driver.check_stream(stream).unwrap();
                latch.open();
                ending.join().unwrap().unwrap();
            });
            assert_unknown(driver.check_stream(stream));
            work.wait().unwrap();
        }
    }
    driver.check_stream(StreamId::DEFAULT).unwrap();
}

/// `zero` and `digest`.
pub fn zeros_and_digests(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 3);
    let mut expected = sample(8, 3 * g);
    write(driver, mapped.range, expected.clone());
    for (start, bytes) in [(5, 11), (g - 3, 7), (g, g), (2 * g + 1, g - 1)] {
        driver
            .zero(StreamId::DEFAULT, DeviceRange::new(mapped.range.addr + start, bytes))
            .unwrap()
            .wait()
            .unwrap();
        let (start, bytes) = (usize::try_from(start).unwrap(), usize::try_from(bytes).unwrap());
        expected[start..start + bytes].fill(0);
        assert_eq!(read(driver, mapped.range), expected);
    }
    let digests = driver.digest(StreamId::DEFAULT, &[mapped.range]).unwrap().wait().unwrap();
    assert_eq!(digests, expected.chunks(expected.len() / 3).map(Digest::of).collect::<Vec<_>>());
    let fresh = driver.stream_create().unwrap();
    let nothing = DeviceRange::new(mapped.range.addr, 0);
    assert!(driver.digest(fresh, &[nothing]).unwrap().wait().unwrap().is_empty(), "no bytes, no digests");
    driver.zero(fresh, nothing).unwrap().wait().unwrap();
    driver.stream_destroy(fresh).unwrap();
    driver.host_trim().unwrap();
    mapped.end();
}

/// \[host-work\], \[order\]
pub fn host_work_keeps_the_order(driver: &dyn Driver) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 1);
    let stream = driver.stream_create().unwrap();
    let (latch, ran) = (Arc::new(Latch::default()), Arc::new(AtomicU64::new(0)));
    let (passing, counted) = (Arc::clone(&latch), Arc::clone(&ran));
    let parts = [CopyPart { device: mapped.range, host_offset: 0 }];
    drop(driver.copy_to_device(stream, Arc::new(sample(11, g).into()), &parts).unwrap());
    let held = driver.launch_host(stream, Box::new(move || passing.pass())).unwrap();
    let zeros = driver.zero(stream, mapped.range).unwrap();
    let count = move || {
        counted.fetch_add(1, Ordering::Relaxed);
    };
    let last = driver.launch_host(stream, Box::new(count));
    let event = driver.event_record(stream).unwrap();
    assert!(!driver.event_query(event).unwrap(), "the stream is held");
    assert_eq!(ran.load(Ordering::Relaxed), 0);
    latch.open();
    held.wait().unwrap();
    zeros.wait().unwrap();
    last.unwrap().wait().unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), 1);
    assert!(read(driver, mapped.range).iter().all(|byte| *byte == 0));
    let panics = driver.launch_host(stream, Box::new(|| std::panic::resume_unwind(Box::new(())))).unwrap();
    assert!(matches!(kind(panics.wait()), DriverErrorKind::Device { .. }));
    assert_unknown(driver.launch_host(StreamId(u64::MAX), Box::new(|| ())));
    driver.stream_synchronize(stream).expect("an error is not remembered");
    driver.event_destroy(event).unwrap();
    driver.stream_destroy(stream).unwrap();
    mapped.end();
}

/// `host_alloc`.
pub fn host_memory_is_exact(driver: &dyn Driver) {
    assert_invalid(driver.host_alloc(0));
    for bytes in [1, 4095, 4097, 3 << 20] {
        let buffer = driver.host_alloc(bytes).unwrap();
        assert_eq!(buffer.len() as u64, bytes);
    }
    let hopeless = kind(driver.host_alloc(1 << 60));
    assert!(
        matches!(hopeless, DriverErrorKind::OutOfHostMemory { asked_bytes, .. } if asked_bytes == 1 << 60)
    );
}

/// \[threads\]
pub fn threads_may_call_anything(driver: &dyn Driver) {
    // A device may keep memory for its first streams, but the amount must not grow.
    eight_threads(driver);
    let before = free(driver);
    eight_threads(driver);
    assert_eq!(free(driver), before);
}

fn eight_threads(driver: &dyn Driver) {
    let g = granule(driver);
    thread::scope(|scope| {
        for thread in 0..8u64 {
            scope.spawn(move || {
                let stream = driver.stream_create().unwrap();
                for round in 0..20 {
                    let mapped = Mapped::new(driver, 1 + (thread + round) % 4);
                    // Few bytes: this checks the calls.
                    let end = DeviceRange::new(mapped.range.end() - g.min(1 << 16), g.min(1 << 16));
                    let bytes = sample(thread * 100 + round, end.bytes);
                    let parts = [CopyPart { device: end, host_offset: 0 }];
                    drop(driver.copy_to_device(stream, Arc::new(bytes.clone().into()), &parts).unwrap());
                    let back = driver.copy_to_host(stream, vec![0; bytes.len()].into(), &parts).unwrap();
                    assert!(*back.wait().unwrap() == *bytes, "thread {thread}, round {round}");
                    driver.memory_info().unwrap();
                    driver.stream_synchronize(stream).unwrap();
                    mapped.end();
                }
                driver.stream_destroy(stream).unwrap();
            });
        }
    });
}

/// Repeated rounds leak nothing by the device's own count.
pub fn rounds_leave_nothing(driver: &dyn Driver) {
    let before = driver.memory_info().unwrap();
    for round in 0..300 {
        let mapped = Mapped::new(driver, 1 + round % 3);
        drop(driver.zero(StreamId::DEFAULT, mapped.range).unwrap());
        mapped.end();
    }
    assert_eq!(driver.memory_info().unwrap(), before);
}
