//! Kernels in flight on several streams while the blocks under them are freed, trimmed and allocated again.
//!
//! On a GPU an early unmap causes an illegal address, which ends the context. The fake libcuda counts the work in
//! flight and refuses the unmap with the same error.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use poorwill_core::{
    AllocRequest, Block, Driver, Level, Pool, PoolConfig, SleepRequest, StreamId, Tag, WakeRequest,
};
use poorwill_driver::CudaDevice;
use poorwill_driver::cuda::{Function, KernelArg, Module};
use poorwill_fake_libcuda::TEST_FILL_PTX;
use poorwill_testkit::device::cuda_config;
use poorwill_testkit::pattern;

use crate::turn;

const STREAMS: u64 = 4;
const ROUNDS: u64 = 60;

/// The GPU, or the fake device whose granules are single pages: it writes every word on the CPU.
fn open() -> CudaDevice {
    let config = cuda_config();
    let ordinal = if config.library.is_some() { 1 } else { config.ordinal };
    CudaDevice::open(&config.numbered(ordinal)).unwrap()
}

/// Queues `rounds` rounds of writing `value` all over a block.
fn fill(device: &CudaDevice, function: &Function, stream: StreamId, block: &Block, value: u32, rounds: u32) {
    let words = block.requested_bytes / 4;
    let args = [
        KernelArg::U64(block.range.addr),
        KernelArg::U64(words),
        KernelArg::U32(value),
        KernelArg::U32(rounds),
    ];
    // SAFETY: the parameters of `poorwill_test_fill`. The block is freed on the same stream, so the pool keeps it
    // mapped until the kernel has finished: these tests check that.
    drop(unsafe { device.launch(stream, function, (8, 128), &args) }.unwrap());
}

fn words(pool: &Pool, block: &Block) -> Vec<u32> {
    let bytes = pattern::read(pool, block.id, usize::try_from(block.requested_bytes).unwrap()).unwrap();
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

#[test]
fn blocks_are_freed_and_unmapped_under_running_kernels() {
    let _turn = turn();
    let device = Arc::new(open());
    let granule = device.info().granule_bytes;
    let config = PoolConfig::default()
        .limited_to(96 * granule)
        .in_chunks_of(4)
        .in_segments_of(8)
        .caching_at_most(8 * granule);
    let pool = Pool::new(Arc::clone(&device) as Arc<dyn Driver>, config).unwrap();
    let module = Module::load(&device, TEST_FILL_PTX).unwrap();
    let function = module.function("poorwill_test_fill").unwrap();
    assert!(module.function("poorwill_no_such_kernel").is_err());

    // Blocks that are written only once: stale writes of the others would show in them.
    let bytes = 3 * granule - 512;
    let witnesses: Vec<Block> =
        (0..4).map(|_| pool.alloc(&AllocRequest::new(bytes, Tag::runtime())).unwrap()).collect();
    let len = usize::try_from(bytes).unwrap();
    for (seed, witness) in (100..).zip(&witnesses) {
        pattern::fill(&pool, witness.id, seed, len).unwrap();
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..STREAMS)
            .map(|nth| {
                let (pool, device, function) = (&pool, &device, &function);
                scope.spawn(move || {
                    let stream = device.stream_create().unwrap();
                    for round in 0..ROUNDS {
                        let bytes = (1 + (nth * 7 + round * 5) % 12) * granule - 1024;
                        let request = AllocRequest::new(bytes, Tag::weights()).on(stream);
                        let block = pool.alloc(&request).unwrap();
                        let value = u32::try_from(nth * 1000 + round).unwrap();
                        fill(device, function, stream, &block, value, 3);
                        if round % 7 == 0 {
                            device.stream_synchronize(stream).unwrap();
                            assert!(words(pool, &block).iter().all(|word| *word == value), "stale data");
                        }
                        pool.free(block.id).unwrap();
                    }
                    device.stream_synchronize(stream).unwrap();
                    device.stream_destroy(stream).unwrap();
                })
            })
            .collect();
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                pool.trim().unwrap();
                std::thread::yield_now();
            }
        });
        let ended: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        over.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|worker| worker.unwrap());
    });
    device.synchronize().expect("no kernel met an illegal address");
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    for (seed, witness) in (100..).zip(&witnesses) {
        assert!(pattern::read(&pool, witness.id, len).unwrap() == pattern::bytes(seed, len), "a stale write");
    }
    pool.close().unwrap();
}

#[test]
fn a_sleep_waits_for_kernels_and_keeps_what_they_wrote() {
    let _turn = turn();
    let device = Arc::new(open());
    let granule = device.info().granule_bytes;
    let pool = Pool::new(Arc::clone(&device) as Arc<dyn Driver>, PoolConfig::default()).unwrap();
    let module = Module::load(&device, TEST_FILL_PTX).unwrap();
    let function = module.function("poorwill_test_fill").unwrap();
    let streams: Vec<StreamId> = (0..STREAMS).map(|_| device.stream_create().unwrap()).collect();
    let blocks: Vec<Block> = streams
        .iter()
        .map(|stream| pool.alloc(&AllocRequest::new(2 * granule, Tag::weights()).on(*stream)).unwrap())
        .collect();
    for cycle in 1..4u32 {
        for (nth, (stream, block)) in (0..).zip(streams.iter().zip(&blocks)) {
            fill(&device, &function, *stream, block, cycle * 10 + nth, 20);
        }
        let report = pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        assert_eq!(report.copied_bytes, STREAMS * 2 * granule, "all of it has changed");
        pool.wake(&WakeRequest::all()).unwrap();
        for (nth, block) in (0..).zip(&blocks) {
            assert!(words(&pool, block).iter().all(|word| *word == cycle * 10 + nth), "cycle {cycle}");
        }
    }
    pool.close().unwrap();
    streams.into_iter().for_each(|stream| device.stream_destroy(stream).unwrap());
}
