//! A checkpoint in host memory: read from its files straight into buffers, by several readers, and held once.
//!
//! [`HostCheckpoint::load`] lays the tensors out in a few exact [`Buffer`]s, takes all of them before it reads a byte,
//! and reads while they are made. Bytes come past the page cache (`O_DIRECT`) where the file system does that, and else
//! through it, and what the page cache has of them is dropped behind; the [`LoadReport`] says which for each file. The
//! header, and whatever else the page cache had of a file, goes as well. So a process takes the checkpoint's bytes, a
//! little memory for each reader, which is given back, and no more.
//!
//! Tensors begin at multiples of 256 bytes where that costs no more than a thousandth of the bytes, or a page, else of
//! 64, of 16, or of the size of their elements. In their files they may begin anywhere, and mostly at some multiple of
//! 8: then a device that writes only to multiples of 512 cannot write them to their places, and the reader copies them
//! there. That takes less of a core than what a kernel would lose that reads in place at odd addresses, and does not
//! run at all where it loads 16 bytes at once. Devices that write to multiples of 4 or 8, as NVMe's do, write to the
//! place itself.
//!
//! The first error stops all readers. Then, and when the caller stops it, everything is given back, with what the
//! device keeps unused of host memory.
//!
//! ```
//! use std::ops::ControlFlow;
//!
//! use poorwill::Device;
//! use poorwill::checkpoint::Checkpoint;
//! use poorwill::offload::{HostCheckpoint, LoadOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let model = poorwill_bench::synthetic::SyntheticMoe { layers: 1, experts: 2, hidden: 64, moe_intermediate: 64, vocab: 100, shards: 2, seed: 1 };
//! # model.write(folder.path(), |_| {})?;
//! let checkpoint = Checkpoint::open(&[folder.path().to_owned()])?;
//! let device = Device::open(&"host:64MiB".parse()?)?;
//! let loaded =
//!     HostCheckpoint::load(&device, &checkpoint, &LoadOptions::default(), &mut |_| ControlFlow::Continue(()))?;
//! let norm = loaded.tensor("model.norm.weight").ok_or("no such tensor")?;
//! assert_eq!(loaded.bytes_of(norm).len() as u64, norm.bytes);
//! # Ok(())
//! # }
//! ```

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

/// Most readers that anybody may ask for.
const READERS_ALLOWED: usize = 256;

/// The least that a reader reads with a call.
const RANGE_BYTES_MIN: u64 = 256 << 10;

/// The share of a checkpoint's bytes that all readers' own memory is kept to, as long as ranges can be smaller.
const STAGING_SHARE: u64 = 128;

/// How to load.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Whether the memory is page-locked.
    pub pin: BufferPin,
    /// What the environment turns off; none of it unless it is given.
    pub switches: Switches,
    /// How many read at the same time, 256 at most; chosen from the machine unless it is given.
    pub readers: Option<NonZeroUsize>,
}

impl LoadOptions {
    /// The same, with memory that is page-locked or not.
    #[must_use]
    pub fn pinning(mut self, pin: BufferPin) -> Self {
        self.pin = pin;
        self
    }

    /// The same, with what the environment turns off.
    #[must_use]
    pub fn switching(mut self, switches: Switches) -> Self {
        self.switches = switches;
        self
    }

    /// The same with so many readers, 256 at most; `None`: chosen from the machine.
    #[must_use]
    pub fn reading_with(mut self, readers: impl Into<Option<NonZeroUsize>>) -> Self {
        self.readers = readers.into();
        self
    }

    /// How many read at the same time: as many as are asked for, and else no more than there are ranges for.
    #[must_use]
    pub fn readers_for(&self, checkpoint: &Checkpoint) -> usize {
        let most = usize::try_from(checkpoint.bytes() / RANGE_BYTES_MIN).unwrap_or(usize::MAX);
        let chosen = || reader::readers().min(most.max(1));
        self.readers.map_or_else(chosen, |readers| readers.get().min(READERS_ALLOWED))
    }
}

/// How far a load is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadProgress {
    /// So much has been read.
    pub read_bytes: u64,
    /// Of so much.
    pub bytes: u64,
}

/// A tensor of a [`HostCheckpoint`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostTensor {
    /// Its name, as the file has it: show it to nobody without escaping it.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its dimensions; none for a scalar.
    pub shape: Vec<u64>,
    /// Its size, 0 if a dimension is.
    pub bytes: u64,
    /// Where it lies; nowhere if it has no bytes.
    pub location: Option<TensorLocation>,
}

/// A checkpoint in host memory. Each of its buffers lives as long as this, or whoever else has it: a
/// [`View`](super::View), a copy to a device, [`TensorBytes`].
#[derive(Debug)]
pub struct HostCheckpoint {
    buffers: Vec<Arc<Buffer>>,
    tensors: Vec<HostTensor>,
    by_name: HashMap<String, usize>,
    report: LoadReport,
}

/// The bytes of a tensor, which stay as long as this does.
#[derive(Debug, Clone)]
pub struct TensorBytes {
    /// None where there are no bytes.
    memory: Option<Arc<HostBuffer>>,
    range: Range<usize>,
}

impl HostCheckpoint {
    /// Reads all tensors of a checkpoint into host memory of a device's.
    ///
    /// `observer` is called on the caller's thread, many times a second but for while memory is made, with how much has
    /// been read, and stops the load with [`ControlFlow::Break`].
    ///
    /// # Errors
    /// `Memory` before a byte is read, with what is asked, held and allowed, where there is no room for all of it;
    /// `Checkpoint` when a file changes or shrinks meanwhile, cannot be read, or two tensors have the same name;
    /// `Stopped`. Nothing stays.
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
        // What was not waited for is given back.
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
            // What was given back, and what was still being made, the device would keep for whoever asks next. Where
            // it cannot be waited for, that is what it does.
            let _ = device.driver().host_trim();
        })?;
        let buffers: Vec<Arc<Buffer>> = made.into_iter().flatten().map(Arc::new).collect();
        let tensors = tensors.iter().zip(&layout.locations).map(|(tensor, location)| HostTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            bytes: tensor.bytes,
            location: *location,
        });
        let tensors: Vec<HostTensor> = tensors.collect();
        let sum = |of: fn(&ReadWorker) -> u64| workers.iter().map(of).sum();
        let report = LoadReport {
            bytes,
            tensors: tensors.len(),
            host_bytes: layout.bytes(),
            buffers: buffers.len(),
            alignment_bytes: layout.alignment,
            seconds: started.elapsed().as_secs_f64(),
            memory_s,
            readers,
            piece_bytes: range_bytes,
            direct_bytes: sum(|worker| worker.direct_bytes),
            staged_bytes: sum(|worker| worker.staged_bytes),
            buffered_bytes: sum(|worker| worker.buffered_bytes),
            staging_bytes: sum(|worker| worker.staging.capacity_bytes()),
            pinned: buffers.iter().all(|buffer| buffer.is_pinned()),
            pageable_because: buffers.iter().find_map(|buffer| buffer.pageable_because().map(str::to_owned)),
            files: Vec::new(),
        };
        Ok(Self { buffers, tensors, by_name, report })
    }

    /// The buffers.
    #[must_use]
    pub fn buffers(&self) -> &[Arc<Buffer>] {
        &self.buffers
    }

    /// The tensors, in the order of the files and of their bytes there.
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

    /// The bytes of a tensor of this checkpoint. Of one of another's, none.
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

/// Where the tensor of each name is.
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

/// As large as it may be for the readers' own memory to be a small part of the checkpoint.
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
