//! NVML as a C program calls it: symbols by name, results as codes.
#![allow(dead_code)] // Each test program uses a part.

use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::ptr;

use libloading::os::unix::Library;

pub(crate) const UNINITIALIZED: c_uint = 1;
pub(crate) const INVALID_ARGUMENT: c_uint = 2;
pub(crate) const NOT_SUPPORTED: c_uint = 3;
pub(crate) const NO_PERMISSION: c_uint = 4;
pub(crate) const NOT_FOUND: c_uint = 6;
pub(crate) const INSUFFICIENT_SIZE: c_uint = 7;
pub(crate) const VERSION_MISMATCH: c_uint = 25;

/// A code where it is not success.
pub(crate) type Answer<T> = Result<T, c_uint>;

/// `nvmlDevice_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Handle(pub(crate) usize);

/// `nvmlMemory_t`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlMemory_v2_t`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct MemoryV2 {
    pub(crate) version: c_uint,
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlProcessInfo_t`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct ProcessInfo {
    pub(crate) pid: c_uint,
    pub(crate) used: u64,
    pub(crate) gpu_instance: c_uint,
    pub(crate) compute_instance: c_uint,
}

/// The library after `nvmlInit_v2`. Its user calls `shut`.
#[derive(Debug)]
pub(crate) struct Nvml(Library);

impl Nvml {
    pub(crate) fn open() -> Answer<Self> {
        // SAFETY: the fake library, whose initialisers are those of any Rust library.
        let library = unsafe { Library::new(poorwill_fake_nvml::path()) }.unwrap();
        let nvml = Self(library);
        // SAFETY: its documented type.
        let init = unsafe { nvml.symbol::<unsafe extern "C" fn() -> c_uint>("nvmlInit_v2") };
        // SAFETY: it takes nothing.
        checked(unsafe { init() }).map(|()| nvml)
    }

    /// Ends what [`Nvml::open`] began.
    pub(crate) fn shut(&self) -> Answer<()> {
        // SAFETY: its documented type.
        let shut = unsafe { self.symbol::<unsafe extern "C" fn() -> c_uint>("nvmlShutdown") };
        // SAFETY: it takes nothing.
        checked(unsafe { shut() })
    }

    /// # Safety
    /// `F` is the documented type of the function with this name.
    pub(crate) unsafe fn symbol<F: Copy>(&self, name: &str) -> F {
        // SAFETY: as the caller promises.
        *unsafe { self.0.get::<F>(name.as_bytes()) }.unwrap()
    }

    pub(crate) fn driver_version(&self) -> String {
        // SAFETY: its documented type.
        let call = unsafe {
            self.symbol::<unsafe extern "C" fn(*mut c_char, c_uint) -> c_uint>("nvmlSystemGetDriverVersion")
        };
        // SAFETY: there is space for the text.
        text(|text, len| unsafe { call(text, len) }).unwrap()
    }

    pub(crate) fn count(&self) -> Answer<u32> {
        // SAFETY: its documented type.
        let call =
            unsafe { self.symbol::<unsafe extern "C" fn(*mut c_uint) -> c_uint>("nvmlDeviceGetCount_v2") };
        let mut count = 0;
        // SAFETY: the number outlives the call.
        checked(unsafe { call(&raw mut count) }).map(|()| count)
    }

    pub(crate) fn by_index(&self, index: u32) -> Answer<Gpu<'_>> {
        // SAFETY: its documented type.
        let call = unsafe {
            self.symbol::<unsafe extern "C" fn(c_uint, *mut Handle) -> c_uint>(
                "nvmlDeviceGetHandleByIndex_v2",
            )
        };
        // SAFETY: the handle outlives the call.
        self.gpu(|handle| unsafe { call(index, handle) })
    }

    pub(crate) fn by_uuid(&self, uuid: &str) -> Answer<Gpu<'_>> {
        self.by_text("nvmlDeviceGetHandleByUUID", uuid)
    }

    pub(crate) fn by_bus(&self, id: &str) -> Answer<Gpu<'_>> {
        self.by_text("nvmlDeviceGetHandleByPciBusId_v2", id)
    }

    fn by_text(&self, name: &str, text: &str) -> Answer<Gpu<'_>> {
        let text = CString::new(text).unwrap();
        // SAFETY: both have this documented type.
        let call = unsafe { self.symbol::<unsafe extern "C" fn(*const c_char, *mut Handle) -> c_uint>(name) };
        // SAFETY: text and handle outlive the call.
        self.gpu(|handle| unsafe { call(text.as_ptr(), handle) })
    }

    fn gpu(&self, call: impl FnOnce(*mut Handle) -> c_uint) -> Answer<Gpu<'_>> {
        let mut handle = Handle(0);
        checked(call(&raw mut handle)).map(|()| Gpu { nvml: self, handle })
    }
}

/// A card or an instance.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gpu<'a> {
    nvml: &'a Nvml,
    pub(crate) handle: Handle,
}

impl Gpu<'_> {
    pub(crate) fn uuid(&self) -> String {
        self.text("nvmlDeviceGetUUID")
    }

    pub(crate) fn name(&self) -> String {
        self.text("nvmlDeviceGetName")
    }

    pub(crate) fn capability(&self) -> (c_int, c_int) {
        // SAFETY: its documented type.
        let call = unsafe {
            self.nvml.symbol::<unsafe extern "C" fn(Handle, *mut c_int, *mut c_int) -> c_uint>(
                "nvmlDeviceGetCudaComputeCapability",
            )
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the numbers outlive the call.
        checked(unsafe { call(self.handle, &raw mut major, &raw mut minor) }).unwrap();
        (major, minor)
    }

    /// By the second version of the call.
    pub(crate) fn memory(&self) -> Answer<Memory> {
        // SAFETY: its documented type.
        let call = unsafe {
            self.nvml
                .symbol::<unsafe extern "C" fn(Handle, *mut MemoryV2) -> c_uint>("nvmlDeviceGetMemoryInfo_v2")
        };
        let mut memory = MemoryV2 { version: 40 | 2 << 24, ..MemoryV2::default() };
        // SAFETY: the struct is of the version that it states.
        checked(unsafe { call(self.handle, &raw mut memory) })?;
        Ok(Memory { total: memory.total, free: memory.free, used: memory.used })
    }

    /// Process numbers and bytes.
    pub(crate) fn processes(&self) -> Vec<(u32, u64)> {
        // SAFETY: its documented type.
        let call = unsafe {
            self.nvml.symbol::<unsafe extern "C" fn(Handle, *mut c_uint, *mut ProcessInfo) -> c_uint>(
                "nvmlDeviceGetComputeRunningProcesses_v3",
            )
        };
        let mut count = 0;
        // SAFETY: without space it only counts.
        let counted = unsafe { call(self.handle, &raw mut count, ptr::null_mut()) };
        assert_eq!(counted, if count == 0 { 0 } else { INSUFFICIENT_SIZE });
        let mut processes = vec![ProcessInfo::default(); usize::try_from(count).unwrap()];
        // SAFETY: there is space for as many.
        checked(unsafe { call(self.handle, &raw mut count, processes.as_mut_ptr()) }).unwrap();
        processes.into_iter().map(|process| (process.pid, process.used)).collect()
    }

    /// The current mode, and that after the next reset.
    pub(crate) fn mig_mode(&self) -> Answer<(u32, u32)> {
        // SAFETY: its documented type.
        let call = unsafe {
            self.nvml.symbol::<unsafe extern "C" fn(Handle, *mut c_uint, *mut c_uint) -> c_uint>(
                "nvmlDeviceGetMigMode",
            )
        };
        let (mut current, mut pending) = (0, 0);
        // SAFETY: the numbers outlive the call.
        checked(unsafe { call(self.handle, &raw mut current, &raw mut pending) }).map(|()| (current, pending))
    }

    pub(crate) fn instance(&self, index: u32) -> Answer<Self> {
        // SAFETY: its documented type.
        let call = unsafe {
            self.nvml.symbol::<unsafe extern "C" fn(Handle, c_uint, *mut Handle) -> c_uint>(
                "nvmlDeviceGetMigDeviceHandleByIndex",
            )
        };
        // SAFETY: the handle outlives the call.
        self.nvml.gpu(|handle| unsafe { call(self.handle, index, handle) })
    }

    pub(crate) fn parent(&self) -> Answer<Self> {
        // SAFETY: its documented type.
        let call = unsafe {
            self.nvml.symbol::<unsafe extern "C" fn(Handle, *mut Handle) -> c_uint>(
                "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
            )
        };
        // SAFETY: the handle outlives the call.
        self.nvml.gpu(|handle| unsafe { call(self.handle, handle) })
    }

    pub(crate) fn instances(&self) -> u32 {
        self.number("nvmlDeviceGetMaxMigDeviceCount").unwrap()
    }

    pub(crate) fn is_instance(&self) -> bool {
        self.number("nvmlDeviceIsMigDeviceHandle").unwrap() == 1
    }

    /// By a call that gives one number: the four of the link, and the two above.
    pub(crate) fn number(&self, name: &str) -> Answer<u32> {
        // SAFETY: all of them have this documented type.
        let call = unsafe { self.nvml.symbol::<unsafe extern "C" fn(Handle, *mut c_uint) -> c_uint>(name) };
        let mut number = 0;
        // SAFETY: the number outlives the call.
        checked(unsafe { call(self.handle, &raw mut number) }).map(|()| number)
    }

    fn text(&self, name: &str) -> String {
        // SAFETY: both have this documented type.
        let call =
            unsafe { self.nvml.symbol::<unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> c_uint>(name) };
        // SAFETY: there is space for the text.
        text(|text, len| unsafe { call(self.handle, text, len) }).unwrap()
    }
}

fn checked(code: c_uint) -> Answer<()> {
    if code == 0 { Ok(()) } else { Err(code) }
}

fn text(call: impl FnOnce(*mut c_char, c_uint) -> c_uint) -> Answer<String> {
    let mut text = [0u8; 96];
    checked(call(text.as_mut_ptr().cast(), 96))?;
    Ok(CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap().to_owned())
}
