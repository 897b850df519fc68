//! Backups as codes: bytes come back exactly, and take less host memory, whatever changes between sleeps.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use poorwill_core::backup::Compress;
use poorwill_core::codec::BLOCK_BYTES;
use poorwill_core::pool::{Corruption, Phase};
use poorwill_core::{
    CopyPart, DeviceRange, DriverErrorKind, HostBuffer, Level, Op, Pool, PoolConfig, PoolError, SleepRequest,
    StreamId, Tag, Verify, WakeRequest,
};
use poorwill_testkit::broken::{BrokenDriver, Defect};
use poorwill_testkit::device::{Kind, TestDevice};
use poorwill_testkit::pattern::{self, weights};
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;

fn config() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8).compressing(Compress::Always)
}

/// Overwrites the granules of a block from `first` on.
fn overwrite(tenant: &mut Tenant, nth: usize, first: u64, bytes: &[u8]) {
    let at = usize::try_from(first * tenant.granule()).unwrap();
    tenant.blocks[nth].bytes[at..at + bytes.len()].copy_from_slice(bytes);
    tenant.write(nth);
}

/// Noise among weights takes a little more than its bytes.
fn coded_max(raw_bytes: u64) -> u64 {
    raw_bytes + raw_bytes / 32
}

fn all() -> SleepRequest {
    SleepRequest::all(Level::One)
}

#[test]
fn cycles_with_any_changes_bring_every_byte_back() {
    for (fast_codec, fast_digests) in [(false, true), (true, true), (true, false)] {
        let device = TestDevice::open(128);
        let driver = ScriptedDriver::new(device.driver(), |_| Verdict::Pass);
        let driver = driver.with_info(|info| {
            info.fast_codec = fast_codec;
            info.fast_digests = fast_digests;
        });
        let pool = Arc::new(Pool::new(Arc::new(driver), config()).unwrap());
        let mut tenant = Tenant::new(&pool, 3);
        let granule = usize::try_from(tenant.granule()).unwrap();
        let nth = tenant.load(22 * granule as u64, &Tag::weights());
        let other = tenant.load(granule as u64 * 5 / 2, &Tag::runtime());
        overwrite(&mut tenant, nth, 0, &weights(1, 22 * granule));
        for cycle in 0..u64::from(Kind::of_this_run().cases(80)) {
            let first = tenant.random(22);
            let count = usize::try_from(tenant.random(22 - first) + 1).unwrap();
            match tenant.random(8) {
                0 => overwrite(&mut tenant, nth, first, &vec![0; count * granule]),
                1 => overwrite(&mut tenant, nth, first, &pattern::bytes(cycle, count * granule)),
                2 | 3 => overwrite(&mut tenant, nth, first, &weights(cycle, count * granule)),
                4 => overwrite(&mut tenant, nth, 0, &weights(cycle, 22 * granule)),
                5 => overwrite(&mut tenant, nth, first, &pattern::bytes(cycle, granule)),
                6 => tenant.touch_granule(other, cycle % 2),
                _ => (0..3).for_each(|offset| tenant.touch_granule(nth, (first + offset) % 22)),
            }
            if cycle % 3 == 0 {
                let prepared = pool.prepare_sleep(&all()).unwrap().wait().unwrap();
                assert!(prepared.stored_bytes <= coded_max(prepared.copied_bytes), "{prepared:?}");
            }
            let slept = pool.sleep(&all()).unwrap();
            assert!(slept.stored_bytes <= coded_max(slept.copied_bytes), "{slept:?}");
            let stats = pool.stats().unwrap();
            assert_eq!(stats.backup_raw_bytes, 25 * granule as u64, "every granule is stored");
            let verify = if cycle % 2 == 0 { Verify::All } else { Verify::Sample };
            let woken = pool.wake(&WakeRequest::all().verifying(verify)).unwrap();
            assert!(woken.read_bytes <= coded_max(woken.copied_bytes), "{woken:?}");
            assert!(verify == Verify::Sample || woken.verified_bytes == woken.copied_bytes, "{woken:?}");
            tenant.verify();
        }
        // Of no cycle.
        overwrite(&mut tenant, nth, 0, &weights(1 << 40, 22 * granule));
        let slept = pool.sleep(&all()).unwrap();
        assert!(slept.stored_bytes < slept.copied_bytes / 100 * 90, "{slept:?}");
        let woken = pool.wake(&WakeRequest::all().verifying(Verify::Sample)).unwrap();
        assert!(woken.read_bytes < woken.copied_bytes / 100 * 90, "{woken:?}");
        tenant.verify();
        drop(tenant);
        pool.close().unwrap();
        drop(pool);
        device.expect_no_host_bytes("backups went with the pool");
    }
}

#[test]
fn a_granule_that_outgrows_its_slot_during_the_sleep_is_an_error_and_nothing_is_lost() {
    let device = TestDevice::open(64);
    let (writes, calls) = (Arc::new(Mutex::new(None::<DeviceRange>)), Arc::new(AtomicU64::new(0)));
    let (armed, machine, seen) = (Arc::clone(&writes), device.driver(), Arc::clone(&calls));
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        // One call measures, the next one encodes.
        if call.op == Op::Encode
            && !call.waiting
            && seen.fetch_add(1, Ordering::Relaxed) == 1
            && let Some(range) = armed.lock().unwrap().take()
        {
            let noise = pattern::bytes(9, usize::try_from(range.bytes).unwrap());
            let part = CopyPart { device: range, host_offset: 0 };
            let noise = Arc::new(HostBuffer::from(noise));
            machine.copy_to_device(StreamId::DEFAULT, noise, &[part]).unwrap().wait().unwrap();
        }
        Verdict::Pass
    });
    let pool = Arc::new(Pool::new(Arc::new(driver), config()).unwrap());
    let mut tenant = Tenant::new(&pool, 3);
    let granule = usize::try_from(tenant.granule()).unwrap();
    let nth = tenant.load(4 * granule as u64, &Tag::weights());
    overwrite(&mut tenant, nth, 0, &weights(1, 4 * granule));
    let grown = DeviceRange::new(tenant.blocks[nth].block.range.addr + granule as u64, granule as u64);
    *writes.lock().unwrap() = Some(grown);
    calls.store(0, Ordering::Relaxed);
    match pool.sleep(&all()).unwrap_err() {
        PoolError::SleepFailed { phase: Phase::Copy, source } => {
            assert_eq!(source.kind, DriverErrorKind::Busy { range: grown });
        }
        error => panic!("{error}"),
    }
    tenant.blocks[nth].bytes[granule..2 * granule].copy_from_slice(&pattern::bytes(9, granule));
    tenant.verify();
    pool.sleep(&all()).unwrap();
    pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
    tenant.verify();
}

/// Whether a sleep or a preparation stores them.
#[test]
fn host_memory_follows_codes_that_get_shorter() {
    for prepares in [false, true] {
        let device = TestDevice::with_capacity(64 << 20);
        let pool = Arc::new(Pool::new(device.driver(), config()).unwrap());
        let mut tenant = Tenant::new(&pool, 3);
        let granule = usize::try_from(tenant.granule()).unwrap();
        let nth = tenant.load(3 * granule as u64, &Tag::weights());
        // Every so many values, one whose exponent is far below.
        for (seed, escapes_every) in (0..).zip([8, 3, usize::MAX, 5]) {
            let mut bytes = weights(seed, 3 * granule);
            bytes.iter_mut().skip(1).step_by(escapes_every.saturating_mul(2)).for_each(|high| *high &= 1);
            overwrite(&mut tenant, nth, 0, &bytes);
            let mut stored_bytes = 0;
            if prepares {
                stored_bytes += pool.prepare_sleep(&all()).unwrap().wait().unwrap().stored_bytes;
            }
            stored_bytes += pool.sleep(&all()).unwrap().stored_bytes;
            let held_bytes = pool.stats().unwrap().backup_bytes;
            let context = format!("{escapes_every}, {prepares}");
            assert!(held_bytes <= stored_bytes * 102 / 100, "{context}: {held_bytes} for {stored_bytes}");
            device.expect_host_bytes(held_bytes, &context);
            pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
            tenant.verify();
        }
    }
}

/// A part of a code, by its name in `docs/codec.md`. `heads` and `data` are the bytes of all blocks.
#[derive(Debug, Clone, Copy)]
struct Place {
    name: &'static str,
    at: fn(heads: usize, data: usize) -> usize,
}

const PLACES: [Place; 9] = [
    Place { name: "where the data begins", at: |_, _| 0 },
    Place { name: "the kind", at: |_, _| 3 },
    Place { name: "where the escapes begin", at: |_, _| 4 },
    Place { name: "the base", at: |_, _| 7 },
    Place { name: "the first plane", at: |heads, _| heads },
    Place { name: "its last byte", at: |heads, _| heads + 2047 },
    Place { name: "the exponents", at: |heads, _| heads + 2048 + 300 },
    Place { name: "the first escape", at: |heads, data| heads + data },
    Place { name: "the last escape", at: |heads, data| heads + data + 3 },
];

#[test]
fn whichever_part_of_a_code_spoils_the_granule_is_lost_by_name_and_the_rest_comes_back() {
    for (place, verify) in
        PLACES.into_iter().flat_map(|place| [None, Some(Verify::All)].map(|verify| (place, verify)))
    {
        let context = format!("{}, {verify:?}", place.name);
        let device = TestDevice::open(64);
        let broken = Arc::new(BrokenDriver::new(device.driver(), Some(Defect::HostMemoryRots)));
        let driver = ScriptedDriver::new(Arc::clone(&broken) as _, |_| Verdict::Pass);
        let driver = driver.with_info(|info| info.fast_digests = true);
        let pool = Arc::new(Pool::new(Arc::new(driver), config()).unwrap());
        let mut tenant = Tenant::new(&pool, 3);
        let granule = usize::try_from(tenant.granule()).unwrap();
        let nth = tenant.load(2 * granule as u64, &Tag::weights());
        let mut bytes = weights(1, 2 * granule);
        // Exponents 2, 4, 6 and 8, in the first block.
        (0..4).for_each(|escape| bytes[2 * 500 * usize::from(escape) + 1] = escape + 1);
        overwrite(&mut tenant, nth, 0, &bytes);
        let slept = pool.sleep(&all()).unwrap();
        assert!(slept.stored_bytes < slept.copied_bytes, "{context}: {slept:?}");
        let blocks = granule / BLOCK_BYTES;
        let at = (place.at)((8 * blocks).next_multiple_of(128), blocks * 2816);
        broken.rot_by(move |bytes| {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 0x02;
            }
        });
        let request = WakeRequest::all().verifying(verify);
        let lost = match pool.wake(&request) {
            Err(PoolError::Corrupt { location: Corruption::Backup, lost }) => lost,
            other => panic!("{context}: {other:?}"),
        };
        let range = tenant.blocks[nth].block.range;
        assert_eq!(lost.len(), 1, "{context}");
        assert_eq!(lost[0].range, DeviceRange::new(range.addr, granule as u64), "{context}");
        assert_eq!(pool.wake(&request.accepting_losses()).unwrap().lost, lost, "{context}");
        let read = |offset: u64| {
            let (id, to) = (tenant.blocks[nth].block.id, HostBuffer::from(vec![0; granule]));
            pool.read(StreamId::DEFAULT, id, offset, to, 0, granule as u64)
        };
        assert!(matches!(read(0), Err(PoolError::Lost { .. })), "{context}");
        assert!(read(granule as u64).unwrap().wait().unwrap()[..] == bytes[granule..], "{context}");
    }
}

#[test]
fn a_spoiled_code_is_corruption_by_name_and_never_wrong_bytes() {
    let mut named = 0;
    for granules in 1..=12 {
        let device = TestDevice::open(64);
        let driver = Arc::new(BrokenDriver::new(device.driver(), Some(Defect::HostMemoryRots)));
        let pool = Arc::new(Pool::new(Arc::clone(&driver) as _, config()).unwrap());
        let mut tenant = Tenant::new(&pool, granules);
        let granule = usize::try_from(tenant.granule()).unwrap();
        let nth = tenant.load(granules * granule as u64, &Tag::weights());
        let len = tenant.blocks[nth].bytes.len();
        overwrite(&mut tenant, nth, 0, &weights(granules, len));
        pool.sleep(&all()).unwrap();
        driver.rot();
        match pool.wake(&WakeRequest::all().verifying(Verify::All)) {
            // The bit was in a slot's padding.
            Ok(_) => tenant.verify(),
            Err(PoolError::Corrupt { location, lost }) => {
                assert_eq!(location, Corruption::Backup);
                assert!(!lost.is_empty());
                let woken = pool.wake(&WakeRequest::all().accepting_losses()).unwrap();
                assert_eq!(woken.lost, lost);
                named += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(named > 6, "{named} of 12");
}
