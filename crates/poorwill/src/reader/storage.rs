//! Files that are read past the page cache, where their file system does it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

#[cfg(target_os = "linux")]
use super::linux as system;
use crate::checkpoint::Checkpoint;

/// What a device asks for where it is not said: more is asked for by none that is known.
pub(crate) const ALIGN_BYTES: u64 = 4096;

/// What direct reads begin and end at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// In the file.
    pub(crate) offset_bytes: u64,
    /// In memory.
    pub(crate) memory_bytes: u64,
}

impl Alignment {
    /// What reads keep to in the file, wherever they go.
    pub(crate) fn unit(self) -> u64 {
        self.offset_bytes.max(ALIGN_BYTES)
    }
}

/// What becomes of the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageCache {
    /// What it has of the files is taken from there and stays; nothing is added where files are read directly.
    Used,
    /// It has nothing of the files at the end that nobody else holds there: for who holds all of it in host memory.
    Emptied,
}

/// What is read from. A seam: in tests it fails as storage does.
pub(crate) trait Storage: Sync {
    /// What direct reads of this file have to keep to; nothing where it is not read directly.
    fn direct(&self, file: usize) -> Option<Alignment>;
    /// One read, which may give less than was asked for.
    fn read(&self, file: usize, direct: bool, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Fills `buf` if the page cache has all of that, and may be used.
    fn read_cached(&self, file: usize, buf: &mut [u8], offset: u64) -> bool;
    /// From now on the file is not read directly.
    fn disable_direct(&self, file: usize, because: String);
    /// Drops what the page cache has of these bytes, unless it may keep them.
    fn drop_cached(&self, file: usize, offset: u64, bytes: u64);
}

/// The files of a checkpoint, each opened when its first byte is read.
pub(crate) struct Files<'a> {
    checkpoint: &'a Checkpoint,
    page_cache: PageCache,
    opened: Vec<OnceLock<Opened>>,
}

struct Opened {
    /// A descriptor of our own, as it should be: its advice is nobody else's.
    own: Option<File>,
    direct: Option<(File, Alignment)>,
    /// Why it is not read directly, if it is not.
    because: OnceLock<String>,
}

impl<'a> Files<'a> {
    pub(crate) fn of(checkpoint: &'a Checkpoint, page_cache: PageCache) -> Self {
        let opened = checkpoint.files().iter().map(|_| OnceLock::new()).collect();
        Self { checkpoint, page_cache, opened }
    }

    /// Whether a file was read, and why it was not read directly, if it was not.
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
                // What is cached would be held twice: at least the header, and what was read ahead of it.
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
        // Whatever is left of them, as what was read ahead in larger ranges than were dropped.
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
            // Whole pages, also where they have something else at their ends: that is read again at worst.
            let begin = offset - offset % ALIGN_BYTES;
            let end = (offset + bytes).next_multiple_of(ALIGN_BYTES);
            system::drop_cached(self.plain(file), begin, end - begin);
        }
    }
}

/// Where there are no direct reads that are known.
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
