//! A library with the symbols of NVIDIA's `libcuda.so.1`, made of host memory.
//!
//! The CUDA driver of `poorwill-driver` loads it in place of the real one. So its loader, structs, flags and
//! order of calls are tested without a GPU. Memory, streams and events are those of
//! [`poorwill_driver::HostDevice`]: unmapped memory faults, and memory in flight cannot be unmapped.
//!
//! It is **strict**: it fails where the real library lets a mistake pass, such as an unmap under a running
//! kernel. Other differences:
//!
//! - A reservation belongs to the device of the current context, and takes mappings of its memory only.
//! - A mapping is of a whole backing. Other devices get access only together with the owner, and only for
//!   copies.
//! - The default stream does not wait for the others. `CU_STREAM_PER_THREAD` is not supported, and streams wait for
//!   events of their own device only.
//! - Every call on memory needs a current context, except the query of the granularity.
//! - Kernels see registered host memory at another address than the host. `cuMemHostGetDevicePointer` returns it for
//!   memory registered as mapped.
//! - A priority outside the range is refused; otherwise all streams are alike.
//! - A kernel is a function of [the table](self#kernels); only names are read from PTX.
//! - A graph counts the captured nodes and cannot be launched. A capture is of one stream.
//!
//! # Settings
//!
//! Read by the first `cuInit` that succeeds. A malformed setting fails it with `CUDA_ERROR_INVALID_VALUE`,
//! and the reason goes to stderr. Items are separated by commas.
//!
//! | variable | value |
//! |---|---|
//! | `POORWILL_FAKE_CUDA_DEVICES` | `TOTAL[/GRANULE]` per device; a granule may be `PAGE`. Default: `256GiB/2MiB,16GiB/PAGE` |
//! | `POORWILL_FAKE_CUDA_FAIL` | `SYMBOL:N[:COUNT[:CODE]]`: the N-th call of the symbol, counted from 1, and the COUNT - 1 after it do nothing and return CODE (default 999). `*` is every symbol that `poorwillFakeArm` counts |
//! | `POORWILL_FAKE_CUDA_DELAY` | `SYMBOL:MICROSECONDS`: calls of the symbol take that much longer |
//! | `POORWILL_FAKE_CUDA_SIMULATE` | `DEVICE:KEY=VALUE`: what a device [simulates](self#simulation) |
//! | `POORWILL_FAKE_CUDA_PROCESSES` | a folder: `cuInit` registers this process in it, and `cuCheckpointProcess*` finds others there. Without it, these are `CUDA_ERROR_NOT_SUPPORTED` |
//! | `POORWILL_FAKE_CUDA_CHECKPOINT` | what happens to this process [when it is taken off](self#checkpoints) |
//!
//! # Simulation
//!
//! By default a device is a whole GPU without other users. Keys combine; each may be set once per device. No
//! figure is rounded.
//!
//! | key | value | effect |
//! |---|---|---|
//! | `hami` | size | a preloaded limiter: `cuMemGetInfo` returns the smaller of limit and capacity as the total, and fails with `CUDA_ERROR_INVALID_VALUE` if more than the limit is in use; `cuDeviceTotalMem` returns 0 |
//! | `mps` | size | a client of the Multi-Process Service with a limit: less is free, the total is the whole card |
//! | `used` | size | memory in use by others, counted against the capacity and a limiter's limit |
//! | `mig` | profile, as in `1g.10gb` | the name ends in `MIG` and the profile |
//! | `integrated` | `0` or `1` | whether the device reports that it shares the host's memory; set `info_free` as well |
//! | `reaches` | numbers, joined by `+`, or `none` | the devices whose memory it can access (default: all others; for an instance, none) |
//! | `capability` | `MAJOR.MINOR` | the compute capability (default 8.0), and its shared memory |
//! | `shared` | size | opt-in shared memory per block |
//! | `total` | size | result of `cuDeviceTotalMem`, even if untrue |
//! | `info_total`, `info_free` | size | results of `cuMemGetInfo`, even if untrue |
//! | `info_code` | number | `cuMemGetInfo` fails with this `CUresult` |
//!
//! `cuMemCreate` gives only what `hami`, `mps` and `used` leave; more is `CUDA_ERROR_OUT_OF_MEMORY`.
//! `poorwillFakeCensus` counts this process's memory only.
//!
//! # Checkpoints
//!
//! Each process has devices of its own. A restore counts what the other processes of the folder hold, too. The state is the
//! process's, as of a [`poorwill_driver::host::HostProcess`]. `cuCheckpointProcessGetState` waits for a step under way.
//! A restore that fails loses the process: its state stays 2, and each later restore is `CUDA_ERROR_OPERATING_SYSTEM`.
//!
//! | item | effect |
//! |---|---|
//! | `STEP:CODE` | `lock`, `checkpoint`, `restore` or `unlock` fails with this `CUresult`, once |
//! | `STEP:CODE:failed` | likewise, and the state is 3 |
//! | `STEP:hold:PATH` | the step writes `PATH.reached`, and waits for the file `PATH`, once |
//! | `communicator` | the process shows a socket of NCCL's rank 1, and its restore fails with 801 |
//! | `suspended` | it shows that socket, and its restore works |
//! | `ipc` | the process shows memory of CUDA IPC, and its restore fails with 1 |
//!
//! # Symbols for tests
//!
//! - `void poorwillFakeArm(uint64_t first, uint64_t count)`: starts counting calls that a machine can make
//!   fail. These are all but `cuGetErrorName`, `cuGetErrorString`, `cuCtx{Push,Pop,Get,Set}Current` and
//!   `cuThreadExchangeStreamCaptureMode`. The calls `first` to `first + count - 1`, counted from 0, do
//!   nothing and return 999.
//! - `uint64_t poorwillFakeDisarm(void)`: stops that, and returns how many calls were counted.
//! - `CUresult poorwillFakeCalled(uint64_t number, char out[64])`: the name of a call since
//!   `poorwillFakeArm`, or `CUDA_ERROR_NOT_FOUND`.
//! - `CUresult poorwillFakeHold(const char *symbol)`: blocks calls of this symbol only;
//!   `CUDA_ERROR_NOT_FOUND` for an unknown symbol. `void poorwillFakeResume(void)` unblocks them; `uint64_t
//!   poorwillFakeHeld(void)` counts them.
//! - `CUresult poorwillFakeCensus(CUdevice device, struct Census *out)`: counts the device's objects.
//!
//! All affect the whole process: tests that use them take turns.
//!
//! # Kernels
//!
//! `src/kernels` has a host function for each kernel. `poorwill_test_fill` is for tests, and
//! [`TEST_FILL_PTX`] is its PTX for real GPUs. `poorwill_digest`, `poorwill_digest_host` and `poorwill_copy`
//! belong to the CUDA driver.
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
mod abi;
#[cfg(target_os = "linux")]
mod calls;
#[cfg(target_os = "linux")]
mod capture;
#[cfg(target_os = "linux")]
mod config;
#[cfg(target_os = "linux")]
mod context;
#[cfg(target_os = "linux")]
mod current;
#[cfg(target_os = "linux")]
mod device;
#[cfg(target_os = "linux")]
mod entry;
#[cfg(target_os = "linux")]
mod faults;
#[cfg(target_os = "linux")]
mod handle;
#[cfg(target_os = "linux")]
mod in_flight;
#[cfg(target_os = "linux")]
mod init;
#[cfg(target_os = "linux")]
mod kernels;
mod locate;
#[cfg(target_os = "linux")]
mod memory;
#[cfg(target_os = "linux")]
mod module;
#[cfg(target_os = "linux")]
mod peer;
#[cfg(target_os = "linux")]
mod process;
#[cfg(target_os = "linux")]
mod queue;
#[cfg(target_os = "linux")]
mod script;
#[cfg(target_os = "linux")]
mod simulation;
#[cfg(target_os = "linux")]
mod state;
#[cfg(target_os = "linux")]
mod testing;
#[cfg(target_os = "linux")]
mod text;
mod uuid;

#[cfg(target_os = "linux")]
pub use abi::Census;
pub use uuid::uuid_text;

/// Path of the shared library: the value of `POORWILL_FAKE_LIBCUDA` (any library with libcuda's symbols),
/// otherwise the one that cargo built with the running program.
///
/// # Panics
/// If there is none; the message lists the tried paths.
#[must_use]
pub fn path() -> std::path::PathBuf {
    locate::find("POORWILL_FAKE_LIBCUDA", "libpoorwill_fake_libcuda.so")
}

/// Writes a copy of the shared library that lacks the symbols of checkpoints, as drivers before 570 do.
///
/// # Errors
/// What the operating system reports.
pub fn without_checkpoints(folder: &std::path::Path) -> std::io::Result<std::path::PathBuf> {
    let mut bytes = std::fs::read(path())?;
    let name = b"cuCheckpointProcess";
    for at in 0..bytes.len().saturating_sub(name.len()) {
        if bytes[at..].starts_with(name) {
            bytes[at] = b'x'; // The linker compares names.
        }
    }
    let copy = folder.join("libpoorwill_old_libcuda.so");
    std::fs::write(&copy, bytes)?;
    Ok(copy)
}

/// PTX of `poorwill_test_fill(u64 address, u64 words, u32 value, u32 rounds)`, for `sm_70` and later. It
/// writes `value` to `words` words of four bytes, `rounds` times.
pub const TEST_FILL_PTX: &str = include_str!("../kernels/poorwill_test_fill.ptx");
