//! Takes processes off NVIDIA's GPUs, through the driver's calls for that (`cuCheckpointProcess*`, driver 570).
//!
//! The contract is [`poorwill_core::hibernation`]. What the driver does beside it, as measured with 580.159:
//!
//! - The calls need the rights of a debugger: the same user or root, and the process's own numbers (its PID namespace).
//! - A state that is asked during a step is answered after it.
//! - A caller that is killed during a checkpoint or restore does not stop it: the process ends that step itself.
//! - The driver locks its own caller if asked; this refuses it.
//! - A communicator of NCCL passes lock and checkpoint, and then fails the restore. So [`inspect`] names it. One that is
//!   suspended comes back, unless its ranks share host memory by CUDA (`NCCL_CUMEM_HOST_ENABLE`).
//!
//! [`inspect`]: poorwill_core::hibernation::Checkpointer::inspect

mod calls;
mod checkpointer;
mod nccl;
mod seen;

pub use checkpointer::CudaCheckpointer;
