//! A library to preload (`LD_PRELOAD`), by which the GPU memory of a whole process sleeps and wakes.
//!
//! It stands in for `cudaMalloc` and `cudaFree`. On threads inside a *region* memory comes from a Poorwill arena of the
//! current device; elsewhere the calls go to the real CUDA runtime. `tms_pause` and `tms_resume` put the memory of a tag to
//! sleep and wake it. The C interface is that of `torch_memory_saver` 0.0.10, by its documented behaviour.
//!
//! - A process without regions notices nothing: nothing happens when the library is loaded, and no device is opened.
//!   A call reaches the CUDA runtime of the global scope, as without this library. Where there is none, it reaches one
//!   that the calling library depends on, whatever its name. A wrapper that jumps to `cudaMalloc` counts as its caller.
//!   Other libraries that stand in for `cudaMalloc` come before this one in `LD_PRELOAD`.
//! - Nothing ends the process. Every failure is a code of `cudaError_t`, and
//!   `poorwill_tms_last_error` returns the calling thread's last sentence.
//! - A pause or resume does everything or, where a device fails, undoes what it did on others. Pausing what is paused,
//!   and resuming what is active, is no error.
//! - In a forked child all calls on the parent's memory are errors. None of them waits.
//!
//! # Settings
//!
//! Booleans are `1`, `true`, `TRUE`, `yes`, `YES`, or `0`, `false`, `FALSE`, `no`, `NO`.
//!
//! | variable | meaning |
//! |---|---|
//! | `TMS_INIT_ENABLE` | whether threads begin inside a region |
//! | `TMS_INIT_ENABLE_CPU_BACKUP` | whether they back up to host memory |
//! | `TMS_INIT_ENABLE_DISK_BACKUP` | whether they back up to disk |
//! | `TMS_INIT_CPU_BACKUP_BACKEND` | `pinned` (default): backups stay for the next pause; `mmap`: a resume drops them |
//! | `TMS_RETAIN_CPU_BACKUP` | whether backups of active memory can be read, and stay for `mmap`, too |
//! | `TMS_DISK_BACKUP_DIR` | folder of backups on disk (default `/tmp`) |
//! | `TMS_DISK_BACKUP_CHUNK_MB` | has no effect |
//! | `POORWILL_WAKE_TIMEOUT` | how many seconds a resume waits for memory that others are about to release (default 2) |
//! | `POORWILL_LEND` | whether pauses lend memory at a broker that runs, instead of releasing it |
//! | `POORWILL_BROKER` | the broker's socket, by default the user's |
//! | `POORWILL_COMPRESS` | `off` (default), `auto` or `always`: whether backups are stored as codes, which `tms_get_cpu_backup_pointer` cannot read |
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

mod backup;
mod code;
mod environment;
mod interpose;
mod loader;
mod message;
mod runtime;
mod saver;
mod symbols;
mod sync;
mod thread;
