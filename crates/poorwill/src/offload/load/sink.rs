//! Host memory as what a reader reads into: into its place where file, memory and device fit, else through a little
//! memory of the reader's own.

use std::iter::Peekable;
use std::mem;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{DriverError, Op};

use super::layout::Layout;
use super::{Buffer, LoadError};
use crate::checkpoint::Checkpoint;
use crate::reader::{self, Filled, Piece, Storage, fits, index, room_bytes};

/// A piece and the memory that it goes to: the buffer's from the piece's first byte to its last.
pub(super) struct Task<'m> {
    piece: &'m Piece,
    memory: &'m mut [u8],
}

/// What one reader has of its own, and how it has read.
#[derive(Debug, Default)]
pub(super) struct Hand {
    pub(super) staging: Staging,
    pub(super) direct_bytes: u64,
    pub(super) staged_bytes: u64,
    pub(super) buffered_bytes: u64,
}

/// Memory of a reader's own.
#[derive(Debug, Default)]
pub(super) struct Staging {
    memory: Vec<u8>,
}

impl Staging {
    /// How much it has come to.
    pub(super) fn taken_bytes(&self) -> u64 {
        self.memory.capacity() as u64
    }

    pub(super) fn take(&mut self, bytes: u64) -> Result<&mut [u8], LoadError> {
        let lacking = index(bytes).saturating_sub(self.memory.len());
        self.memory.try_reserve_exact(lacking).map_err(|_| LoadError::Staging { bytes })?;
        self.memory.resize(self.memory.len() + lacking, 0);
        Ok(&mut self.memory)
    }
}

/// Where pieces are read from and go to.
pub(super) struct Sink<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) storage: &'a dyn Storage,
    pub(super) layout: &'a Layout,
}

impl Sink<'_> {
    /// What is to be read into buffer `nth`, which was just made: the next of the pieces.
    pub(super) fn tasks<'m>(
        &self,
        nth: usize,
        pieces: &mut Peekable<impl Iterator<Item = &'m Piece>>,
        made: &'m mut Buffer,
    ) -> DriverResult<Vec<Task<'m>>> {
        let wrong = |words: &str| DriverError::invalid(Op::HostAlloc, words);
        let mut memory = made.as_mut_slice().ok_or_else(|| wrong("memory that was just made is in use"))?;
        let (mut tasks, mut at) = (Vec::new(), 0);
        while let Some(piece) = pieces.next_if(|piece| self.layout.span(piece).0 == nth) {
            let (_, begin, end) = self.layout.span(piece);
            tasks.push(Task { piece, memory: split(&mut memory, begin - at, end - begin) });
            at = end;
        }
        Ok(tasks)
    }

    /// Reads a piece to where it goes.
    pub(super) fn read(&self, task: Task<'_>, hand: &mut Hand) -> Result<u64, LoadError> {
        let (Task { piece, mut memory }, storage) = (task, self.storage);
        let refused = |fault| LoadError::Checkpoint(piece.refused(self.checkpoint, fault));
        let is_in_place = fits(storage, piece, memory);
        let is_direct = if is_in_place {
            reader::read(storage, piece, memory).map_err(refused)?.is_direct
        } else {
            let room = hand.staging.take(room_bytes(storage, piece))?;
            let Filled { mut begin, is_direct } = reader::read(storage, piece, room).map_err(refused)?;
            let mut at = self.layout.span(piece).1;
            for part in &piece.parts {
                let place = self.layout.place(part).offset;
                let to = split(&mut memory, place - at, part.bytes);
                to.copy_from_slice(&room[begin..begin + to.len()]);
                (begin, at) = (begin + to.len(), place + part.bytes);
            }
            is_direct
        };
        *match (is_direct, is_in_place) {
            (true, true) => &mut hand.direct_bytes,
            (true, false) => &mut hand.staged_bytes,
            (false, _) => &mut hand.buffered_bytes,
        } += piece.bytes;
        Ok(piece.bytes)
    }
}

/// Cuts so many bytes off, behind a gap.
fn split<'m>(memory: &mut &'m mut [u8], gap: u64, bytes: u64) -> &'m mut [u8] {
    let (_, rest) = mem::take(memory).split_at_mut(index(gap));
    let (cut, rest) = rest.split_at_mut(index(bytes));
    *memory = rest;
    cut
}
