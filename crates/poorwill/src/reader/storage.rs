//! Files read past the page cache, where their file system allows it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

pub(crate) use poorwill_driver::system::direct::{ALIGN_BYTES, Alignment};

#[cfg(target_os = "linux")]
use super::linux as system;
use crate::checkpoint::Checkpoint;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageCache {
    /// Cached bytes are used and stay; direct reads add none.
    Used,
    /// Drops cached pages that no other process maps, for callers that keep all bytes.
    Emptied,
}

/// Where bytes are read from; tests substitute failing storage.
pub(crate) trait Storage: Sync {
    /// Alignment of direct reads; `None` if the file is not read directly.
    fn direct(&self, file: usize) -> Option<Alignment>;
    fn read(&self, file: usize, direct: bool, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Fills `buf` if all of it is cached and may be used.
    fn read_cached(&self, file: usize, buf: &mut [u8], offset: u64) -> bool;
    fn disable_direct(&self, file: usize, because: String);
    fn drop_cached(&self, file: usize, offset: u64, bytes: u64);
}

pub(crate) struct Files<'a> {
    checkpoint: &'a Checkpoint,
    page_cache: PageCache,
    opened: Vec<OnceLock<Opened>>,
}

struct Opened {
    /// A separate descriptor, so that its advice affects no other user.
    own: Option<File>,
    direct: Option<(File, Alignment)>,
    because: OnceLock<String>,
}

impl<'a> Files<'a> {
    pub(crate) fn of(checkpoint: &'a Checkpoint, page_cache: PageCache) -> Self {
        let opened = checkpoint.files().iter().map(|_| OnceLock::new()).collect();
        Self { checkpoint, page_cache, opened }
    }

    /// `None` for an unread file; otherwise whether it was read directly, or why not.
    #[cfg(target_os = "linux")]
    pub(crate) fn how(&self, file: usize) -> Option<Result<(), String>> {
        self.opened[file].get().map(|opened| opened.because.get().cloned().map_or(Ok(()), Err))
    }

    fn plain(&self, file: usize) -> &File {
        self.checkpoint.files()[file].file()
    }

    fn opened(&self, file: usize) -> &Opened {
        let plain = self.plain(file);
        self.opened[file].get_or_init(|| {
            let own = (self.page_cache == PageCache::Emptied).then(|| {
                // Cached bytes would be held twice: the header, and what was read ahead of it.
                system::drop_cached(plain, 0, 0);
                system::without_reading_ahead(plain)
            });
            let (direct, because) = match system::direct(plain) {
                Ok(direct) => (Some(direct), OnceLock::new()),
                Err(because) => (None, OnceLock::from(because)),
            };
            Opened { own: own.flatten(), direct, because }
        })
    }
}

impl Drop for Files<'_> {
    fn drop(&mut self) {
        // The rest, such as pages read ahead beyond the dropped ranges.
        if self.page_cache == PageCache::Emptied {
            self.checkpoint.files().iter().for_each(|file| system::drop_cached(file.file(), 0, 0));
        }
    }
}

impl Storage for Files<'_> {
    fn direct(&self, file: usize) -> Option<Alignment> {
        let Opened { direct, because, .. } = self.opened(file);
        direct.as_ref().filter(|_| because.get().is_none()).map(|(_, aligned)| *aligned)
    }

    fn read(&self, file: usize, is_direct: bool, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let Opened { own, direct, .. } = self.opened(file);
        let direct = direct.as_ref().filter(|_| is_direct).map(|(direct, _)| direct);
        direct.or(own.as_ref()).unwrap_or(self.plain(file)).read_at(buf, offset)
    }

    fn read_cached(&self, file: usize, buf: &mut [u8], offset: u64) -> bool {
        self.page_cache == PageCache::Used && system::read_cached(self.plain(file), buf, offset)
    }

    fn disable_direct(&self, file: usize, because: String) {
        let _ = self.opened(file).because.set(because); // The first reason is the reason.
    }

    fn drop_cached(&self, file: usize, offset: u64, bytes: u64) {
        if self.page_cache == PageCache::Emptied {
            // Whole pages; neighbouring bytes in them are at worst read again.
            let begin = offset - offset % ALIGN_BYTES;
            let end = (offset + bytes).next_multiple_of(ALIGN_BYTES);
            system::drop_cached(self.plain(file), begin, end - begin);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::{Alignment, File};

    pub(super) fn direct(_: &File) -> Result<(File, Alignment), String> {
        Err("this system is not Linux".to_owned())
    }
    pub(super) fn without_reading_ahead(_: &File) -> Option<File> {
        None
    }
    pub(super) fn read_cached(_: &File, _: &mut [u8], _: u64) -> bool {
        false
    }
    pub(super) fn drop_cached(_: &File, _: u64, _: u64) {}
}
