//! The loaded library: its symbols as methods, and the common setup of tests.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ops::Deref;
use std::process::{Command, Output};
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;
use poorwill_fake_libcuda::Census;

pub(crate) const OUT_OF_MEMORY: c_int = 2;
pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const NOT_INITIALIZED: c_int = 3;
pub(crate) const INVALID_DEVICE: c_int = 101;
pub(crate) const INVALID_CONTEXT: c_int = 201;
pub(crate) const INVALID_HANDLE: c_int = 400;
pub(crate) const NOT_READY: c_int = 600;
pub(crate) const ILLEGAL_ADDRESS: c_int = 700;
pub(crate) const CONTEXT_IS_DESTROYED: c_int = 709;
pub(crate) const NOT_PERMITTED: c_int = 800;
pub(crate) const UNKNOWN: c_int = 999;

/// `CUmemAllocationProp`, as a caller writes it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Prop {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location_kind: c_int,
    pub(crate) device: c_int,
    pub(crate) meta: usize,
    pub(crate) flags: [u8; 8],
}

/// Plain memory of a device.
pub(crate) fn prop(device: c_int) -> Prop {
    Prop { kind: 1, handle_types: 0, location_kind: 1, device, meta: 0, flags: [0; 8] }
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Access {
    pub(crate) location_kind: c_int,
    pub(crate) device: c_int,
    pub(crate) flags: c_int,
}

pub(crate) fn access(device: c_int) -> Access {
    Access { location_kind: 1, device, flags: 3 }
}

macro_rules! library {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)+) => {
        /// The symbols.
        #[allow(non_snake_case)]
        pub(crate) struct Cuda {
            $($name: unsafe extern "C" fn($($kind),*) -> $result,)+
            _library: Library,
        }

        #[allow(non_snake_case)]
        impl Cuda {
            fn load() -> Self {
                // SAFETY: the library does nothing when it is loaded.
                let library = unsafe { Library::new(poorwill_fake_libcuda::path()) }.unwrap();
                Self {
                    $($name: {
                        // SAFETY: the library's symbol has this type.
                        *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }.unwrap()
                    },)+
                    _library: library,
                }
            }

            $(
                #[allow(clippy::too_many_arguments)]
                pub(crate) fn $name(&self, $($argument: $kind),*) -> $result {
                    // SAFETY: the tests pass pointers to values that outlive the call, or NULL; what a copy or
                    // kernel uses outlives that.
                    unsafe { (self.$name)($($argument),*) }
                }
            )+
        }
    };
}

library! {
    cuInit(flags: c_uint) -> c_int;
    cuDriverGetVersion(version: *mut c_int) -> c_int;
    cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int;
    cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int;
    cuDeviceGetCount(count: *mut c_int) -> c_int;
    cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int;
    cuDeviceGetName(name: *mut u8, len: c_int, device: c_int) -> c_int;
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
    cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> c_int;
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int;
    cuDeviceGetPCIBusId(id: *mut u8, len: c_int, device: c_int) -> c_int;
    cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int;
    cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> c_int;
    cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int;
    cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) -> c_int;
    cuCtxCreate_v2(context: *mut u64, flags: c_uint, device: c_int) -> c_int;
    cuCtxDestroy_v2(context: u64) -> c_int;
    cuCtxPushCurrent_v2(context: u64) -> c_int;
    cuCtxPopCurrent_v2(context: *mut u64) -> c_int;
    cuCtxGetCurrent(context: *mut u64) -> c_int;
    cuCtxSetCurrent(context: u64) -> c_int;
    cuCtxGetDevice(device: *mut c_int) -> c_int;
    cuCtxGetStreamPriorityRange(lowest: *mut c_int, highest: *mut c_int) -> c_int;
    cuCtxSynchronize() -> c_int;
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;
    cuMemGetAllocationGranularity(granule: *mut usize, prop: *const Prop, option: c_int) -> c_int;
    cuMemAddressReserve(addr: *mut u64, bytes: usize, alignment: usize, wish: u64, flags: u64) -> c_int;
    cuMemAddressFree(addr: u64, bytes: usize) -> c_int;
    cuMemCreate(handle: *mut u64, bytes: usize, prop: *const Prop, flags: u64) -> c_int;
    cuMemRelease(handle: u64) -> c_int;
    cuMemMap(addr: u64, bytes: usize, offset: usize, handle: u64, flags: u64) -> c_int;
    cuMemUnmap(addr: u64, bytes: usize) -> c_int;
    cuMemSetAccess(addr: u64, bytes: usize, wanted: *const Access, count: usize) -> c_int;
    cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: c_uint) -> c_int;
    cuMemHostGetDevicePointer_v2(pointer: *mut u64, host: *mut c_void, flags: c_uint) -> c_int;
    cuMemHostUnregister(host: *mut c_void) -> c_int;
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: u64) -> c_int;
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: u64) -> c_int;
    cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64) -> c_int;
    cuMemcpyPeerAsync(
        to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize, stream: u64
    ) -> c_int;
    cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: u64) -> c_int;
    cuStreamCreate(stream: *mut u64, flags: c_uint) -> c_int;
    cuStreamCreateWithPriority(stream: *mut u64, flags: c_uint, priority: c_int) -> c_int;
    cuStreamDestroy_v2(stream: u64) -> c_int;
    cuStreamSynchronize(stream: u64) -> c_int;
    cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) -> c_int;
    cuStreamGetCtx(stream: u64, context: *mut u64) -> c_int;
    cuStreamIsCapturing(stream: u64, status: *mut c_int) -> c_int;
    cuStreamBeginCapture_v2(stream: u64, mode: c_int) -> c_int;
    cuStreamEndCapture(stream: u64, graph: *mut u64) -> c_int;
    cuGraphGetNodes(graph: u64, nodes: *mut c_void, count: *mut usize) -> c_int;
    cuGraphDestroy(graph: u64) -> c_int;
    cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int;
    cuEventCreate(event: *mut u64, flags: c_uint) -> c_int;
    cuEventDestroy_v2(event: u64) -> c_int;
    cuEventRecord(event: u64, stream: u64) -> c_int;
    cuEventQuery(event: u64) -> c_int;
    cuEventSynchronize(event: u64) -> c_int;
    cuLaunchHostFunc(stream: u64, function: Option<extern "C" fn(*mut c_void)>, data: *mut c_void) -> c_int;
    cuModuleLoadData(module: *mut u64, image: *const c_void) -> c_int;
    cuModuleUnload(module: u64) -> c_int;
    cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) -> c_int;
    cuLaunchKernel(
        function: u64, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: u64, params: *mut *mut c_void, extra: *mut c_void
    ) -> c_int;
    cuCheckpointProcessLock(pid: c_int, args: *mut [u32; 16]) -> c_int;
    cuCheckpointProcessCheckpoint(pid: c_int, args: *mut [u32; 16]) -> c_int;
    cuCheckpointProcessRestore(pid: c_int, args: *mut [u32; 16]) -> c_int;
    cuCheckpointProcessUnlock(pid: c_int, args: *mut [u32; 16]) -> c_int;
    cuCheckpointProcessGetState(pid: c_int, state: *mut c_int) -> c_int;
    poorwillFakeArm(first: u64, count: u64) -> ();
    poorwillFakeDisarm() -> u64;
    poorwillFakeCensus(device: c_int, out: *mut Census) -> c_int;
}

impl Cuda {
    /// The loaded library. Only another test may have called `cuInit`.
    pub(crate) fn loaded() -> &'static Self {
        static CUDA: OnceLock<Cuda> = OnceLock::new();
        CUDA.get_or_init(Self::load)
    }

    pub(crate) fn census(&self, device: c_int) -> Census {
        let mut census = Census::default();
        assert_eq!(self.poorwillFakeCensus(device, &raw mut census), 0);
        census
    }

    pub(crate) fn name_of(&self, code: c_int) -> Option<String> {
        let mut name = ptr::null();
        let known = self.cuGetErrorName(code, &raw mut name) == 0;
        assert_eq!(known, !name.is_null());
        // SAFETY: the library's names live as long as it does.
        known.then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned())
    }
}

/// A test's turn, with the primary context of device 0 current. The test fails if it leaves an object.
pub(crate) struct Turn {
    cuda: &'static Cuda,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Turn {
    type Target = Cuda;
    fn deref(&self) -> &Cuda {
        self.cuda
    }
}

/// Waits for a turn.
pub(crate) fn turn() -> Turn {
    static TURNS: Mutex<()> = Mutex::new(());
    let taken = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    let turn = Turn { cuda: Cuda::loaded(), _turn: taken };
    assert_eq!(turn.cuInit(0), 0);
    let mut context = 0;
    assert_eq!(turn.cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
    assert_eq!(turn.cuCtxSetCurrent(context), 0);
    turn
}

impl Drop for Turn {
    fn drop(&mut self) {
        let ended = [self.cuCtxSynchronize(), self.cuDevicePrimaryCtxRelease_v2(0)];
        if !std::thread::panicking() {
            assert_eq!(ended, [0, 0]);
            for device in 0..2 {
                assert_eq!(self.census(device), Census::default(), "left behind on device {device}");
            }
        }
    }
}

/// A mapping with access on device 0.
pub(crate) struct Mapped<'t> {
    cuda: &'t Turn,
    pub(crate) addr: u64,
    pub(crate) bytes: usize,
    pub(crate) handle: u64,
}

pub(crate) const GRANULE: usize = 2 << 20;

impl<'t> Mapped<'t> {
    pub(crate) fn new(cuda: &'t Turn, granules: usize) -> Self {
        let (mut addr, mut handle, bytes) = (0, 0, granules * GRANULE);
        assert_eq!(cuda.cuMemAddressReserve(&raw mut addr, bytes, 0, 0, 0), 0);
        assert_eq!(cuda.cuMemCreate(&raw mut handle, bytes, &prop(0), 0), 0);
        assert_eq!(cuda.cuMemMap(addr, bytes, 0, handle, 0), 0);
        assert_eq!(cuda.cuMemSetAccess(addr, bytes, &access(0), 1), 0);
        Self { cuda, addr, bytes, handle }
    }

    pub(crate) fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0xEE; bytes];
        let to = read.as_mut_ptr().cast();
        assert_eq!(self.cuda.cuMemcpyDtoHAsync_v2(to, self.addr + offset, bytes, 0), 0);
        assert_eq!(self.cuda.cuStreamSynchronize(0), 0);
        read
    }

    pub(crate) fn end(self) {
        assert_eq!(self.cuda.cuCtxSynchronize(), 0);
        assert_eq!(self.cuda.cuMemUnmap(self.addr, self.bytes), 0);
        assert_eq!(self.cuda.cuMemRelease(self.handle), 0);
        assert_eq!(self.cuda.cuMemAddressFree(self.addr, self.bytes), 0);
    }
}

/// Runs the test `name` of this file again in its own process with these variables.
pub(crate) fn in_a_child(name: &str, variables: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env("CHILD", name)
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

pub(crate) fn is_child() -> bool {
    std::env::var_os("CHILD").is_some()
}

/// Fails with the child's output, unless it ran one test successfully.
pub(crate) fn expect_success(output: &Output) {
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", output.status);
}
