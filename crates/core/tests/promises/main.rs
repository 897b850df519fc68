//! What a pool promises on every device: run on the host device, on the CUDA driver over the fake library, and on GPUs.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod backups;
mod cancel;
mod capture;
mod changes;
mod codes;
mod copy_paths;
mod deadline;
mod faults;
mod growth;
mod handover;
mod hold;
mod host_reclaim;
mod in_flight;
mod kept;
mod lend;
mod links;
mod mark;
mod midst;
mod parts;
mod peer_copies;
mod pool;
mod prepare;
mod pressure;
mod property;
mod read_backup;
mod retry;
mod shared_memory;
mod sizes;
mod soak;
mod spans;
mod spill;
mod spoiled;
mod stage;
mod streams;
mod stress;
mod unknown_streams;
mod unused;
mod waits;
