//! The device without memory beside the host device.

use std::collections::BTreeMap;
use std::mem::discriminant;

use ::poorwill::{AllocRequest, Arena, Device, DeviceSpec, PoolConfig, Tag, chain};
use fastrand::Rng;
use poorwill_bench::churn::{Load, Step as ChurnStep};
use poorwill_testkit::effort::Effort;

use super::super::poorwill::Pool;
use super::*;
use crate::card::Card;
use crate::cases::Case;
use crate::replay::{Moment, Replayer, Run};
use crate::trace::{Block, Trace, TraceBuilder};

fn host(capacity_bytes: u64) -> Arc<dyn Driver> {
    Device::open(&DeviceSpec::host_of(capacity_bytes)).unwrap().driver()
}

/// The host device at the addresses of a device without memory: the kernel's depend on what else a process maps.
#[derive(Debug)]
struct MovedHost {
    host: Arc<dyn Driver>,
    addresses: MemorylessDevice,
    /// First addresses: here, and of the host device.
    moved: Mutex<BTreeMap<u64, u64>>,
}

impl MovedHost {
    fn of(capacity_bytes: u64) -> Self {
        Self {
            host: host(capacity_bytes),
            addresses: MemorylessDevice::of(capacity_bytes),
            moved: Mutex::default(),
        }
    }

    /// Where a range is on the host device. Other addresses than of a reservation are none there, either.
    fn moved(&self, range: DeviceRange) -> DeviceRange {
        let moved = self.moved.lock().unwrap();
        let base = moved.range(..=range.addr).next_back();
        base.filter(|(base, _)| self.reserved_bytes(**base) > range.addr - **base)
            .map_or(range, |(base, to)| DeviceRange::new(range.addr - base + to, range.bytes))
    }

    fn reserved_bytes(&self, base: u64) -> u64 {
        self.addresses.account().reservations[&base]
    }
}

impl Driver for MovedHost {
    fn info(&self) -> &DeviceInfo {
        self.host.info()
    }

    fn reserve(&self, bytes: u64) -> Result<DeviceRange> {
        let there = self.host.reserve(bytes)?;
        let here = self.addresses.reserve(bytes).unwrap();
        self.moved.lock().unwrap().insert(here.addr, there.addr);
        Ok(here)
    }

    fn unreserve(&self, range: DeviceRange) -> Result<()> {
        self.host.unreserve(self.moved(range))?;
        self.addresses.unreserve(range).unwrap();
        self.moved.lock().unwrap().remove(&range.addr);
        Ok(())
    }

    fn map(&self, range: DeviceRange, backing: BackingId) -> Result<()> {
        self.host.map(self.moved(range), backing)
    }

    fn set_access(&self, range: DeviceRange) -> Result<()> {
        self.host.set_access(self.moved(range))
    }

    fn unmap(&self, range: DeviceRange) -> Result<()> {
        self.host.unmap(self.moved(range))
    }

    fn check_process(&self) -> Result<()> {
        self.host.check_process()
    }

    fn create(&self, bytes: u64) -> Result<BackingId> {
        self.host.create(bytes)
    }

    fn release(&self, backing: BackingId) -> Result<()> {
        self.host.release(backing)
    }

    fn stream_create(&self) -> Result<StreamId> {
        self.host.stream_create()
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<()> {
        self.host.stream_destroy(stream)
    }

    fn check_stream(&self, stream: StreamId) -> Result<()> {
        self.host.check_stream(stream)
    }

    fn stream_synchronize(&self, stream: StreamId) -> Result<()> {
        self.host.stream_synchronize(stream)
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.host.stream_wait_event(stream, event)
    }

    fn event_record(&self, stream: StreamId) -> Result<EventId> {
        self.host.event_record(stream)
    }

    fn event_query(&self, event: EventId) -> Result<bool> {
        self.host.event_query(event)
    }

    fn event_synchronize(&self, event: EventId) -> Result<()> {
        self.host.event_synchronize(event)
    }

    fn event_destroy(&self, event: EventId) -> Result<()> {
        self.host.event_destroy(event)
    }

    fn synchronize(&self) -> Result<()> {
        self.host.synchronize()
    }

    fn copy_to_device(&self, _: StreamId, _: Arc<HostBuffer>, _: &[CopyPart]) -> Result<Pending<()>> {
        no_bytes(Op::CopyToDevice)
    }

    fn copy_to_host(&self, _: StreamId, _: HostBuffer, _: &[CopyPart]) -> Result<Pending<HostBuffer>> {
        no_bytes(Op::CopyToHost)
    }

    fn copy_within(&self, _: StreamId, _: &[MovePart]) -> Result<Pending<()>> {
        no_bytes(Op::CopyWithin)
    }

    fn zero(&self, _: StreamId, _: DeviceRange) -> Result<Pending<()>> {
        no_bytes(Op::Zero)
    }

    fn digest(&self, _: StreamId, _: &[DeviceRange]) -> Result<Pending<Vec<Digest>>> {
        no_bytes(Op::Digest)
    }

    fn launch_host(&self, _: StreamId, _: HostWork) -> Result<Pending<()>> {
        no_bytes(Op::LaunchHost)
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.host.memory_info()
    }

    fn host_alloc(&self, bytes: u64) -> Result<HostBuffer> {
        self.host.host_alloc(bytes)
    }

    fn host_trim(&self) -> Result<()> {
        self.host.host_trim()
    }
}

/// The run of a trace, and all addresses after these steps.
fn replayed(
    trace: &Trace,
    card: Card,
    steps: &[usize],
    driver: &dyn Fn(u64) -> Arc<dyn Driver>,
) -> (Run, Vec<Moment>) {
    let replayer = || {
        let driver = driver(card.usable_bytes().max(GRANULE_BYTES));
        let pool = Pool::over(driver, card, trace).unwrap();
        Replayer::new(trace, Box::new(pool), card)
    };
    let run = replayer().run(&"poorwill".parse().unwrap(), card).unwrap();
    (run, replayer().moments(steps).unwrap())
}

fn assert_same_on_the_host_device(trace: &Trace, card: Card) {
    let last = trace.steps.len() - 1;
    let steps: Vec<usize> = (1..=10).map(|tenth| last * tenth / 10).collect();
    let (run, moments) = replayed(trace, card, &steps, &|bytes| Arc::new(MemorylessDevice::of(bytes)));
    let (on_host, at_host) = replayed(trace, card, &steps, &|bytes| Arc::new(MovedHost::of(bytes)));
    let differs = run.mapped_bytes.iter().zip(&on_host.mapped_bytes).position(|(one, other)| one != other);
    assert_eq!(differs, None, "{}", trace.name);
    assert_eq!(run, on_host, "{}", trace.name);
    assert_eq!(moments, at_host, "{}", trace.name);
}

#[test]
fn loads_of_churn_map_what_they_map_on_the_host_device() {
    for load in Load::ALL {
        let mut trace = TraceBuilder::new(load.name());
        let mut next = 0;
        for step in load.steps(0) {
            match step {
                ChurnStep::Alloc { bytes } => {
                    trace.alloc(next, Block { bytes, stream: 0, pool: 0, stack: 0 }).unwrap();
                    next += 1;
                }
                ChurnStep::Free { block } => trace.free(u64::try_from(block).unwrap()).unwrap(),
            }
        }
        let card = Card { total_bytes: 139 << 30, taken_bytes: 1 << 30, budget_bytes: None };
        assert_same_on_the_host_device(&trace.finish(None), card);
    }
}

#[test]
fn reported_loads_map_what_they_map_on_the_host_device() {
    for name in Case::NAMES {
        let case = Case::of(name).unwrap().unwrap();
        assert_same_on_the_host_device(&case.trace, case.card);
    }
}

/// Several pools, and all sizes.
fn random_trace(rng: &mut Rng, seed: u64) -> Trace {
    let mut trace = TraceBuilder::new(&format!("seed {seed}"));
    let (most, pools) = (rng.usize(1..300), rng.u32(1..5));
    let (mut live, mut next) = (Vec::new(), 0);
    while trace.len() < 800 {
        if rng.u8(..) == 0 {
            trace.empty_cache();
        } else if live.len() < most && rng.u8(..) < 140 || live.is_empty() {
            let bytes = match rng.u8(..) {
                0..150 => rng.u64(1..1 << 20),
                150..230 => rng.u64(1 << 20..16 << 20),
                _ => rng.u64(16 << 20..300 << 20),
            };
            trace.alloc(next, Block { bytes, stream: 0, pool: rng.u32(0..pools), stack: 0 }).unwrap();
            live.push(next);
            next += 1;
        } else {
            trace.free(live.swap_remove(rng.usize(..live.len()))).unwrap();
        }
    }
    trace.finish(None)
}

#[test]
fn random_traces_map_what_they_map_on_the_host_device() {
    for seed in 0..u64::from(Effort::of_this_run().cases(40)) {
        let mut rng = Rng::with_seed(seed);
        let trace = random_trace(&mut rng, seed);
        let live_most = trace.live_bytes().into_iter().max().unwrap();
        // What fits with nothing wasted, what does not fit, and what fits in any case.
        for percent in [rng.u64(100..140), rng.u64(70..100), 1000] {
            let total_bytes = (live_most * percent / 100).next_multiple_of(GRANULE_BYTES);
            let card = Card { total_bytes, taken_bytes: 0, budget_bytes: None };
            assert_same_on_the_host_device(&trace, card);
        }
    }
}

/// What a call gave, without words and addresses of an error.
fn outcome<T: std::fmt::Debug>(op: Op, result: &Result<T>) -> (Op, bool, String) {
    let text = match result {
        Ok(given) => format!("{given:?}"),
        Err(DriverError { op, kind, .. }) => match kind {
            DriverErrorKind::OutOfMemory { .. } | DriverErrorKind::UnknownHandle { .. } => {
                format!("{op:?}: {kind}")
            }
            _ => format!("{op:?}: {:?}", discriminant(kind)),
        },
    };
    (op, result.is_ok(), text)
}

const GRANULES: u64 = 60;

/// A call, right or wrong.
fn call(driver: &dyn Driver, rng: &mut Rng, reserved: &[DeviceRange]) -> (Op, bool, String) {
    let whole = rng.choice(reserved).copied().unwrap_or(DeviceRange::new(GRANULE_BYTES, GRANULE_BYTES));
    // Some cross its end, and a few are no granules.
    let odd_bytes = if rng.u8(..) < 8 { 512 } else { 0 };
    let (first, granules) = match rng.u8(..4) {
        0 => (0, whole.bytes / GRANULE_BYTES),
        _ => (rng.u64(..=whole.bytes / GRANULE_BYTES), rng.u64(..3)),
    };
    let range = DeviceRange::new(whole.addr + first * GRANULE_BYTES + odd_bytes, granules * GRANULE_BYTES);
    let (backing, stream, event) =
        (BackingId(rng.u64(..20)), StreamId(rng.u64(..30)), EventId(rng.u64(..30)));
    match rng.u8(..30) {
        0 => outcome(Op::Reserve, &driver.reserve(range.bytes)),
        1..3 => outcome(Op::Create, &driver.create(range.bytes)),
        3 => outcome(Op::Unreserve, &driver.unreserve(range)),
        4..6 => outcome(Op::Release, &driver.release(backing)),
        6..15 => outcome(Op::Map, &driver.map(range, backing)),
        15 => outcome(Op::SetAccess, &driver.set_access(range)),
        16..20 => outcome(Op::Unmap, &driver.unmap(range)),
        20 => outcome(Op::StreamCreate, &driver.stream_create()),
        21 => outcome(Op::StreamDestroy, &driver.stream_destroy(stream)),
        22 => outcome(Op::CheckStream, &driver.check_stream(stream)),
        23 => outcome(Op::StreamSynchronize, &driver.stream_synchronize(stream)),
        24 => outcome(Op::StreamWaitEvent, &driver.stream_wait_event(stream, event)),
        25 => outcome(Op::EventRecord, &driver.event_record(stream)),
        26 => {
            outcome(Op::EventQuery, &driver.event_synchronize(event).and_then(|()| driver.event_query(event)))
        }
        27 => outcome(Op::EventDestroy, &driver.event_destroy(event)),
        28 => outcome(Op::Synchronize, &driver.synchronize()),
        _ => outcome(Op::MemoryInfo, &driver.memory_info()),
    }
}

#[test]
fn every_call_gives_what_the_host_device_gives() {
    let mut given = BTreeMap::new();
    for seed in 0..u64::from(Effort::of_this_run().cases(60)) {
        let capacity_bytes = GRANULES * GRANULE_BYTES;
        let (here, there) = (MemorylessDevice::of(capacity_bytes), MovedHost::of(capacity_bytes));
        let mut rng = Rng::with_seed(seed);
        let mut known: Vec<DeviceRange> = Vec::new();
        for step in 0..700 {
            // Those that are gone stay for a while.
            let reserved = here.account().reservations.clone();
            if step % 50 == 0 {
                known.clear();
            }
            known.extend(reserved.into_iter().map(|(addr, bytes)| DeviceRange::new(addr, bytes)));
            let mut same = rng.clone();
            let (op, is_right, text) = call(&here, &mut rng, &known);
            assert_eq!((op, is_right, text), call(&there, &mut same, &known), "seed {seed}, step {step}");
            *given.entry((op, is_right)).or_insert(0) += 1;
        }
    }
    // Three calls are always right, the other 14 either way.
    assert_eq!(given.len(), 31, "{given:?}");
}

#[test]
fn addresses_are_disjoint_and_used_again() {
    let device = MemorylessDevice::of(GRANULE_BYTES);
    let mut reserved: Vec<DeviceRange> = Vec::new();
    let mut rng = Rng::with_seed(1);
    for _ in 0..3000 {
        if reserved.len() < 50 {
            let range = device.reserve(rng.u64(1..100) * GRANULE_BYTES).unwrap();
            assert!(
                range.addr > 0 && range.addr.is_multiple_of(GRANULE_BYTES) && range.end() <= ADDRESSES_END
            );
            assert!(!reserved.iter().any(|other| other.overlaps(&range)));
            reserved.push(range);
        } else {
            device.unreserve(reserved.swap_remove(rng.usize(..reserved.len()))).unwrap();
        }
    }
    assert!(reserved.iter().all(|range| range.addr > ADDRESSES_END - (100 << 30)));
    let refused = device.reserve(ADDRESSES_END).unwrap_err().kind;
    assert!(matches!(refused, DriverErrorKind::OutOfAddressSpace { .. }), "{refused}");
    reserved.into_iter().for_each(|range| device.unreserve(range).unwrap());
    assert_eq!(device.account().gaps, BTreeMap::from([(GRANULE_BYTES, ADDRESSES_END)]));
}

#[test]
fn what_needs_bytes_is_unsupported() {
    let device = MemorylessDevice::of(GRANULE_BYTES);
    let error = device.host_alloc(1).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::Unsupported { .. }), "{error}");
    let arena = Arena::over(Arc::new(device), PoolConfig::default()).unwrap();
    let block = arena.alloc(&AllocRequest::new(1000, Tag::weights())).unwrap();
    let error = arena.write_all(block.id, 0, b"bytes").unwrap_err();
    assert!(chain(&error).contains("addresses and no memory"), "{}", chain(&error));
    arena.close().unwrap();
}
