//! Backups as codes: bytes come back exactly, and take less host memory, whatever changes between sleeps.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use poorwill_core::backup::Compress;
use poorwill_core::codec::BLOCK_BYTES;
use poorwill_core::pool::{Corruption, Phase};
use poorwill_core::{
    AllocRequest, CopyPart, DeviceRange, DriverErrorKind, HostBuffer, Level, Op, Pool, PoolConfig, PoolError,
    SleepRequest, StreamId, Tag, TagState, Verify, WakeRequest,
};
use poorwill_testkit::broken::{BrokenDriver, Defect};
use poorwill_testkit::clock::Clock;
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::latch::{Latch, hold};
use poorwill_testkit::pattern::{self, weights};
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::eventually;

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
            (info.fast_codec, info.fast_digests) = (fast_codec, fast_digests);
            // Then some codes pass through scratch memory.
            (info.kernel_copies, info.save_streams) = (fast_codec, 2);
        });
        let pool = Arc::new(Pool::new(Arc::new(driver), config()).unwrap());
        let mut tenant = Tenant::new(&pool, 3);
        let granule = usize::try_from(tenant.granule()).unwrap();
        let nth = tenant.load(22 * granule as u64, &Tag::weights());
        let other = tenant.load(granule as u64 * 5 / 2, &Tag::runtime());
        overwrite(&mut tenant, nth, 0, &weights(1, 22 * granule));
        for cycle in 0..u64::from(DeviceKind::of_this_run().cases(80)) {
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

/// Weights whose wakes pass their codes through scratch memory if that is left over.
struct Passing {
    device: TestDevice,
    tenant: Tenant,
    seen: Arc<Seen>,
}

/// Granules of the weights: engines take the first third, and the last.
const PASSING_GRANULES: u64 = 96;

/// Of a device where more than enough is left over.
const DEVICE_GRANULES: u64 = 160;

/// A test's reaction to a call of the driver.
type OnCall = Box<dyn FnMut(Call) -> Verdict + Send>;

#[derive(Default)]
struct Seen {
    /// The scratch memory of decodings, by stream.
    scratch: Mutex<BTreeMap<StreamId, DeviceRange>>,
    on_call: Mutex<Option<OnCall>>,
    /// Reserved ranges, but those unreserved.
    reserved: AtomicI64,
}

impl Seen {
    fn see(&self, call: Call) -> Verdict {
        let verdict = self.on_call.lock().unwrap().as_mut().map_or(Verdict::Pass, |react| react(call));
        if verdict != Verdict::Pass {
            return verdict;
        }
        match call.op {
            Op::Reserve => drop(self.reserved.fetch_add(1, Ordering::Relaxed)),
            Op::Unreserve => drop(self.reserved.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
        if let (Some(stream), Some(scratch)) = (call.stream, call.scratch) {
            let of_stream = *self.scratch.lock().unwrap().entry(stream).or_insert(scratch.range);
            assert_eq!(of_stream, scratch.range, "each stream has one part");
        }
        Verdict::Pass
    }

    fn react(&self, on_call: impl FnMut(Call) -> Verdict + Send + 'static) {
        *self.on_call.lock().unwrap() = Some(Box::new(on_call));
    }
}

impl Passing {
    fn new(granules: u64, limit_granules: Option<u64>) -> Self {
        let device = TestDevice::open(granules);
        let seen = Arc::new(Seen::default());
        let script = Arc::clone(&seen);
        let driver = ScriptedDriver::new(device.driver(), move |call| script.see(call));
        // By a clock that stands still, copy engines are the faster.
        let driver = driver.by(&Arc::new(Clock::default())).with_info(|info| {
            (info.fast_codec, info.kernel_copies, info.save_streams) = (true, true, 2);
        });
        let granule_bytes = device.info().granule_bytes;
        let mut config = config();
        config.limit_bytes = limit_granules.map(|granules| granules * granule_bytes);
        let pool = Arc::new(Pool::new(Arc::new(driver), config).unwrap());
        let mut tenant = Tenant::new(&pool, 3);
        let nth = tenant.load(PASSING_GRANULES * granule_bytes, &Tag::weights());
        let len = tenant.blocks[nth].bytes.len();
        overwrite(&mut tenant, nth, 0, &weights(1, len));
        pool.sleep(&all()).unwrap();
        Self { device, tenant, seen }
    }

    fn free_bytes(&self) -> u64 {
        self.device.memory_info().unwrap().free_bytes
    }

    /// The scratch memory that was used since the last call.
    fn used(&self) -> Vec<DeviceRange> {
        std::mem::take(&mut *self.seen.scratch.lock().unwrap()).into_values().collect()
    }

    fn end(self) {
        let Self { device, tenant, seen } = self;
        tenant.verify();
        let pool = Arc::clone(&tenant.pool);
        drop(tenant);
        pool.close().unwrap();
        assert_eq!(seen.reserved.load(Ordering::Relaxed), 0, "all addresses are given back");
        drop(pool);
        assert_eq!(device.resident_bytes(), 0);
        device.expect_no_host_bytes("backups went with the pool");
    }
}

fn verified() -> WakeRequest {
    WakeRequest::all().verifying(Verify::All)
}

#[test]
fn codes_pass_through_memory_that_is_left_over() {
    let left_over = Passing::new(DEVICE_GRANULES, None);
    let little =
        [Passing::new(PASSING_GRANULES + 8, None), Passing::new(DEVICE_GRANULES, Some(PASSING_GRANULES + 8))];
    let awake_bytes = PASSING_GRANULES * left_over.tenant.granule();
    for passing in little {
        passing.tenant.pool.wake(&verified()).unwrap();
        assert_eq!(passing.used(), [], "nothing is left over");
        passing.end();
    }
    for _ in 0..2 {
        let free_bytes = left_over.free_bytes();
        let woken = left_over.tenant.pool.wake(&verified()).unwrap();
        assert_eq!((woken.copied_bytes, woken.verified_bytes), (awake_bytes, awake_bytes));
        let used = left_over.used();
        assert_eq!(used.len(), 2, "each stream of saves has a part: {used:?}");
        assert!(!used[0].overlaps(&used[1]), "{used:?}");
        assert_eq!(left_over.free_bytes(), free_bytes - awake_bytes, "it is gone again");
        left_over.tenant.verify();
        left_over.tenant.pool.sleep(&all()).unwrap();
    }
    left_over.tenant.pool.wake(&verified()).unwrap();
    left_over.end();
}

/// A request for all that the weights leave takes the memory from the wake, or the wake does without. Work that is
/// queued there ends first, and whatever the driver refuses, nothing uses it afterwards.
#[test]
fn scratch_memory_gives_way_to_whatever_else_needs_memory() {
    let refusals = [None, Some(Op::Unmap), Some(Op::Unreserve)];
    for (limit_granules, refused) in
        [None, Some(140)].into_iter().flat_map(|limit| refusals.map(|op| (limit, op)))
    {
        let passing = Passing::new(DEVICE_GRANULES, limit_granules);
        let (pool, granule) = (&passing.tenant.pool, passing.tenant.granule());
        let rest = (limit_granules.unwrap_or(DEVICE_GRANULES) - PASSING_GRANULES) * granule;
        pool.wake(&verified()).unwrap();
        let streams: Vec<StreamId> = passing.seen.scratch.lock().unwrap().keys().copied().collect();
        assert_eq!(passing.used().len(), 2);
        pool.sleep(&all()).unwrap();
        let latch = Arc::new(Latch::default());
        hold(&**pool.driver(), streams[1], &latch);
        let (opened, mut is_taken, mut refused) = (Arc::clone(&latch), false, refused);
        let (seen, is_early) = (Arc::clone(&passing.seen), Arc::new(AtomicBool::default()));
        let early = Arc::clone(&is_early);
        passing.seen.react(move |call| {
            assert!(!is_taken || call.scratch.is_none(), "it was taken");
            let is_in_use = |unmaps: &DeviceRange| {
                let parts = seen.scratch.lock().unwrap();
                !opened.is_open() && parts.values().any(|part| unmaps.overlaps(part))
            };
            early.fetch_or(call.unmaps.as_ref().is_some_and(is_in_use), Ordering::Relaxed);
            if call.op == Op::StreamSynchronize {
                is_taken = true;
                opened.open();
            }
            match is_taken && refused.take_if(|op| *op == call.op).is_some() {
                true => Verdict::device_failure(call),
                false => Verdict::Pass,
            }
        });
        let block = thread::scope(|scope| {
            let request = scope.spawn(|| {
                eventually("both parts are in use", || passing.seen.scratch.lock().unwrap().len() == 2);
                let block = pool.alloc(&AllocRequest::new(rest, Tag::kv_cache()));
                latch.open();
                block.unwrap()
            });
            pool.wake(&verified()).unwrap();
            request.join().unwrap()
        });
        *passing.seen.on_call.lock().unwrap() = None;
        assert!(!is_early.load(Ordering::Relaxed), "it was unmapped with work in flight");
        assert_eq!(pool.stats().unwrap().mapped_bytes, rest + PASSING_GRANULES * granule);
        pool.free(block.id).unwrap();
        passing.end();
    }
}

#[test]
fn a_panic_leaves_no_scratch_memory() {
    let passing = Passing::new(DEVICE_GRANULES, None);
    let free_bytes = passing.free_bytes();
    let request = verified().telling(|_| panic!("a test's own panic"));
    let panicked = catch_unwind(AssertUnwindSafe(|| passing.tenant.pool.wake(&request)));
    assert!(panicked.is_err() && !passing.used().is_empty());
    assert_eq!(passing.tenant.pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
    assert_eq!(passing.free_bytes(), free_bytes);
    passing.tenant.pool.wake(&verified()).unwrap();
    passing.end();
}

#[test]
fn whichever_call_fails_no_scratch_memory_is_left() {
    let stride = DeviceKind::of_this_run().stride_of_cycles();
    let (mut undone, mut woken, mut unused) = (0, 0, 0);
    for (offset, burst) in (0..).zip([1, 3]) {
        for first in (offset..).step_by(stride) {
            let passing = Passing::new(DEVICE_GRANULES, None);
            let (pool, granule) = (&passing.tenant.pool, passing.tenant.granule());
            let seen = Arc::new(AtomicU64::new(0));
            let calls = Arc::clone(&seen);
            passing.seen.react(move |call| {
                let nth = calls.fetch_add(1, Ordering::Relaxed);
                let fails = (first..first + burst).contains(&nth);
                if fails { Verdict::device_failure(call) } else { Verdict::Pass }
            });
            let result = pool.wake(&verified());
            *passing.seen.on_call.lock().unwrap() = None;
            unused += u64::from(passing.used().is_empty());
            if result.is_ok() {
                woken += 1;
            } else {
                undone += 1;
                pool.wake(&verified()).unwrap();
            }
            // What was refused is tried again when memory is needed, at the latest when the pool is closed.
            let granules = [0, 1, DEVICE_GRANULES - PASSING_GRANULES][usize::try_from(first % 3).unwrap()];
            if granules > 0 {
                let block = pool.alloc(&AllocRequest::new(granules * granule, Tag::kv_cache())).unwrap();
                pool.free(block.id).unwrap();
                pool.trim().unwrap();
                let context = format!("{burst} calls fail, the first is {first}");
                let mapped_bytes = PASSING_GRANULES * granule;
                assert_eq!(pool.stats().unwrap().mapped_bytes, mapped_bytes, "{context}");
                assert_eq!(passing.free_bytes(), DEVICE_GRANULES * granule - mapped_bytes, "{context}");
            }
            passing.end();
            if seen.load(Ordering::Relaxed) <= first {
                break;
            }
        }
    }
    let stride = stride as u64;
    assert!(
        undone >= 100 / stride && woken >= 10 / stride && unused >= 5 / stride,
        "{undone} {woken} {unused}"
    );
}
