//! Reading one piece into its place: directly where file, memory and device fit, through a little memory of the reader's
//! own where they do not, and through the page cache where a file is not read directly at all.

use std::io::{self, ErrorKind};

use super::layout::Piece;
use super::storage::{ALIGN_BYTES, Aligned, Storage};

/// How a piece was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Direct,
    Staged,
    Buffered,
}

/// Why a piece was not read.
#[derive(Debug)]
pub(super) enum Fault {
    /// The file ends here.
    End(u64),
    /// The system said so, at this byte of the file.
    Failed(u64, io::Error),
    /// There is no memory of the reader's own, of which so much was wanted.
    Memory(u64),
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

    /// So many bytes, at a multiple of `align_bytes`.
    pub(super) fn take(&mut self, bytes: u64, align_bytes: u64) -> Result<&mut [u8], Fault> {
        let wanted = bytes + align_bytes;
        let fault = |_| Fault::Memory(wanted);
        let [len, align, all] = [bytes, align_bytes, wanted].map(|bytes| usize::try_from(bytes).ok());
        let (Some(len), Some(align), Some(all)) = (len, align, all) else {
            return Err(Fault::Memory(wanted));
        };
        if self.memory.len() < all {
            self.memory.try_reserve_exact(all - self.memory.len()).map_err(|_| Fault::Memory(wanted))?;
            self.memory.resize(all, 0);
        }
        let start = self.memory.as_ptr().addr();
        let from = start.next_multiple_of(align) - start;
        self.memory.get_mut(from..from + len).ok_or(()).map_err(fault)
    }
}

/// Reads a piece into `memory`, which is the buffer's from the piece's first byte to its last.
pub(super) fn read(
    storage: &dyn Storage,
    piece: &Piece,
    memory: &mut [u8],
    staging: &mut Staging,
) -> Result<Way, Fault> {
    if let Some(aligned) = storage.direct(piece.file) {
        match read_direct(storage, piece, memory, staging, aligned) {
            Err(Fault::Failed(_, error)) if is_refused(&error) => {
                storage.give_up_direct(piece.file, format!("direct reads of it are refused: {error}"));
            }
            other => return other,
        }
    }
    let read = read_buffered(storage, piece, memory);
    storage.forget(piece.file, piece.offset, piece.bytes);
    read.map(|()| Way::Buffered)
}

/// Whether a direct read fails for no reason but that it is direct.
fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported)
}

fn read_direct(
    storage: &dyn Storage,
    piece: &Piece,
    memory: &mut [u8],
    staging: &mut Staging,
    aligned: Aligned,
) -> Result<Way, Fault> {
    let unit = aligned.offset_bytes.max(ALIGN_BYTES);
    let end = piece.offset + piece.bytes;
    let is_whole = piece.offset.is_multiple_of(unit) && end.is_multiple_of(unit);
    let is_aligned = (memory.as_ptr().addr() as u64).is_multiple_of(aligned.memory_bytes);
    if is_whole && is_aligned && piece.parts.len() == 1 {
        fill_direct(storage, piece.file, memory, piece.offset, piece.bytes, unit)?;
        return Ok(Way::Direct);
    }
    let begin = piece.offset - piece.offset % unit;
    let bytes = end.next_multiple_of(unit) - begin;
    let staged = staging.take(bytes, aligned.memory_bytes.max(ALIGN_BYTES))?;
    fill_direct(storage, piece.file, staged, begin, end - begin, unit)?;
    let mut from = piece.offset - begin;
    for (part, to) in parts(piece, memory) {
        to.copy_from_slice(slice(staged, from, part.bytes));
        from += part.bytes;
    }
    Ok(Way::Staged)
}

/// Fills `buf`, which is as large as whole units, with the file's bytes from `begin` on, `wanted` at least.
fn fill_direct(
    storage: &dyn Storage,
    file: usize,
    buf: &mut [u8],
    begin: u64,
    wanted: u64,
    unit: u64,
) -> Result<(), Fault> {
    let mut got = 0;
    while got < wanted {
        // What comes to less than whole units is the end of the file, or is read as if it were not: the page cache
        // knows the rest.
        let is_direct = got.is_multiple_of(unit);
        let rest = if is_direct { buf.len() as u64 - got } else { wanted - got };
        match storage.read(file, is_direct, slice_mut(buf, got, rest), begin + got) {
            Ok(0) => return Err(Fault::End(begin + got)),
            Ok(bytes) => got += bytes as u64,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Fault::Failed(begin + got, error)),
        }
        if !is_direct {
            storage.forget(file, begin, wanted);
        }
    }
    Ok(())
}

fn read_buffered(storage: &dyn Storage, piece: &Piece, memory: &mut [u8]) -> Result<(), Fault> {
    let mut from = piece.offset;
    for (part, to) in parts(piece, memory) {
        let mut got = 0;
        while got < part.bytes {
            match storage.read(piece.file, false, slice_mut(to, got, part.bytes - got), from + got) {
                Ok(0) => return Err(Fault::End(from + got)),
                Ok(bytes) => got += bytes as u64,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Fault::Failed(from + got, error)),
            }
        }
        from += part.bytes;
    }
    Ok(())
}

/// The parts of a piece, each with its place in the piece's memory.
fn parts<'m>(
    piece: &Piece,
    mut memory: &'m mut [u8],
) -> impl Iterator<Item = (super::layout::Part, &'m mut [u8])> {
    let mut at = piece.begin();
    piece.parts.iter().map(move |part| {
        let (gap, bytes) = (index(part.at - at), index(part.bytes));
        let (_, rest) = std::mem::take(&mut memory).split_at_mut(gap);
        let (to, rest) = rest.split_at_mut(bytes);
        memory = rest;
        at = part.at + part.bytes;
        (*part, to)
    })
}

/// Of what lies in memory, there is an index.
fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn slice(bytes: &[u8], from: u64, len: u64) -> &[u8] {
    &bytes[index(from)..index(from + len)]
}

fn slice_mut(bytes: &mut [u8], from: u64, len: u64) -> &mut [u8] {
    &mut bytes[index(from)..index(from + len)]
}
