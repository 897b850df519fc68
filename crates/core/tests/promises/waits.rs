//! Which calls wait for which work: one stream's work against another stream's allocation, step by step.
//!
//! Work is queued on held streams, so the test decides when it passes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use poorwill_core::pool::Awaited;
use poorwill_core::{
    AllocRequest, Block, BlockKind, Level, Op, Pending, Pool, PoolConfig, PoolError, SleepRequest, StreamId,
    Tag, TagState, WakeRequest,
};
use poorwill_testkit::clock::Clock;
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::watchdog::{TEST_TIMEOUT, eventually, watched};

/// A pool of `granules` that reports through the channel when the thread of that name has to wait for an event.
fn directed(
    granules: Option<u64>,
    waiter: &'static str,
) -> (TestDevice, Pool, mpsc::Sender<Report>, mpsc::Receiver<Report>) {
    let device = TestDevice::open(256);
    let (sender, reports) = mpsc::channel();
    let (notifier, queries) = (Mutex::new(sender.clone()), AtomicU64::new(0));
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        if thread::current().name() == Some(waiter) {
            // Repeated queries count as waiting.
            let asked = u64::from(call.op == Op::EventQuery);
            let asked = queries.fetch_add(asked, Ordering::Relaxed) + asked;
            if call.op == Op::EventSynchronize || (call.op == Op::EventQuery && asked == 100) {
                notifier.lock().unwrap().send(Report::Waiting).unwrap();
            }
        }
        Verdict::Pass
    });
    let config = PoolConfig::default()
        .limited_to(granules.map(|granules| granules * device.info().granule_bytes))
        .in_chunks_of(4)
        .in_spans_of(4)
        .in_segments_of(8);
    let pool = Pool::new(Arc::new(driver), config).unwrap();
    (device, pool, sender, reports)
}

/// Why a test that holds one stream and lets another pass cannot run.
const HELD_TOGETHER: &str = "one held stream may hold up the other";

/// A thread of the tests.
const WAITER: &str = "waiter";
/// The pool's own.
const REAPER: &str = "poorwill-reaper";

/// What a thread reports.
#[derive(Debug)]
enum Report {
    Waiting,
    Done(Result<Block, PoolError>),
}

/// Held-back work, released at the latest when the test ends.
struct Held {
    latch: Arc<Latch>,
    copy: Option<Pending<()>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.latch.open();
    }
}

impl Held {
    /// Work on a block that passes only on command.
    fn on(pool: &Pool, stream: StreamId, block: &Block) -> Self {
        let latch = Arc::new(Latch::default());
        let bytes = vec![7; usize::try_from(block.requested_bytes).unwrap()];
        let copy = latch::write(pool, stream, block, &latch, &bytes);
        Self { latch, copy: Some(copy) }
    }

    fn pass(mut self) {
        self.latch.open();
        self.copy.take().unwrap().wait().unwrap();
    }
}

#[test]
fn an_allocation_that_waits_for_streams_creates_no_memory() {
    let (device, pool, sender, reports) = directed(None, WAITER);
    let bytes = 4 * device.info().granule_bytes;
    let (own, other) = (device.stream_create().unwrap(), device.stream_create().unwrap());
    let request = |stream| AllocRequest::new(bytes, Tag::weights()).on(stream);
    let first = pool.alloc(&request(own)).unwrap();
    let held = Held::on(&pool, own, &first);
    pool.free(first.id).unwrap();
    let created_bytes = || pool.stats().unwrap().created_bytes;
    let before = created_bytes();

    thread::scope(|scope| {
        let mut more = request(other);
        more.bytes = 2 * bytes;
        let (waiting, shared) = (more.waiting_for_streams(Duration::MAX), &pool);
        let waiter = move || sender.send(Report::Done(shared.alloc(&waiting))).unwrap();
        thread::Builder::new().name(WAITER.into()).spawn_scoped(scope, waiter).unwrap();
        assert!(matches!(reports.recv().unwrap(), Report::Waiting));
        let immediate = pool.alloc(&request(other).waiting_for_streams(Duration::ZERO)).unwrap();
        assert_eq!(created_bytes(), before + bytes, "it does not wait");
        held.pass();
        let Report::Done(waited) = reports.recv().unwrap() else { panic!("it waits once") };
        assert_eq!(created_bytes(), before + 2 * bytes, "what was freed serves it, and the rest is created");
        pool.free(waited.unwrap().id).unwrap();
        pool.free(immediate.id).unwrap();
    });
    pool.close().unwrap();
}

#[test]
fn what_was_waited_for_in_vain_is_not_waited_for_again() {
    watched(waited_for_in_vain);
}

fn waited_for_in_vain() {
    let (device, clock) = (TestDevice::open(256), Arc::new(Clock::default()));
    // A second passes between two looks at freed memory.
    let ticking = Arc::clone(&clock);
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        if call.op == Op::EventQuery {
            ticking.advance(Duration::from_secs(1));
        }
        Verdict::Pass
    });
    let config = PoolConfig::default().in_chunks_of(4).in_segments_of(8);
    let pool = Pool::new(Arc::new(driver.by(&clock)), config).unwrap();
    let bytes = 4 * device.info().granule_bytes;
    let (own, other) = (device.stream_create().unwrap(), device.stream_create().unwrap());
    let request = |stream_wait_max| {
        AllocRequest::new(bytes, Tag::weights()).on(other).waiting_for_streams(stream_wait_max)
    };
    let first = pool.alloc(&AllocRequest::new(bytes, Tag::weights()).on(own)).unwrap();
    let held = Held::on(&pool, own, &first);
    pool.free(first.id).unwrap();
    let created_bytes = || pool.stats().unwrap().created_bytes;
    let before = created_bytes();
    let began = clock.now();
    pool.alloc(&request(Duration::from_secs(10))).unwrap();
    assert_eq!(created_bytes(), before + bytes);
    assert!(clock.now() - began >= Duration::from_secs(10), "as long as it had stream_wait_max");
    // It would wait forever.
    pool.alloc(&request(Duration::MAX)).unwrap();
    assert_eq!(created_bytes(), before + 2 * bytes);
    held.pass();
    device.synchronize().unwrap();
    pool.alloc(&request(Duration::MAX)).unwrap();
    assert_eq!(created_bytes(), before + 2 * bytes, "it is not stuck any more");
    pool.close().unwrap();
}

#[test]
fn a_stream_has_its_own_memory_back_at_once_and_another_one_when_its_work_has_passed() {
    let (device, pool, ..) = directed(None, WAITER);
    let granule = device.info().granule_bytes;
    let (own, other) = (device.stream_create().unwrap(), device.stream_create().unwrap());
    for bytes in [1, 600, granule - 512, granule, 3 * granule + 1, 4 * granule, 11 * granule + 700] {
        let request = |stream| AllocRequest::new(bytes, Tag::weights()).on(stream);
        let first = pool.alloc(&request(own)).unwrap();
        let held = Held::on(&pool, own, &first);
        pool.free(first.id).unwrap();
        let again = pool.alloc(&request(own)).unwrap();
        pool.free(again.id).unwrap();
        let elsewhere = pool.alloc(&request(other)).unwrap();
        held.pass();
        device.synchronize().unwrap();
        assert_eq!(again.range, first.range, "{bytes}");
        assert!(!elsewhere.range.overlaps(&first.range), "{bytes}");
        pool.free(elsewhere.id).unwrap();
        let created_bytes = pool.stats().unwrap().created_bytes;
        let both = [other, other].map(|stream| pool.alloc(&request(stream)).unwrap());
        assert_eq!(pool.stats().unwrap().created_bytes, created_bytes, "{bytes}: the place of each is free");
        both.iter().for_each(|block| pool.free(block.id).unwrap());
        pool.trim().unwrap();
    }
    pool.close().unwrap();
}

#[test]
fn a_recorded_use_keeps_a_block_from_its_own_stream_too() {
    let (device, pool, ..) = directed(None, WAITER);
    let granule = device.info().granule_bytes;
    let (own, other) = (device.stream_create().unwrap(), device.stream_create().unwrap());
    for bytes in [600, granule, 5 * granule] {
        let request = AllocRequest::new(bytes, Tag::weights()).on(own);
        let first = pool.alloc(&request).unwrap();
        pool.record_use(first.id, other).unwrap();
        let held = Held::on(&pool, other, &first);
        pool.free(first.id).unwrap();
        let waiting = |pool: &Pool| {
            let segments = pool.snapshot().unwrap().segments;
            segments.iter().flat_map(|segment| &segment.blocks).any(|block| block.kind == BlockKind::Waiting)
        };
        let next = pool.alloc(&request).unwrap();
        let waited = waiting(&pool);
        held.pass();
        pool.trim().unwrap();
        assert!(waited && !next.range.overlaps(&first.range), "{bytes}");
        assert!(!waiting(&pool), "a trim waits for the others");
        pool.free(next.id).unwrap();
    }
    pool.close().unwrap();
}

/// At the limit, any work that may release memory is waited for.
#[test]
fn an_allocation_at_the_limit_waits_for_the_work_that_holds_what_it_needs() {
    for recorded in [false, true] {
        let (device, pool, sender, reports) = directed(Some(8), WAITER);
        let granule = device.info().granule_bytes;
        let (own, other) = (device.stream_create().unwrap(), device.stream_create().unwrap());
        let first = pool.alloc(&AllocRequest::new(6 * granule, Tag::weights()).on(own)).unwrap();
        let worker = if recorded { other } else { own };
        if recorded {
            pool.record_use(first.id, other).unwrap();
        }
        let held = Held::on(&pool, worker, &first);
        pool.free(first.id).unwrap();
        let wanted = if recorded { own } else { other };
        let request = AllocRequest::new(5 * granule, Tag::kv_cache()).on(wanted);
        thread::scope(|scope| {
            let waits = || sender.send(Report::Done(pool.alloc(&request))).unwrap();
            thread::Builder::new().name(WAITER.into()).spawn_scoped(scope, waits).unwrap();
            let early = reports.recv().unwrap();
            held.pass();
            assert!(matches!(early, Report::Waiting), "{early:?}, and the work was held");
            let done = reports.iter().find_map(|report| match report {
                Report::Waiting => None,
                Report::Done(result) => Some(result),
            });
            let block = done.unwrap().unwrap();
            assert_eq!(block.requested_bytes, 5 * granule);
        });
        assert!(pool.stats().unwrap().peak_mapped_bytes <= 8 * granule);
        pool.close().unwrap();
    }
}

/// Only needed memory is waited for: a stuck stream keeps its own memory, and no other.
#[test]
fn an_allocation_at_the_limit_does_not_wait_for_a_stream_that_it_does_not_need() {
    if skipped_unless(DeviceKind::holds_streams_apart, HELD_TOGETHER) {
        return;
    }
    let (device, pool, sender, reports) = directed(Some(8), WAITER);
    let granule = device.info().granule_bytes;
    let streams = [0; 3].map(|_| device.stream_create().unwrap());
    let [stuck, passing] = [0, 1].map(|nth| {
        let request = AllocRequest::new(3 * granule, Tag::weights()).on(streams[nth]);
        let block = pool.alloc(&request).unwrap();
        let held = Held::on(&pool, streams[nth], &block);
        pool.free(block.id).unwrap();
        held
    });
    let request = AllocRequest::new(4 * granule, Tag::weights()).on(streams[2]);
    let early = thread::scope(|scope| {
        let waits = || sender.send(Report::Done(pool.alloc(&request))).unwrap();
        thread::Builder::new().name(WAITER.into()).spawn_scoped(scope, waits).unwrap();
        assert!(matches!(reports.recv().unwrap(), Report::Waiting), "the work was held");
        passing.pass();
        let early = reports.recv_timeout(TEST_TIMEOUT);
        stuck.pass();
        early
    });
    assert!(
        matches!(early, Ok(Report::Done(Ok(_)))),
        "{early:?}, and three of five free granules had passed"
    );
    pool.close().unwrap();
}

/// A block that waits for a stream is free when that stream's work has passed, whatever other streams do.
#[test]
fn a_stuck_stream_keeps_no_block_that_another_one_has_finished_with() {
    if skipped_unless(DeviceKind::holds_streams_apart, HELD_TOGETHER) {
        return;
    }
    let (device, pool, _tell, reports) = directed(None, REAPER);
    let [stuck, own, other] = [0; 3].map(|_| device.stream_create().unwrap());
    let request = |stream| AllocRequest::new(5000, Tag::weights()).on(stream);
    let blocks = [stuck, own].map(|stream| pool.alloc(&request(stream)).unwrap());
    let helds = [Held::on(&pool, stuck, &blocks[0]), Held::on(&pool, other, &blocks[1])];
    pool.record_use(blocks[1].id, other).unwrap();
    blocks.iter().for_each(|block| pool.free(block.id).unwrap());
    let [still_held, passing] = helds;
    reports.recv().unwrap();
    passing.pass();
    let is_waiting = || {
        let segments = pool.snapshot().unwrap().segments;
        segments.iter().flat_map(|segment| &segment.blocks).any(|block| block.kind == BlockKind::Waiting)
    };
    eventually("all work on the block has passed", || !is_waiting());
    still_held.pass();
    pool.close().unwrap();
}

/// The longest wait here, by a clock that advances a second with each query of an event.
const MOST: Duration = Duration::from_secs(10);
/// So many queries are never needed.
const LONG: Duration = Duration::from_secs(365 * 24 * 3600);

/// A pool with that clock, whose driver refuses to wait for an event: a call with a deadline must not make it wait.
fn hurried(granules: Option<u64>) -> (TestDevice, Pool, Arc<Clock>) {
    let (device, clock) = (TestDevice::open(256), Arc::new(Clock::default()));
    let ticking = Arc::clone(&clock);
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        match call.op {
            Op::EventQuery => ticking.advance(Duration::from_secs(1)),
            Op::EventSynchronize => return Verdict::device_failure(call),
            _ => {}
        }
        Verdict::Pass
    });
    let limit_bytes = granules.map(|granules| granules * device.info().granule_bytes);
    let config = PoolConfig::default().in_chunks_of(1).in_segments_of(1).limited_to(limit_bytes);
    let pool = Pool::new(Arc::new(driver.by(&clock)), config).unwrap();
    (device, pool, clock)
}

/// Why a waiting call was refused: the bytes it lacked, the time it waited, and the streams it waited for.
fn timed_out<T: std::fmt::Debug>(result: Result<T, PoolError>) -> (u64, Duration, Vec<StreamId>) {
    let error = result.unwrap_err();
    let text = error.to_string();
    let PoolError::TimedOut { needed_bytes, waited, awaited: Awaited::Work(streams), .. } = error else {
        panic!("{text}")
    };
    assert!(streams.iter().all(|stream| text.contains(&stream.to_string())), "{text}");
    assert!(text.contains("wait longer"), "{text}");
    (needed_bytes, waited, streams)
}

/// Blocks of `granules` on each stream, freed while their work is held.
fn freed_under_work(pool: &Pool, granules: u64, streams: &[StreamId]) -> Vec<Held> {
    let bytes = granules * pool.driver().info().granule_bytes;
    let hold = |stream: &StreamId| {
        let block = pool.alloc(&AllocRequest::new(bytes, Tag::weights()).on(*stream)).unwrap();
        let held = Held::on(pool, *stream, &block);
        pool.free(block.id).unwrap();
        held
    };
    streams.iter().map(hold).collect()
}

#[test]
fn an_allocation_waits_no_longer_than_its_deadline_and_names_the_streams() {
    watched(|| {
        for stuck in [1, 2] {
            if stuck > 1 && !DeviceKind::of_this_run().holds_streams_apart() {
                continue;
            }
            let (device, pool, clock) = hurried(Some(8));
            let granule = device.info().granule_bytes;
            let streams = [0; 3].map(|_| device.stream_create().unwrap());
            let helds = freed_under_work(&pool, 3, &streams[..stuck]);
            let request = AllocRequest::new(7 * granule, Tag::kv_cache()).on(streams[2]);
            let began = clock.now();
            let refused = timed_out(pool.alloc(&request.clone().within(MOST)));
            assert_eq!((refused.0, &refused.2[..]), (7 * granule, &streams[..stuck]));
            assert!(refused.1 >= MOST && clock.now() - began >= MOST, "{refused:?}");
            let refused = timed_out(pool.alloc(&request.clone().within(Duration::ZERO)));
            assert_eq!(refused.2, streams[..stuck], "it looks once");
            // Impossible requests do not wait.
            let never = AllocRequest::new(9 * granule, Tag::kv_cache()).on(streams[2]).within(MOST);
            assert!(matches!(pool.alloc(&never), Err(PoolError::OverLimit { .. })));
            helds.into_iter().for_each(Held::pass);
            pool.alloc(&request.within(LONG)).unwrap();
            pool.close().unwrap();
        }
    });
}

/// Waiting for streams, to avoid creating memory, ends with the deadline of the whole call.
#[test]
fn waiting_for_streams_ends_with_the_deadline() {
    watched(|| {
        let (device, pool, clock) = hurried(None);
        let [own, other] = [0; 2].map(|_| device.stream_create().unwrap());
        let helds = freed_under_work(&pool, 4, &[own]);
        let bytes = 4 * device.info().granule_bytes;
        let request = AllocRequest::new(bytes, Tag::weights()).on(other);
        let (created_bytes, began) = (pool.stats().unwrap().created_bytes, clock.now());
        pool.alloc(&request.waiting_for_streams(Duration::MAX).within(MOST)).unwrap();
        assert_eq!(pool.stats().unwrap().created_bytes, created_bytes + bytes);
        assert!(clock.now() - began >= MOST);
        helds.into_iter().for_each(Held::pass);
        pool.close().unwrap();
    });
}

#[test]
fn a_trim_waits_no_longer_than_its_deadline_and_releases_the_rest() {
    watched(|| {
        let (device, pool, clock) = hurried(None);
        let granule = device.info().granule_bytes;
        let [stuck, other] = [0; 2].map(|_| device.stream_create().unwrap());
        let live = pool.alloc(&AllocRequest::new(5 * granule, Tag::weights()).on(other)).unwrap();
        let helds = freed_under_work(&pool, 3, &[stuck]);
        let began = clock.now();
        let refused = timed_out(pool.trim_within(MOST));
        assert_eq!((refused.0, refused.2), (3 * granule, vec![stuck]));
        assert!(refused.1 >= MOST && clock.now() - began >= MOST);
        // Memory freed on another stream is released all the same, as soon as it is seen to be complete.
        pool.free(live.id).unwrap();
        if DeviceKind::of_this_run().holds_streams_apart() {
            eventually("the rest is given back", || {
                timed_out(pool.trim_within(Duration::ZERO));
                pool.stats().unwrap().mapped_bytes == 3 * granule
            });
        }
        helds.into_iter().for_each(Held::pass);
        assert!(pool.trim_within(LONG).unwrap() >= 3 * granule);
        assert_eq!(pool.stats().unwrap().mapped_bytes, 0);
        pool.close().unwrap();
    });
}

/// For the stream that a block is on, and for one that only its use was recorded of.
#[test]
fn a_sleep_waits_no_longer_than_its_deadline_and_leaves_everything_awake() {
    watched(|| {
        for recorded in [false, true] {
            let (device, pool, clock) = hurried(None);
            let [own, other] = [0; 2].map(|_| device.stream_create().unwrap());
            let bytes = 3 * device.info().granule_bytes;
            let block = pool.alloc(&AllocRequest::new(bytes, Tag::weights()).on(own)).unwrap();
            let busy = if recorded { other } else { own };
            if recorded {
                pool.record_use(block.id, other).unwrap();
            }
            let held = Held::on(&pool, busy, &block);
            let began = clock.now();
            let refused = timed_out(pool.sleep(&SleepRequest::all(Level::One).within(MOST)));
            assert_eq!((refused.0, refused.2), (0, vec![busy]));
            assert!(refused.1 >= MOST && clock.now() - began >= MOST);
            assert_eq!(pool.tag_state(&Tag::weights()).unwrap(), TagState::Awake);
            assert_eq!(pool.stats().unwrap().mapped_bytes, bytes);
            held.pass();
            pool.sleep(&SleepRequest::all(Level::One).within(LONG)).unwrap();
            pool.wake(&WakeRequest::all()).unwrap();
            pool.close().unwrap();
        }
    });
}

#[test]
fn a_wake_waits_no_longer_than_its_deadline_for_work_that_holds_what_it_needs() {
    watched(|| {
        let (device, pool, clock) = hurried(Some(8));
        let granule = device.info().granule_bytes;
        let stuck = device.stream_create().unwrap();
        pool.alloc(&AllocRequest::new(6 * granule, Tag::kv_cache())).unwrap();
        pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        let helds = freed_under_work(&pool, 4, &[stuck]);
        let began = clock.now();
        let refused = timed_out(pool.wake(&WakeRequest::all().within(MOST)));
        assert_eq!((refused.0, refused.2), (6 * granule, vec![stuck]));
        assert!(refused.1 >= MOST && clock.now() - began >= MOST);
        assert_eq!(pool.tag_state(&Tag::kv_cache()).unwrap(), TagState::AsleepDropped);
        assert_eq!(pool.stats().unwrap().mapped_bytes, 4 * granule, "it holds nothing");
        helds.into_iter().for_each(Held::pass);
        pool.wake(&WakeRequest::all().within(LONG)).unwrap();
        pool.close().unwrap();
    });
}
