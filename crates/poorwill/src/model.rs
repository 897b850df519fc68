//! A checkpoint in an arena, comparable with its files at any time.
//!
//! Each reader copies through its own page-locked buffer on its own stream. Reads bypass the page cache where
//! the storage allows it, except for cached bytes.
//!
//! Each tensor has its own block. All blocks are allocated before the first read, so a model that does not
//! fit fails at once; a failed load frees them.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use poorwill_core::{
    AllocRequest, Block, DriverError, DriverErrorKind, HostBuffer, PoolError, StreamId, Tag,
};

use crate::arena::Arena;
use crate::checkpoint::{Checkpoint, CheckpointError, Tensor, text};
use crate::reader::{
    self, ALIGN_BYTES, FileRange, Files, PageCache, RANGE_BYTES_MAX, Storage, TensorPart, buffer_bytes, index,
};

/// Why a model was not loaded, restored or verified.
///
/// ```
/// use poorwill::checkpoint::Checkpoint;
/// use poorwill::model::{Model, ModelError};
/// use poorwill::{Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # let file = folder.path().join("m.safetensors");
/// # std::fs::write(&file, [&length, header.as_bytes(), &[7; 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let checkpoint = Checkpoint::open(&[folder])?;
/// let config = Config::on("host:64MiB".parse()?).limited_to(2 << 20);
/// let arena = Arena::open(config)?;
/// let _other = arena.alloc(&poorwill::AllocRequest::new(2 << 20, Tag::runtime()))?;
/// let error = Model::load(&arena, &checkpoint, &Tag::weights(), &|_| ()).unwrap_err();
/// assert!(matches!(error, ModelError::Alloc { bytes: 4, .. }));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No memory for a tensor: free blocks, or raise the arena's limit.
    #[error("no memory for tensor {} of {} ({bytes} B)", text::name(tensor), text::path(path))]
    Alloc {
        /// The file.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// Its bytes.
        bytes: u64,
        /// The pool's error.
        source: Box<PoolError>,
    },
    /// The arena refused a copy.
    #[error("cannot copy tensor {}", text::name(tensor))]
    Pool {
        /// Its name.
        tensor: String,
        /// The pool's error.
        source: Box<PoolError>,
    },
    /// The device failed a copy, or the host has no memory for one.
    #[error("moving bytes of tensor {} failed", text::name(tensor))]
    Copy {
        /// Its name.
        tensor: String,
        /// The driver's error.
        source: DriverError,
    },
    /// The device provides no stream for copies.
    #[error("no stream to move the model on")]
    Stream(#[source] DriverError),
    /// Device and file differ.
    #[error(
        "tensor {} of {} differs from the file at byte {offset} of {bytes}",
        text::name(tensor),
        text::path(path)
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// The first different byte.
        offset: u64,
        /// Its bytes.
        bytes: u64,
    },
    /// A block changed its address.
    #[error("tensor {} has moved from {:#x} to {:#x}", text::name(tensor), from.range.addr, to.range.addr)]
    Moved {
        /// Its name.
        tensor: String,
        /// The block as allocated.
        from: Block,
        /// The block now.
        to: Block,
    },
}

/// Receives the bytes of each copy, on several threads.
pub type Progress<'a> = &'a (dyn Fn(u64) + Sync);

/// A checkpoint whose tensors have blocks in an arena.
///
/// ```
/// use poorwill::checkpoint::Checkpoint;
/// use poorwill::model::Model;
/// use poorwill::{Arena, Config, Level, SleepRequest, Tag, WakeRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # std::fs::write(folder.path().join("m.safetensors"), [&length, header.as_bytes(), &[7; 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let checkpoint = Checkpoint::open(&[folder])?;
/// let model = Model::load(&arena, &checkpoint, &Tag::weights(), &|bytes| println!("{bytes} more bytes"))?;
///
/// arena.sleep(&SleepRequest::all(Level::Two))?; // Drops the weights.
/// arena.wake(&WakeRequest::all())?;
/// model.read_in(&|_| ())?;
/// arena.mark_restored(&[Tag::weights()])?;
/// model.verify(&|_| ())?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Model<'a> {
    arena: &'a Arena,
    checkpoint: &'a Checkpoint,
    /// By tensor; `None` for an empty tensor.
    blocks: Vec<Option<Block>>,
}

impl<'a> Model<'a> {
    /// Reads each tensor into a block of `tag`.
    ///
    /// # Errors
    /// `Alloc`; `Checkpoint` when the files change or shrink; `Pool`, `Copy`, `Stream`. All blocks are freed.
    pub fn load(
        arena: &'a Arena,
        checkpoint: &'a Checkpoint,
        tag: &Tag,
        progress: Progress<'_>,
    ) -> Result<Self, ModelError> {
        let mut model = Self { arena, checkpoint, blocks: Vec::new() };
        let loaded = model.allocate(tag).and_then(|()| model.read_in(progress));
        if let Err(error) = loaded {
            // Report the first failure; the arena frees remaining blocks.
            let _ = model.free();
            return Err(error);
        }
        Ok(model)
    }

    /// Reads every tensor again, after a sleep dropped them. Then call [`Arena::mark_restored`]: other blocks
    /// may have the same tag.
    ///
    /// # Errors
    /// As [`Model::load`]; the blocks stay.
    pub fn read_in(&self, progress: Progress<'_>) -> Result<(), ModelError> {
        self.read_in_from(&Files::of(self.checkpoint, PageCache::Used), progress)
    }

    pub(crate) fn read_in_from(
        &self,
        storage: &dyn Storage,
        progress: Progress<'_>,
    ) -> Result<(), ModelError> {
        self.for_each_range(storage, 1, progress, |range, begin, buffer, worker| {
            let (buffer, pool) = (Arc::new(buffer), self.arena.pool());
            let mut copies = Vec::new();
            let queued = self.tensor_ranges(range, begin).try_for_each(|part| {
                let TensorRange { block, offset, bytes, at, .. } = part;
                let copy = pool.write(worker.stream, block.id, offset, Arc::clone(&buffer), at, bytes);
                copies.push((part.done(copy)?, part));
                Ok(())
            });
            // Wait even after a failure: an unfinished copy keeps its buffer.
            let ended = copies.into_iter().map(|(copy, part)| copied(part.tensor, copy.wait()));
            let ended = ended.fold(Ok(()), Result::and);
            worker.spare.extend(Arc::into_inner(buffer));
            queued.and(ended)
        })
    }

    /// Compares every byte on the device with the files, and every address with the allocated one.
    ///
    /// # Errors
    /// `Mismatch` or `Moved` for the first tensor; otherwise as [`Model::load`].
    pub fn verify(&self, progress: Progress<'_>) -> Result<(), ModelError> {
        let files = Files::of(self.checkpoint, PageCache::Used);
        self.for_each_range(&files, 2, progress, |range, begin, stored, worker| {
            let mut found = self.buffer(range, worker, stored.len() as u64)?;
            let pool = self.arena.pool();
            for part in self.tensor_ranges(range, begin) {
                let TensorRange { tensor, block, offset, bytes, at } = part;
                let now = part.done(pool.block(block.id))?;
                if now != block {
                    return Err(ModelError::Moved { tensor: tensor.name.clone(), from: block, to: now });
                }
                let copy = part.done(pool.read(worker.stream, block.id, offset, found, at, bytes))?;
                found = copied(tensor, copy.wait())?;
                let range = index(at)..index(at + bytes);
                let (there, here) = (&found[range.clone()], &stored[range]);
                // Search for the first difference only in a range that differs: it is slower.
                if there != here {
                    let nth = there.iter().zip(here).take_while(|(a, b)| a == b).count();
                    return Err(ModelError::Mismatch {
                        path: self.path(tensor),
                        tensor: tensor.name.clone(),
                        offset: offset + nth as u64,
                        bytes: tensor.bytes,
                    });
                }
            }
            worker.spare.extend([found, stored]);
            Ok(())
        })
    }

    /// Frees every block.
    ///
    /// # Errors
    /// `Pool` for a block freed elsewhere.
    pub fn free(&mut self) -> Result<(), ModelError> {
        let mut failed = Ok(());
        for (block, tensor) in self.blocks.drain(..).zip(self.checkpoint.tensors()) {
            if let Some(Err(source)) = block.map(|block| self.arena.free(block.id)) {
                failed =
                    failed.and(Err(ModelError::Pool { tensor: tensor.name.clone(), source: source.into() }));
            }
        }
        failed
    }

    fn allocate(&mut self, tag: &Tag) -> Result<(), ModelError> {
        for tensor in self.checkpoint.tensors() {
            let block = if tensor.bytes == 0 {
                None
            } else {
                let block = self.arena.alloc(&AllocRequest::new(tensor.bytes, tag.clone()));
                Some(block.map_err(|source| ModelError::Alloc {
                    path: self.path(tensor),
                    tensor: tensor.name.clone(),
                    bytes: tensor.bytes,
                    source: source.into(),
                })?)
            };
            self.blocks.push(block);
        }
        Ok(())
    }

    /// Reads all ranges with several workers of `buffers` buffers each. `work` gets the range's offset in its
    /// buffer.
    fn for_each_range(
        &self,
        storage: &dyn Storage,
        buffers: usize,
        progress: Progress<'_>,
        work: impl Fn(&FileRange, u64, HostBuffer, &mut CopyWorker) -> Result<(), ModelError> + Sync,
    ) -> Result<(), ModelError> {
        if self.blocks.is_empty() {
            return Ok(()); // They were freed.
        }
        let ranges = reader::ranges(self.checkpoint.tensors(), RANGE_BYTES_MAX, |_, _| true);
        let mut workers = self.workers(reader::readers().min(ranges.len()), buffers)?;
        let streams: Vec<StreamId> = workers.iter().map(|worker| worker.stream).collect();
        let read = |range: FileRange, worker: &mut CopyWorker| {
            let mut buffer = self.buffer(&range, worker, buffer_bytes(storage, &range))?;
            let filled = reader::read(storage, &range, &mut buffer);
            let begin = filled.map_err(|error| range.refused(self.checkpoint, error))?.begin;
            work(&range, begin as u64, buffer, worker)?;
            progress(range.bytes);
            Ok(range.bytes)
        };
        let ended = reader::run(&mut workers, [Ok(ranges)], read, &mut |_| ControlFlow::Continue(()));
        let mut result = ended.map(drop);
        for stream in streams {
            result = result.and(self.arena.driver().stream_destroy(stream).map_err(ModelError::Stream));
        }
        result
    }

    /// At least one worker; fewer than `wanted` when streams or host memory run out.
    fn workers(&self, wanted: usize, buffers: usize) -> Result<Vec<CopyWorker>, ModelError> {
        let mut workers = Vec::new();
        while workers.len() < wanted {
            match self.worker(buffers) {
                Ok(worker) => workers.push(worker),
                Err(ModelError::Stream(_)) if !workers.is_empty() => break,
                Err(ModelError::Copy { source, .. })
                    if !workers.is_empty() && is_out_of_host_memory(&source) =>
                {
                    break;
                }
                Err(error) => {
                    workers.iter().for_each(|CopyWorker { stream, .. }| {
                        _ = self.arena.driver().stream_destroy(*stream);
                    });
                    return Err(error);
                }
            }
        }
        Ok(workers)
    }

    fn worker(&self, buffers: usize) -> Result<CopyWorker, ModelError> {
        let driver = self.arena.driver();
        let stream = driver.stream_create().map_err(ModelError::Stream)?;
        match (0..buffers).map(|_| driver.host_alloc(RANGE_BYTES_MAX + ALIGN_BYTES)).collect() {
            Ok(spare) => Ok(CopyWorker { stream, spare }),
            Err(source) => {
                driver.stream_destroy(stream).map_err(ModelError::Stream)?;
                let tensor = self.checkpoint.tensors().first().map(|tensor| tensor.name.clone());
                Err(ModelError::Copy { tensor: tensor.unwrap_or_default(), source })
            }
        }
    }

    fn buffer(
        &self,
        range: &FileRange,
        worker: &mut CopyWorker,
        bytes: u64,
    ) -> Result<HostBuffer, ModelError> {
        let spare = worker.spare.pop().filter(|spare| spare.len() as u64 >= bytes);
        let made = || self.arena.driver().host_alloc(bytes.max(RANGE_BYTES_MAX + ALIGN_BYTES));
        let tensor = &self.checkpoint.tensors()[range.parts[0].tensor];
        copied(tensor, spare.map_or_else(made, Ok))
    }

    fn tensor_ranges(&self, range: &FileRange, mut at: u64) -> impl Iterator<Item = TensorRange<'a>> {
        range.parts.iter().filter_map(move |part| {
            let TensorPart { tensor, offset, bytes } = *part;
            at += bytes;
            let (tensor, block) = (&self.checkpoint.tensors()[tensor], self.blocks[tensor]?);
            Some(TensorRange { tensor, block, offset, bytes, at: at - bytes })
        })
    }

    fn path(&self, tensor: &Tensor) -> PathBuf {
        self.checkpoint.files().get(tensor.file).map(|file| file.path.clone()).unwrap_or_default()
    }
}

/// Bytes of a tensor; `at` is their offset in the buffer.
struct TensorRange<'a> {
    tensor: &'a Tensor,
    block: Block,
    offset: u64,
    bytes: u64,
    at: u64,
}

impl TensorRange<'_> {
    fn done<T>(&self, result: Result<T, PoolError>) -> Result<T, ModelError> {
        result.map_err(|source| ModelError::Pool { tensor: self.tensor.name.clone(), source: source.into() })
    }
}

fn copied<T>(tensor: &Tensor, result: Result<T, DriverError>) -> Result<T, ModelError> {
    result.map_err(|source| ModelError::Copy { tensor: tensor.name.clone(), source })
}

fn is_out_of_host_memory(error: &DriverError) -> bool {
    matches!(error.kind, DriverErrorKind::OutOfHostMemory { .. })
}

struct CopyWorker {
    stream: StreamId,
    spare: Vec<HostBuffer>,
}
