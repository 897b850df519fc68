//! Calls that only C can make: NULL or too little space for results, and invalid handles.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

use std::ffi::{CStr, c_char, c_uint};
use std::ptr;

use library::{
    Handle, INSUFFICIENT_SIZE, INVALID_ARGUMENT, Memory, MemoryV2, Nvml, ProcessInfo, VERSION_MISMATCH,
};

mod library;

#[test]
fn arguments_from_c_are_checked() {
    let uuid = format!("GPU-{}", poorwill_fake_libcuda::uuid_text(0));
    let devices = format!("{uuid}:total=10:used=4:process=1/2:process=3/4");
    // SAFETY: this is the only test of the program, and no other thread of it reads the environment.
    unsafe { std::env::set_var("POORWILL_FAKE_NVML_DEVICES", devices) };
    let nvml = Nvml::open().unwrap();
    let device = nvml.by_index(0).unwrap().handle;
    let len = u32::try_from(uuid.len()).unwrap();

    type GetUuid = unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> c_uint;
    // SAFETY: its documented type.
    let get_uuid = unsafe { nvml.symbol::<GetUuid>("nvmlDeviceGetUUID") };
    let mut text = [1; 64];
    // SAFETY: the handle is the library's, and there is space for the text.
    assert_eq!(unsafe { get_uuid(device, text.as_mut_ptr(), len) }, INSUFFICIENT_SIZE);
    assert_eq!(text, [1; 64], "nothing was written");
    // SAFETY: as above.
    assert_eq!(unsafe { get_uuid(device, text.as_mut_ptr(), len + 1) }, 0);
    // SAFETY: the library has ended it with a zero.
    assert_eq!(unsafe { CStr::from_ptr(text.as_ptr()) }.to_str(), Ok(uuid.as_str()));
    // SAFETY: the library checks pointers before it uses them.
    assert_eq!(unsafe { get_uuid(device, ptr::null_mut(), 64) }, INVALID_ARGUMENT);
    // SAFETY: handles are looked up.
    assert_eq!(unsafe { get_uuid(Handle(0), text.as_mut_ptr(), 64) }, INVALID_ARGUMENT);
    // SAFETY: handles are looked up.
    let code = unsafe { get_uuid(Handle(2), text.as_mut_ptr(), 64) };
    assert_eq!(code, INVALID_ARGUMENT);

    type ByUuid = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_uint;
    // SAFETY: its documented type.
    let by_uuid = unsafe { nvml.symbol::<ByUuid>("nvmlDeviceGetHandleByUUID") };
    // SAFETY: the library checks pointers before it uses them.
    assert_eq!(unsafe { by_uuid(ptr::null(), ptr::null_mut()) }, INVALID_ARGUMENT);

    let mut memory = Memory::default();
    type MemoryInfo<T> = unsafe extern "C" fn(Handle, *mut T) -> c_uint;
    // SAFETY: its documented type.
    let memory_info = unsafe { nvml.symbol::<MemoryInfo<Memory>>("nvmlDeviceGetMemoryInfo") };
    // SAFETY: the struct is the one that this version writes.
    assert_eq!(unsafe { memory_info(device, &raw mut memory) }, 0);
    assert_eq!((memory.total, memory.free, memory.used), (10, 6, 4));

    let mut memory = MemoryV2::default();
    // SAFETY: its documented type.
    let memory_info = unsafe { nvml.symbol::<MemoryInfo<MemoryV2>>("nvmlDeviceGetMemoryInfo_v2") };
    // SAFETY: the struct is the one that this version writes.
    assert_eq!(unsafe { memory_info(device, &raw mut memory) }, VERSION_MISMATCH);
    assert_eq!(memory.total, 0);

    let mut processes = [ProcessInfo::default()];
    type List = unsafe extern "C" fn(Handle, *mut c_uint, *mut ProcessInfo) -> c_uint;
    // SAFETY: its documented type.
    let list = unsafe { nvml.symbol::<List>("nvmlDeviceGetComputeRunningProcesses_v3") };
    let mut count = 1;
    // SAFETY: there is space for one.
    assert_eq!(unsafe { list(device, &raw mut count, processes.as_mut_ptr()) }, INSUFFICIENT_SIZE);
    assert_eq!((count, processes[0].pid), (2, 0), "how many there are, and none of them");
    // SAFETY: the library checks pointers before it uses them.
    assert_eq!(unsafe { list(device, &raw mut count, ptr::null_mut()) }, INVALID_ARGUMENT);

    // SAFETY: its documented type.
    let string = unsafe { nvml.symbol::<unsafe extern "C" fn(c_uint) -> *const c_char>("nvmlErrorString") };
    for code in [0, 4, 12345] {
        // SAFETY: it takes any number.
        let text = unsafe { string(code) };
        // SAFETY: the library's texts live as long as it does, and end with a zero.
        assert!(!unsafe { CStr::from_ptr(text) }.is_empty());
    }
}
