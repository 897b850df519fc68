//! Files that are read past the page cache, where their file system does it.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::num::NonZeroU64;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Advice, AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::checkpoint::Checkpoint;

/// What a device asks for where it is not said: more is asked for by none that is known.
pub(super) const ALIGN_BYTES: u64 = 4096;

/// File systems whose files are in memory, so that there is nothing past the page cache.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// What direct reads begin and end at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Aligned {
    /// In the file.
    pub(super) offset_bytes: u64,
    /// In memory.
    pub(super) memory_bytes: u64,
}

/// What is read from. A seam: in tests it fails as storage does.
pub(super) trait Storage: Sync {
    /// What direct reads of this file have to keep to; nothing where it is not read directly.
    fn direct(&self, file: usize) -> Option<Aligned>;
    /// One read, which may give less than was asked for.
    fn read(&self, file: usize, direct: bool, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    /// From now on the file is not read directly.
    fn give_up_direct(&self, file: usize, because: String);
    /// Drops what the page cache has of these bytes.
    fn forget(&self, file: usize, offset: u64, bytes: u64);
}

/// The files of a checkpoint, each opened when its first byte is read. Dropped, it leaves nothing of them in the page
/// cache that somebody else does not hold there.
pub(super) struct Files<'a> {
    checkpoint: &'a Checkpoint,
    opened: Vec<OnceLock<Opened>>,
}

struct Opened {
    /// A descriptor of our own, as it should be: its advice is nobody else's.
    own: Option<File>,
    direct: Option<(File, Aligned)>,
    is_given_up: AtomicBool,
    because: OnceLock<String>,
}

impl<'a> Files<'a> {
    pub(super) fn of(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, opened: checkpoint.files().iter().map(|_| OnceLock::new()).collect() }
    }

    /// Whether a file was read, and why it was not read directly, if it was not.
    pub(super) fn how(&self, file: usize) -> Option<Result<(), String>> {
        let opened = self.opened.get(file)?.get()?;
        Some(match opened.because.get() {
            None => Ok(()),
            Some(because) => Err(because.clone()),
        })
    }

    fn plain(&self, file: usize) -> io::Result<&File> {
        let file = self.checkpoint.files().get(file).ok_or(ErrorKind::NotFound)?;
        Ok(file.file())
    }

    fn opened(&self, file: usize) -> io::Result<&Opened> {
        let plain = self.plain(file)?;
        Ok(self.opened[file].get_or_init(|| Opened::of(plain)))
    }
}

impl Drop for Files<'_> {
    fn drop(&mut self) {
        // Whatever is left of them, as what was read ahead in larger pieces than were dropped.
        for file in self.checkpoint.files() {
            let _ = rustix::fs::fadvise(file.file(), 0, None, Advice::DontNeed);
        }
    }
}

impl Opened {
    fn of(plain: &File) -> Self {
        let own = reopen(plain, OFlags::empty()).ok();
        if let Some(own) = &own {
            // Readers ask for what they want; what is read ahead of one would only be dropped.
            let _ = rustix::fs::fadvise(own, 0, None, Advice::Random);
        }
        // What is cached would be held twice: at least the header, and what was read ahead of it.
        let _ = rustix::fs::fadvise(plain, 0, None, Advice::DontNeed);
        let opened = |direct, because: Option<String>| {
            let because = because.map_or_else(OnceLock::new, OnceLock::from);
            Self { own, direct, is_given_up: AtomicBool::new(false), because }
        };
        match aligned(plain) {
            Err(because) => opened(None, Some(because)),
            Ok(aligned) => match reopen(plain, OFlags::DIRECT) {
                Ok(direct) => opened(Some((direct, aligned)), None),
                Err(errno) => opened(None, Some(format!("it cannot be opened for direct reads: {errno}"))),
            },
        }
    }
}

/// What direct reads have to keep to, or why there are none.
fn aligned(plain: &File) -> Result<Aligned, String> {
    if rustix::fs::fstatfs(plain).is_ok_and(|system| IN_MEMORY.contains(&system.f_type)) {
        return Err("its file system keeps its files in memory".to_owned());
    }
    let unsaid = Aligned { offset_bytes: ALIGN_BYTES, memory_bytes: ALIGN_BYTES };
    let Ok(said) = rustix::fs::statx(plain, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Ok(unsaid);
    };
    if !StatxFlags::from_bits_retain(said.stx_mask).contains(StatxFlags::DIOALIGN) {
        return Ok(unsaid); // By kernels before 6.1, and by file systems that say nothing.
    }
    let bytes = [said.stx_dio_offset_align, said.stx_dio_mem_align].map(u64::from);
    match bytes {
        [offset_bytes, memory_bytes] if bytes.iter().all(|bytes| bytes.is_power_of_two()) => {
            Ok(Aligned { offset_bytes, memory_bytes })
        }
        _ => Err("its file system says that it reads nothing directly".to_owned()),
    }
}

/// The same file, whatever has become of its path, with a position and advice of its own.
fn reopen(plain: &File, flags: OFlags) -> Result<File, Errno> {
    let path = format!("/proc/self/fd/{}", plain.as_raw_fd());
    rustix::fs::open(path, flags | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map(File::from)
}

impl Storage for Files<'_> {
    fn direct(&self, file: usize) -> Option<Aligned> {
        let opened = self.opened(file).ok()?;
        let is_given_up = opened.is_given_up.load(Ordering::Relaxed);
        opened.direct.as_ref().filter(|_| !is_given_up).map(|(_, aligned)| *aligned)
    }

    fn read(&self, file: usize, direct: bool, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let opened = self.opened(file)?;
        match (&opened.direct, &opened.own) {
            (Some((direct_file, _)), _) if direct => direct_file.read_at(buf, offset),
            (_, Some(own)) => own.read_at(buf, offset),
            (_, None) => self.plain(file)?.read_at(buf, offset),
        }
    }

    fn give_up_direct(&self, file: usize, because: String) {
        if let Ok(opened) = self.opened(file) {
            let _ = opened.because.set(because); // The first reason is the reason.
            opened.is_given_up.store(true, Ordering::Relaxed);
        }
    }

    fn forget(&self, file: usize, offset: u64, bytes: u64) {
        // Whole pages, also where they have something else at their ends: that is read again at worst.
        let begin = offset - offset % ALIGN_BYTES;
        let end = (offset + bytes).next_multiple_of(ALIGN_BYTES);
        if let (Ok(plain), Some(len)) = (self.plain(file), NonZeroU64::new(end - begin)) {
            let _ = rustix::fs::fadvise(plain, begin, Some(len), Advice::DontNeed);
        }
    }
}
