//! Divides a checkpoint into ranges, and locates read errors.

use super::error::ReadError;
use crate::checkpoint::{Checkpoint, CheckpointError, Tensor};

/// Contiguous bytes of a file, read at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileRange {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// The tensors' parts, in order and without a gap.
    pub(crate) parts: Vec<TensorPart>,
}

/// Bytes of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorPart {
    pub(crate) tensor: usize,
    /// The first byte, in the tensor.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// Takes `tensors` by file and offset. A range ends at a multiple of `range_bytes` in its file, at a gap, and
/// where `joins` separates a tensor from the one before.
pub(crate) fn ranges(
    tensors: &[Tensor],
    range_bytes: u64,
    joins: impl Fn(usize, usize) -> bool,
) -> Vec<FileRange> {
    let mut ranges: Vec<FileRange> = Vec::new();
    for (nth, tensor) in tensors.iter().enumerate() {
        let mut done = 0;
        while done < tensor.bytes {
            let offset = tensor.offset + done;
            let bytes = (tensor.bytes - done).min(range_bytes - offset % range_bytes);
            let part = TensorPart { tensor: nth, offset: done, bytes };
            done += bytes;
            let continued = ranges.last_mut().filter(|range| {
                range.file == tensor.file
                    && range.end() == offset
                    && !offset.is_multiple_of(range_bytes)
                    && range.parts.last().is_none_or(|last| joins(last.tensor, nth))
            });
            match continued {
                None => ranges.push(FileRange { file: tensor.file, offset, bytes, parts: vec![part] }),
                Some(range) => {
                    range.bytes += bytes;
                    range.parts.push(part);
                }
            }
        }
    }
    ranges
}

impl FileRange {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.bytes
    }

    /// A read error, with the tensor at that byte of the file.
    pub(crate) fn refused(&self, checkpoint: &Checkpoint, error: ReadError) -> CheckpointError {
        let (ReadError::End(at) | ReadError::Failed(at, _)) = error;
        let mut offset = self.offset;
        let part = self.parts.iter().find(|part| {
            let is_here = at < offset + part.bytes;
            offset += if is_here { 0 } else { part.bytes };
            is_here
        });
        let path = checkpoint.files()[self.file].path.clone();
        let tensor = part.map_or_else(String::new, |part| checkpoint.tensors()[part.tensor].name.clone());
        let wanted_bytes = part.map_or(self.bytes, |part| part.bytes);
        match error {
            ReadError::End(at) => {
                // A direct read may begin, and end, before the range.
                let got_bytes = at.saturating_sub(offset);
                CheckpointError::ShortRead { path, tensor, offset, wanted_bytes, got_bytes }
            }
            ReadError::Failed(_, source) => {
                CheckpointError::Read { path, tensor, offset, wanted_bytes, source }
            }
        }
    }
}
