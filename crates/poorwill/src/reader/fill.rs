//! Reading a piece whole: directly where its file is read so, else through the page cache.

use std::io::{self, ErrorKind};

use super::plan::Piece;
use super::storage::{ALIGN_BYTES, Aligned, Storage};

/// Why a piece was not read.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The file ends here.
    End(u64),
    /// The system said so, at this byte of the file.
    Failed(u64, io::Error),
}

/// A piece that was read.
pub(crate) struct Filled {
    /// Where in its room it begins.
    pub(crate) begin: usize,
    /// Whether it came past the page cache.
    pub(crate) is_direct: bool,
}

/// Where direct reads for a piece begin and end.
fn whole_units(piece: &Piece, aligned: Aligned) -> (u64, u64) {
    let unit = aligned.unit();
    (piece.offset - piece.offset % unit, piece.end().next_multiple_of(unit))
}

/// Whether a piece can be read into exactly this memory.
pub(crate) fn fits(storage: &dyn Storage, piece: &Piece, memory: &[u8]) -> bool {
    let is_fit = |aligned| {
        let start = memory.as_ptr().addr() as u64;
        whole_units(piece, aligned) == (piece.offset, piece.end())
            && start.is_multiple_of(aligned.memory_bytes)
    };
    memory.len() as u64 == piece.bytes && storage.direct(piece.file).is_none_or(is_fit)
}

/// How much room a piece needs otherwise.
pub(crate) fn room_bytes(storage: &dyn Storage, piece: &Piece) -> u64 {
    let Some(aligned) = storage.direct(piece.file) else { return piece.bytes };
    let (begin, end) = whole_units(piece, aligned);
    end - begin + aligned.memory_bytes.max(ALIGN_BYTES)
}

/// Reads a piece into memory that it [`fits`], or that has room for it. What the page cache has of it is taken from
/// there, if that may be used.
pub(crate) fn read(storage: &dyn Storage, piece: &Piece, room: &mut [u8]) -> Result<Filled, Fault> {
    let bytes = index(piece.bytes);
    let buffered = Filled { begin: 0, is_direct: false };
    if storage.read_cached(piece.file, &mut room[..bytes], piece.offset) {
        return Ok(buffered);
    }
    if let Some(aligned) = storage.direct(piece.file) {
        let (begin, end) = whole_units(piece, aligned);
        let start = room.as_ptr().addr() as u64;
        let is_exact = room.len() as u64 == end - begin;
        let align_bytes = aligned.memory_bytes.max(if is_exact { 1 } else { ALIGN_BYTES });
        let from = start.next_multiple_of(align_bytes) - start;
        let memory = &mut room[index(from)..index(from + end - begin)];
        match fill(storage, piece, begin, memory, Some(aligned.unit())) {
            Err(Fault::Failed(_, error)) if is_refused(&error) => {
                storage.give_up_direct(piece.file, format!("direct reads of it are refused: {error}"));
            }
            Err(fault) => return Err(fault),
            Ok(()) => {
                return Ok(Filled { begin: index(from + piece.offset - begin), is_direct: true });
            }
        }
    }
    let read = fill(storage, piece, piece.offset, &mut room[..bytes], None);
    storage.forget(piece.file, piece.offset, piece.bytes);
    read.map(|()| buffered)
}

/// Whether a direct read fails for no reason but that it is direct.
fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported)
}

/// Fills `memory` with the file's bytes from `begin` on, to the piece's end at least: directly in such units, if any.
fn fill(
    storage: &dyn Storage,
    piece: &Piece,
    begin: u64,
    memory: &mut [u8],
    unit: Option<u64>,
) -> Result<(), Fault> {
    let (mut got, wanted) = (0, piece.end() - begin);
    while got < wanted {
        // What comes to less than whole units is the end of the file, or is read as if it were not: the page cache
        // knows the rest.
        let is_direct = unit.is_some_and(|unit| got.is_multiple_of(unit));
        let end = if is_direct { memory.len() } else { index(wanted) };
        match storage.read(piece.file, is_direct, &mut memory[index(got)..end], begin + got) {
            Ok(0) => return Err(Fault::End(begin + got)),
            Ok(bytes) => got += bytes as u64,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Fault::Failed(begin + got, error)),
        }
        if unit.is_some() && !is_direct {
            storage.forget(piece.file, begin, wanted);
        }
    }
    Ok(())
}

/// Of what lies in memory, there is an index.
pub(crate) fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
