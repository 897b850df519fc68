//! One safetensors file.
//!
//! The file stays open as long as the checkpoint, so renames and deletions do not matter. It is never mapped:
//! truncation is a short read, not a `SIGBUS`.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::error::{CheckpointError, HeaderError};
use super::header::{self, PREFIX_BYTES};
use super::layout::{self, Entry, Payload};

/// A file of a checkpoint.
///
/// ```
/// use poorwill::checkpoint::Checkpoint;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # let file = folder.path().join("m.safetensors");
/// # std::fs::write(&file, [&length, header.as_bytes(), &[7; 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let checkpoint = Checkpoint::open(&[folder])?;
/// for file in checkpoint.files() {
///     println!("{}: {} bytes", file.path.display(), file.bytes);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct ShardFile {
    /// The path it was opened by.
    pub path: PathBuf,
    /// Its size when opened, with header.
    pub bytes: u64,
    file: File,
}

impl ShardFile {
    /// `open_files` of the checkpoint are open already.
    pub(super) fn open(path: PathBuf, open_files: usize) -> Result<Self, CheckpointError> {
        // Check first: opening a pipe waits for its writer.
        let metadata = fs::metadata(&path).map_err(|source| failed(&path, "open", source))?;
        if !metadata.is_file() {
            return Err(CheckpointError::NotAFile { path });
        }
        let file = File::open(&path).map_err(|source| open_failed(&path, open_files, source))?;
        let bytes = file.metadata().map_err(|source| failed(&path, "open", source))?.len();
        Ok(Self { path, bytes, file })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Checks the header, and returns the tensors by offset.
    pub(super) fn entries(&self) -> Result<Vec<Entry>, CheckpointError> {
        let malformed = |error| CheckpointError::Header { path: self.path.clone(), error };
        let header = self.header()?;
        let raw = header::parse(&header).map_err(malformed)?;
        let payload = Payload { begin: PREFIX_BYTES + header.len() as u64, file_bytes: self.bytes };
        layout::check(raw, payload).map_err(malformed)
    }

    fn header(&self) -> Result<Vec<u8>, CheckpointError> {
        let malformed = |error| CheckpointError::Header { path: self.path.clone(), error };
        let unreadable = |source| failed(&self.path, "read the header", source);
        if self.bytes < PREFIX_BYTES {
            return Err(malformed(HeaderError::FileTooShort { file_bytes: self.bytes }));
        }
        let mut prefix = [0; 8];
        self.file.read_exact_at(&mut prefix, 0).map_err(unreadable)?;
        let header_bytes = header::length(prefix, self.bytes).map_err(malformed)?;
        let header_bytes =
            usize::try_from(header_bytes).map_err(|_| unreadable(io::Error::from(ErrorKind::OutOfMemory)))?;
        let mut header = vec![0; header_bytes];
        self.file.read_exact_at(&mut header, PREFIX_BYTES).map_err(unreadable)?;
        Ok(header)
    }

    /// Fills `buf` as far as the file reaches.
    pub(super) fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut got = 0;
        while got < buf.len() {
            match self.file.read_at(&mut buf[got..], offset + got as u64) {
                Ok(0) => break,
                Ok(bytes) => got += bytes,
                Err(source) if source.kind() == ErrorKind::Interrupted => {}
                Err(source) => return Err(source),
            }
        }
        Ok(got)
    }
}

pub(super) fn failed(path: &Path, operation: &'static str, source: io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    match source.kind() {
        ErrorKind::NotFound => CheckpointError::NotFound { path },
        _ => CheckpointError::Io { path, operation, source },
    }
}

fn open_failed(path: &Path, open_files: usize, source: io::Error) -> CheckpointError {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    match source.raw_os_error() {
        Some(EMFILE | ENFILE) => {
            CheckpointError::TooManyOpenFiles { path: path.to_path_buf(), open_files, source }
        }
        _ => failed(path, "open", source),
    }
}
