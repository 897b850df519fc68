//! NVIDIA's GPUs, through whatever driver the machine has.
//!
//! The driver's library is opened at run time, so the same program runs where there is none and says so; nothing
//! of a CUDA toolkit is needed, to build or to run. Memory is that of the driver's virtual memory management, in
//! the primary context, which PyTorch and the CUDA runtime use as well.
//!
//! What a GPU cannot tell, the contract does not ask for: work in flight under an unmap is not noticed here (it is
//! on the host device and in the tests' fake driver). Digests are computed by a kernel where the driver takes it, on the
//! host otherwise; copies to the device are made by copy engines, and on streams made for that by a kernel.
//!
//! Floors, each of which knows those below it alone (`host` has files of the same names for the same things):
//!
//! ```text
//! device                the contract; beside it launch and buffers, what callers of a GPU get beyond it
//! state                 what is mapped          transfer, copies, digest   how bytes move and are digested
//! vm                    the calls for that      kernel, slots, staging     by kernels, through page-locked memory
//! peers                                         queue, job, stream         work in order, and what it keeps alive
//! context, registered   a GPU's context with host memory; locked page-locks it
//! primary               the context itself
//! gpu, ffi              which GPUs there are; the library
//! ```
//!
//! The rules behind the `unsafe` here are C1 to C6 in `docs/unsafe.md`.

mod buffers;
mod context;
mod copies;
mod device;
mod digest;
mod ffi;
mod gpu;
mod job;
mod kernel;
mod launch;
mod locked;
mod peers;
mod primary;
mod queue;
mod registered;
mod slots;
mod staging;
mod state;
mod stream;
mod transfer;
mod usage;
mod vm;

pub use copies::{COPY_PAGE_BYTES, COPY_PTX};
pub use device::{CudaConfig, CudaDevice};
pub use digest::{DIGEST_LEAVES_MAX, DIGEST_LEAVES_MIN, DIGEST_PTX};
pub use gpu::{GpuInfo, gpu, gpus};
pub use kernel::{Function, Grid, KernelArg, Module};
pub use peers::Peers;
pub use primary::CudaMemory;
pub use registered::HostView;
