//! A checkpoint in an arena: loaded by several readers, compared with its files at any time.
//!
//! The files are read in pieces into page-locked memory of each reader's, and copied from there on a stream of each
//! reader's: past the page cache where the storage reads so, but for what the page cache has already.
//!
//! Each tensor has a block of its own. Loading allocates all of them before it reads a byte, so a model that
//! does not fit is refused at once, and frees all of them when it fails. A [`Model`] frees nothing when it is
//! dropped: its blocks live as long as the arena, or until [`Model::free`].

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use poorwill_core::{
    AllocRequest, Block, DriverError, DriverErrorKind, HostBuffer, PoolError, StreamId, Tag,
};

use crate::arena::Arena;
use crate::checkpoint::{Checkpoint, CheckpointError, Tensor, text};
use crate::reader::{
    self, ALIGN_BYTES, Files, PIECE_BYTES_MAX, PageCache, Part, Piece, Storage, index, room_bytes,
};

/// Why a model could not be loaded, restored or verified.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No memory for a tensor.
    #[error("no memory for tensor {} of {} ({bytes} B)", text::name(tensor), text::path(path))]
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
    #[error("cannot copy tensor {}", text::name(tensor))]
    Pool {
        /// The tensor, as the file names it.
        tensor: String,
        /// What the pool said.
        source: Box<PoolError>,
    },
    /// The device failed a copy, or the host has no memory for one.
    #[error("moving bytes of tensor {} failed", text::name(tensor))]
    Copy {
        /// The tensor, as the file names it.
        tensor: String,
        /// What the driver said.
        source: DriverError,
    },
    /// The device has no stream to copy on.
    #[error("no stream to move the model on")]
    Stream(#[source] DriverError),
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
        self.read_in_from(&Files::of(self.checkpoint, PageCache::Used), progress)
    }

    pub(crate) fn read_in_from(
        &self,
        storage: &dyn Storage,
        progress: Progress<'_>,
    ) -> Result<(), ModelError> {
        self.for_each_piece(storage, 1, progress, |piece, begin, buffer, hand| {
            let (buffer, pool) = (Arc::new(buffer), self.arena.pool());
            let mut copies = Vec::new();
            let queued = self.stretches(piece, begin).try_for_each(|stretch| {
                let Stretch { block, offset, bytes, at, .. } = stretch;
                let copy = pool.write(hand.stream, block.id, offset, Arc::clone(&buffer), at, bytes);
                copies.push((stretch.done(copy)?, stretch));
                Ok(())
            });
            // Whatever failed: a copy that nobody waits for keeps its buffer for a while.
            let ended = copies.into_iter().map(|(copy, stretch)| copied(stretch.tensor, copy.wait()));
            let ended = ended.fold(Ok(()), Result::and);
            hand.kept.extend(Arc::into_inner(buffer));
            queued.and(ended)
        })
    }

    /// Compares every byte on the device with the files, and every address with where it was.
    ///
    /// # Errors
    /// `Mismatch` or `Moved` for the first tensor found; otherwise as for [`Model::load`].
    pub fn verify(&self, progress: Progress<'_>) -> Result<(), ModelError> {
        let files = Files::of(self.checkpoint, PageCache::Used);
        self.for_each_piece(&files, 2, progress, |piece, begin, stored, hand| {
            let mut found = self.buffer(piece, hand, stored.len() as u64)?;
            let pool = self.arena.pool();
            for stretch in self.stretches(piece, begin) {
                let Stretch { tensor, block, offset, bytes, at } = stretch;
                let now = stretch.done(pool.block(block.id))?;
                if now != block {
                    return Err(ModelError::Moved { tensor: tensor.name.clone(), from: block, to: now });
                }
                let copy = stretch.done(pool.read(hand.stream, block.id, offset, found, at, bytes))?;
                found = copied(tensor, copy.wait())?;
                let range = index(at)..index(at + bytes);
                let (there, here) = (&found[range.clone()], &stored[range]);
                // The first that differs is looked for where one does: it takes longer.
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
            hand.kept.extend([found, stored]);
            Ok(())
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

    /// Has several readers, with so many buffers each, read all pieces, and do something with what was read and where in
    /// its buffer it begins; the first error ends all.
    fn for_each_piece(
        &self,
        storage: &dyn Storage,
        buffers: usize,
        progress: Progress<'_>,
        work: impl Fn(&Piece, u64, HostBuffer, &mut Hand) -> Result<(), ModelError> + Sync,
    ) -> Result<(), ModelError> {
        if self.blocks.is_empty() {
            return Ok(()); // They were freed.
        }
        let pieces = reader::pieces(self.checkpoint.tensors(), PIECE_BYTES_MAX, |_, _| true);
        let mut hands = self.hands(reader::readers().min(pieces.len()), buffers)?;
        let streams: Vec<StreamId> = hands.iter().map(|hand| hand.stream).collect();
        let read = |piece: Piece, hand: &mut Hand| {
            let mut buffer = self.buffer(&piece, hand, room_bytes(storage, &piece))?;
            let filled = reader::read(storage, &piece, &mut buffer);
            let begin = filled.map_err(|fault| piece.refused(self.checkpoint, fault))?.begin;
            work(&piece, begin as u64, buffer, hand)?;
            progress(piece.bytes);
            Ok(piece.bytes)
        };
        let ended = reader::run(&mut hands, [Ok(pieces)], read, &mut |_| ControlFlow::Continue(()));
        let mut result = ended.map(drop);
        for stream in streams {
            result = result.and(self.arena.driver().stream_destroy(stream).map_err(ModelError::Stream));
        }
        result
    }

    /// What each reader works with: for one at least, and for fewer than are wanted if the device has no more streams,
    /// or no more host memory is to be had.
    fn hands(&self, wanted: usize, buffers: usize) -> Result<Vec<Hand>, ModelError> {
        let mut hands = Vec::new();
        while hands.len() < wanted {
            match self.hand(buffers) {
                Ok(hand) => hands.push(hand),
                Err(ModelError::Stream(_)) if !hands.is_empty() => break,
                Err(ModelError::Copy { source, .. }) if !hands.is_empty() && is_lack(&source) => break,
                Err(error) => {
                    // The error that counts is the first one.
                    hands
                        .iter()
                        .for_each(|Hand { stream, .. }| _ = self.arena.driver().stream_destroy(*stream));
                    return Err(error);
                }
            }
        }
        Ok(hands)
    }

    fn hand(&self, buffers: usize) -> Result<Hand, ModelError> {
        let driver = self.arena.driver();
        let stream = driver.stream_create().map_err(ModelError::Stream)?;
        match (0..buffers).map(|_| driver.host_alloc(PIECE_BYTES_MAX + ALIGN_BYTES)).collect() {
            Ok(kept) => Ok(Hand { stream, kept }),
            Err(source) => {
                driver.stream_destroy(stream).map_err(ModelError::Stream)?;
                let tensor = self.checkpoint.tensors().first().map(|tensor| tensor.name.clone());
                Err(ModelError::Copy { tensor: tensor.unwrap_or_default(), source })
            }
        }
    }

    /// A buffer with room for a piece.
    fn buffer(&self, piece: &Piece, hand: &mut Hand, bytes: u64) -> Result<HostBuffer, ModelError> {
        let kept = hand.kept.pop().filter(|kept| kept.len() as u64 >= bytes);
        let made = || self.arena.driver().host_alloc(bytes.max(PIECE_BYTES_MAX + ALIGN_BYTES));
        let tensor = &self.checkpoint.tensors()[piece.parts[0].tensor];
        copied(tensor, kept.map_or_else(made, Ok))
    }

    /// What a piece, which begins at `at` of its buffer, is made of.
    fn stretches(&self, piece: &Piece, mut at: u64) -> impl Iterator<Item = Stretch<'a>> {
        piece.parts.iter().filter_map(move |part| {
            let Part { tensor, offset, bytes } = *part;
            at += bytes;
            let (tensor, block) = (&self.checkpoint.tensors()[tensor], self.blocks[tensor]?);
            Some(Stretch { tensor, block, offset, bytes, at: at - bytes })
        })
    }

    fn path(&self, tensor: &Tensor) -> PathBuf {
        self.checkpoint.files().get(tensor.file).map(|file| file.path.clone()).unwrap_or_default()
    }
}

/// Bytes of a tensor, and where in a buffer they are.
struct Stretch<'a> {
    tensor: &'a Tensor,
    block: Block,
    offset: u64,
    bytes: u64,
    at: u64,
}

impl Stretch<'_> {
    fn done<T>(&self, result: Result<T, PoolError>) -> Result<T, ModelError> {
        result.map_err(|source| ModelError::Pool { tensor: self.tensor.name.clone(), source: source.into() })
    }
}

fn copied<T>(tensor: &Tensor, result: Result<T, DriverError>) -> Result<T, ModelError> {
    result.map_err(|source| ModelError::Copy { tensor: tensor.name.clone(), source })
}

fn is_lack(error: &DriverError) -> bool {
    matches!(error.kind, DriverErrorKind::OutOfHostMemory { .. })
}

/// What one reader has of its own.
struct Hand {
    stream: StreamId,
    kept: Vec<HostBuffer>,
}
