//! A cancelled call ends undone, or is done: whenever it is cancelled, and whatever it waits for.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use poorwill_core::pool::UndoneBecause;
use poorwill_core::{
    AllocRequest, CancellationToken, Decision, Driver, Level, LocalDecision, Op, Pool, PoolConfig, PoolError,
    SleepRequest, Tag, TagState, WakeRequest,
};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::watched;

/// Far beyond the waits of these tests.
const LONG: Duration = Duration::from_secs(3600);

fn config() -> PoolConfig {
    PoolConfig::default().in_chunks_of(4).in_segments_of(8)
}

fn tenant(driver: Arc<dyn Driver>) -> Tenant {
    let mut tenant = Tenant::new(&Arc::new(Pool::new(driver, config()).unwrap()), 5);
    let granule = tenant.granule();
    for bytes in [3 * granule + 100, 700, 10 * granule] {
        tenant.load(bytes, &Tag::weights());
    }
    tenant.load(5 * granule, &Tag::runtime());
    tenant
}

fn all() -> SleepRequest {
    SleepRequest::all(Level::One)
}

fn states(pool: &Pool) -> [TagState; 2] {
    [Tag::weights(), Tag::runtime()].map(|tag| pool.tag_state(&tag).unwrap())
}

/// Whether it was cancelled; any other failure fails the test.
fn is_cancelled<T>(result: Result<T, PoolError>) -> bool {
    match result {
        Ok(_) => false,
        Err(PoolError::Cancelled { .. }) => true,
        Err(error) => panic!("{error}"),
    }
}

/// Cancels the armed token in one of the driver's next calls.
#[derive(Default)]
struct Trap {
    calls_left: AtomicI64,
    token: Mutex<CancellationToken>,
}

impl Trap {
    fn arm(&self, calls: i64) -> CancellationToken {
        let token = CancellationToken::default();
        *self.token.lock().unwrap() = token.clone();
        self.calls_left.store(calls, Ordering::Relaxed);
        token
    }

    fn call(&self) {
        if self.calls_left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.token.lock().unwrap().cancel();
        }
    }
}

#[test]
fn whenever_it_is_cancelled_a_call_is_undone_or_done() {
    watched(|| {
        let (device, trap) = (TestDevice::open(64), Arc::new(Trap::default()));
        let springs = Arc::clone(&trap);
        let driver = ScriptedDriver::new(device.driver(), move |_| {
            springs.call();
            Verdict::Pass
        });
        let tenant = tenant(Arc::new(driver));
        let (pool, awake) = (&tenant.pool, [TagState::Awake; 2]);
        let asleep = [TagState::AsleepBackedUp; 2];
        let (mut slept, mut woke) = (Vec::new(), Vec::new());
        for calls in 1.. {
            let token = trap.arm(calls);
            let was_undone = is_cancelled(token.scope(|| pool.sleep(&all())));
            assert_eq!(states(pool), if was_undone { awake } else { asleep }, "at call {calls}");
            slept.push(was_undone);
            trap.arm(0);
            if was_undone {
                tenant.verify();
                pool.sleep(&all()).unwrap();
            }
            let token = trap.arm(calls);
            let was_undone = is_cancelled(token.scope(|| pool.wake(&WakeRequest::all())));
            assert_eq!(states(pool), if was_undone { asleep } else { awake }, "at call {calls}");
            assert!(!was_undone || device.resident_bytes() == 0, "at call {calls}");
            woke.push(was_undone);
            trap.arm(0);
            if was_undone {
                pool.wake(&WakeRequest::all()).unwrap();
            }
            tenant.verify();
            // Neither has as many calls.
            if !token.is_cancelled() && !slept[slept.len() - 1] {
                break;
            }
        }
        for each in [&slept, &woke] {
            assert!(each[0], "a call that has just begun is undone");
            let undone = each.iter().filter(|was_undone| **was_undone).count();
            assert!(undone > 3 && undone < each.len(), "{undone} of {} are undone", each.len());
        }
    });
}

#[test]
fn a_wake_that_waits_for_memory_ends() {
    watched(|| {
        let device = TestDevice::open(32);
        let (sender, queries) = mpsc::channel();
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            if call.op == Op::MemoryInfo {
                // After the test's end there is no receiver.
                let _ = sender.send(());
            }
            Verdict::Pass
        });
        let tenant = tenant(Arc::new(driver));
        tenant.pool.sleep(&all()).unwrap();
        let other = Pool::new(device.driver(), config()).unwrap();
        let bytes = 20 * tenant.granule();
        other.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
        let held = (device.resident_bytes(), device.host_bytes());
        queries.try_iter().for_each(drop);
        let token = CancellationToken::default();
        thread::scope(|scope| {
            let wake = || token.scope(|| tenant.pool.wake(&WakeRequest::all().within(LONG)));
            let waker = scope.spawn(wake);
            // It has found no memory, and polls again and again.
            queries.iter().take(9).for_each(drop);
            token.cancel();
            assert!(is_cancelled(waker.join().unwrap()));
        });
        assert_eq!((device.resident_bytes(), device.host_bytes()), held);
        assert_eq!(states(&tenant.pool), [TagState::AsleepBackedUp; 2]);
        // Without a time it is refused, and does not wait.
        let refused = CancellationToken::default().scope(|| tenant.pool.wake(&WakeRequest::all()));
        assert!(matches!(refused, Err(PoolError::DeviceFull { .. })), "{refused:?}");
        other.close().unwrap();
        tenant.pool.wake(&WakeRequest::all()).unwrap();
        tenant.verify();
    });
}

#[test]
fn a_sleep_that_waits_for_a_stream_ends() {
    watched(|| {
        let device = TestDevice::open(64);
        let (sender, waits) = mpsc::channel();
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            if call.op == Op::EventQuery {
                let _ = sender.send(());
            }
            Verdict::Pass
        });
        let pool = Pool::new(Arc::new(driver), config()).unwrap();
        let stream = pool.driver().stream_create().unwrap();
        let request = AllocRequest::new(4 * device.info().granule_bytes, Tag::weights()).on(stream);
        let block = pool.alloc(&request).unwrap();
        let latch = Arc::new(Latch::default());
        let bytes = vec![7; usize::try_from(block.requested_bytes).unwrap()];
        let work = latch::write(&pool, stream, &block, &latch, &bytes);
        waits.try_iter().for_each(drop);
        let token = CancellationToken::default();
        thread::scope(|scope| {
            let sleeper = scope.spawn(|| token.scope(|| pool.sleep(&all())));
            waits.iter().take(9).for_each(drop);
            token.cancel();
            assert!(is_cancelled(sleeper.join().unwrap()));
        });
        assert_eq!(pool.tag_state(&Tag::weights()).unwrap(), TagState::Awake);
        latch.open();
        work.wait().unwrap();
        pool.sleep(&all()).unwrap();
        pool.close().unwrap();
    });
}

#[test]
fn what_waits_for_another_call_ends() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(device.driver());
        let pool = &tenant.pool;
        let group: Arc<dyn Decision> = Arc::new(LocalDecision::default());
        let weights = SleepRequest::of([Tag::weights()], Level::One);
        let staged = pool.stage_sleep(&weights, group, LONG).unwrap();
        let token = CancellationToken::default();
        let calls: [&(dyn Fn() -> Result<(), PoolError> + Sync); 4] = [
            &|| pool.sleep(&all()).map(drop),
            &|| pool.wake(&WakeRequest::all()).map(drop),
            &|| pool.discard(&[Tag::weights()]).map(drop),
            &|| pool.alloc(&AllocRequest::new(700, Tag::weights())).map(drop),
        ];
        let token = &token;
        thread::scope(|scope| {
            let waiting = calls.map(|call| scope.spawn(move || token.scope(call)));
            token.cancel();
            for ended in waiting {
                assert!(is_cancelled(ended.join().unwrap()));
            }
        });
        staged.undo().unwrap();
        tenant.verify();
        pool.sleep(&all()).unwrap();
    });
}

#[test]
fn a_staged_call_proposes_to_undo() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(device.driver());
        let decision = Arc::new(LocalDecision::default());
        let token = CancellationToken::default();
        let group = || Arc::clone(&decision) as Arc<dyn Decision>;
        let staged = token.scope(|| tenant.pool.stage_sleep(&all(), group(), LONG)).unwrap();
        token.cancel();
        let undone = staged.wait().unwrap_err();
        assert!(matches!(undone, PoolError::Undone { because: UndoneBecause::Cancelled, .. }), "{undone}");
        assert_eq!(decision.verdict().unwrap(), Some(poorwill_core::Verdict::Undo));
        tenant.verify();
    });
}

#[test]
fn a_token_ends_with_its_scope() {
    let device = TestDevice::open(64);
    let tenant = tenant(device.driver());
    let [outer, inner] = [(); 2].map(|()| CancellationToken::default());
    inner.cancel();
    outer.scope(|| {
        assert!(is_cancelled(inner.scope(|| tenant.pool.sleep(&all()))));
        tenant.pool.sleep(&all()).unwrap();
        outer.cancel();
        assert!(is_cancelled(tenant.pool.wake(&WakeRequest::all())));
    });
    tenant.pool.wake(&WakeRequest::all()).unwrap();
    tenant.verify();
}
