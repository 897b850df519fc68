//! The device that the tests of a run are about.
//!
//! `POORWILL_TEST_DEVICE` names it: `host` (also where nothing is named) is the host device, `fake` the CUDA
//! driver over a stand-in for NVIDIA's library, `cuda:N` a GPU. A promise is written once, against
//! [`TestDevice`], and holds on all of them. What can only be shown on one kind says so with
//! [`skipped_unless`] and ends there.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::ops::Deref;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use poorwill_core::Driver;
use poorwill_driver::{CudaConfig, CudaDevice, HostConfig, HostDevice};

use crate::effort::Effort;
use crate::slice::Slice;
use crate::watchdog::eventually;

/// The environment variable that names the kind.
pub const VARIABLE: &str = "POORWILL_TEST_DEVICE";

/// A kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The host device.
    Host,
    /// The CUDA driver over the fake library.
    Fake,
    /// The GPU of this number.
    Cuda(u32),
}

impl FromStr for Kind {
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

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Fake => f.write_str("fake"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl Kind {
    /// What the environment names.
    ///
    /// # Panics
    /// When that is none.
    #[must_use]
    pub fn of_this_run() -> Self {
        match std::env::var(VARIABLE) {
            Ok(text) => text.parse().unwrap_or_else(|error| panic!("{error}")),
            Err(std::env::VarError::NotPresent) => Self::Host,
            Err(error) => panic!("{VARIABLE}: {error}"),
        }
    }

    /// Whether streams that are held by functions of the host are held independently of each other. A GPU's
    /// driver may run all of these on one thread, and then the first one that waits holds up the others.
    #[must_use]
    pub fn holds_streams_apart(self) -> bool {
        !matches!(self, Self::Cuda(_))
    }

    /// One of so many injected failures is enough: of each on the host device, of fewer where the same code has run
    /// on it before or where 2 MiB really move, and of fewer still in a quick run. Strides are primes, so that they
    /// stay out of step with what repeats.
    #[must_use]
    pub fn stride(self) -> usize {
        self.stride_of(Effort::of_this_run())
    }

    /// The same of cases that each move dozens of granules to the host and back.
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

    /// How many of the `usual` random cases to run: at least one.
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

/// Whether a test ends here, since it needs what only some kinds have; it says so.
#[must_use]
pub fn skipped_unless(has: impl FnOnce(Kind) -> bool, reason: &str) -> bool {
    let kind = Kind::of_this_run();
    let skipped = !has(kind);
    if skipped {
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        // Not `eprintln`, whose words the test harness keeps to itself when the test passes.
        let _ = writeln!(io::stderr(), "{test}: skipped on {kind}: {reason}");
    }
    skipped
}

/// A device that belongs to one test alone, or its share of one. It dereferences to its driver.
#[derive(Debug, Clone)]
pub struct TestDevice {
    kind: Kind,
    machine: Machine,
}

#[derive(Debug, Clone)]
enum Machine {
    Host(Arc<HostDevice>),
    /// Of a machine that the whole process shares.
    Slice(Arc<Slice>),
}

impl TestDevice {
    /// A device of so many granules, as small as the machine has them.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn open(granules: u64) -> Self {
        match Kind::of_this_run() {
            Kind::Host => Self::host(&HostConfig::of_pages(granules)),
            Kind::Fake => Self::slice(Kind::Fake, 1, |_| granules),
            Kind::Cuda(ordinal) => Self::slice(Kind::Cuda(ordinal), ordinal, |_| granules),
        }
    }

    /// A device of this capacity with granules of 2 MiB, as GPUs have them.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn with_capacity(bytes: u64) -> Self {
        let granules = |driver: &dyn Driver| bytes / driver.info().granule_bytes;
        match Kind::of_this_run() {
            Kind::Host => Self::host(&HostConfig::with_capacity(bytes)),
            Kind::Fake => Self::slice(Kind::Fake, 0, granules),
            Kind::Cuda(ordinal) => Self::slice(Kind::Cuda(ordinal), ordinal, granules),
        }
    }

    /// Most that [`TestDevice::with_capacity`] can give.
    #[must_use]
    pub fn capacity_bytes_max() -> u64 {
        match Kind::of_this_run() {
            Kind::Host => u64::MAX,
            Kind::Fake => shared(Kind::Fake, 0).info().total_bytes,
            Kind::Cuda(ordinal) => shared(Kind::Cuda(ordinal), ordinal).info().total_bytes,
        }
    }

    fn host(config: &HostConfig) -> Self {
        Self { kind: Kind::Host, machine: Machine::Host(Arc::new(HostDevice::open(config).unwrap())) }
    }

    fn slice(kind: Kind, ordinal: u32, granules: impl FnOnce(&dyn Driver) -> u64) -> Self {
        let machine = shared(kind, ordinal);
        let granules = granules(&*machine);
        Self { kind, machine: Machine::Slice(Arc::new(Slice::new(machine, granules))) }
    }

    /// What it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// As pools take it.
    #[must_use]
    pub fn driver(&self) -> Arc<dyn Driver> {
        match &self.machine {
            Machine::Host(device) => Arc::clone(device) as Arc<dyn Driver>,
            Machine::Slice(slice) => Arc::clone(slice) as Arc<dyn Driver>,
        }
    }

    /// The machine itself: the whole GPU, not the share of one test. Other tests and processes move its figures.
    #[must_use]
    pub fn machine(&self) -> Arc<dyn Driver> {
        match &self.machine {
            Machine::Host(device) => Arc::clone(device) as Arc<dyn Driver>,
            Machine::Slice(slice) => Arc::clone(slice.inner()),
        }
    }

    /// Whether another process finds the same memory when it opens the device.
    #[must_use]
    pub fn is_shared_between_processes(&self) -> bool {
        matches!(self.kind, Kind::Cuda(_))
    }

    /// Host memory given out by `host_alloc` and not dropped yet, in bytes.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        match &self.machine {
            Machine::Host(device) => device.host_bytes(),
            Machine::Slice(slice) => slice.host_bytes(),
        }
    }

    /// Waits until nobody has host memory of this device any more. Where work ends that nobody waits for, what it has
    /// touched is let go of by whoever uses the device next: on one that tests share, that may be another test's
    /// thread, which is not done with it yet.
    ///
    /// # Panics
    /// When somebody keeps it; with `context`.
    pub fn expect_no_host_bytes(&self, context: &str) {
        self.expect_host_bytes(0, context);
    }

    /// Waits until so many bytes of host memory of this device are in use: see [`TestDevice::expect_no_host_bytes`].
    ///
    /// # Panics
    /// When there are more or fewer; with `context`.
    pub fn expect_host_bytes(&self, bytes: u64, context: &str) {
        eventually(context, || {
            // Using the device has it let go.
            self.memory_info().unwrap();
            self.host_bytes() == bytes
        });
    }

    /// Memory behind the device: the operating system's own count of what was touched on the host device,
    /// elsewhere what was created and not given back.
    ///
    /// # Panics
    /// When the operating system does not tell.
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

/// The machine that all slices of this process are cut from. Opened once: a GPU's context takes its time.
fn shared(kind: Kind, ordinal: u32) -> Arc<dyn Driver> {
    static OPEN: Mutex<BTreeMap<(Kind, u32), Arc<dyn Driver>>> = Mutex::new(BTreeMap::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(open.entry((kind, ordinal)).or_insert_with(|| open_cuda(kind, ordinal)))
}

/// The CUDA driver's device of this number, of the library that belongs to the kind.
fn open_cuda(kind: Kind, ordinal: u32) -> Arc<dyn Driver> {
    let library = library_of(kind);
    Arc::new(CudaDevice::open(&CudaConfig::default().numbered(ordinal).through(library)).unwrap())
}

/// How the CUDA driver is opened in this run: on the GPU that is named, otherwise over the fake library, where
/// granules are those of GPUs.
#[must_use]
pub fn cuda_config() -> CudaConfig {
    match Kind::of_this_run() {
        Kind::Cuda(ordinal) => CudaConfig::gpu(ordinal),
        Kind::Host | Kind::Fake => CudaConfig::default().through(library_of(Kind::Fake)),
    }
}

fn library_of(kind: Kind) -> Option<PathBuf> {
    (kind == Kind::Fake).then(poorwill_fake_libcuda::path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_names() {
        for kind in [Kind::Host, Kind::Fake, Kind::Cuda(0), Kind::Cuda(17)] {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        for text in ["", "cuda", "cuda:", "cuda:-1", "gpu", "host:8GiB"] {
            let error = text.parse::<Kind>().unwrap_err();
            assert!(error.contains(VARIABLE) && error.contains("cuda:N"), "{error}");
        }
    }

    #[test]
    fn fewer_cases_are_still_some() {
        let kinds = [Kind::Host, Kind::Fake, Kind::Cuda(0)];
        assert_eq!(kinds.map(|kind| kind.cases_of(Effort::Usual, 100)), [100, 25, 10]);
        assert_eq!(kinds.map(|kind| kind.cases_of(Effort::Quick, 100)), [10, 3, 1]);
        assert_eq!(kinds.map(|kind| kind.cases_of(Effort::Quick, 1)), [1, 1, 1]);
        assert_eq!(kinds.map(|kind| kind.stride_of(Effort::Usual)), [1, 7, 11]);
        assert_eq!(kinds.map(|kind| kind.stride_of(Effort::Long)), [1, 1, 1]);
        assert_eq!(kinds.map(|kind| kind.stride_of_cycles_of(Effort::Usual)), [1, 7, 23]);
        assert_eq!(kinds.map(|kind| kind.stride_of_cycles_of(Effort::Long)), [1, 1, 1]);
    }
}
