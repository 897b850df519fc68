//! Calls that only C can make: NULL or too little space for results, and invalid handles.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

use std::ffi::CStr;
use std::{mem, ptr};

use nvml_wrapper::Nvml;

const INVALID_ARGUMENT: u32 = 2;
const INSUFFICIENT_SIZE: u32 = 7;
const VERSION_MISMATCH: u32 = 25;

#[test]
fn arguments_from_c_are_checked() {
    let uuid = format!("GPU-{}", poorwill_fake_libcuda::uuid_text(0));
    let devices = format!("{uuid}:total=10:used=4:process=1/2:process=3/4");
    // SAFETY: this is the only test of the program, and no other thread of it reads the environment.
    unsafe { std::env::set_var("POORWILL_FAKE_NVML_DEVICES", devices) };
    let nvml = Nvml::builder().lib_path(poorwill_fake_nvml::path().as_os_str()).init().unwrap();
    let device = nvml.device_by_index(0).unwrap();
    let (lib, len) = (nvml.lib(), u32::try_from(uuid.len()).unwrap());

    let get_uuid = *lib.nvmlDeviceGetUUID.as_ref().unwrap();
    let mut text = [1; 64];
    // SAFETY: the handle is the library's, and there is space for the text.
    let device = unsafe { device.handle() };
    // SAFETY: as above.
    assert_eq!(unsafe { get_uuid(device, text.as_mut_ptr(), len) }, INSUFFICIENT_SIZE);
    assert_eq!(text, [1; 64], "nothing was written");
    // SAFETY: as above.
    assert_eq!(unsafe { get_uuid(device, text.as_mut_ptr(), len + 1) }, 0);
    // SAFETY: the library has ended it with a zero.
    assert_eq!(unsafe { CStr::from_ptr(text.as_ptr()) }.to_str(), Ok(uuid.as_str()));
    // SAFETY: the library checks pointers before it uses them.
    assert_eq!(unsafe { get_uuid(device, ptr::null_mut(), 64) }, INVALID_ARGUMENT);
    // SAFETY: handles are looked up.
    assert_eq!(unsafe { get_uuid(ptr::null_mut(), text.as_mut_ptr(), 64) }, INVALID_ARGUMENT);
    // SAFETY: handles are looked up.
    let code = unsafe { get_uuid(ptr::without_provenance_mut(2), text.as_mut_ptr(), 64) };
    assert_eq!(code, INVALID_ARGUMENT);

    let by_uuid = *lib.nvmlDeviceGetHandleByUUID.as_ref().unwrap();
    // SAFETY: the library checks pointers before it uses them.
    assert_eq!(unsafe { by_uuid(ptr::null(), ptr::null_mut()) }, INVALID_ARGUMENT);

    // SAFETY: a struct of numbers.
    let mut memory = unsafe { mem::zeroed() };
    let memory_info = *lib.nvmlDeviceGetMemoryInfo.as_ref().unwrap();
    // SAFETY: the struct is the one that this version writes.
    assert_eq!(unsafe { memory_info(device, &raw mut memory) }, 0);
    assert_eq!((memory.total, memory.free, memory.used), (10, 6, 4));

    // SAFETY: a struct of numbers.
    let mut memory = unsafe { mem::zeroed() };
    let memory_info = *lib.nvmlDeviceGetMemoryInfo_v2.as_ref().unwrap();
    // SAFETY: the struct is the one that this version writes.
    assert_eq!(unsafe { memory_info(device, &raw mut memory) }, VERSION_MISMATCH);
    assert_eq!(memory.total, 0);

    // SAFETY: structs of numbers.
    let mut processes = [unsafe { mem::zeroed() }];
    let list = *lib.nvmlDeviceGetComputeRunningProcesses_v3.as_ref().unwrap();
    let mut count = 1;
    // SAFETY: there is space for one.
    assert_eq!(unsafe { list(device, &raw mut count, processes.as_mut_ptr()) }, INSUFFICIENT_SIZE);
    assert_eq!((count, processes[0].pid), (2, 0), "how many there are, and none of them");
    // SAFETY: the library checks pointers before it uses them.
    assert_eq!(unsafe { list(device, &raw mut count, ptr::null_mut()) }, INVALID_ARGUMENT);

    let string = *lib.nvmlErrorString.as_ref().unwrap();
    for code in [0, 4, 12345] {
        // SAFETY: it takes any number.
        let text = unsafe { string(code) };
        // SAFETY: the library's texts live as long as it does, and end with a zero.
        assert!(!unsafe { CStr::from_ptr(text) }.is_empty());
    }
}
