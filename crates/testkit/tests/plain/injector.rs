//! The fault suite with an injector below the driver: what it fails is what the calls of the trait would be.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use poorwill_core::Op;
use poorwill_driver::{HostConfig, HostDevice};
use poorwill_testkit::faults::{Injector, Subject, some_calls};
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};

/// Fails calls of a scripted driver, as a fake library would fail its own.
#[derive(Default)]
struct Script {
    armed: AtomicBool,
    calls: AtomicU64,
    failing: Mutex<(u64, u64)>,
    /// By name, since it was armed last.
    names: Mutex<Vec<String>>,
    /// Those that were made to fail, over all arms.
    failed: AtomicU64,
}

impl Script {
    fn fails(&self, op: Op) -> bool {
        if !self.armed.load(Ordering::Relaxed) {
            return false;
        }
        // Under the lock, so that each call that counts has its name.
        let mut names = self.names.lock().unwrap();
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        names.push(op.to_string());
        drop(names);
        let (first, count) = *self.failing.lock().unwrap();
        let fails = (first..first + count).contains(&call);
        self.failed.fetch_add(u64::from(fails), Ordering::Relaxed);
        fails
    }
}

struct Below(Arc<Script>);

impl Injector for Below {
    fn arm(&self, first: u64, count: u64) {
        *self.0.failing.lock().unwrap() = (first, count);
        self.0.calls.store(0, Ordering::Relaxed);
        self.0.names.lock().unwrap().clear();
        assert!(!self.0.armed.swap(true, Ordering::Relaxed), "armed twice");
    }

    fn disarm(&self) -> u64 {
        assert!(self.0.armed.swap(false, Ordering::Relaxed), "disarmed twice");
        self.0.calls.load(Ordering::Relaxed)
    }

    fn called(&self, number: u64) -> String {
        self.0.names.lock().unwrap()[usize::try_from(number).unwrap()].clone()
    }
}

#[test]
fn calls_below_the_driver_are_counted_over_a_whole_run() {
    let device = || Arc::new(HostDevice::open(&HostConfig::of_pages(64)).unwrap());
    let failed = Mutex::new(Vec::new());
    let below = || {
        let script = Arc::new(Script::default());
        failed.lock().unwrap().push(Arc::clone(&script));
        let fails = Arc::clone(&script);
        let driver = ScriptedDriver::new(device(), move |call| {
            if fails.fails(call.op) { Verdict::device_failure(call) } else { Verdict::Pass }
        });
        let injector: Option<Box<dyn Injector>> = Some(Box::new(Below(script)));
        Subject { injector, ..Subject::new(Arc::new(driver), || ()) }
    };
    let stride = 23;
    let tally = some_calls(stride, &below);
    let failed: Vec<u64> =
        failed.into_inner().unwrap().iter().map(|script| script.failed.load(Ordering::Relaxed)).collect();
    // Every run but the last of each burst meets a whole burst, or the part of it that the run still makes.
    assert!(failed.iter().filter(|count| **count > 0).count() as u64 == tally.runs, "{failed:?}");
    for burst in [1, 2, 3, 5] {
        assert!(failed.iter().filter(|count| **count == burst).count() > 10, "{burst}: {failed:?}");
    }
    assert!(failed.iter().all(|count| *count <= 5));
    assert!(tally.sleeps_undone > 0 && tally.wakes_undone > 0 && tally.allocs_undone > 0, "{tally:?}");
}
