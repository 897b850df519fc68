//! Whichever call of NVIDIA's library fails, everything or nothing has happened.
//!
//! The suite of `poorwill_testkit::faults`, one floor down: not the calls of the driver trait fail here but the
//! symbols of the (fake) libcuda that our driver calls, each in turn and in bursts.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::ffi::c_int;
use std::sync::Arc;

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
        Self { arm, disarm, census }
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
        (self.arm)(first, count);
    }

    fn disarm(&self) -> u64 {
        (self.disarm)()
    }
}

/// The device with the small granules.
const ORDINAL: c_int = 1;

#[test]
fn every_call_of_the_library_may_fail() {
    let fake = Fake::load();
    let library = Some(poorwill_fake_libcuda::path());
    let config = CudaConfig { ordinal: ORDINAL.unsigned_abs(), library };
    let device = Arc::new(CudaDevice::open(&config).unwrap());
    let subject = || {
        let slice = Arc::new(Slice::new(Arc::clone(&device) as Arc<dyn Driver>, 64));
        let (watched, device, fake) = (Arc::clone(&slice), Arc::clone(&device), fake.clone());
        let injector = Some(Box::new(fake.clone()) as Box<dyn Injector>);
        let assert_clean = move || {
            device.synchronize().unwrap();
            device.memory_info().unwrap(); // Lets go of what nobody waited for.
            assert_eq!((watched.held_bytes(), watched.host_bytes()), (0, 0));
            let left = fake.census(ORDINAL);
            assert_eq!((left.backings, left.mappings, left.held_bytes), (0, 0, 0), "{left:?}");
            assert_eq!(left.reservations, 0, "{left:?}");
        };
        Subject { driver: slice, assert_clean: Box::new(assert_clean), injector }
    };
    let tally = every_nth_call(&subject);
    let hard = [tally.sleeps_undone, tally.stranded, tally.shortfalls, tally.wakes_undone];
    assert!(tally.runs > 1000 && hard.into_iter().all(|cases| cases > 20), "{tally:?}");
    assert!(tally.allocs_undone > 100 && tally.trims_undone > 10, "{tally:?}");
    drop(device);
    let left = fake.census(ORDINAL);
    assert_eq!(left.contexts_retained, 0, "{left:?}");
}
