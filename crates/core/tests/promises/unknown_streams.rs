//! Streams that do not exist: calls with them are refused, since their work could not be waited for.

use std::sync::Arc;

use poorwill_core::{AllocRequest, Block, HostBuffer, Pool, PoolConfig, PoolError, StreamId, Tag};
use poorwill_testkit::device::TestDevice;

const GRANULES: u64 = 16;

fn pool(device: &TestDevice) -> Pool {
    let limit_bytes = Some(GRANULES * device.info().granule_bytes);
    let config = PoolConfig::default().limited_to(limit_bytes).in_chunks_of(4).in_segments_of(8);
    Pool::new(device.driver(), config).unwrap()
}

/// All that the pool can hold, on a stream.
fn all(device: &TestDevice, tag: Tag, stream: StreamId) -> AllocRequest {
    AllocRequest::new(GRANULES * device.info().granule_bytes, tag).on(stream)
}

/// Every call with a stream parameter, each with its own name for the operation.
fn refusals(pool: &Pool, block: &Block, stream: StreamId) -> Vec<PoolError> {
    let buffer = || HostBuffer::from(vec![0; 512]);
    vec![
        pool.alloc(&AllocRequest::new(512, Tag::weights()).on(stream)).unwrap_err(),
        pool.record_use(block.id, stream).unwrap_err(),
        pool.write(stream, block.id, 0, Arc::new(buffer()), 0, 512).unwrap_err(),
        pool.read(stream, block.id, 0, buffer(), 0, 512).unwrap_err(),
    ]
}

fn assert_refused(pool: &Pool, block: &Block, gone: StreamId) {
    let before = pool.snapshot().unwrap();
    let remembered = pool.remembered().unwrap();
    let mut said = Vec::new();
    for error in refusals(pool, block, gone) {
        assert!(matches!(error, PoolError::UnknownStream { stream, .. } if stream == gone), "{error:?}");
        said.push(error.to_string());
    }
    assert!(said.iter().all(|words| words.contains(&gone.to_string()) && words.contains("stream_create")));
    said.sort_unstable();
    said.dedup();
    assert_eq!(said.len(), 4, "each names what was to be done: {said:?}");
    assert_eq!(pool.snapshot().unwrap(), before);
    assert_eq!(pool.remembered().unwrap(), remembered);
}

#[test]
fn a_stream_that_never_was_is_refused() {
    let device = TestDevice::open(GRANULES);
    let pool = pool(&device);
    let block = pool.alloc(&AllocRequest::new(512, Tag::weights())).unwrap();
    // The last one resembles a CUDA handle.
    for never in [StreamId(u64::MAX), StreamId(1 << 40), StreamId(0x55d0_c0de_beef)] {
        assert_refused(&pool, &block, never);
    }
    pool.free(block.id).unwrap();
    // No block uses it: another tag can have it at once.
    pool.alloc(&all(&device, Tag::runtime(), StreamId::DEFAULT)).unwrap();
}

#[test]
fn a_stream_that_was_destroyed_is_refused_and_what_it_had_is_free() {
    let device = TestDevice::open(GRANULES);
    let pool = pool(&device);
    let stream = device.stream_create().unwrap();
    let block = pool.alloc(&all(&device, Tag::weights(), stream)).unwrap();
    pool.record_use(block.id, stream).unwrap();
    device.stream_destroy(stream).unwrap();
    // Although the pool knows the stream, and a block is live on it.
    assert_refused(&pool, &block, stream);
    pool.free(block.id).unwrap();
    let error = pool.alloc(&all(&device, Tag::weights(), stream)).unwrap_err();
    assert!(matches!(error, PoolError::UnknownStream { .. }), "{error}");
    let other = device.stream_create().unwrap();
    assert_ne!(other, stream);
    let block = pool.alloc(&all(&device, Tag::runtime(), other)).unwrap();
    pool.free(block.id).unwrap();
    pool.close().unwrap();
    device.stream_destroy(other).unwrap();
}
