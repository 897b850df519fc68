//! Reads ranges: directly where the file allows it, else through the page cache.

use std::io::{self, ErrorKind};

use super::error::ReadError;
use super::plan::FileRange;
use super::storage::{ALIGN_BYTES, Alignment, Storage};

pub(crate) struct RangeRead {
    pub(crate) begin: usize,
    pub(crate) is_direct: bool,
}

/// The range, extended to the alignment of direct reads.
fn whole_units(range: &FileRange, aligned: Alignment) -> (u64, u64) {
    let unit = aligned.unit();
    (range.offset - range.offset % unit, range.end().next_multiple_of(unit))
}

/// Whether a range can be read into exactly this memory.
pub(crate) fn fits(storage: &dyn Storage, range: &FileRange, memory: &[u8]) -> bool {
    let is_fit = |aligned| {
        let start = memory.as_ptr().addr() as u64;
        whole_units(range, aligned) == (range.offset, range.end())
            && start.is_multiple_of(aligned.memory_bytes)
    };
    memory.len() as u64 == range.bytes && storage.direct(range.file).is_none_or(is_fit)
}

/// The buffer size for a range that does not fit.
pub(crate) fn buffer_bytes(storage: &dyn Storage, range: &FileRange) -> u64 {
    let Some(aligned) = storage.direct(range.file) else { return range.bytes };
    let (begin, end) = whole_units(range, aligned);
    end - begin + aligned.memory_bytes.max(ALIGN_BYTES)
}

/// Reads into memory that the range [`fits`], or a buffer of [`buffer_bytes`].
pub(crate) fn read(
    storage: &dyn Storage,
    range: &FileRange,
    buffer: &mut [u8],
) -> Result<RangeRead, ReadError> {
    let bytes = index(range.bytes);
    let buffered = RangeRead { begin: 0, is_direct: false };
    if storage.read_cached(range.file, &mut buffer[..bytes], range.offset) {
        return Ok(buffered);
    }
    if let Some(aligned) = storage.direct(range.file) {
        let (begin, end) = whole_units(range, aligned);
        let start = buffer.as_ptr().addr() as u64;
        let is_exact = buffer.len() as u64 == end - begin;
        let align_bytes = aligned.memory_bytes.max(if is_exact { 1 } else { ALIGN_BYTES });
        let from = start.next_multiple_of(align_bytes) - start;
        let memory = &mut buffer[index(from)..index(from + end - begin)];
        match fill(storage, range, begin, memory, Some(aligned.unit())) {
            Err(ReadError::Failed(_, error)) if is_refused(&error) => {
                storage.disable_direct(range.file, format!("direct reads of it are refused: {error}"));
            }
            Err(error) => return Err(error),
            Ok(()) => {
                return Ok(RangeRead { begin: index(from + range.offset - begin), is_direct: true });
            }
        }
    }
    let read = fill(storage, range, range.offset, &mut buffer[..bytes], None);
    storage.drop_cached(range.file, range.offset, range.bytes);
    read.map(|()| buffered)
}

/// Whether a read fails only because it is direct.
fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported)
}

/// Fills `memory` from `begin` at least to the range's end; directly if `unit` gives the alignment.
fn fill(
    storage: &dyn Storage,
    range: &FileRange,
    begin: u64,
    memory: &mut [u8],
    unit: Option<u64>,
) -> Result<(), ReadError> {
    let (mut got, wanted) = (0, range.end() - begin);
    while got < wanted {
        // A read that ends inside a unit met the end of the file. Continue through the page cache, in case it
        // did not.
        let is_direct = unit.is_some_and(|unit| got.is_multiple_of(unit));
        let end = if is_direct { memory.len() } else { index(wanted) };
        match storage.read(range.file, is_direct, &mut memory[index(got)..end], begin + got) {
            Ok(0) => return Err(ReadError::End(begin + got)),
            Ok(bytes) => got += bytes as u64,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(ReadError::Failed(begin + got, error)),
        }
        if unit.is_some() && !is_direct {
            storage.drop_cached(range.file, begin, wanted);
        }
    }
    Ok(())
}

pub(crate) fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
