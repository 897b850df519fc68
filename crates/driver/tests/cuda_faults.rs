//! Whichever call of NVIDIA's library fails, everything or nothing has happened.
//!
//! The suite of `poorwill_testkit::faults`, one floor down: not the calls of the driver trait fail here but the
//! symbols of the (fake) libcuda that our driver calls, each in turn and in bursts.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::ffi::c_int;
use std::sync::{Arc, Mutex};

use libloading::os::unix::{Library, Symbol};
use poorwill_core::Driver;
use poorwill_driver::{CudaConfig, CudaDevice};
use poorwill_fake_libcuda::Census;
use poorwill_testkit::faults::{Injector, Subject, every_nth_call};
use poorwill_testkit::slice::Slice;

/// The fake library's own symbols.
#[derive(Clone)]
struct Fake {
    arm: Symbol<extern "C" fn(u64, u64)>,
    disarm: Symbol<extern "C" fn() -> u64>,
    census: Symbol<unsafe extern "C" fn(c_int, *mut Census) -> c_int>,
    armed: Arc<Mutex<Armed>>,
}

/// Which calls are to fail, and how many did.
#[derive(Debug, Default)]
struct Armed {
    first: u64,
    count: u64,
    failed: u64,
}

impl Fake {
    fn load() -> Self {
        // SAFETY: a library of ours, which the driver under test loads as well.
        let library = unsafe { Library::new(poorwill_fake_libcuda::path()) }.unwrap();
        // SAFETY: the type that the symbol has there.
        let arm = unsafe { library.get(b"poorwillFakeArm") }.unwrap();
        // SAFETY: likewise.
        let disarm = unsafe { library.get(b"poorwillFakeDisarm") }.unwrap();
        // SAFETY: likewise.
        let census = unsafe { library.get(b"poorwillFakeCensus") }.unwrap();
        std::mem::forget(library);
        Self { arm, disarm, census, armed: Arc::default() }
    }

    fn census(&self, device: c_int) -> Census {
        let mut census = Census::default();
        // SAFETY: `census` outlives the call.
        assert_eq!(unsafe { (self.census)(device, &raw mut census) }, 0);
        census
    }
}

impl Injector for Fake {
    fn arm(&self, first: u64, count: u64) {
        let mut armed = self.armed.lock().unwrap();
        (armed.first, armed.count) = (first, count);
        (self.arm)(first, count);
    }

    fn disarm(&self) -> u64 {
        let calls = (self.disarm)();
        let mut armed = self.armed.lock().unwrap();
        armed.failed += calls.saturating_sub(armed.first).min(armed.count);
        calls
    }
}

/// The device with the small granules.
const ORDINAL: c_int = 1;

#[test]
fn every_call_of_the_library_may_fail() {
    let fake = Fake::load();
    let library = Some(poorwill_fake_libcuda::path());
    let config = CudaConfig { ordinal: ORDINAL.unsigned_abs(), library, ..CudaConfig::default() };
    // Keeps the context, which would take along all that was left in it.
    let witness = CudaDevice::open(&config).unwrap();
    let before = fake.census(ORDINAL);
    let device = Arc::new(CudaDevice::open(&config).unwrap());
    let subject = || {
        let slice = Arc::new(Slice::new(Arc::clone(&device) as Arc<dyn Driver>, 64));
        let (watched, device, fake) = (Arc::clone(&slice), Arc::clone(&device), fake.clone());
        let start = fake.census(ORDINAL);
        let (handles, failed) = (start.streams + start.events, fake.armed.lock().unwrap().failed);
        let injector = Some(Box::new(fake.clone()) as Box<dyn Injector>);
        let assert_clean = move || {
            device.synchronize().unwrap();
            device.memory_info().unwrap(); // Lets go of what nobody waited for.
            assert_eq!((watched.held_bytes(), watched.host_bytes()), (0, 0));
            let left = fake.census(ORDINAL);
            assert_eq!((left.backings, left.mappings, left.held_bytes), (0, 0, 0), "{left:?}");
            assert_eq!(left.reservations, 0, "{left:?}");
            // An event or stream that is dropped is lost when its destruction is the call that fails: nobody is
            // there to try again.
            let lost = fake.armed.lock().unwrap().failed - failed;
            let handles_max = handles + lost;
            assert!(left.streams + left.events <= handles_max, "{lost} of {handles_max}: {left:?}");
        };
        Subject { driver: slice, assert_clean: Box::new(assert_clean), injector }
    };
    let tally = every_nth_call(&subject);
    let hard = [tally.sleeps_undone, tally.stranded, tally.shortfalls, tally.wakes_undone];
    assert!(tally.runs > 1000 && hard.into_iter().all(|cases| cases > 20), "{tally:?}");
    assert!(tally.allocs_undone > 100 && tally.trims_undone > 10, "{tally:?}");
    drop(device);
    let left = fake.census(ORDINAL);
    // Nothing fails while it is dropped. The streams and events are those that were lost (above).
    assert_eq!(left, Census { streams: left.streams, events: left.events, ..before });
    drop(witness);
    let left = fake.census(ORDINAL);
    assert_eq!(left, Census::default(), "everything goes with the context");
}
