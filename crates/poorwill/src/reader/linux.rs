//! Linux calls for reads past the page cache.

use std::fs::File;
use std::io::IoSliceMut;
use std::num::NonZeroU64;
use std::os::fd::AsRawFd;

use rustix::fs::{Advice, AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};

use super::storage::{ALIGN_BYTES, Alignment};

/// `tmpfs` and `ramfs`: nothing lies past the page cache.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

pub(super) fn direct(plain: &File) -> Result<(File, Alignment), String> {
    let aligned = aligned(plain)?;
    match reopen(plain, OFlags::DIRECT) {
        Ok(direct) => Ok((direct, aligned)),
        Err(errno) => Err(format!("it cannot be opened for direct reads: {errno}")),
    }
}

/// A descriptor without read-ahead, whose extra bytes would only be dropped.
pub(super) fn without_reading_ahead(plain: &File) -> Option<File> {
    let own = reopen(plain, OFlags::empty()).ok()?;
    let _ = rustix::fs::fadvise(&own, 0, None, Advice::Random);
    Some(own)
}

pub(super) fn read_cached(plain: &File, buf: &mut [u8], offset: u64) -> bool {
    let mut got = 0;
    while got < buf.len() {
        let rest = &mut [IoSliceMut::new(&mut buf[got..])];
        match rustix::io::preadv2(plain, rest, offset + got as u64, ReadWriteFlags::NOWAIT) {
            Ok(0) | Err(_) => return false,
            Ok(bytes) => got += bytes,
        }
    }
    true
}

/// 0 `bytes` means to the end.
pub(super) fn drop_cached(plain: &File, offset: u64, bytes: u64) {
    let _ = rustix::fs::fadvise(plain, offset, NonZeroU64::new(bytes), Advice::DontNeed);
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

/// The same file by descriptor, whatever its path now means, with its own position and advice.
fn reopen(plain: &File, flags: OFlags) -> Result<File, Errno> {
    let path = format!("/proc/self/fd/{}", plain.as_raw_fd());
    rustix::fs::open(path, flags | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map(File::from)
}
