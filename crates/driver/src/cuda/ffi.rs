//! The driver's library: the symbols in use, with their C types.
//!
//! NVIDIA's documentation of the CUDA driver API has the names, types and values; no header or toolkit is
//! needed. Handles are integers here, since only the driver looks into them. Rules C1 to C6 in
//! `docs/unsafe.md` say how to call the functions.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use poorwill_core::{DriverErrorKind, Op};

use crate::ledger::{Result, of};

/// Result of a driver call: an integer, since later drivers have values unknown here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct CuResult(pub(super) c_int);

impl CuResult {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const INVALID_VALUE: Self = Self(1);
    pub(super) const OUT_OF_MEMORY: Self = Self(2);
    pub(super) const NOT_INITIALIZED: Self = Self(3);
    pub(super) const NO_DEVICE: Self = Self(100);
    pub(super) const OPERATING_SYSTEM: Self = Self(304);
    pub(super) const ILLEGAL_STATE: Self = Self(401);
    pub(super) const NOT_READY: Self = Self(600);
    pub(super) const HOST_MEMORY_ALREADY_REGISTERED: Self = Self(712);
    pub(super) const HOST_MEMORY_NOT_REGISTERED: Self = Self(713);
    pub(super) const NOT_PERMITTED: Self = Self(800);
    pub(super) const NOT_SUPPORTED: Self = Self(801);
    pub(super) const UNKNOWN: Self = Self(999);
    /// For the default stream: a stream that it would wait for is being captured.
    pub(super) const STREAM_CAPTURE_IMPLICIT: Self = Self(906);

    /// Whether the process has lost its context, so that every later call fails.
    fn is_fatal(self) -> bool {
        matches!(self.0, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721)
    }
}

pub(super) type Raw = usize;
pub(super) type CuDevice = c_int;
pub(super) type CuDeviceptr = u64;

/// `CUmemLocation`: type 1 is a device.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Location {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

/// `CUmemAllocationProp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct AllocationProp {
    /// 1: pinned, the only kind there is.
    pub(super) kind: c_int,
    pub(super) requested_handle_types: c_int,
    pub(super) location: Location,
    pub(super) win32_handle_meta_data: Raw,
    pub(super) compression: u8,
    pub(super) gpu_direct_rdma_capable: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct AccessDesc {
    pub(super) location: Location,
    pub(super) flags: c_int,
}

/// The arguments of each step that takes a process off its devices: the lock's limit, else zeros.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct CheckpointArgs {
    /// 0 is no limit.
    pub(super) timeout_ms: c_uint,
    pub(super) reserved_0: c_uint,
    pub(super) reserved_1: [u64; 7],
}

pub(super) type HostFn = extern "C" fn(*mut c_void);

pub(super) const ATTRIBUTE_SHARED_MEMORY_PER_BLOCK: c_int = 8;
pub(super) const ATTRIBUTE_INTEGRATED: c_int = 18;
pub(super) const ATTRIBUTE_CAPABILITY_MAJOR: c_int = 75;
pub(super) const ATTRIBUTE_CAPABILITY_MINOR: c_int = 76;
pub(super) const ATTRIBUTE_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
pub(super) const ATTRIBUTE_VIRTUAL_MEMORY: c_int = 102;
pub(super) const ATTRIBUTE_FILE_DESCRIPTORS: c_int = 103;
pub(super) const ATTRIBUTE_RDMA_WITH_VIRTUAL_MEMORY: c_int = 110;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const FILE_DESCRIPTOR: c_int = 1;
pub(super) const GRANULARITY_MINIMUM: c_int = 0;
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(super) const CAPTURE_MODE_RELAXED: c_int = 2;
/// `CU_MEMHOSTREGISTER_PORTABLE` and `_DEVICEMAP`: for every context, and with an address for kernels.
pub(super) const REGISTER_FLAGS: c_uint = 1 | 2;
pub(super) const EVENT_BLOCKING_SYNC: c_uint = 1;
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;

macro_rules! symbols {
    ($(#[$attribute:meta])* $table:ident from $driver_min:ident;
     $($field:ident: $since:literal, $($symbol:literal)|+, fn($($arg:ty),*);)+) => {
        $(#[$attribute])*
        #[derive(Debug)]
        pub(super) struct $table {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> CuResult,)+
        }

        impl $table {
            fn of(library: &Library, path: &Path) -> Result<Self> {
                Ok(Self { $($field: {
                    let found = symbol(library, path, $since, $driver_min, &[$($symbol),+])?;
                    // SAFETY: C1, the documented type of the function under this name. A pointer to data and a
                    // pointer to a function have one size on every system with this library.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> CuResult>(found) }
                },)+ })
            }
        }
    };
}

symbols! {
    /// The symbols in use, each under the first name that the driver exports.
    Api from DRIVER_MIN;
    init: "2.0", "cuInit", fn(c_uint);
    driver_get_version: "2.2", "cuDriverGetVersion", fn(*mut c_int);
    get_error_name: "6.0", "cuGetErrorName", fn(CuResult, *mut *const c_char);
    get_error_string: "6.0", "cuGetErrorString", fn(CuResult, *mut *const c_char);
    device_get_count: "2.0", "cuDeviceGetCount", fn(*mut c_int);
    device_get: "2.0", "cuDeviceGet", fn(*mut CuDevice, c_int);
    device_get_name: "2.0", "cuDeviceGetName", fn(*mut c_char, c_int, CuDevice);
    device_get_attribute: "2.0", "cuDeviceGetAttribute", fn(*mut c_int, c_int, CuDevice);
    device_get_uuid: "9.2", "cuDeviceGetUuid_v2" | "cuDeviceGetUuid", fn(*mut [u8; 16], CuDevice);
    device_get_pci_bus_id: "4.1", "cuDeviceGetPCIBusId", fn(*mut c_char, c_int, CuDevice);
    device_can_access_peer: "4.0", "cuDeviceCanAccessPeer", fn(*mut c_int, CuDevice, CuDevice);
    device_total_mem: "3.2", "cuDeviceTotalMem_v2", fn(*mut usize, CuDevice);
    primary_ctx_retain: "7.0", "cuDevicePrimaryCtxRetain", fn(*mut Raw, CuDevice);
    primary_ctx_release: "7.0", "cuDevicePrimaryCtxRelease_v2" | "cuDevicePrimaryCtxRelease", fn(CuDevice);
    primary_ctx_get_state: "7.0", "cuDevicePrimaryCtxGetState", fn(CuDevice, *mut c_uint, *mut c_int);
    ctx_get_current: "4.0", "cuCtxGetCurrent", fn(*mut Raw);
    ctx_push_current: "4.0", "cuCtxPushCurrent_v2", fn(Raw);
    ctx_pop_current: "4.0", "cuCtxPopCurrent_v2", fn(*mut Raw);
    ctx_synchronize: "2.0", "cuCtxSynchronize", fn();
    ctx_create: "3.2", "cuCtxCreate_v2", fn(*mut Raw, c_uint, CuDevice);
    ctx_destroy: "4.0", "cuCtxDestroy_v2", fn(Raw);
    ctx_set_limit: "3.1", "cuCtxSetLimit", fn(c_int, usize);
    ctx_get_stream_priority_range: "5.5", "cuCtxGetStreamPriorityRange", fn(*mut c_int, *mut c_int);
    mem_get_info: "3.2", "cuMemGetInfo_v2", fn(*mut usize, *mut usize);
    mem_get_granularity: "10.2", "cuMemGetAllocationGranularity",
        fn(*mut usize, *const AllocationProp, c_int);
    mem_address_reserve: "10.2", "cuMemAddressReserve", fn(*mut CuDeviceptr, usize, usize, CuDeviceptr, u64);
    mem_address_free: "10.2", "cuMemAddressFree", fn(CuDeviceptr, usize);
    mem_create: "10.2", "cuMemCreate", fn(*mut u64, usize, *const AllocationProp, u64);
    mem_export: "10.2", "cuMemExportToShareableHandle", fn(*mut c_int, u64, c_int, u64);
    mem_import: "10.2", "cuMemImportFromShareableHandle", fn(*mut u64, Raw, c_int);
    mem_release: "10.2", "cuMemRelease", fn(u64);
    mem_map: "10.2", "cuMemMap", fn(CuDeviceptr, usize, usize, u64, u64);
    mem_unmap: "10.2", "cuMemUnmap", fn(CuDeviceptr, usize);
    mem_set_access: "10.2", "cuMemSetAccess", fn(CuDeviceptr, usize, *const AccessDesc, usize);
    mem_host_register: "6.5", "cuMemHostRegister_v2", fn(*mut c_void, usize, c_uint);
    mem_host_unregister: "4.0", "cuMemHostUnregister", fn(*mut c_void);
    mem_host_get_device_pointer: "3.2", "cuMemHostGetDevicePointer_v2",
        fn(*mut CuDeviceptr, *mut c_void, c_uint);
    memcpy_htod_async: "3.2", "cuMemcpyHtoDAsync_v2", fn(CuDeviceptr, *const c_void, usize, Raw);
    memcpy_dtoh_async: "3.2", "cuMemcpyDtoHAsync_v2", fn(*mut c_void, CuDeviceptr, usize, Raw);
    memcpy_async: "4.0", "cuMemcpyAsync", fn(CuDeviceptr, CuDeviceptr, usize, Raw);
    memset_d8_async: "3.2", "cuMemsetD8Async", fn(CuDeviceptr, u8, usize, Raw);
    stream_create: "2.0", "cuStreamCreate", fn(*mut Raw, c_uint);
    stream_create_with_priority: "5.5", "cuStreamCreateWithPriority", fn(*mut Raw, c_uint, c_int);
    stream_destroy: "4.0", "cuStreamDestroy_v2", fn(Raw);
    stream_synchronize: "2.0", "cuStreamSynchronize", fn(Raw);
    stream_wait_event: "3.2", "cuStreamWaitEvent", fn(Raw, Raw, c_uint);
    stream_get_ctx: "9.2", "cuStreamGetCtx", fn(Raw, *mut Raw);
    stream_is_capturing: "10.0", "cuStreamIsCapturing", fn(Raw, *mut c_int);
    thread_exchange_stream_capture_mode: "10.1", "cuThreadExchangeStreamCaptureMode", fn(*mut c_int);
    event_create: "2.0", "cuEventCreate", fn(*mut Raw, c_uint);
    event_destroy: "4.0", "cuEventDestroy_v2", fn(Raw);
    event_record: "2.0", "cuEventRecord", fn(Raw, Raw);
    event_query: "2.0", "cuEventQuery", fn(Raw);
    event_synchronize: "2.0", "cuEventSynchronize", fn(Raw);
    launch_host_func: "10.0", "cuLaunchHostFunc", fn(Raw, HostFn, *mut c_void);
    module_load_data: "2.0", "cuModuleLoadData", fn(*mut Raw, *const c_char);
    module_unload: "2.0", "cuModuleUnload", fn(Raw);
    module_get_function: "2.0", "cuModuleGetFunction", fn(*mut Raw, Raw, *const c_char);
    launch_kernel: "4.0", "cuLaunchKernel",
        fn(Raw, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Raw, *mut *mut c_void, *mut *mut c_void);
}

symbols! {
    /// The symbols that take processes off their devices.
    CheckpointApi from CHECKPOINT_DRIVER_MIN;
    lock: "12.8", "cuCheckpointProcessLock", fn(c_int, *mut CheckpointArgs);
    checkpoint: "12.8", "cuCheckpointProcessCheckpoint", fn(c_int, *mut CheckpointArgs);
    restore: "12.8", "cuCheckpointProcessRestore", fn(c_int, *mut CheckpointArgs);
    unlock: "12.8", "cuCheckpointProcessUnlock", fn(c_int, *mut CheckpointArgs);
    state: "12.8", "cuCheckpointProcessGetState", fn(c_int, *mut c_int);
}

const LIBCUDA: &str = "libcuda.so.1";

/// The oldest driver with every symbol here, and its CUDA version.
const DRIVER_MIN: &str = "440.33 (CUDA 10.2)";
/// The oldest driver that takes processes off their devices.
const CHECKPOINT_DRIVER_MIN: &str = "570 (CUDA 12.8)";

impl CheckpointApi {
    /// The symbols of a library that [`Api::load`] has loaded.
    pub(super) fn load(library: Option<&Path>) -> Result<Self> {
        let path = library.unwrap_or(Path::new(LIBCUDA));
        let library = open(path)?;
        let api = Self::of(&library, path)?;
        std::mem::forget(library);
        Ok(api)
    }
}

impl Api {
    /// Loads the driver's library once and never unloads it: it has its own threads and exit handlers.
    pub(super) fn load(library: Option<&Path>) -> poorwill_core::driver::Result<&'static Self> {
        static LOADED: Mutex<Vec<(PathBuf, &'static Api)>> = Mutex::new(Vec::new());
        let path = library.unwrap_or(Path::new(LIBCUDA));
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, api)) = loaded.iter().find(|(known, _)| known == path) {
            return Ok(api);
        }
        let opened = open(path).and_then(|library| {
            let api = Self::of(&library, path)?;
            std::mem::forget(library);
            Ok(api)
        });
        let api: &'static Self = Box::leak(Box::new(opened.map_err(of(Op::Open))?));
        loaded.push((path.to_owned(), api));
        Ok(api)
    }

    pub(super) fn error(&self, code: CuResult) -> DriverErrorKind {
        let name = self.error_text(self.get_error_name, code).unwrap_or_else(|| "CUDA error".into());
        let text = self.error_text(self.get_error_string, code).unwrap_or_else(|| "no text".into());
        let lost = if code.is_fatal() {
            "; by this the process has lost its CUDA context, and only a new process gets one"
        } else {
            ""
        };
        DriverErrorKind::Device { code: code.0.into(), name, text: format!("{text}{lost}") }
    }

    fn error_text(
        &self,
        call: unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult,
        code: CuResult,
    ) -> Option<String> {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: C2, `text` outlives the call.
        let found = unsafe { call(code, &raw mut text) };
        if found != CuResult::SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: the driver returned a C string that lives as long as the library, which is for ever.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    }

    pub(super) fn check(&self, code: CuResult) -> Result<()> {
        if code == CuResult::SUCCESS { Ok(()) } else { Err(self.error(code)) }
    }

    pub(super) fn get<T: Default>(&self, call: impl FnOnce(*mut T) -> CuResult) -> Result<T> {
        let mut value = T::default();
        self.check(call(&raw mut value)).map(|()| value)
    }
}

fn open(path: &Path) -> Result<Library> {
    let name: &OsStr = path.as_ref();
    // SAFETY: C1; loading runs the initialisers of the NVIDIA driver, as in any program that uses a GPU.
    // Another library runs its own.
    let opened = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
    opened.map_err(|error| DriverErrorKind::Unsupported {
        reason: format!(
            "there is no usable NVIDIA driver here: {} would not load ({error}); it comes with NVIDIA's driver \
             (in a container, with NVIDIA's container toolkit)",
            path.display()
        ),
    })
}

fn symbol(
    library: &Library,
    path: &Path,
    since: &str,
    driver_min: &str,
    names: &[&str],
) -> Result<*mut c_void> {
    for name in names {
        // SAFETY: C1; this only looks the address up.
        let found = unsafe { library.get::<*mut c_void>(name.as_bytes()) };
        if let Ok(found) = found {
            let address = found.into_raw();
            if !address.is_null() {
                return Ok(address);
            }
        }
    }
    let reason = format!(
        "the NVIDIA driver is too old: {} has no {}, which came with CUDA {since}; use driver {driver_min} or \
         later",
        path.display(),
        names[0]
    );
    Err(DriverErrorKind::Unsupported { reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let error = Api::load(Some(Path::new("/nonexistent/libcuda.so.1"))).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/libcuda.so.1") && error.contains("NVIDIA's driver"), "{error}");
        let error = Api::load(Some(Path::new("libc.so.6"))).unwrap_err().to_string();
        assert!(error.contains("libc.so.6 has no cuInit"), "{error}");
        assert!(error.contains("use driver 440.33 (CUDA 10.2) or later"), "{error}");
        let error = CheckpointApi::load(Some(Path::new("libc.so.6"))).unwrap_err().to_string();
        assert!(
            error.contains("libc.so.6 has no cuCheckpointProcessLock, which came with CUDA 12.8"),
            "{error}"
        );
    }

    #[test]
    fn only_some_errors_cost_the_context() {
        let fatal = [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721];
        for code in 0..1000 {
            assert_eq!(CuResult(code).is_fatal(), fatal.contains(&code), "{code}");
        }
    }

    #[test]
    fn structures_are_as_the_driver_lays_them_out() {
        assert_eq!(size_of::<AllocationProp>(), 32);
        assert_eq!(std::mem::offset_of!(AllocationProp, win32_handle_meta_data), 16);
        assert_eq!(std::mem::offset_of!(AllocationProp, gpu_direct_rdma_capable), 25);
        assert_eq!(size_of::<AccessDesc>(), 12);
        assert_eq!(size_of::<CheckpointArgs>(), 64);
    }
}
