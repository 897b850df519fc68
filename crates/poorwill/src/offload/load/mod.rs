//! Loads a checkpoint into host memory.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::ops::{ControlFlow, Deref, Range};
use std::sync::Arc;
use std::time::Instant;

use poorwill_core::HostBuffer;
use poorwill_driver::BufferPin;

pub use self::direct::read_directly;
pub use self::error::LoadError;
pub use self::layout::TensorLocation;
pub use self::report::{FileReport, LoadReport, ReadMethod};

use self::layout::Layout;
use self::sink::{ReadWorker, Sink, Task};
use super::{Buffer, Switches};
use crate::checkpoint::{Checkpoint, CheckpointError, Dtype, Tensor};
use crate::open::Device;
use crate::reader::{self, ALIGN_BYTES, Files, PageCache, RANGE_BYTES_MAX, Storage};

mod direct;
mod error;
mod layout;
mod report;
mod sink;

const READERS_ALLOWED: usize = 256;

const RANGE_BYTES_MIN: u64 = 256 << 10;

/// The readers' share of a checkpoint, while ranges can shrink.
const STAGING_SHARE: u64 = 128;

/// How to load.
///
/// ```
/// use poorwill::offload::{BufferPin, LoadOptions, Switches};
///
/// # fn main() -> Result<(), poorwill::offload::InvalidSwitch> {
/// let options = LoadOptions::default().pinning(BufferPin::Never).switching(Switches::from_env()?);
/// let options = options.reading_with(std::num::NonZeroUsize::new(8));
/// # assert_eq!(options.pin, BufferPin::Never);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Whether to page-lock the memory.
    pub pin: BufferPin,
    /// What the environment disables; by default nothing.
    pub switches: Switches,
    /// Concurrent readers, at most 256; by default chosen for the machine.
    pub readers: Option<NonZeroUsize>,
}

impl LoadOptions {
    /// Sets [`Self::pin`].
    #[must_use]
    pub fn pinning(mut self, pin: BufferPin) -> Self {
        self.pin = pin;
        self
    }

    /// Sets [`Self::switches`].
    #[must_use]
    pub fn switching(mut self, switches: Switches) -> Self {
        self.switches = switches;
        self
    }

    /// Sets [`Self::readers`].
    #[must_use]
    pub fn reading_with(mut self, readers: impl Into<Option<NonZeroUsize>>) -> Self {
        self.readers = readers.into();
        self
    }

    /// The requested number of readers, or by default at most one per range.
    #[must_use]
    pub fn readers_for(&self, checkpoint: &Checkpoint) -> usize {
        let most = usize::try_from(checkpoint.bytes() / RANGE_BYTES_MIN).unwrap_or(usize::MAX);
        let chosen = || reader::readers().min(most.max(1));
        self.readers.map_or_else(chosen, |readers| readers.get().min(READERS_ALLOWED))
    }
}

/// Progress of a load.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use poorwill::Device;
/// use poorwill::checkpoint::Checkpoint;
/// use poorwill::offload::{HostCheckpoint, LoadOptions, LoadProgress};
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
/// let mut observer = |progress: LoadProgress| {
///     println!("{} of {} bytes", progress.read_bytes, progress.bytes);
///     ControlFlow::Continue(())
/// };
/// HostCheckpoint::load(&device, &checkpoint, &LoadOptions::default(), &mut observer)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadProgress {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes in all.
    pub bytes: u64,
}

/// A tensor of a [`HostCheckpoint`].
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
/// let tensor = loaded.tensor("w").ok_or("no such tensor")?;
/// assert_eq!((tensor.shape.as_slice(), tensor.bytes), (&[4][..], 4));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostTensor {
    /// Its name; escape it before you show it.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions; none for a scalar.
    pub shape: Vec<u64>,
    /// Size.
    pub bytes: u64,
    /// Its location; `None` for an empty tensor.
    pub location: Option<TensorLocation>,
}

/// A checkpoint in host memory, read by several readers and held once.
///
/// [`HostCheckpoint::load`] reserves exact [`Buffer`]s before the first read, and reads while they are made.
/// Reads bypass the page cache (`O_DIRECT`) where the file system allows it; otherwise cached pages are
/// dropped afterwards. So a process needs the checkpoint's bytes, and a little memory per reader. A
/// [`View`](super::View), a copy or [`TensorBytes`] may keep a buffer longer.
///
/// Tensors are aligned to 256 bytes if that costs at most a thousandth of the bytes, or a page. Otherwise to
/// 64, 16, or their element size. In files, they mostly begin at multiples of 8. If a device writes only to
/// multiples of 512, the reader copies them into place. That costs less than unaligned kernel loads, and
/// 16-byte loads would fail. NVMe devices write to multiples of 4 or 8, without a copy.
///
/// The first error, or the observer, stops all readers and releases all memory.
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
/// # std::fs::write(folder.path().join("m.safetensors"), [&length, header.as_bytes(), &[7; 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let checkpoint = Checkpoint::open(&[folder])?;
/// let device = Device::open(&"host:64MiB".parse()?)?;
/// let mut observer = |_| ControlFlow::Continue(());
/// let loaded = HostCheckpoint::load(&device, &checkpoint, &LoadOptions::default(), &mut observer)?;
/// let tensor = loaded.tensor("w").ok_or("no such tensor")?;
/// assert_eq!(*loaded.bytes_of(tensor), [7; 4]);
/// println!("{} B/s", loaded.report().bytes as f64 / loaded.report().seconds);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HostCheckpoint {
    buffers: Vec<Arc<Buffer>>,
    tensors: Vec<HostTensor>,
    by_name: HashMap<String, usize>,
    report: LoadReport,
}

/// A tensor's bytes; keeps them alive.
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
/// let bytes = loaded.bytes_of(&loaded.tensors()[0]);
/// drop(loaded);
/// assert_eq!(*bytes, [7; 4]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct TensorBytes {
    memory: Option<Arc<HostBuffer>>,
    range: Range<usize>,
}

impl LoadReport {
    /// What readers and buffers tell.
    fn of(workers: &[ReadWorker], buffers: &[Arc<Buffer>]) -> Self {
        let sum = |of: fn(&ReadWorker) -> u64| workers.iter().map(of).sum();
        Self {
            bytes: 0,
            tensors: 0,
            host_bytes: 0,
            buffers: buffers.len(),
            alignment_bytes: None,
            seconds: 0.0,
            memory_s: 0.0,
            readers: 0,
            piece_bytes: 0,
            direct_bytes: sum(|worker| worker.direct_bytes),
            staged_bytes: sum(|worker| worker.staged_bytes),
            buffered_bytes: sum(|worker| worker.buffered_bytes),
            staging_bytes: sum(|worker| worker.staging.capacity_bytes()),
            pinned: buffers.iter().all(|buffer| buffer.is_pinned()),
            pageable_because: buffers.iter().find_map(|buffer| buffer.pageable_because().map(str::to_owned)),
            files: Vec::new(),
        }
    }
}

impl HostTensor {
    fn all(tensors: &[Tensor], layout: &Layout) -> Vec<Self> {
        let at = |(tensor, location): (&Tensor, &Option<TensorLocation>)| Self {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            bytes: tensor.bytes,
            location: *location,
        };
        tensors.iter().zip(&layout.locations).map(at).collect()
    }
}

impl HostCheckpoint {
    /// Reads all tensors into host memory of a device.
    ///
    /// `observer` runs on the caller's thread, many times a second except while memory is made.
    /// [`ControlFlow::Break`] stops the load.
    ///
    /// # Errors
    /// All release everything:
    /// - `Memory` before the first read, with requested, held and allowed bytes.
    /// - `Checkpoint` for a file that changes, shrinks or fails, or for two tensors of one name.
    /// - `Stopped`; `Staging`.
    pub fn load(
        device: &Device,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        observer: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<Self, LoadError> {
        let files = Files::of(checkpoint, PageCache::Emptied);
        let mut loaded = Self::load_from(device, checkpoint, &files, options, observer)?;
        loaded.report.files = file_reports(checkpoint, &files);
        Ok(loaded)
    }

    pub(crate) fn load_from(
        device: &Device,
        checkpoint: &Checkpoint,
        storage: &dyn Storage,
        options: &LoadOptions,
        observer: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<Self, LoadError> {
        let started = Instant::now();
        let (tensors, bytes) = (checkpoint.tensors(), checkpoint.bytes());
        let by_name = by_name(checkpoint)?;
        let layout = Layout::of(tensors);
        let readers = options.readers_for(checkpoint);
        let range_bytes = range_bytes_for(bytes, readers);
        let ranges = layout.ranges(tensors, range_bytes);
        let sink = Sink { checkpoint, storage, layout: &layout };
        let refused =
            |source| LoadError::Memory { bytes: layout.bytes(), buffers: layout.buffers.len(), source };
        let pending = Buffer::new_all(device, &layout.buffers, options.pin, options.switches);
        let pending = pending.map_err(refused)?;

        let mut made: Vec<Option<Buffer>> = layout.buffers.iter().map(|_| None).collect();
        let mut workers: Vec<ReadWorker> = (0..readers).map(|_| ReadWorker::default()).collect();
        let mut memory_s = 0.0;
        let mut ranges = ranges.iter().peekable();
        // Dropping the rest releases it.
        let batches = pending.into_iter().zip(&mut made).enumerate().map(|(nth, (pending, location))| {
            let made = pending.wait().and_then(|made| sink.tasks(nth, &mut ranges, location.insert(made)));
            memory_s = started.elapsed().as_secs_f64();
            made.map_err(refused)
        });
        let read = |task: Task<'_>, worker: &mut ReadWorker| sink.read(task, worker);
        let loaded = reader::run(&mut workers, batches, read, &mut |read_bytes| {
            let stopped = |()| LoadError::Stopped { read_bytes, bytes };
            observer(LoadProgress { read_bytes, bytes }).map_break(stopped)
        });
        let readers = loaded.inspect_err(|_| {
            made.clear();
            // The device would cache released and unfinished memory; it still does if it cannot be waited
            // for.
            let _ = device.driver().host_trim();
        })?;
        let buffers: Vec<Arc<Buffer>> = made.into_iter().flatten().map(Arc::new).collect();
        let report = LoadReport {
            bytes,
            tensors: tensors.len(),
            host_bytes: layout.bytes(),
            alignment_bytes: layout.alignment,
            seconds: started.elapsed().as_secs_f64(),
            memory_s,
            readers,
            piece_bytes: range_bytes,
            ..LoadReport::of(&workers, &buffers)
        };
        let tensors = HostTensor::all(tensors, &layout);
        Ok(Self { buffers, tensors, by_name, report })
    }

    /// The buffers.
    #[must_use]
    pub fn buffers(&self) -> &[Arc<Buffer>] {
        &self.buffers
    }

    /// The tensors, by file and offset.
    #[must_use]
    pub fn tensors(&self) -> &[HostTensor] {
        &self.tensors
    }

    /// The tensor of this name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&HostTensor> {
        self.by_name.get(name).and_then(|nth| self.tensors.get(*nth))
    }

    /// What the load did.
    #[must_use]
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// A tensor's bytes; empty for a tensor of another checkpoint.
    #[must_use]
    pub fn bytes_of(&self, tensor: &HostTensor) -> TensorBytes {
        let none = TensorBytes { memory: None, range: 0..0 };
        let Some(TensorLocation { buffer, offset }) =
            tensor.location.filter(|_| self.tensor(&tensor.name) == Some(tensor))
        else {
            return none;
        };
        let memory = self.buffers.get(buffer).and_then(|buffer| buffer.memory());
        match [offset, offset + tensor.bytes].map(usize::try_from) {
            [Ok(begin), Ok(end)] => TensorBytes { memory, range: begin..end },
            _ => none,
        }
    }
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.as_deref().and_then(|memory| memory.get(self.range.clone())).unwrap_or_default()
    }
}

fn by_name(checkpoint: &Checkpoint) -> Result<HashMap<String, usize>, CheckpointError> {
    let mut by_name = HashMap::with_capacity(checkpoint.tensors().len());
    let path = |tensor: &Tensor| checkpoint.files()[tensor.file].path.clone();
    for (nth, tensor) in checkpoint.tensors().iter().enumerate() {
        if let Some(first) = by_name.insert(tensor.name.clone(), nth) {
            return Err(CheckpointError::DuplicateTensor {
                tensor: tensor.name.clone(),
                first: path(&checkpoint.tensors()[first]),
                second: path(tensor),
            });
        }
    }
    Ok(by_name)
}

/// As large as possible while the readers' buffers stay a small share of the checkpoint.
fn range_bytes_for(bytes: u64, readers: usize) -> u64 {
    let share = bytes / STAGING_SHARE / (readers.max(1) as u64);
    let unit = 16 * ALIGN_BYTES;
    (share - share % unit).clamp(RANGE_BYTES_MIN, RANGE_BYTES_MAX)
}

fn file_reports(checkpoint: &Checkpoint, files: &Files<'_>) -> Vec<FileReport> {
    let mut bytes = vec![0; checkpoint.files().len()];
    for tensor in checkpoint.tensors() {
        bytes[tensor.file] += tensor.bytes;
    }
    let report = |(nth, (file, bytes)): (usize, (&crate::checkpoint::ShardFile, u64))| {
        let (how, because) = match files.how(nth) {
            None => (ReadMethod::Unread, None),
            Some(Ok(())) => (ReadMethod::Direct, None),
            Some(Err(because)) => (ReadMethod::Buffered, Some(because)),
        };
        FileReport { path: file.path.clone(), bytes, how, because }
    };
    checkpoint.files().iter().zip(bytes).enumerate().map(report).collect()
}
