//! A library with the symbols of NVIDIA's `libcuda.so.1`, made of host memory.
//!
//! The CUDA driver of `poorwill-driver` loads it in place of the real one, so that its loader, its structs,
//! its flags and the order of its calls are tested where no GPU is. Memory, streams and events are those of
//! [`poorwill_driver::HostDevice`]: what is not mapped faults, and what is in flight cannot be unmapped.
//!
//! It is **strict**: where the real library would let a mistake pass (an unmap under a running kernel, a copy
//! on a stream of another context), it answers with an error. It differs from the real one in this:
//!
//! - A reservation belongs to the device whose context was current when it was made, and takes mappings of
//!   that device's memory only.
//! - A mapping is of a whole backing, and other devices get access together with the one that it belongs to only. What
//!   they may do then is copy; their kernels do not reach it.
//! - The default stream does not wait for the others; `CU_STREAM_PER_THREAD` is not supported, and streams wait
//!   for events of their own device only.
//! - Every call on memory but the question for the granule needs a current context.
//! - Kernels know registered memory of the host by another address than the host, which
//!   `cuMemHostGetDevicePointer` gives for what was registered as mapped.
//! - A priority that is out of the range is refused; otherwise all streams are alike.
//! - A kernel is a function of [the table](self#kernels); its PTX is read for names only.
//! - A graph counts what was captured and cannot be launched. A capture is of one stream: others do not join it.
//!
//! # Settings
//!
//! Read by the first `cuInit` that succeeds. With a malformed one `cuInit` gives `CUDA_ERROR_INVALID_VALUE` and
//! says on stderr what is wrong.
//!
//! | variable | value |
//! |---|---|
//! | `POORWILL_FAKE_CUDA_DEVICES` | `TOTAL[/GRANULE]` per device, separated by commas; `PAGE` is a granule, too. Without it: `256GiB/2MiB,16GiB/PAGE` |
//! | `POORWILL_FAKE_CUDA_FAIL` | `SYMBOL:N[:COUNT[:CODE]]`, separated by commas: the N-th call of the symbol, counted from 1, and the COUNT - 1 after it do nothing and give CODE (otherwise 999). `*` is every symbol that `poorwillFakeArm` counts |
//! | `POORWILL_FAKE_CUDA_DELAY` | `SYMBOL:MICROSECONDS`, separated by commas: calls of the symbol take that much longer |
//! | `POORWILL_FAKE_CUDA_PLAY` | `DEVICE:KEY=VALUE`, separated by commas: what a device [plays](self#plays) |
//!
//! # Plays
//!
//! Without a play a device is a whole GPU of its own. Each key may be set once per device, and they go together:
//! a limit and neighbours, for one. No figure is rounded, and the capacity is that of `POORWILL_FAKE_CUDA_DEVICES`.
//!
//! | key | value | what the device does then |
//! |---|---|---|
//! | `hami` | size | as under a limiter that is preloaded: `cuMemGetInfo` gives the least of limit and capacity as the total, and fails with `CUDA_ERROR_INVALID_VALUE` when more than the limit is in use; `cuDeviceTotalMem` gives 0 |
//! | `mps` | size | as for a client of the Multi-Process Service with a limit: less is free, the total is the whole card |
//! | `used` | size | others use that much, of the capacity and of a limiter's limit |
//! | `mig` | profile, as in `1g.10gb` | its name ends in `MIG` and the profile |
//! | `integrated` | `0` or `1` | whether it says that it shares the host's memory; `info_free` plays the rest |
//! | `reaches` | numbers, joined by `+`, or `none` | the devices whose memory it can be given access to (otherwise all others; an instance none) |
//! | `capability` | `MAJOR.MINOR` | its compute capability (otherwise 8.0), and the shared memory that goes with it |
//! | `shared` | size | what a block can have of shared memory when it asks for it |
//! | `total` | size | said by `cuDeviceTotalMem`, whatever is true |
//! | `info_total`, `info_free` | size | said by `cuMemGetInfo`, whatever is true |
//! | `info_code` | number | `cuMemGetInfo` fails with this `CUresult` |
//!
//! What `hami`, `mps` and `used` leave is all that `cuMemCreate` gives, and more is `CUDA_ERROR_OUT_OF_MEMORY`.
//! `poorwillFakeCensus` counts what this process holds, without the others' share.
//!
//! # Symbols for tests
//!
//! - `void poorwillFakeArm(uint64_t first, uint64_t count)`: from now on counts every call of a symbol that can
//!   fail for a reason of the machine's (all but `cuGetErrorName`, `cuGetErrorString`,
//!   `cuCtx{Push,Pop,Get,Set}Current` and `cuThreadExchangeStreamCaptureMode`). The calls number `first` to
//!   `first + count - 1`, counted from 0, do nothing and give 999.
//! - `uint64_t poorwillFakeDisarm(void)`: stops that, and gives how many calls were counted.
//! - `CUresult poorwillFakeCalled(uint64_t number, char out[64])`: the name of the call with this number, of those that
//!   were counted since `poorwillFakeArm`; `CUDA_ERROR_NOT_FOUND` where there were fewer.
//! - `CUresult poorwillFakeHold(const char *symbol)`: from now on calls of the symbol wait, and none of another any more;
//!   `CUDA_ERROR_NOT_FOUND` where there is no such symbol. `void poorwillFakeLetGo(void)` has them go on, and
//!   `uint64_t poorwillFakeHeld(void)` tells how many wait.
//! - `CUresult poorwillFakeCensus(CUdevice device, struct Census *out)`: what is there now; see [`Census`].
//!
//! All of these concern the whole process: tests that use them take turns.
//!
//! # Kernels
//!
//! `src/kernels` holds a function of the host for each kernel that can be launched: `poorwill_test_fill`,
//! whose PTX for real GPUs is [`TEST_FILL_PTX`], and `poorwill_digest` and `poorwill_digest_host`, which
//! the CUDA driver brings along.
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
mod entry;
#[cfg(target_os = "linux")]
mod faults;
#[cfg(target_os = "linux")]
mod kernels;
#[cfg(target_os = "linux")]
mod memory;
#[cfg(target_os = "linux")]
mod module;
#[cfg(target_os = "linux")]
mod peer;
mod place;
#[cfg(target_os = "linux")]
mod play;
#[cfg(target_os = "linux")]
mod queue;
mod uuid;
#[cfg(target_os = "linux")]
mod world;

#[cfg(target_os = "linux")]
pub use abi::Census;
pub use uuid::uuid_text;

/// The shared library: what the environment variable `POORWILL_FAKE_LIBCUDA` names (any library with the
/// symbols of libcuda), otherwise the one that cargo built with the running program.
///
/// # Panics
/// When it is not there; the message says where it was looked for.
#[must_use]
pub fn path() -> std::path::PathBuf {
    place::find("POORWILL_FAKE_LIBCUDA", "libpoorwill_fake_libcuda.so")
}

/// PTX of the kernel `poorwill_test_fill(u64 address, u64 words, u32 value, u32 rounds)`, for `sm_70` and
/// later: writes `value` to `words` words of four bytes at `address`, `rounds` times over.
pub const TEST_FILL_PTX: &str = include_str!("../kernels/poorwill_test_fill.ptx");
