//! Promise 3: whichever driver call fails, everything or nothing has happened.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use poorwill_testkit::broken::{BrokenDriver, DEFECTS, Defect};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::faults::{Subject, Tally, some_calls, some_calls_of_sleeps};
use poorwill_testkit::storing::Storing;

const GRANULES: u64 = 64;

/// At least one of so many calls fails where a defect is to be noticed: some show after a few calls only.
const STRIDE_MAX: usize = 7;

fn watched() -> Subject {
    let device = TestDevice::open(GRANULES);
    Subject::new(device.driver(), move || {
        assert_eq!(device.resident_bytes(), 0, "the system has all memory back");
        device.expect_no_host_bytes("all backups are gone");
    })
}

#[test]
fn every_driver_call_may_fail() {
    let stride = DeviceKind::of_this_run().stride();
    let tally = some_calls(stride, &watched);
    expect_hard_cases(tally, stride as u64);
    let stride = stride as u64;
    assert!(tally.allocs_undone >= 100 / stride && tally.trims_undone >= 10 / stride, "{tally:?}");
}

#[test]
fn every_driver_call_may_fail_where_backups_are_codes() {
    let stride = DeviceKind::of_this_run().stride() * 11;
    let subject = || Subject { storing: Storing::Codes, ..watched() };
    let tally = some_calls_of_sleeps(stride, &subject);
    expect_hard_cases(tally, stride as u64);
    assert!(tally.codes_failed >= 6, "{tally:?}");
}

fn expect_hard_cases(tally: Tally, stride: u64) {
    let hard = [tally.sleeps_undone, tally.stranded, tally.shortfalls, tally.wakes_undone];
    assert!(tally.runs > 500 / stride && hard.into_iter().all(|cases| cases >= 20 / stride), "{tally:?}");
    // With a large stride, it is by chance whether a failure falls into a rare step.
    assert!(tally.prepares_undone >= 20 / stride, "{tally:?}");
}

/// A suite that a broken driver or a broken undo passes would prove nothing.
#[test]
fn the_suite_notices_what_is_broken() {
    let unnoticed: Vec<_> = DEFECTS.into_iter().filter(|defect| passes(Some(*defect))).collect();
    assert!(passes(None), "the wrapper without a defect must pass");
    assert!(unnoticed.is_empty(), "not noticed: {unnoticed:?}");
}

fn passes(defect: Option<Defect>) -> bool {
    let subject =
        || Subject::new(Arc::new(BrokenDriver::new(TestDevice::open(GRANULES).driver(), defect)), || ());
    // A few runs are enough without a defect: the other test has the rest.
    let stride = DeviceKind::of_this_run().stride();
    let stride = if defect.is_some() { stride.min(STRIDE_MAX) } else { stride * 10 };
    catch_unwind(AssertUnwindSafe(|| some_calls(stride, &subject))).is_ok()
}
