//! The fake library's own symbols, and devices over it.

use std::ffi::{CStr, c_char, c_int};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libloading::os::unix::{Library, Symbol};
use poorwill_core::{DeviceRange, Driver};
use poorwill_driver::{CudaConfig, CudaDevice};
use poorwill_fake_libcuda::Census;

/// No other test of this program runs until it is dropped.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The symbols that CUDA does not have.
#[derive(Clone)]
pub(crate) struct Fake {
    arm: Symbol<extern "C" fn(u64, u64)>,
    disarm: Symbol<extern "C" fn() -> u64>,
    called: Symbol<unsafe extern "C" fn(u64, *mut [u8; 64]) -> c_int>,
    hold: Symbol<unsafe extern "C" fn(*const c_char) -> c_int>,
    let_go: Symbol<extern "C" fn()>,
    held: Symbol<extern "C" fn() -> u64>,
    census: Symbol<unsafe extern "C" fn(c_int, *mut Census) -> c_int>,
}

impl Fake {
    pub(crate) fn load() -> Self {
        // SAFETY: a library of ours, which the driver under test loads as well.
        let library = unsafe { Library::new(poorwill_fake_libcuda::path()) }.unwrap();
        // SAFETY: the type that the symbol has there.
        let arm = unsafe { library.get(b"poorwillFakeArm") }.unwrap();
        // SAFETY: likewise.
        let disarm = unsafe { library.get(b"poorwillFakeDisarm") }.unwrap();
        // SAFETY: likewise.
        let called = unsafe { library.get(b"poorwillFakeCalled") }.unwrap();
        // SAFETY: likewise.
        let hold = unsafe { library.get(b"poorwillFakeHold") }.unwrap();
        // SAFETY: likewise.
        let let_go = unsafe { library.get(b"poorwillFakeResume") }.unwrap();
        // SAFETY: likewise.
        let held = unsafe { library.get(b"poorwillFakeHeld") }.unwrap();
        // SAFETY: likewise.
        let census = unsafe { library.get(b"poorwillFakeCensus") }.unwrap();
        std::mem::forget(library);
        Self { arm, disarm, called, hold, let_go, held, census }
    }

    /// From now on counts calls, and has so many from the `first` on fail.
    pub(crate) fn arm(&self, first: u64, count: u64) {
        (self.arm)(first, count);
    }

    /// Has every call fail from now on.
    pub(crate) fn arm_all(&self) {
        self.arm(0, u64::MAX >> 1);
    }

    /// Ends that; how many calls were counted.
    pub(crate) fn disarm(&self) -> u64 {
        (self.disarm)()
    }

    /// The name of the call with this number, of those that were counted since it was armed last.
    pub(crate) fn called(&self, number: u64) -> String {
        let mut name = [0; 64];
        // SAFETY: `name` outlives the call.
        assert_eq!(unsafe { (self.called)(number, &raw mut name) }, 0);
        String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned()
    }

    /// Calls of this symbol wait until the guard is dropped.
    pub(crate) fn hold(&self, symbol: &CStr) -> LetGo<'_> {
        // SAFETY: `symbol` outlives the call.
        assert_eq!(unsafe { (self.hold)(symbol.as_ptr()) }, 0);
        LetGo(self)
    }

    /// How many calls wait now.
    pub(crate) fn held(&self) -> u64 {
        (self.held)()
    }

    /// What there is on the device of this number.
    pub(crate) fn census(&self, device: u32) -> Census {
        let mut census = Census::default();
        // SAFETY: `census` outlives the call.
        assert_eq!(unsafe { (self.census)(c_int::try_from(device).unwrap(), &raw mut census) }, 0);
        census
    }
}

/// Has the calls that wait go on when it is dropped.
pub(crate) struct LetGo<'a>(&'a Fake);

impl Drop for LetGo<'_> {
    fn drop(&mut self) {
        (self.0.let_go)();
    }
}

pub(crate) fn config(ordinal: u32) -> CudaConfig {
    CudaConfig::gpu(ordinal).through(Some(poorwill_fake_libcuda::path()))
}

/// 0 has granules as GPUs have them, 1 has small ones.
pub(crate) fn open(ordinal: u32) -> CudaDevice {
    CudaDevice::open(&config(ordinal)).unwrap()
}

/// A mapping with access, which nothing but the mapping keeps.
pub(crate) fn mapped(device: &CudaDevice, granules: u64) -> DeviceRange {
    let range = device.reserve(granules * device.info().granule_bytes).unwrap();
    let backing = device.create(range.bytes).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    device.release(backing).unwrap();
    range
}
