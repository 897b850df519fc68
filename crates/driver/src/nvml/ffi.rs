//! NVIDIA's management library: the symbols in use, with their C types, as safe calls.
//!
//! NVIDIA's documentation of NVML has the names, types and values; no header is needed. A symbol that a driver
//! lacks fails the calls that need it, and no others. [`NvmlLibrary`] ends NVML and unloads it when it is dropped.
//! Rules C1 and C2 in `docs/unsafe.md` hold here, too.

use std::ffi::{CStr, CString, OsStr, c_char, c_uint};
use std::fmt;

use libloading::os::unix::{Library as Loaded, RTLD_LAZY, RTLD_LOCAL};

pub(super) type Result<T> = std::result::Result<T, NvmlError>;

/// Why a call has no answer.
#[derive(Debug)]
pub(super) enum NvmlError {
    /// The library does not load. The system's text begins with its name.
    Load(libloading::Error),
    /// The library has no such symbol, in the system's words.
    Symbol(String),
    /// A text with a zero inside.
    Zero,
    /// A text that is not UTF-8.
    Encoding,
    /// NVML's own.
    Code(NvmlCode),
}

/// An `nvmlReturn_t`: an integer, since later drivers have values unknown here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NvmlCode(c_uint);

impl NvmlCode {
    const SUCCESS: Self = Self(0);
    pub(super) const INVALID_ARGUMENT: Self = Self(2);
    pub(super) const NOT_SUPPORTED: Self = Self(3);
    pub(super) const NOT_FOUND: Self = Self(6);
    const INSUFFICIENT_SIZE: Self = Self(7);
    pub(super) const FUNCTION_NOT_FOUND: Self = Self(13);
    #[cfg(test)]
    pub(super) const NO_PERMISSION: Self = Self(4);
    #[cfg(test)]
    pub(super) const GPU_IS_LOST: Self = Self(15);
}

impl fmt::Display for NvmlCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            1 => "NVML was not first initialized with `nvmlInit`",
            2 => "a supplied argument was invalid",
            3 => "the requested operation is not available on the target device",
            4 => "the current user does not have permission to perform this operation",
            5 => "NVML was already initialized",
            6 => "a query to find an object was unsuccessful",
            7 => "an input argument is not large enough",
            8 => "device's external power cables are not properly attached",
            9 => "NVIDIA driver is not loaded",
            10 => "the provided timeout was reached",
            11 => "NVIDIA kernel detected an interrupt issue with a device",
            12 => "a shared library couldn't be found or loaded",
            13 => "a function couldn't be found in a shared library",
            14 => "the infoROM is corrupted",
            15 => "device fell off the bus or has otherwise become inaccessible",
            16 => "device requires a reset before it can be used again",
            17 => "device control has been blocked by the operating system/cgroups",
            18 => "RM detects a driver/library version mismatch",
            19 => "operation cannot be performed because the GPU is currently in use",
            20 => "insufficient memory",
            21 => "no data",
            22 => "the requested vgpu operation is not available on the target device because ECC is enabled",
            999 => "an internal driver error occurred",
            other => return write!(f, "unexpected enum variant value: {other}"),
        })
    }
}

impl fmt::Display for NvmlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(error) => write!(f, "a libloading error occurred: {error}"),
            Self::Symbol(reason) => write!(f, "function symbol failed to load: {reason}"),
            Self::Zero => f.write_str("nul byte inside string"),
            Self::Encoding => f.write_str("could not interpret string as utf-8"),
            Self::Code(code) => code.fmt(f),
        }
    }
}

/// `nvmlDevice_t`: only NVML looks into it.
type RawDevice = usize;

/// `nvmlMemory_v2_t`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct MemoryInfo {
    version: c_uint,
    pub(super) total_bytes: u64,
    reserved_bytes: u64,
    pub(super) free_bytes: u64,
    pub(super) used_bytes: u64,
}

impl MemoryInfo {
    /// The size, and the version in the upper byte.
    const VERSION: c_uint = 40 | 2 << 24;
}

/// `nvmlProcessInfo_t`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct ProcessInfo {
    pub(super) pid: c_uint,
    used_bytes: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

impl ProcessInfo {
    /// `None` where the driver keeps no figure.
    pub(super) fn used_bytes(&self) -> Option<u64> {
        Some(self.used_bytes).filter(|bytes| *bytes < u64::MAX)
    }
}

const _: () = assert!(size_of::<MemoryInfo>() == 40 && size_of::<ProcessInfo>() == 24);

/// A function, or why the library has none of this name.
type Symbol<F> = std::result::Result<F, String>;
type NumberOf = unsafe extern "C" fn(RawDevice, *mut c_uint) -> c_uint;
type ListOf = unsafe extern "C" fn(RawDevice, *mut c_uint, *mut ProcessInfo) -> c_uint;

macro_rules! symbols {
    ($($field:ident: $symbol:literal, $kind:ty;)+) => {
        #[derive(Debug)]
        struct Symbols {
            $($field: Symbol<$kind>,)+
        }

        impl Symbols {
            fn of(library: &Loaded) -> Self {
                Self { $($field: {
                    // SAFETY: C1, the documented type of the function under this name.
                    let found = unsafe { library.get::<$kind>($symbol.as_bytes()) };
                    found.map(|symbol| *symbol).map_err(|error| error.to_string())
                },)+ }
            }
        }
    };
}

symbols! {
    init: "nvmlInit_v2", unsafe extern "C" fn() -> c_uint;
    shutdown: "nvmlShutdown", unsafe extern "C" fn() -> c_uint;
    driver_version: "nvmlSystemGetDriverVersion", unsafe extern "C" fn(*mut c_char, c_uint) -> c_uint;
    count: "nvmlDeviceGetCount_v2", unsafe extern "C" fn(*mut c_uint) -> c_uint;
    by_index: "nvmlDeviceGetHandleByIndex_v2", unsafe extern "C" fn(c_uint, *mut RawDevice) -> c_uint;
    by_uuid: "nvmlDeviceGetHandleByUUID", unsafe extern "C" fn(*const c_char, *mut RawDevice) -> c_uint;
    uuid: "nvmlDeviceGetUUID", unsafe extern "C" fn(RawDevice, *mut c_char, c_uint) -> c_uint;
    minor_number: "nvmlDeviceGetMinorNumber", NumberOf;
    memory: "nvmlDeviceGetMemoryInfo_v2", unsafe extern "C" fn(RawDevice, *mut MemoryInfo) -> c_uint;
    processes: "nvmlDeviceGetComputeRunningProcesses_v3", ListOf;
    mps_processes: "nvmlDeviceGetMPSComputeRunningProcesses_v3", ListOf;
    link_width: "nvmlDeviceGetCurrPcieLinkWidth", NumberOf;
    link_width_max: "nvmlDeviceGetMaxPcieLinkWidth", NumberOf;
    link_generation: "nvmlDeviceGetCurrPcieLinkGeneration", NumberOf;
    link_generation_max: "nvmlDeviceGetMaxPcieLinkGeneration", NumberOf;
    mig_mode: "nvmlDeviceGetMigMode", unsafe extern "C" fn(RawDevice, *mut c_uint, *mut c_uint) -> c_uint;
    instances_max: "nvmlDeviceGetMaxMigDeviceCount", NumberOf;
    instance: "nvmlDeviceGetMigDeviceHandleByIndex",
        unsafe extern "C" fn(RawDevice, c_uint, *mut RawDevice) -> c_uint;
    parent: "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", unsafe extern "C" fn(RawDevice, *mut RawDevice) -> c_uint;
}

/// The library, loaded and begun.
#[derive(Debug)]
pub(super) struct NvmlLibrary {
    symbols: Symbols,
    /// Kept loaded as long as its symbols.
    _loaded: Loaded,
}

/// A GPU, or an instance of one. It lives as long as its library.
#[derive(Debug, Clone, Copy)]
pub(super) struct GpuHandle<'a> {
    handle: RawDevice,
    symbols: &'a Symbols,
}

/// NVML's largest sizes of texts.
const DRIVER_VERSION_BYTES: c_uint = 80;
const UUID_BYTES: c_uint = 96;
/// As many as a GPU rarely has.
const PROCESSES: c_uint = 16;
/// For those that start between two calls.
const SPARE_PROCESSES: c_uint = 5;

impl NvmlLibrary {
    /// Loads it and begins.
    pub(super) fn open(name: &OsStr) -> Result<Self> {
        // SAFETY: C1; loading runs the initialisers of NVIDIA's library, as in any program that uses NVML.
        let loaded = unsafe { Loaded::open(Some(name), RTLD_LAZY | RTLD_LOCAL) };
        let loaded = loaded.map_err(NvmlError::Load)?;
        let symbols = Symbols::of(&loaded);
        let init = known(&symbols.init)?;
        // SAFETY: C1, it takes nothing.
        check(unsafe { init() })?;
        Ok(Self { symbols, _loaded: loaded })
    }

    pub(super) fn driver_version(&self) -> Result<String> {
        let call = known(&self.symbols.driver_version)?;
        // SAFETY: C1, C2; the text has as many bytes.
        text(DRIVER_VERSION_BYTES, |text, bytes| unsafe { call(text, bytes) })
    }

    pub(super) fn count(&self) -> Result<u32> {
        let call = known(&self.symbols.count)?;
        // SAFETY: C1, C2.
        value(|count| unsafe { call(count) })
    }

    pub(super) fn by_index(&self, index: u32) -> Result<GpuHandle<'_>> {
        let call = known(&self.symbols.by_index)?;
        // SAFETY: C1, C2.
        self.gpu(value(|handle| unsafe { call(index, handle) }))
    }

    /// Of a GPU or an instance, by its UUID with the prefix.
    pub(super) fn by_uuid(&self, uuid: &str) -> Result<GpuHandle<'_>> {
        let uuid = CString::new(uuid).map_err(|_| NvmlError::Zero)?;
        let call = known(&self.symbols.by_uuid)?;
        // SAFETY: C1, C2; the text ends with a zero and outlives the call.
        self.gpu(value(|handle| unsafe { call(uuid.as_ptr(), handle) }))
    }

    fn gpu(&self, handle: Result<RawDevice>) -> Result<GpuHandle<'_>> {
        handle.map(|handle| GpuHandle { handle, symbols: &self.symbols })
    }
}

impl Drop for NvmlLibrary {
    fn drop(&mut self) {
        if let Ok(shutdown) = self.symbols.shutdown {
            // SAFETY: C1, it takes nothing. Handles borrow the library, so there are none any more.
            unsafe { shutdown() };
        }
    }
}

impl GpuHandle<'_> {
    /// With its prefix.
    pub(super) fn uuid(&self) -> Result<String> {
        let call = known(&self.symbols.uuid)?;
        // SAFETY: C1, C2; the text has as many bytes.
        text(UUID_BYTES, |text, bytes| unsafe { call(self.handle, text, bytes) })
    }

    /// Of its device file.
    pub(super) fn minor_number(&self) -> Result<u32> {
        self.number(&self.symbols.minor_number)
    }

    pub(super) fn memory(&self) -> Result<MemoryInfo> {
        let call = known(&self.symbols.memory)?;
        let mut memory = MemoryInfo { version: MemoryInfo::VERSION, ..MemoryInfo::default() };
        // SAFETY: C1, C2; the struct is of the version that it states.
        check(unsafe { call(self.handle, &raw mut memory) }).map(|()| memory)
    }

    /// Those that compute there.
    pub(super) fn processes(&self) -> Result<Vec<ProcessInfo>> {
        self.listed(&self.symbols.processes)
    }

    /// Those that compute there through the Multi-Process Service.
    pub(super) fn mps_processes(&self) -> Result<Vec<ProcessInfo>> {
        self.listed(&self.symbols.mps_processes)
    }

    pub(super) fn link_width(&self) -> Result<u32> {
        self.number(&self.symbols.link_width)
    }

    pub(super) fn link_width_max(&self) -> Result<u32> {
        self.number(&self.symbols.link_width_max)
    }

    pub(super) fn link_generation(&self) -> Result<u32> {
        self.number(&self.symbols.link_generation)
    }

    pub(super) fn link_generation_max(&self) -> Result<u32> {
        self.number(&self.symbols.link_generation_max)
    }

    /// The mode that it is in, whatever it will be in after the next reset.
    pub(super) fn mig_mode(&self) -> Result<u32> {
        let call = known(&self.symbols.mig_mode)?;
        let mut pending = 0;
        // SAFETY: C1, C2.
        value(|current| unsafe { call(self.handle, current, &raw mut pending) })
    }

    /// How many instances it may have.
    pub(super) fn instances_max(&self) -> Result<u32> {
        self.number(&self.symbols.instances_max)
    }

    pub(super) fn instance(&self, index: u32) -> Result<Self> {
        let call = known(&self.symbols.instance)?;
        // SAFETY: C1, C2.
        self.other(value(|handle| unsafe { call(self.handle, index, handle) }))
    }

    /// The GPU that contains this instance.
    pub(super) fn parent(&self) -> Result<Self> {
        let call = known(&self.symbols.parent)?;
        // SAFETY: C1, C2.
        self.other(value(|handle| unsafe { call(self.handle, handle) }))
    }

    fn other(&self, handle: Result<RawDevice>) -> Result<Self> {
        handle.map(|handle| Self { handle, ..*self })
    }

    fn number(&self, symbol: &Symbol<NumberOf>) -> Result<u32> {
        let call = known(symbol)?;
        // SAFETY: C1, C2; the handle is the library's, which it borrows.
        value(|number| unsafe { call(self.handle, number) })
    }

    fn listed(&self, symbol: &Symbol<ListOf>) -> Result<Vec<ProcessInfo>> {
        listed(self.handle, known(symbol)?)
    }
}

/// Mostly with one call: the driver visits all its clients in each. A second one where there are more than usual.
fn listed(handle: RawDevice, call: ListOf) -> Result<Vec<ProcessInfo>> {
    let mut count = PROCESSES;
    loop {
        let space = count;
        let mut processes = vec![ProcessInfo::default(); places(space)];
        // SAFETY: C1, C2; there is space for `count`.
        let code = unsafe { call(handle, &raw mut count, processes.as_mut_ptr()) };
        if NvmlCode(code) != NvmlCode::INSUFFICIENT_SIZE || count <= space {
            check(code)?;
            processes.truncate(places(count));
            return Ok(processes);
        }
        count = count.saturating_add(SPARE_PROCESSES);
    }
}

fn known<F: Copy>(symbol: &Symbol<F>) -> Result<F> {
    symbol.clone().map_err(NvmlError::Symbol)
}

fn check(code: c_uint) -> Result<()> {
    let code = NvmlCode(code);
    if code == NvmlCode::SUCCESS { Ok(()) } else { Err(NvmlError::Code(code)) }
}

fn value<T: Default>(call: impl FnOnce(*mut T) -> c_uint) -> Result<T> {
    let mut value = T::default();
    check(call(&raw mut value)).map(|()| value)
}

fn text(bytes: c_uint, call: impl FnOnce(*mut c_char, c_uint) -> c_uint) -> Result<String> {
    let mut text = vec![0u8; places(bytes)];
    check(call(text.as_mut_ptr().cast(), bytes))?;
    let text = CStr::from_bytes_until_nul(&text).map_err(|_| NvmlError::Encoding)?;
    text.to_str().map(str::to_owned).map_err(|_| NvmlError::Encoding)
}

/// On Linux an address has at least as many bits.
fn places(count: c_uint) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    static CALLS: AtomicU32 = AtomicU32::new(0);
    static STARTED: AtomicU32 = AtomicU32::new(0);

    /// The handle says how many processes there are. One more has started before each further call.
    ///
    /// # Safety
    /// There is space for `count`.
    unsafe extern "C" fn list(device: RawDevice, count: *mut c_uint, list: *mut ProcessInfo) -> c_uint {
        CALLS.fetch_add(1, Ordering::Relaxed);
        let processes = c_uint::try_from(device).unwrap() + STARTED.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's count, and space for as many.
        let space = unsafe { count.replace(processes) };
        if processes > space {
            return NvmlCode::INSUFFICIENT_SIZE.0;
        }
        for pid in 0..processes {
            let place = list.wrapping_add(places(pid));
            // SAFETY: likewise.
            unsafe { place.write(ProcessInfo { pid, ..ProcessInfo::default() }) };
        }
        0
    }

    /// # Safety
    /// `count` is the caller's.
    unsafe extern "C" fn forbidden(_: RawDevice, count: *mut c_uint, _: *mut ProcessInfo) -> c_uint {
        // SAFETY: the caller's count.
        unsafe { count.write(0) };
        NvmlCode::NO_PERMISSION.0
    }

    #[test]
    fn processes_are_listed_with_one_call_unless_there_are_many() {
        for (processes, calls) in [(0, 1), (1, 1), (16, 1), (17, 2), (300, 2)] {
            CALLS.store(0, Ordering::Relaxed);
            STARTED.store(0, Ordering::Relaxed);
            let pids: Vec<c_uint> =
                listed(processes, list).unwrap().iter().map(|process| process.pid).collect();
            assert_eq!(CALLS.load(Ordering::Relaxed), calls, "{processes} processes");
            let last = c_uint::try_from(processes).unwrap() + calls - 1;
            assert_eq!(pids, (0..last).collect::<Vec<_>>());
        }
        let refused = listed(0, forbidden).unwrap_err();
        assert!(matches!(refused, NvmlError::Code(NvmlCode::NO_PERMISSION)), "{refused}");
    }
}
