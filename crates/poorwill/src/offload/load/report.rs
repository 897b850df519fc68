//! The report of a load: sizes in bytes and times in seconds, as the names say.

use std::path::PathBuf;

use serde::Serialize;

/// What a load did.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use poorwill::Device;
/// use poorwill::checkpoint::Checkpoint;
/// use poorwill::offload::{HostCheckpoint, LoadOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # let file = folder.path().join("m.safetensors");
/// # std::fs::write(&file, [&length, header.as_bytes(), &[7; 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let checkpoint = Checkpoint::open(&[folder])?;
/// let device = Device::open(&"host:64MiB".parse()?)?;
/// let mut observer = |_| ControlFlow::Continue(());
/// let loaded = HostCheckpoint::load(&device, &checkpoint, &LoadOptions::default(), &mut observer)?;
/// let report = loaded.report();
/// assert_eq!(report.direct_bytes + report.staged_bytes + report.buffered_bytes, report.bytes);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of all buffers.
    pub host_bytes: u64,
    /// Number of buffers.
    pub buffers: usize,
    /// Common alignment of tensors; `None` for that of their elements.
    pub alignment_bytes: Option<u64>,
    /// Time from the call to the last byte.
    pub seconds: f64,
    /// Time to the last buffer, in parallel with reading.
    pub memory_s: f64,
    /// Concurrent readers.
    pub readers: usize,
    /// Most bytes of one read.
    pub piece_bytes: u64,
    /// Read past the page cache, in place.
    pub direct_bytes: u64,
    /// Read past the page cache, and copied for alignment.
    pub staged_bytes: u64,
    /// Read through the page cache, whose pages were then dropped.
    pub buffered_bytes: u64,
    /// The readers' buffers, released by now.
    pub staging_bytes: u64,
    /// Whether all buffers are page-locked.
    pub pinned: bool,
    /// Why a buffer is not.
    pub pageable_because: Option<String>,
    /// How each file was read.
    pub files: Vec<FileReport>,
}

/// How a file was read.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use poorwill::Device;
/// use poorwill::checkpoint::Checkpoint;
/// use poorwill::offload::{HostCheckpoint, LoadOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # let file = folder.path().join("m.safetensors");
/// # std::fs::write(&file, [&length, header.as_bytes(), &[7; 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let checkpoint = Checkpoint::open(&[folder])?;
/// let device = Device::open(&"host:64MiB".parse()?)?;
/// let mut observer = |_| ControlFlow::Continue(());
/// let loaded = HostCheckpoint::load(&device, &checkpoint, &LoadOptions::default(), &mut observer)?;
/// for file in &loaded.report().files {
///     println!("{}: {:?}", file.path.display(), file.because);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FileReport {
    /// The path it was opened by.
    pub path: PathBuf,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// The method.
    pub how: ReadMethod,
    /// Why it was not read directly.
    pub because: Option<String>,
}

/// How a file was read.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use poorwill::Device;
/// use poorwill::checkpoint::Checkpoint;
/// use poorwill::offload::{HostCheckpoint, LoadOptions, ReadMethod};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # let file = folder.path().join("m.safetensors");
/// # std::fs::write(&file, [&length, header.as_bytes(), &[7; 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let checkpoint = Checkpoint::open(&[folder])?;
/// let device = Device::open(&"host:64MiB".parse()?)?;
/// let mut observer = |_| ControlFlow::Continue(());
/// let loaded = HostCheckpoint::load(&device, &checkpoint, &LoadOptions::default(), &mut observer)?;
/// let files = &loaded.report().files;
/// println!("{} read directly", files.iter().filter(|file| file.how == ReadMethod::Direct).count());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReadMethod {
    /// Past the page cache (`O_DIRECT`).
    Direct,
    /// Through the page cache, with its pages dropped afterwards (`POSIX_FADV_DONTNEED`).
    Buffered,
    /// Not read: no bytes of the checkpoint.
    Unread,
}
