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
//! - A mapping is of a whole backing, and only the device that it belongs to gets access.
//! - The default stream does not wait for the others; `CU_STREAM_PER_THREAD` is not supported, and streams wait
//!   for events of their own device only.
//! - Every call on memory but the question for the granule needs a current context.
//! - A kernel is a function of [the table](self#kernels); its PTX is read for names only.
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
//!
//! # Symbols for tests
//!
//! - `void poorwillFakeArm(uint64_t first, uint64_t count)`: from now on counts every call of a symbol that can
//!   fail for a reason of the machine's (all but `cuGetErrorName`, `cuGetErrorString` and
//!   `cuCtx{Push,Pop,Get,Set}Current`). The calls number `first` to `first + count - 1`, counted from 0, do
//!   nothing and give 999.
//! - `uint64_t poorwillFakeDisarm(void)`: stops that, and gives how many calls were counted.
//! - `CUresult poorwillFakeCensus(CUdevice device, struct Census *out)`: what is there now; see [`Census`].
//!
//! All of these concern the whole process: tests that use them take turns.
//!
//! # Kernels
//!
//! `src/kernels` holds a function of the host for each kernel that can be launched: for now
//! `poorwill_test_fill`, whose PTX for real GPUs is [`TEST_FILL_PTX`].
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
mod abi;
#[cfg(target_os = "linux")]
mod calls;
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
mod place;
#[cfg(target_os = "linux")]
mod queue;
#[cfg(target_os = "linux")]
mod world;

#[cfg(target_os = "linux")]
pub use abi::Census;
pub use place::path;

/// PTX of the kernel `poorwill_test_fill(u64 address, u64 words, u32 value, u32 rounds)`, for `sm_70` and
/// later: writes `value` to `words` words of four bytes at `address`, `rounds` times over.
pub const TEST_FILL_PTX: &str = include_str!("../kernels/poorwill_test_fill.ptx");
