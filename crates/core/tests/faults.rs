//! Promise 3 on the host device: whichever driver call fails, everything or nothing has happened.
#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use poorwill_driver::{HostConfig, HostDevice};
use poorwill_testkit::canary::{BrokenDriver, DEFECTS, Defect};
use poorwill_testkit::faults::{Subject, every_nth_call};

fn device() -> Arc<HostDevice> {
    Arc::new(HostDevice::open(&HostConfig::of_pages(64)).unwrap())
}

fn host() -> Subject {
    let device = device();
    let watched = Arc::clone(&device);
    Subject {
        driver: device,
        assert_clean: Box::new(move || {
            assert_eq!(watched.resident_bytes().unwrap(), 0, "the system has all memory back");
            assert_eq!(watched.host_bytes(), 0, "all backups are gone");
        }),
    }
}

#[test]
fn every_driver_call_may_fail() {
    let tally = every_nth_call(&host);
    let hard = [tally.sleeps_undone, tally.stranded, tally.shortfalls, tally.wakes_undone];
    assert!(tally.runs > 500 && hard.into_iter().all(|cases| cases > 20), "{tally:?}");
    assert!(tally.allocs_undone > 100 && tally.trims_undone > 10, "{tally:?}");
}

/// The canaries: a suite that a broken driver or a broken undo passes would prove nothing.
#[test]
fn the_suite_notices_what_is_broken() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {})); // The panics below are wanted; their text is noise.
    let unnoticed: Vec<_> = DEFECTS.into_iter().filter(|defect| passes(Some(*defect))).collect();
    std::panic::set_hook(hook);
    assert!(passes(None), "the wrapper without a defect must pass");
    assert!(unnoticed.is_empty(), "not noticed: {unnoticed:?}");
}

fn passes(defect: Option<Defect>) -> bool {
    let subject =
        || Subject { driver: Arc::new(BrokenDriver::new(device(), defect)), assert_clean: Box::new(|| ()) };
    catch_unwind(AssertUnwindSafe(|| every_nth_call(&subject))).is_ok()
}
