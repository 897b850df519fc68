//! Whichever call of NVIDIA's library fails, everything or nothing has happened.
//!
//! The suite of `poorwill_testkit::faults`, one layer down. Here the symbols of the (fake) libcuda fail instead
//! of calls of the driver trait, each in turn and in bursts.

use std::sync::{Arc, Mutex};

use poorwill_core::Driver;
use poorwill_fake_libcuda::Census;
use poorwill_testkit::device::DeviceKind;
use poorwill_testkit::faults::{Injector, Subject, some_calls, some_calls_of_sleeps};
use poorwill_testkit::slice::Slice;
use poorwill_testkit::storing::Storing;

use super::fake::{Fake, alone, open};

/// Arms the fake, and counts what failed.
#[derive(Clone)]
struct Counting {
    fake: Fake,
    armed: Arc<Mutex<Armed>>,
}

/// Which calls are to fail, and how many did.
#[derive(Debug, Default)]
struct Armed {
    first: u64,
    count: u64,
    failed: u64,
}

impl Injector for Counting {
    fn arm(&self, first: u64, count: u64) {
        let mut armed = self.armed.lock().unwrap();
        (armed.first, armed.count) = (first, count);
        self.fake.arm(first, count);
    }

    fn disarm(&self) -> u64 {
        let calls = self.fake.disarm();
        let mut armed = self.armed.lock().unwrap();
        armed.failed += calls.saturating_sub(armed.first).min(armed.count);
        calls
    }

    fn called(&self, number: u64) -> String {
        self.fake.called(number)
    }
}

/// The device with the small granules.
const ORDINAL: u32 = 1;

#[test]
fn every_call_of_the_library_may_fail() {
    let _turn = alone();
    let fake = Fake::load();
    let counting = Counting { fake: fake.clone(), armed: Arc::default() };
    // Keeps the context, which would take along all that was left in it.
    let witness = open(ORDINAL);
    let before = fake.census(ORDINAL);
    let device = Arc::new(open(ORDINAL));
    let subject = |storing| {
        let slice = Arc::new(Slice::new(Arc::clone(&device) as Arc<dyn Driver>, 64));
        let (watched, device, fake) = (Arc::clone(&slice), Arc::clone(&device), fake.clone());
        let counting = counting.clone();
        let start = fake.census(ORDINAL);
        let (handles, failed) = (start.streams + start.events, counting.armed.lock().unwrap().failed);
        let injector = Some(Box::new(counting.clone()) as Box<dyn Injector>);
        let assert_clean = move || {
            device.synchronize().unwrap();
            device.memory_info().unwrap(); // Drops what abandoned work kept.
            assert_eq!((watched.held_bytes(), watched.host_bytes()), (0, 0));
            let left = fake.census(ORDINAL);
            assert_eq!((left.backings, left.mappings, left.held_bytes), (0, 0, 0), "{left:?}");
            assert_eq!(left.reservations, 0, "{left:?}");
            // A dropped event or stream is leaked when its destruction is the call that fails: no code tries
            // again.
            let lost = counting.armed.lock().unwrap().failed - failed;
            let handles_max = handles + lost;
            assert!(left.streams + left.events <= handles_max, "{lost} of {handles_max}: {left:?}");
        };
        Subject { injector, storing, ..Subject::new(slice, assert_clean) }
    };
    let stride = DeviceKind::Fake.stride();
    let tally = some_calls(stride, &|| subject(Storing::Raw));
    let hard = [tally.sleeps_undone, tally.stranded, tally.shortfalls, tally.wakes_undone];
    let few = stride as u64;
    // With a large stride, it is by chance whether a failure falls into a rare step.
    assert!(tally.runs > 1000 / few && hard.into_iter().all(|cases| cases >= 20 / few), "{tally:?}");
    assert!(tally.stranded > 1, "{tally:?}");
    assert!(tally.allocs_undone >= 100 / few && tally.trims_undone >= 10 / few, "{tally:?}");
    let tally = some_calls_of_sleeps(stride * 13, &|| subject(Storing::Codes));
    assert!(tally.sleeps_undone > 10 && tally.wakes_undone > 10 && tally.prepares_undone > 0, "{tally:?}");
    drop(device);
    let left = fake.census(ORDINAL);
    // Nothing fails while it is dropped. The streams and events are those that were lost (above).
    assert_eq!(left, Census { streams: left.streams, events: left.events, ..before });
    drop(witness);
    let left = fake.census(ORDINAL);
    assert_eq!(left, Census::default(), "everything goes with the context");
}
