//! Wakes from disk, beside a plain reader of the same file.

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use poorwill::backup::DiskInfo;
use poorwill::proc;
use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use crate::figures::as_float;

/// What a plain reader asks for at a time.
const BLOCK_BYTES: usize = 8 << 20;

const ALIGN_BYTES: usize = 4096;

/// Wakes of the load from disk.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiskCycles {
    /// The disk, after the first spill.
    pub disk: DiskInfo,
    /// In order.
    pub cycles: Vec<DiskCycle>,
    /// Best rate of a wake over the best rate of the plain reader, in stored bytes.
    pub read_ratio: f64,
}

/// A sleep whose backups are moved to disk, and the wake.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DiskCycle {
    /// Moving the backups to disk.
    pub spill_s: f64,
    /// Stored bytes that were moved.
    pub spilled_bytes: u64,
    /// The wake, with every byte read from disk.
    pub wake_s: f64,
    /// Stored bytes that it read.
    pub read_bytes: u64,
    /// One thread that reads the same file, 8 MiB at a time, past the page cache where that is possible.
    pub plain_read_s: f64,
    /// Bytes of the file.
    pub plain_read_bytes: u64,
}

impl DiskCycle {
    pub(super) fn ratio(cycles: &[Self]) -> f64 {
        let best = |rate: fn(&Self) -> f64| cycles.iter().map(rate).fold(0.0, f64::max);
        let woken = best(|cycle| as_float(cycle.read_bytes) / cycle.wake_s.max(1e-9));
        let plain = best(|cycle| as_float(cycle.plain_read_bytes) / cycle.plain_read_s.max(1e-9));
        woken / plain.max(1e-9)
    }
}

/// Seconds and bytes of a plain read of this process's unnamed file in `folder`.
pub(super) fn plain_read(folder: &Path) -> io::Result<(f64, u64)> {
    let path = unnamed_file(folder)?;
    let open = |flags| rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC | flags, Mode::empty());
    let file = fs::File::from(open(OFlags::DIRECT).or_else(|_| open(OFlags::empty()))?);
    let mut memory = vec![0_u8; BLOCK_BYTES + ALIGN_BYTES];
    let addr = memory.as_ptr().addr();
    let start = addr.next_multiple_of(ALIGN_BYTES) - addr;
    let (began, mut at) = (Instant::now(), 0);
    loop {
        match file.read_at(&mut memory[start..start + BLOCK_BYTES], at)? {
            0 => return Ok((began.elapsed().as_secs_f64(), at)),
            bytes => at += bytes as u64,
        }
    }
}

/// The longest file that this process has open in the folder, and that has no name.
fn unnamed_file(folder: &Path) -> io::Result<PathBuf> {
    let folder = fs::canonicalize(folder)?;
    let mut found: Option<(u64, PathBuf)> = None;
    for entry in fs::read_dir(proc::descriptors_folder(std::process::id()))? {
        let path = entry?.path();
        let (Ok(target), Ok(about)) = (fs::read_link(&path), fs::metadata(&path)) else { continue };
        if target.starts_with(&folder) && about.is_file() && about.nlink() == 0 {
            found = found.max(Some((about.len(), path)));
        }
    }
    let none = || io::Error::new(io::ErrorKind::NotFound, "the disk's file is not open");
    found.map(|(_, path)| path).ok_or_else(none)
}
