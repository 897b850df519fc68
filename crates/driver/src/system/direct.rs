//! Files whose bytes pass the page cache by.

#[cfg(target_os = "linux")]
pub use linux::{direct, reopen};

/// Assumed alignment; no known device needs more.
pub const ALIGN_BYTES: u64 = 4096;

/// Multiples that direct reads and writes keep to, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// Of offsets and lengths.
    pub offset_bytes: u64,
    /// Of addresses.
    pub memory_bytes: u64,
}

impl Alignment {
    /// For offsets, at least [`ALIGN_BYTES`].
    #[must_use]
    pub fn unit(self) -> u64 {
        self.offset_bytes.max(ALIGN_BYTES)
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
    use rustix::io::Errno;

    use super::{ALIGN_BYTES, Alignment};

    /// `tmpfs` and `ramfs`: nothing lies past the page cache.
    const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

    /// Another descriptor of `plain`, opened with `access` (for reading, writing, or both) and for direct transfers.
    ///
    /// # Errors
    /// Why the file has none.
    pub fn direct(plain: &File, access: OFlags) -> Result<(File, Alignment), String> {
        let aligned = aligned(plain)?;
        match reopen(plain, access | OFlags::DIRECT) {
            Ok(direct) => Ok((direct, aligned)),
            Err(errno) => Err(format!("it cannot be opened for direct reads: {errno}")),
        }
    }

    /// The same file by descriptor, whatever its path now means, with its own position and advice.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn reopen(plain: &File, flags: OFlags) -> Result<File, Errno> {
        let path = format!("/proc/self/fd/{}", plain.as_raw_fd());
        rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).map(File::from)
    }

    fn aligned(plain: &File) -> Result<Alignment, String> {
        if rustix::fs::fstatfs(plain).is_ok_and(|system| IN_MEMORY.contains(&system.f_type)) {
            return Err("its file system keeps its files in memory".to_owned());
        }
        let unsaid = Alignment { offset_bytes: ALIGN_BYTES, memory_bytes: ALIGN_BYTES };
        let Ok(said) = rustix::fs::statx(plain, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
            return Ok(unsaid);
        };
        if !StatxFlags::from_bits_retain(said.stx_mask).contains(StatxFlags::DIOALIGN) {
            return Ok(unsaid); // By kernels before 6.1, and by file systems that say nothing.
        }
        let bytes = [said.stx_dio_offset_align, said.stx_dio_mem_align].map(u64::from);
        match bytes {
            [offset_bytes, memory_bytes] if bytes.iter().all(|bytes| bytes.is_power_of_two()) => {
                Ok(Alignment { offset_bytes, memory_bytes })
            }
            _ => Err("its file system does not support direct reads".to_owned()),
        }
    }
}
