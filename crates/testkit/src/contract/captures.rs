//! Rules about graph captures.

use std::thread;

use poorwill_core::{CopyPart, Driver, DriverErrorKind, HostBuffer, StreamId};

use super::{Mapped, granule, kind, read, sample, write};

/// `capture`: without a capture, none is reported.
pub fn nothing_is_captured_unasked(driver: &dyn Driver) {
    assert_eq!(driver.capturing(), Ok(None));
    let mapped = Mapped::new(driver, 1);
    let stream = driver.stream_create().unwrap();
    driver.zero(stream, mapped.range).unwrap().wait().unwrap();
    let event = driver.event_record(stream).unwrap();
    assert_eq!(driver.capturing(), Ok(None));
    driver.event_destroy(event).unwrap();
    driver.stream_destroy(stream).unwrap();
    assert_eq!(driver.capturing(), Ok(None));
    mapped.end();
}

/// How to capture, for drivers of a device that can.
pub trait Capturer {
    /// Starts the capture of a stream in the strictest mode, where calls of other threads might invalidate
    /// it.
    fn begin(&self, stream: StreamId);

    /// Ends the capture, on the same thread. Returns whether it was still valid.
    fn end(&self, stream: StreamId) -> bool;
}

/// `capture`: a capture is reported; invalidating calls are refused, and others leave it valid.
///
/// # Panics
/// If the rule is broken.
pub fn a_capture_is_reported_and_stays_valid(driver: &(dyn Driver + Sync), capturer: &dyn Capturer) {
    let mapped = Mapped::new(driver, 2);
    let bytes = sample(5, mapped.range.bytes);
    write(driver, mapped.range, bytes.clone());
    let [captured, other] = [0, 1].map(|_| driver.stream_create().unwrap());
    let before = driver.event_record(captured).unwrap();
    capturer.begin(captured);
    assert_eq!(driver.capturing(), Ok(Some(captured)));
    refused(driver, captured, &mapped);
    harmless(driver, other);
    thread::scope(|scope| {
        scope.spawn(|| {
            harmless(driver, other);
            refused(driver, captured, &mapped);
        });
    });
    assert_eq!(driver.event_query(before), Ok(true), "an event from before stays complete");
    driver.event_synchronize(before).unwrap();
    driver.event_destroy(before).unwrap();
    assert_eq!(read(driver, mapped.range), bytes, "the default stream runs");
    assert_eq!(driver.capturing(), Ok(Some(captured)));
    assert!(capturer.end(captured), "the capture was invalidated");
    assert_eq!(driver.capturing(), Ok(None));
    driver.synchronize().unwrap();
    driver.zero(captured, mapped.range).unwrap().wait().unwrap();
    driver.stream_synchronize(captured).unwrap();
    assert!(read(driver, mapped.range).iter().all(|byte| *byte == 0), "the stream runs again");
    [captured, other].into_iter().for_each(|stream| driver.stream_destroy(stream).unwrap());
    mapped.end();
}

fn refused(driver: &dyn Driver, stream: StreamId, mapped: &Mapped<'_>) {
    let named = DriverErrorKind::Capturing { stream };
    let event = driver.event_record(StreamId::DEFAULT).unwrap();
    let part = [CopyPart { device: mapped.range, host_offset: 0 }];
    let buffer = || HostBuffer::from(vec![1; usize::try_from(mapped.range.bytes).unwrap()]);
    assert_eq!(kind(driver.synchronize()), named);
    assert_eq!(kind(driver.stream_synchronize(stream)), named);
    assert_eq!(kind(driver.stream_destroy(stream)), named);
    assert_eq!(kind(driver.stream_wait_event(stream, event)), named);
    assert_eq!(kind(driver.event_record(stream)), named);
    assert_eq!(kind(driver.zero(stream, mapped.range).map(drop)), named);
    assert_eq!(kind(driver.digest(stream, &[mapped.range]).map(drop)), named);
    assert_eq!(kind(driver.copy_to_device(stream, buffer().into(), &part).map(drop)), named);
    assert_eq!(kind(driver.copy_to_host(stream, buffer(), &part).map(drop)), named);
    assert_eq!(kind(driver.save(stream, buffer(), &part).map(drop)), named);
    assert_eq!(kind(driver.launch_host(stream, Box::new(|| ())).map(drop)), named);
    driver.event_destroy(event).unwrap();
}

/// All that a pool does, on another stream.
fn harmless(driver: &dyn Driver, stream: StreamId) {
    let g = granule(driver);
    let mapped = Mapped::new(driver, 2);
    let own = driver.stream_create_background().unwrap();
    let by_kernel = driver.stream_create_kernel_copies().unwrap();
    for stream in [stream, own, by_kernel] {
        driver.zero(stream, mapped.range).unwrap().wait().unwrap();
        let digests = driver.digest(stream, &[mapped.range]).unwrap().wait().unwrap();
        let buffer = driver.host_alloc(2 * g).unwrap();
        let part = [CopyPart { device: mapped.range, host_offset: 0 }];
        let (buffer, saved) = driver.save(stream, buffer, &part).unwrap().wait().unwrap();
        assert_eq!(saved, digests);
        driver.copy_to_device(stream, buffer.into(), &part).unwrap().wait().unwrap();
        driver.launch_host(stream, Box::new(|| ())).unwrap().wait().unwrap();
        let event = driver.event_record(stream).unwrap();
        driver.stream_wait_event(StreamId::DEFAULT, event).unwrap();
        driver.event_synchronize(event).unwrap();
        assert_eq!(driver.event_query(event), Ok(true));
        driver.event_destroy(event).unwrap();
        driver.stream_synchronize(stream).unwrap();
    }
    [own, by_kernel].into_iter().for_each(|stream| driver.stream_destroy(stream).unwrap());
    driver.host_trim().unwrap();
    driver.memory_info().unwrap();
    driver.unmap(mapped.range).unwrap();
    driver.release(mapped.backing).unwrap();
    driver.unreserve(mapped.range).unwrap();
}
