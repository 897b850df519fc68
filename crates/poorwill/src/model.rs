//! A checkpoint in an arena: loaded by several readers, compared with its files at any time.
//!
//! Each tensor has a block of its own. Loading allocates all of them before it reads a byte, so a model that
//! does not fit is refused at once, and frees all of them when it fails. A [`Model`] frees nothing when it is
//! dropped: its blocks live as long as the arena, or until [`Model::free`].

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use poorwill_core::{AllocRequest, Block, DriverError, HostBuffer, PoolError, StreamId, Tag};

use crate::arena::Arena;
use crate::checkpoint::{Checkpoint, CheckpointError, Tensor, text};

/// Bytes that one reader moves at a time.
const PIECE_BYTES: u64 = 4 << 20;

/// Most readers; more do not make a disk or a memory bus faster.
const READERS_MAX: usize = 8;

/// Why a model could not be loaded, restored or verified.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No memory for a tensor.
    #[error("tensor {} of {} ({bytes} B): {source}", text::name(tensor), text::path(path))]
    Alloc {
        /// The file.
        path: PathBuf,
        /// The tensor, as the file names it.
        tensor: String,
        /// Its size in bytes.
        bytes: u64,
        /// What the pool said.
        source: Box<PoolError>,
    },
    /// The arena refused or failed a copy.
    #[error("tensor {}: {source}", text::name(tensor))]
    Pool {
        /// The tensor, as the file names it.
        tensor: String,
        /// What the pool said.
        source: Box<PoolError>,
    },
    /// The device failed a copy, or the host has no memory for one.
    #[error("moving bytes of tensor {} failed: {source}", text::name(tensor))]
    Copy {
        /// The tensor, as the file names it.
        tensor: String,
        /// What the driver said.
        source: DriverError,
    },
    /// The device has no stream to copy on.
    #[error("no stream to move the model on: {0}")]
    Stream(DriverError),
    /// The device holds other bytes than the file.
    #[error(
        "tensor {} of {} differs from the file at byte {offset} of {bytes}",
        text::name(tensor),
        text::path(path)
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The tensor, as the file names it.
        tensor: String,
        /// The first byte that differs.
        offset: u64,
        /// Size of the tensor in bytes.
        bytes: u64,
    },
    /// A block is not where it was allocated.
    #[error("tensor {} has moved from {:#x} to {:#x}", text::name(tensor), from.range.addr, to.range.addr)]
    Moved {
        /// The tensor, as the file names it.
        tensor: String,
        /// Where it was allocated.
        from: Block,
        /// Where it is.
        to: Block,
    },
}

/// Told how many bytes were just moved, from several threads.
pub type Progress<'a> = &'a (dyn Fn(u64) + Sync);

/// A checkpoint whose tensors have blocks in an arena.
#[derive(Debug)]
pub struct Model<'a> {
    arena: &'a Arena,
    checkpoint: &'a Checkpoint,
    /// By tensor; none for a tensor without bytes.
    blocks: Vec<Option<Block>>,
}

impl<'a> Model<'a> {
    /// Allocates a block of `tag` for each tensor of `checkpoint` and reads it in.
    ///
    /// # Errors
    /// `Alloc`, naming the tensor; `Checkpoint` when the files change or shrink meanwhile; `Pool`, `Copy`,
    /// `Stream`.
    /// Nothing stays allocated.
    pub fn load(
        arena: &'a Arena,
        checkpoint: &'a Checkpoint,
        tag: &Tag,
        progress: Progress<'_>,
    ) -> Result<Self, ModelError> {
        let mut model = Self { arena, checkpoint, blocks: Vec::new() };
        let loaded = model.allocate(tag).and_then(|()| model.read_in(progress));
        if let Err(error) = loaded {
            // The first failure is the one to report; blocks that cannot be freed go with the arena.
            let _ = model.free();
            return Err(error);
        }
        Ok(model)
    }

    /// Reads every tensor from its file again, after a sleep that dropped them. Marking the tag as restored
    /// is left to the caller, who knows whether other blocks have the tag.
    ///
    /// # Errors
    /// As for [`Model::load`], but the blocks stay.
    pub fn read_in(&self, progress: Progress<'_>) -> Result<(), ModelError> {
        self.for_each_piece(progress, |piece, buffers| {
            let bytes = piece.len();
            let mut buffer = piece.copied(buffers.take(self.arena))?;
            self.checkpoint.read_exact_at(piece.tensor, piece.offset, &mut buffer[..bytes])?;
            let buffer = Arc::new(buffer);
            let shared = Arc::clone(&buffer);
            let pool = self.arena.pool();
            let copy = pool.write(buffers.stream, piece.block.id, piece.offset, shared, 0, piece.bytes);
            piece.copied(copy.map_err(|source| piece.pool_error(source))?.wait())?;
            buffers.kept.extend(Arc::into_inner(buffer));
            Ok(())
        })
    }

    /// Compares every byte on the device with the files, and every address with where it was.
    ///
    /// # Errors
    /// `Mismatch` or `Moved` for the first tensor found; otherwise as for [`Model::load`].
    pub fn verify(&self, progress: Progress<'_>) -> Result<(), ModelError> {
        self.for_each_piece(progress, |piece, buffers| {
            let now = self.arena.pool().block(piece.block.id).map_err(|source| piece.pool_error(source))?;
            if now != piece.block {
                return Err(ModelError::Moved { tensor: piece.name(), from: piece.block, to: now });
            }
            let (bytes, buffer) = (piece.len(), piece.copied(buffers.take(self.arena))?);
            let mut stored = piece.copied(buffers.take(self.arena))?;
            let pool = self.arena.pool();
            let copy = pool.read(buffers.stream, piece.block.id, piece.offset, buffer, 0, piece.bytes);
            let copy = copy.map_err(|source| piece.pool_error(source))?;
            let read = self.checkpoint.read_exact_at(piece.tensor, piece.offset, &mut stored[..bytes]);
            // Whatever became of the file: a copy that nobody waits for keeps its buffer for a while.
            let found = piece.copied(copy.wait())?;
            read?;
            let differs = found[..bytes] != stored[..bytes];
            let first = differs.then(|| found.iter().zip(stored.iter()).position(|(a, b)| a != b)).flatten();
            buffers.kept.extend([found, stored]);
            first.map_or(Ok(()), |first| Err(self.mismatch(piece, first)))
        })
    }

    /// Frees every block.
    ///
    /// # Errors
    /// `Pool` for a block that somebody else freed.
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

    /// Cuts the tensors into pieces and lets several readers work them off; the first error ends all. The
    /// caller's thread is one of them, so that a system without another thread or stream to give still works.
    fn for_each_piece(
        &self,
        progress: Progress<'_>,
        work: impl Fn(&Piece<'_>, &mut Buffers) -> Result<(), ModelError> + Sync,
    ) -> Result<(), ModelError> {
        let pieces = self.pieces();
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let failed = Mutex::new(None);
        let read = |stream: StreamId| {
            let mut buffers = Buffers { stream, kept: Vec::new() };
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                if let Err(error) = work(piece, &mut buffers) {
                    stop.store(true, Ordering::Relaxed);
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    break;
                }
                progress(piece.bytes);
            }
        };
        let streams = self.streams(pieces.len())?;
        thread::scope(|scope| {
            for &stream in streams.iter().skip(1) {
                let read = &read;
                // Where no thread is to be had, the others do its share.
                let _ = thread::Builder::new().spawn_scoped(scope, move || read(stream));
            }
            streams.first().copied().map(read);
        });
        let mut result = failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err);
        for stream in streams {
            result = result.and(self.arena.driver().stream_destroy(stream).map_err(ModelError::Stream));
        }
        result
    }

    /// A stream for each reader: at least one if there is work, fewer than are wanted if the device has no more.
    fn streams(&self, pieces: usize) -> Result<Vec<StreamId>, ModelError> {
        let readers =
            thread::available_parallelism().map_or(1, NonZeroUsize::get).min(READERS_MAX).min(pieces);
        let mut streams = Vec::new();
        while streams.len() < readers {
            match self.arena.driver().stream_create() {
                Ok(stream) => streams.push(stream),
                Err(error) if streams.is_empty() => return Err(ModelError::Stream(error)),
                Err(_) => break,
            }
        }
        Ok(streams)
    }

    fn pieces(&self) -> Vec<Piece<'a>> {
        let with_blocks = self.checkpoint.tensors().iter().zip(&self.blocks);
        let placed = with_blocks.filter_map(|(tensor, block)| Some((tensor, (*block)?)));
        placed
            .flat_map(|(tensor, block)| {
                let offsets = (0..tensor.bytes).step_by(usize::try_from(PIECE_BYTES).unwrap_or(usize::MAX));
                offsets.map(move |offset| {
                    let bytes = PIECE_BYTES.min(tensor.bytes - offset);
                    Piece { tensor, block, offset, bytes }
                })
            })
            .collect()
    }

    fn mismatch(&self, piece: &Piece<'_>, first: usize) -> ModelError {
        ModelError::Mismatch {
            path: self.path(piece.tensor),
            tensor: piece.name(),
            offset: piece.offset + first as u64,
            bytes: piece.tensor.bytes,
        }
    }

    fn path(&self, tensor: &Tensor) -> PathBuf {
        self.checkpoint.files().get(tensor.file).map(|file| file.path.clone()).unwrap_or_default()
    }
}

/// A stretch of a tensor.
struct Piece<'a> {
    tensor: &'a Tensor,
    block: Block,
    offset: u64,
    bytes: u64,
}

impl Piece<'_> {
    /// Never more than [`PIECE_BYTES`].
    fn len(&self) -> usize {
        usize::try_from(self.bytes).unwrap_or(usize::MAX)
    }

    fn name(&self) -> String {
        self.tensor.name.clone()
    }

    fn copied<T>(&self, result: Result<T, DriverError>) -> Result<T, ModelError> {
        result.map_err(|source| ModelError::Copy { tensor: self.name(), source })
    }

    fn pool_error(&self, source: PoolError) -> ModelError {
        ModelError::Pool { tensor: self.name(), source: source.into() }
    }
}

/// What one reader works with.
struct Buffers {
    stream: StreamId,
    kept: Vec<HostBuffer>,
}

impl Buffers {
    fn take(&mut self, arena: &Arena) -> Result<HostBuffer, DriverError> {
        self.kept.pop().map_or_else(|| arena.driver().host_alloc(PIECE_BYTES), Ok)
    }
}
