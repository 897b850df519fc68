//! Linux calls for reads past the page cache.

use std::fs::File;
use std::io::IoSliceMut;
use std::num::NonZeroU64;

use poorwill_driver::system::direct::{Alignment, reopen};
use rustix::fs::{Advice, OFlags};
use rustix::io::ReadWriteFlags;

pub(super) fn direct(plain: &File) -> Result<(File, Alignment), String> {
    poorwill_driver::system::direct::direct(plain, OFlags::RDONLY)
}

/// A descriptor without read-ahead, whose extra bytes would only be dropped.
pub(super) fn without_reading_ahead(plain: &File) -> Option<File> {
    let own = reopen(plain, OFlags::RDONLY).ok()?;
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
