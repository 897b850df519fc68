//! GPUs that are played: each has so many bytes, and those who are on it hold what their processes hold.
//!
//! What a process holds is the operating system's figure: its share of the pages that it has in memory (`Pss`, shared
//! pages counted in parts, by `/proc/PID/smaps_rollup`), or all of them (`VmRSS`) where its shares are not told. Either
//! counts the memory of Poorwill's host device, which is a file in memory that is mapped. A program's own memory counts as well,
//! so a process holds something of the GPU as soon as it is there, as on a real one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::{fmt, fs, io};

use super::{Measured, Memory, Meter, on_a_thread};
use crate::policy::Gpu;
use crate::supervise::has_ended;

/// The numbers of the processes that are on a GPU. It may wait for files.
pub type PidsOn = Arc<dyn Fn(Gpu) -> Vec<u32> + Send + Sync>;

/// Measures processes in place of GPUs.
#[derive(Clone)]
pub struct Processes {
    gpu_bytes: u64,
    pids: PidsOn,
}

impl Processes {
    /// With GPUs of so many bytes each, and who is on them.
    #[must_use]
    pub fn new(gpu_bytes: u64, pids: PidsOn) -> Self {
        Self { gpu_bytes, pids }
    }
}

impl fmt::Debug for Processes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Processes").field("gpu_bytes", &self.gpu_bytes).finish_non_exhaustive()
    }
}

impl Meter for Processes {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        let Self { gpu_bytes, pids } = self.clone();
        Box::pin(on_a_thread(gpus, move |gpu| {
            let mut used_bytes = 0_u64;
            for pid in BTreeSet::from_iter(pids(gpu)) {
                let held = held_bytes(pid).map_err(|error| {
                    format!("what process {pid} holds cannot be read: {error}; it needs Linux's /proc")
                })?;
                used_bytes = used_bytes.saturating_add(held);
            }
            Ok(Memory { free_bytes: gpu_bytes.saturating_sub(used_bytes), total_bytes: gpu_bytes })
        }))
    }
}

/// What a process holds; nothing if it has ended.
fn held_bytes(pid: u32) -> io::Result<u64> {
    // Where the system tells no shares it has no such file, or not for this user.
    let shares = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"));
    let (text, key) = match shares {
        Ok(text) if !text.is_empty() => (text, "Pss:"),
        _ => match fs::read_to_string(format!("/proc/{pid}/status")) {
            Ok(text) => (text, "VmRSS:"),
            Err(error) if has_ended(&error) => return Ok(0),
            Err(error) => return Err(error),
        },
    };
    // Of one that has ended and was not asked how there is no such line.
    let Some(line) = text.lines().find_map(|line| line.strip_prefix(key)) else { return Ok(0) };
    let kib = line.trim().strip_suffix("kB").and_then(|kib| kib.trim().parse::<u64>().ok());
    let bytes = kib.and_then(|kib| kib.checked_mul(1024));
    bytes.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("`{key}{line}` is no size")))
}
