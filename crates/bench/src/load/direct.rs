//! Reading files past the page cache into nothing: what their storage gives at best.
//!
//! This shares nothing with the loads that it stands beside.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use poorwill::checkpoint::{Checkpoint, CheckpointError};
use poorwill::offload::LoadError;
use rustix::fs::{Advice, Mode, OFlags};

use crate::figures::timed;

/// What one call reads.
pub(super) const PIECE_BYTES: u64 = 4 << 20;

/// What direct reads begin at, in files and in memory: more is asked for by no device that is known.
const ALIGN_BYTES: usize = 4096;

/// File systems whose files are in memory, so that there is nothing past the page cache: tmpfs and ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// A file of a checkpoint.
struct Direct {
    path: PathBuf,
    bytes: u64,
    file: File,
}

/// Reads all files of a checkpoint directly, by so many readers, and gives the seconds that it took; nothing where one
/// of them is not read so here.
///
/// # Errors
/// `Checkpoint` when a file cannot be read, `Staging` without memory for the readers.
pub(super) fn read(checkpoint: &Checkpoint, readers: usize) -> Result<Option<f64>, LoadError> {
    // Opened before the clock runs, as a load's files are.
    let files: Option<Vec<Direct>> =
        checkpoint.files().iter().map(|shard| Direct::open(shard.path.clone(), shard.bytes)).collect();
    let Some(files) = files else { return Ok(None) };
    let pieces: Vec<(&Direct, u64)> = files
        .iter()
        .flat_map(|file| (0..file.bytes.div_ceil(PIECE_BYTES)).map(move |nth| (file, nth * PIECE_BYTES)))
        .collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let read = || {
        let outcome = aligned_memory().and_then(|mut memory| {
            let buf = memory.as_mut_slice();
            while let Some((file, offset)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                file.read_piece(buf, *offset)?;
            }
            Ok(())
        });
        if let Err(error) = outcome {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            next.store(pieces.len(), Ordering::Relaxed);
        }
    };
    let (seconds, ()) = timed(|| {
        thread::scope(|scope| {
            for _ in 1..readers {
                // Where no more threads are to be had, fewer read.
                let _ = thread::Builder::new().spawn_scoped(scope, read);
            }
            read();
        });
        failed.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    })?;
    Ok(Some(seconds))
}

impl Direct {
    /// Nothing where it is not read past the page cache.
    fn open(path: PathBuf, bytes: u64) -> Option<Self> {
        let flags = OFlags::DIRECT | OFlags::RDONLY | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(&path, flags, Mode::empty()).ok()?);
        let system = rustix::fs::fstatfs(&file).ok()?;
        if IN_MEMORY.contains(&system.f_type) {
            return None;
        }
        let direct = Self { path, bytes, file };
        // What a file system does not do it may say at the first read only.
        let mut memory = aligned_memory().ok()?;
        let probed = direct.file.read_at(&mut memory.as_mut_slice()[..ALIGN_BYTES], 0);
        probed.is_ok().then_some(direct)
    }

    /// One piece, to its end or the file's.
    fn read_piece(&self, buf: &mut [u8], offset: u64) -> Result<(), LoadError> {
        let mut got = 0;
        while got < buf.len() {
            match self.file.read_at(&mut buf[got..], offset + got as u64) {
                Ok(0) => break,
                Ok(bytes) => got += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(source) => return Err(self.failed(source)),
            }
            // Short of whole units is the file's end.
            if !got.is_multiple_of(ALIGN_BYTES) {
                break;
            }
        }
        Ok(())
    }

    fn failed(&self, source: io::Error) -> LoadError {
        CheckpointError::Io { path: self.path.clone(), operation: "read directly", source }.into()
    }
}

/// Room for a piece, at a multiple of what direct reads want.
struct Aligned {
    memory: Vec<u8>,
    from: usize,
}

fn aligned_memory() -> Result<Aligned, LoadError> {
    let bytes = usize::try_from(PIECE_BYTES).unwrap_or(usize::MAX).saturating_add(ALIGN_BYTES);
    let mut memory = Vec::new();
    memory.try_reserve_exact(bytes).map_err(|_| LoadError::Staging { bytes: PIECE_BYTES })?;
    memory.resize(bytes, 0);
    let start = memory.as_ptr().addr();
    Ok(Aligned { from: start.next_multiple_of(ALIGN_BYTES) - start, memory })
}

impl Aligned {
    fn as_mut_slice(&mut self) -> &mut [u8] {
        let end = self.memory.len() - ALIGN_BYTES + self.from;
        &mut self.memory[self.from..end]
    }
}

/// Files of which the page cache is to keep nothing.
pub(super) struct Uncached(Vec<Option<File>>);

impl Uncached {
    /// Those of a checkpoint. One that is not there any more has nothing to forget.
    pub(super) fn of(checkpoint: &Checkpoint) -> Self {
        Self(checkpoint.files().iter().map(|file| File::open(&file.path).ok()).collect())
    }

    /// Drops what the page cache has of these bytes, whole pages of them.
    pub(super) fn forget(&self, file: usize, offset: u64, bytes: u64) {
        let begin = offset - offset % ALIGN_BYTES as u64;
        let end = (offset + bytes).next_multiple_of(ALIGN_BYTES as u64);
        if let (Some(file), Some(len)) = (&self.0[file], NonZeroU64::new(end - begin)) {
            // Advice: who does not take it keeps some pages.
            let _ = rustix::fs::fadvise(file, begin, Some(len), Advice::DontNeed);
        }
    }
}
