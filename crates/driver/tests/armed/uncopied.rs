//! The calls of the library where nothing is copied: those that move memory, once for each handle, and few others.

use std::collections::BTreeMap;
use std::sync::Arc;

use poorwill_core::{AllocRequest, Level, Pool, PoolConfig, SleepRequest, Tag, WakeRequest};

use super::fake::{Fake, alone, open};

/// A model's, as in `bench/peers`: four large tensors, and two that share a granule with those of other layers.
const LAYER: [u64; 6] = [96 << 20, 64 << 20, 224 << 20, 112 << 20, 16 << 10, 16 << 10];
const LAYERS: u64 = 10;

/// The calls of `action`, by name.
fn calls(fake: &Fake, action: impl FnOnce()) -> BTreeMap<String, u64> {
    fake.arm(u64::MAX, 0);
    action();
    let mut calls = BTreeMap::new();
    for number in 0..fake.disarm() {
        *calls.entry(fake.called(number)).or_default() += 1;
    }
    calls
}

#[test]
fn nothing_is_called_beside_what_moves_memory_where_nothing_is_copied() {
    let (_alone, fake) = (alone(), Fake::load());
    let pool = Pool::new(Arc::new(open(0)), PoolConfig::default()).unwrap();
    for bytes in (0..LAYERS).flat_map(|_| LAYER) {
        pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
    }
    let sleep = || drop(pool.sleep(&SleepRequest::all(Level::Two)).unwrap());
    let wake = || drop(pool.wake(&WakeRequest::all()).unwrap());

    // What was loaded has a handle for each large tensor. Some granules were created ahead.
    let first = calls(&fake, sleep);
    assert!(first["cuMemRelease"] < 6 * LAYERS && first["cuMemUnmap"] < 5 * LAYERS, "{first:?}");

    let handles = 4 * LAYERS + 1;
    let named = |calls: &[(&str, u64)]| {
        calls.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect::<BTreeMap<String, u64>>()
    };
    let of_wake = [("cuMemCreate", handles), ("cuMemMap", handles), ("cuMemSetAccess", handles)];
    // Before, again when the tags are its own, and where the device is waited for: whether a stream is captured.
    let of_sleep = [
        ("cuStreamIsCapturing", 3),
        ("cuCtxSynchronize", 1),
        ("cuMemGetInfo_v2", 2),
        ("cuMemUnmap", handles),
        ("cuMemRelease", handles),
    ];
    for _ in 0..2 {
        assert_eq!(calls(&fake, wake), named(&of_wake));
        assert_eq!(calls(&fake, sleep), named(&of_sleep));
    }
}
