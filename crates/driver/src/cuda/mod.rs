//! NVIDIA's GPUs, with the machine's driver.
//!
//! The driver's library is loaded at run time, so the same program also runs without one and reports that. No
//! CUDA toolkit is needed. Memory comes from the driver's virtual memory management, in the primary context,
//! which PyTorch and the CUDA runtime share.
//!
//! The contract does not ask for what a GPU cannot detect: an unmap under work in flight goes unnoticed here.
//! The host device and the tests' fake driver detect it.
//!
//! Layers, each of which uses only those below it:
//!
//! ```text
//! device the contract; with launch and buffers, the extensions of a GPU
//! state what is mapped transfer, copies, digest, codec moving, digesting, encoding
//! vm the calls for that kernel, slots, staging kernels and page-locked memory
//! peers queue, job, stream work in order, and what it keeps alive
//! context, registered a GPU's context with host memory; locked page-locks it
//! primary the context itself
//! gpu, ffi which GPUs exist; the library
//! checkpoint other processes, taken off their GPUs: beside the device, upon gpu and ffi
//! ```
//!
//! Rules C1 to C6 in `docs/unsafe.md` cover the `unsafe` code here.

mod buffers;
mod codec;
mod context;
mod copies;
mod device;
mod digest;
mod ffi;
mod gpu;
mod hibernation;
mod job;
mod kernel;
mod launch;
mod links;
mod locked;
mod peer_memory;
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

pub use codec::CODEC_PTX;
pub use copies::{COPY_PAGE_BYTES, COPY_PTX};
pub use device::{CudaConfig, CudaDevice};
pub use digest::{DIGEST_LEAVES_MAX, DIGEST_LEAVES_MIN, DIGEST_PTX};
pub use gpu::{GpuInfo, gpu, gpus};
pub use hibernation::CudaCheckpointer;
pub use kernel::{Function, Grid, KernelArg, Module};
pub use links::Links;
pub use peer_memory::PeerGpu;
pub use peers::Peers;
pub use primary::CudaMemory;
pub use registered::HostView;
