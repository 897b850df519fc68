//! The device of a test run.
//!
//! `POORWILL_TEST_DEVICE` names it: `host` (the default) is the host device, `fake` the CUDA driver over the
//! fake libcuda, `cuda:N` a GPU. A promise is written once, against [`TestDevice`], for all of them. A test
//! for some kinds only ends with [`skipped_unless`].

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::ops::Deref;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use poorwill_core::Driver;
use poorwill_driver::{CudaConfig, CudaDevice, HostConfig, HostDevice, cuda};

use crate::effort::Effort;
use crate::slice::Slice;
use crate::watchdog::eventually;

/// The environment variable that names the kind.
pub const VARIABLE: &str = "POORWILL_TEST_DEVICE";

/// A kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// The host device.
    Host,
    /// The CUDA driver over the fake libcuda.
    Fake,
    /// The GPU with this ordinal.
    Cuda(u32),
}

impl FromStr for DeviceKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("cuda:").map(str::parse)) {
            ("host", _) => Ok(Self::Host),
            ("fake", _) => Ok(Self::Fake),
            (_, Some(Ok(ordinal))) => Ok(Self::Cuda(ordinal)),
            _ => Err(format!("{VARIABLE} is `{text}`; it can be host, fake or cuda:N")),
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Fake => f.write_str("fake"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl DeviceKind {
    /// The kind named by the environment.
    ///
    /// # Panics
    /// If the name is unknown.
    #[must_use]
    pub fn of_this_run() -> Self {
        match std::env::var(VARIABLE) {
            Ok(text) => text.parse().unwrap_or_else(|error| panic!("{error}")),
            Err(std::env::VarError::NotPresent) => Self::Host,
            Err(error) => panic!("{VARIABLE}: {error}"),
        }
    }

    /// Whether host functions can hold several streams independently. A GPU's driver may run all of them on
    /// one thread, where the first one that waits delays the others.
    #[must_use]
    pub fn holds_streams_apart(self) -> bool {
        !matches!(self, Self::Cuda(_))
    }

    /// The step between injected failures: one of so many calls fails.
    ///
    /// It is 1 on the host device, except in a quick run. The others run the same code again, or really move
    /// 2 MiB. Strides are primes, to stay out of step with repeated patterns.
    #[must_use]
    pub fn stride(self) -> usize {
        self.stride_of(Effort::of_this_run())
    }

    /// The stride for cases that each move dozens of granules to the host and back.
    #[must_use]
    pub fn stride_of_cycles(self) -> usize {
        self.stride_of_cycles_of(Effort::of_this_run())
    }

    fn stride_of_cycles_of(self, effort: Effort) -> usize {
        match (self, effort) {
            (Self::Cuda(_), Effort::Usual) => 23,
            (Self::Cuda(_), Effort::Quick) => 101,
            _ => self.stride_of(effort),
        }
    }

    fn stride_of(self, effort: Effort) -> usize {
        match (self, effort) {
            (_, Effort::Long) | (Self::Host, Effort::Usual) => 1,
            (Self::Host, Effort::Quick) | (Self::Fake, Effort::Usual) => 7,
            (Self::Cuda(_), Effort::Usual) => 11,
            (Self::Fake | Self::Cuda(_), Effort::Quick) => 37,
        }
    }

    /// How many of `usual` random cases to run: at least one.
    #[must_use]
    pub fn cases(self, usual: u32) -> u32 {
        self.cases_of(Effort::of_this_run(), usual)
    }

    fn cases_of(self, effort: Effort, usual: u32) -> u32 {
        let share = match self {
            Self::Host => 1,
            Self::Fake => 4,
            Self::Cuda(_) => 10,
        };
        effort.cases(usual.div_ceil(share))
    }
}

/// Whether the test must end here, since this kind of device lacks what it needs. Prints the reason.
#[must_use]
pub fn skipped_unless(has: impl FnOnce(DeviceKind) -> bool, reason: &str) -> bool {
    let kind = DeviceKind::of_this_run();
    let skipped = !has(kind);
    if skipped {
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        // The test harness captures `eprintln` when the test passes.
        let _ = writeln!(io::stderr(), "{test}: skipped on {kind}: {reason}");
    }
    skipped
}

/// A device, or a share of one, for one test.
#[derive(Debug, Clone)]
pub struct TestDevice {
    kind: DeviceKind,
    machine: Machine,
}

#[derive(Debug, Clone)]
enum Machine {
    Host(Arc<HostDevice>),
    /// A share of a device of the whole process.
    Slice(Arc<Slice>),
}

impl TestDevice {
    /// A device of this many granules, of the smallest size it supports.
    ///
    /// # Panics
    /// If the device cannot be opened.
    #[must_use]
    pub fn open(granules: u64) -> Self {
        match DeviceKind::of_this_run() {
            DeviceKind::Host => Self::host(&HostConfig::of_pages(granules)),
            DeviceKind::Fake => Self::slice(DeviceKind::Fake, 1, |_| granules),
            DeviceKind::Cuda(ordinal) => Self::slice(DeviceKind::Cuda(ordinal), ordinal, |_| granules),
        }
    }

    /// The same with links of other devices, which others do not show.
    ///
    /// # Panics
    /// If the device cannot be opened.
    #[must_use]
    pub fn linked(granules: u64) -> Self {
        match DeviceKind::of_this_run() {
            DeviceKind::Host => Self::host(&HostConfig::of_pages(granules).linking_over(2)),
            DeviceKind::Fake => Self::linked_slice(DeviceKind::Fake, 1, granules),
            DeviceKind::Cuda(ordinal) => Self::linked_slice(DeviceKind::Cuda(ordinal), ordinal, granules),
        }
    }

    fn linked_slice(kind: DeviceKind, ordinal: u32, granules: u64) -> Self {
        let slice = Slice::new(shared(kind, ordinal), granules).showing_links();
        Self { kind, machine: Machine::Slice(Arc::new(slice)) }
    }

    /// A device of this capacity with granules of 2 MiB, as GPUs have them.
    ///
    /// # Panics
    /// If the device cannot be opened.
    #[must_use]
    pub fn with_capacity(bytes: u64) -> Self {
        let granules = |driver: &dyn Driver| bytes / driver.info().granule_bytes;
        match DeviceKind::of_this_run() {
            DeviceKind::Host => Self::host(&HostConfig::with_capacity(bytes)),
            DeviceKind::Fake => Self::slice(DeviceKind::Fake, 0, granules),
            DeviceKind::Cuda(ordinal) => Self::slice(DeviceKind::Cuda(ordinal), ordinal, granules),
        }
    }

    /// The largest capacity for [`TestDevice::with_capacity`].
    #[must_use]
    pub fn capacity_bytes_max() -> u64 {
        match DeviceKind::of_this_run() {
            DeviceKind::Host => u64::MAX,
            DeviceKind::Fake => shared(DeviceKind::Fake, 0).info().total_bytes,
            DeviceKind::Cuda(ordinal) => shared(DeviceKind::Cuda(ordinal), ordinal).info().total_bytes,
        }
    }

    fn host(config: &HostConfig) -> Self {
        Self { kind: DeviceKind::Host, machine: Machine::Host(Arc::new(HostDevice::open(config).unwrap())) }
    }

    fn slice(kind: DeviceKind, ordinal: u32, granules: impl FnOnce(&dyn Driver) -> u64) -> Self {
        let machine = shared(kind, ordinal);
        let granules = granules(&*machine);
        Self { kind, machine: Machine::Slice(Arc::new(Slice::new(machine, granules))) }
    }

    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// The driver, as pools take it.
    #[must_use]
    pub fn driver(&self) -> Arc<dyn Driver> {
        match &self.machine {
            Machine::Host(device) => Arc::clone(device) as Arc<dyn Driver>,
            Machine::Slice(slice) => Arc::clone(slice) as Arc<dyn Driver>,
        }
    }

    /// The device itself, not the share of one test: others change its figures.
    #[must_use]
    pub fn machine(&self) -> Arc<dyn Driver> {
        match &self.machine {
            Machine::Host(device) => Arc::clone(device) as Arc<dyn Driver>,
            Machine::Slice(slice) => Arc::clone(slice.inner()),
        }
    }

    /// Whether another process sees the same memory when it opens the device.
    #[must_use]
    pub fn is_shared_between_processes(&self) -> bool {
        matches!(self.kind, DeviceKind::Cuda(_))
    }

    /// Live bytes of host memory from `host_alloc`.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        match &self.machine {
            Machine::Host(device) => device.host_bytes(),
            Machine::Slice(slice) => slice.host_bytes(),
        }
    }

    /// Waits until no host memory of this device is in use.
    ///
    /// Dropped work releases its buffer in a later call of the device, which may run on another test's
    /// thread.
    ///
    /// # Panics
    /// If host memory stays in use; with `context`.
    pub fn expect_no_host_bytes(&self, context: &str) {
        self.expect_host_bytes(0, context);
    }

    /// As [`TestDevice::expect_no_host_bytes`], for this much host memory.
    ///
    /// # Panics
    /// If there stays more or less; with `context`.
    pub fn expect_host_bytes(&self, bytes: u64, context: &str) {
        eventually(context, || {
            // Any call releases the buffers of completed work.
            self.memory_info().unwrap();
            self.host_bytes() == bytes
        });
    }

    /// Physical memory: on the host device, the operating system's count of touched memory; elsewhere, what
    /// was created and not released.
    ///
    /// # Panics
    /// If the operating system reports no count.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        match &self.machine {
            Machine::Host(device) => device.resident_bytes().unwrap(),
            Machine::Slice(slice) => slice.held_bytes(),
        }
    }
}

impl Deref for TestDevice {
    type Target = dyn Driver;

    fn deref(&self) -> &(dyn Driver + 'static) {
        match &self.machine {
            Machine::Host(device) => &**device,
            Machine::Slice(slice) => &**slice,
        }
    }
}

impl fmt::Display for TestDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.info().name)
    }
}

/// The device that all slices of this process share; opened once, since creating a GPU's context is slow.
fn shared(kind: DeviceKind, ordinal: u32) -> Arc<dyn Driver> {
    static OPEN: Mutex<BTreeMap<(DeviceKind, u32), Arc<dyn Driver>>> = Mutex::new(BTreeMap::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(open.entry((kind, ordinal)).or_insert_with(|| open_cuda(kind, ordinal)))
}

fn open_cuda(kind: DeviceKind, ordinal: u32) -> Arc<dyn Driver> {
    let config = CudaConfig::default().numbered(ordinal).through(library_of(kind));
    let config = config.linking_over(cuda::Links::Reachable);
    Arc::new(CudaDevice::open(&config).unwrap())
}

/// The CUDA configuration of this run: the named GPU, otherwise the fake library, with a GPU's granules.
#[must_use]
pub fn cuda_config() -> CudaConfig {
    match DeviceKind::of_this_run() {
        DeviceKind::Cuda(ordinal) => CudaConfig::gpu(ordinal),
        DeviceKind::Host | DeviceKind::Fake => CudaConfig::default().through(cuda_library()),
    }
}

/// The library of [`cuda_config`]: `None` for the machine's.
#[must_use]
pub fn cuda_library() -> Option<PathBuf> {
    match DeviceKind::of_this_run() {
        DeviceKind::Cuda(_) => None,
        DeviceKind::Host | DeviceKind::Fake => library_of(DeviceKind::Fake),
    }
}

fn library_of(kind: DeviceKind) -> Option<PathBuf> {
    (kind == DeviceKind::Fake).then(poorwill_fake_libcuda::path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_names() {
        for kind in [DeviceKind::Host, DeviceKind::Fake, DeviceKind::Cuda(0), DeviceKind::Cuda(17)] {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        for text in ["", "cuda", "cuda:", "cuda:-1", "gpu", "host:8GiB"] {
            let error = text.parse::<DeviceKind>().unwrap_err();
            assert!(error.contains(VARIABLE) && error.contains("cuda:N"), "{error}");
        }
    }

    #[test]
    fn fewer_cases_are_still_some() {
        let kinds = [DeviceKind::Host, DeviceKind::Fake, DeviceKind::Cuda(0)];
        assert_eq!(kinds.map(|kind| kind.cases_of(Effort::Usual, 100)), [100, 25, 10]);
        assert_eq!(kinds.map(|kind| kind.cases_of(Effort::Quick, 100)), [10, 3, 1]);
        assert_eq!(kinds.map(|kind| kind.cases_of(Effort::Quick, 1)), [1, 1, 1]);
        assert_eq!(kinds.map(|kind| kind.stride_of(Effort::Usual)), [1, 7, 11]);
        assert_eq!(kinds.map(|kind| kind.stride_of(Effort::Long)), [1, 1, 1]);
        assert_eq!(kinds.map(|kind| kind.stride_of_cycles_of(Effort::Usual)), [1, 7, 23]);
        assert_eq!(kinds.map(|kind| kind.stride_of_cycles_of(Effort::Long)), [1, 1, 1]);
    }
}
