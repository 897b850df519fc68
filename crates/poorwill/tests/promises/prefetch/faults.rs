//! Passes, and measurements of passes, with driver calls failing at every point.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use poorwill::offload::{Prefetcher, Slots};
use poorwill::{Arena, Driver, Op, Tag, chain};
use poorwill_bench::offload::{OffloadPlan, Source, run};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};

use super::careless::{Careless, Fault, Held};
use super::{arena, layer};

/// Calls counted, and which of them fail.
struct Script {
    /// No failures before and after this: the pool has its own tests.
    armed: AtomicBool,
    first: u64,
    burst: u64,
    calls: AtomicU64,
    /// What failed.
    failed: Mutex<Vec<Op>>,
}

/// A device whose calls `first .. first + burst` fail.
fn failing(inner: Arc<dyn Driver>, first: u64, burst: u64) -> (Arc<dyn Driver>, Arc<Script>) {
    let (armed, calls, failed) = Default::default();
    let script = Arc::new(Script { armed, first, burst, calls, failed });
    let asked = Arc::clone(&script);
    let driver = ScriptedDriver::new(inner, move |call| {
        let is_armed = asked.armed.load(Ordering::Relaxed);
        let number = asked.calls.fetch_add(u64::from(is_armed), Ordering::Relaxed);
        if is_armed && (asked.first..asked.first + asked.burst).contains(&number) {
            asked.failed.lock().unwrap().push(call.op);
            return Verdict::device_failure(call);
        }
        Verdict::Pass
    });
    (Arc::new(driver), script)
}

/// Runs `scenario` with calls failing from each point on, until none of them is reached. It returns whether
/// it succeeded.
fn at_every_place(step: usize, scenario: impl Fn(&TestDevice, &Arena) -> bool) {
    let (mut successes, mut failures) = (0, 0);
    for burst in [1, 2] {
        for first in (0..).step_by(step * DeviceKind::of_this_run().stride()) {
            let device = TestDevice::open(32);
            let counting = Careless::new(device.driver(), Fault::None, Held::Nothing);
            let (driver, script) = failing(Arc::clone(&counting) as Arc<dyn Driver>, first, burst);
            let arena = arena(driver);
            script.armed.store(true, Ordering::Relaxed);
            let succeeded = scenario(&device, &arena);
            script.armed.store(false, Ordering::Relaxed);
            let failed = script.failed.lock().unwrap().clone();
            let context = format!("{burst} from call {first} on: {failed:?}");
            assert_eq!(arena.stats().unwrap().live_bytes, 0, "{context}");
            arena.close().unwrap();
            drop(arena);
            assert_eq!(device.memory_info().unwrap().free_bytes, device.info().total_bytes, "{context}");
            device.expect_no_host_bytes(&context);
            let [streams, events] = counting.streams_and_events();
            // The pool destroys an event of its own once, on a thread of its own.
            let refused = failed.iter().filter(|op| **op == Op::EventDestroy).count();
            let left = i64::try_from(refused).unwrap();
            assert!(streams == 0 && (0..=left).contains(&events), "{streams}, {events}: {context}");
            if failed.is_empty() {
                assert!(succeeded && first > 20, "{context}");
                break;
            }
            if succeeded { successes += 1 } else { failures += 1 }
        }
    }
    assert!(failures > successes, "{failures} failures and {successes} successes");
}

#[test]
fn a_pass_that_fails_leaves_nothing_behind() {
    at_every_place(1, |device, arena| {
        let layers: Vec<_> = (0..5).map(|number| layer(&**device, number, 2)).collect();
        let memory: Vec<_> = layers.iter().map(|(memory, _)| Arc::clone(memory)).collect();
        let bytes = 2 * device.info().granule_bytes;
        let slots = Slots::new(Tag::weights(), NonZeroUsize::new(2).unwrap(), bytes);
        let Ok(mut prefetcher) = Prefetcher::new(arena, &slots) else { return false };
        let mut is_good = true;
        for _ in 0..2 {
            let mut pending = Vec::new();
            let passed = prefetcher.forward(&memory, &mut |turn| {
                pending.push(arena.driver().digest(turn.stream, &[turn.range])?);
                Ok(())
            });
            is_good &= passed.is_ok();
            if passed.is_ok() {
                assert_eq!(pending.len(), 5);
                for (digests, (_, expected)) in pending.into_iter().zip(&layers) {
                    match digests.wait() {
                        Ok(digests) => {
                            assert_eq!(digests, *expected, "a pass that is said to be right is wrong");
                        }
                        Err(_) => is_good = false,
                    }
                }
            }
        }
        is_good & prefetcher.close().is_ok()
    });
}

#[test]
fn measuring_that_fails_leaves_nothing_behind() {
    at_every_place(3, |device, arena| {
        let bytes = NonZeroU64::new(6 * device.info().granule_bytes).unwrap();
        let plan = OffloadPlan { layers: NonZeroU32::new(3).unwrap(), ..OffloadPlan::new(bytes) };
        match run(arena, &Source::Driver, &plan, &mut |_| {}) {
            Ok(report) => {
                assert!(report.verified && report.mismatch.is_none(), "{report:?}");
                true
            }
            Err(error) => {
                assert!(chain(&error).contains("INJECTED"), "{error}");
                false
            }
        }
    });
}
