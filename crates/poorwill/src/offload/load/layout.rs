//! Where the bytes of a checkpoint go: which buffer holds which tensor, and in which pieces they are read. Pure.
//!
//! Tensors keep the order that they have in their files, so that what follows another in a file follows it in memory,
//! too. No tensor lies in two buffers, and between tensors there is no more than alignment takes.

use crate::checkpoint::{Dtype, Tensor};

/// What tensors begin at a multiple of, the best first. Kernels that read host memory in place load 16 bytes at a time,
/// and PyTorch's own memory begins at multiples of 64 on a CPU, and of 256 and more on a GPU.
const ALIGNMENTS: [u64; 3] = [256, 64, 16];

/// What alignment may cost: this share of the bytes, or a page, which memory is taken by anyway.
const PADDING_SHARE: u64 = 1000;
const PADDING_MIN: u64 = 4096;

/// How large buffers are, unless a tensor is larger: reading begins when the first one is there.
const BUFFER_BYTES_MIN: u64 = 256 << 20;
const BUFFER_BYTES_MAX: u64 = 1 << 30;

/// How many they are, between those sizes.
const BUFFERS_AIM: u64 = 64;

/// Where a tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The buffer, a position in [`HostCheckpoint::buffers`](super::HostCheckpoint::buffers).
    pub buffer: usize,
    /// Its first byte there.
    pub offset: u64,
}

/// Bytes that are read with one call, from one file into one buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// The file, and where in it they begin.
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Where they go, in their order and without a gap between them in the file.
    pub(super) parts: Vec<Part>,
}

/// Bytes of a piece that stay together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// Their place in the buffer.
    pub(super) at: u64,
    pub(super) bytes: u64,
}

impl Piece {
    /// The part of the buffer from the first of its bytes to the last.
    pub(super) fn begin(&self) -> u64 {
        self.parts.first().map_or(0, |part| part.at)
    }

    pub(super) fn end(&self) -> u64 {
        self.parts.last().map_or(0, |part| part.at + part.bytes)
    }
}

/// Where everything goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    /// What all tensors begin at a multiple of, if that is more than their types ask for.
    pub(super) alignment: Option<u64>,
    /// The size of each buffer.
    pub(super) buffers: Vec<u64>,
    /// By tensor; none for one without bytes.
    pub(super) places: Vec<Option<Place>>,
}

impl Layout {
    /// For these tensors, which are in the order of their files and of their bytes there.
    pub(super) fn of(tensors: &[Tensor]) -> Self {
        let bytes = total(tensors);
        let target = (bytes / BUFFERS_AIM).clamp(BUFFER_BYTES_MIN, BUFFER_BYTES_MAX);
        Self::with_target(tensors, target)
    }

    /// The same with buffers of about this size.
    pub(super) fn with_target(tensors: &[Tensor], target: u64) -> Self {
        let bytes = total(tensors);
        let allowed = (bytes / PADDING_SHARE).max(PADDING_MIN);
        let aligned = |alignment| Self::aligned(tensors, target, Some(alignment));
        let fits = |layout: &Self| layout.bytes() - bytes <= allowed;
        ALIGNMENTS.into_iter().map(aligned).find(fits).unwrap_or_else(|| Self::aligned(tensors, target, None))
    }

    fn aligned(tensors: &[Tensor], target: u64, alignment: Option<u64>) -> Self {
        let (mut buffers, mut places, mut open) = (Vec::new(), Vec::new(), 0u64);
        for tensor in tensors {
            if tensor.bytes == 0 {
                places.push(None);
                continue;
            }
            let mut offset = open.next_multiple_of(alignment.unwrap_or_else(|| element_bytes(tensor.dtype)));
            if open > 0 && offset + tensor.bytes > target {
                buffers.push(open);
                offset = 0;
            }
            places.push(Some(Place { buffer: buffers.len(), offset }));
            open = offset + tensor.bytes;
        }
        buffers.extend((open > 0).then_some(open));
        Self { alignment, buffers, places }
    }

    /// All buffers together.
    pub(super) fn bytes(&self) -> u64 {
        self.buffers.iter().sum()
    }

    /// The pieces of each buffer, in the order of the files: each ends at a multiple of `piece_bytes` of its file, or
    /// where something else comes.
    pub(super) fn pieces(&self, tensors: &[Tensor], piece_bytes: u64) -> Vec<Vec<Piece>> {
        let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); self.buffers.len()];
        for (tensor, place) in tensors.iter().zip(&self.places) {
            let Some(Place { buffer, offset: at }) = *place else { continue };
            let mut done = 0;
            while done < tensor.bytes {
                let from = tensor.offset + done;
                let bytes = (tensor.bytes - done).min(piece_bytes - from % piece_bytes);
                push(&mut pieces[buffer], piece_bytes, tensor.file, from, Part { at: at + done, bytes });
                done += bytes;
            }
        }
        pieces
    }
}

/// Adds bytes of a file to the piece that they continue, or begins another.
fn push(pieces: &mut Vec<Piece>, piece_bytes: u64, file: usize, from: u64, part: Part) {
    let continued = pieces.last_mut().filter(|piece| {
        piece.file == file && piece.offset + piece.bytes == from && !from.is_multiple_of(piece_bytes)
    });
    match continued {
        None => pieces.push(Piece { file, offset: from, bytes: part.bytes, parts: vec![part] }),
        Some(piece) => {
            piece.bytes += part.bytes;
            match piece.parts.last_mut() {
                Some(last) if last.at + last.bytes == part.at => last.bytes += part.bytes,
                _ => piece.parts.push(part),
            }
        }
    }
}

/// Size of all tensors together. Each lies in a file of its own bytes, so there is such a number.
fn total(tensors: &[Tensor]) -> u64 {
    tensors.iter().map(|tensor| tensor.bytes).sum()
}

/// What an element begins at a multiple of.
fn element_bytes(dtype: Dtype) -> u64 {
    (dtype.bitsize() as u64 / 8).max(1).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Tensors of a file one after the other, from a byte on.
    fn file(number: usize, begin: u64, sizes: &[u64]) -> Vec<Tensor> {
        let mut offset = begin;
        let tensor = |(nth, bytes): (usize, &u64)| {
            let tensor = Tensor {
                name: format!("{number}.{nth}"),
                dtype: Dtype::U8,
                shape: vec![*bytes],
                bytes: *bytes,
                file: number,
                offset,
            };
            offset += bytes;
            tensor
        };
        sizes.iter().enumerate().map(tensor).collect()
    }

    /// Every byte of every tensor is in exactly one piece, and goes to its place.
    fn assert_read(layout: &Layout, tensors: &[Tensor], piece_bytes: u64) {
        let pieces = layout.pieces(tensors, piece_bytes);
        assert_eq!(pieces.len(), layout.buffers.len());
        // What lies where, by the file and the first byte there.
        let mut found = BTreeMap::new();
        for (buffer, pieces) in pieces.iter().enumerate() {
            let mut end = 0;
            for piece in pieces {
                assert!(piece.begin() >= end && piece.end() <= layout.buffers[buffer]);
                end = piece.end();
                assert!(piece.bytes > 0 && piece.offset % piece_bytes + piece.bytes <= piece_bytes);
                assert_eq!(piece.bytes, piece.parts.iter().map(|part| part.bytes).sum::<u64>());
                let mut from = piece.offset;
                for part in &piece.parts {
                    let before = found.insert((piece.file, from), (part.bytes, buffer, part.at));
                    assert_eq!(before, None, "read twice");
                    from += part.bytes;
                }
            }
        }
        let mut count = 0;
        for (tensor, place) in tensors.iter().zip(&layout.places) {
            let Some(place) = place else {
                assert_eq!(tensor.bytes, 0);
                continue;
            };
            assert!(place.offset + tensor.bytes <= layout.buffers[place.buffer]);
            assert!(place.offset.is_multiple_of(layout.alignment.unwrap_or(1)));
            count += tensor.bytes;
            for nth in [0, tensor.bytes / 2, tensor.bytes - 1] {
                let byte = tensor.offset + nth;
                let ((file, from), (bytes, buffer, at)) =
                    found.range(..=(tensor.file, byte)).next_back().unwrap();
                assert!(*file == tensor.file && byte < from + bytes, "byte {byte} of file {file}");
                assert_eq!((*buffer, at + byte - from), (place.buffer, place.offset + nth));
            }
        }
        assert_eq!(count, found.values().map(|(bytes, ..)| bytes).sum::<u64>());
    }

    #[test]
    fn tensors_of_whole_lines_lie_as_in_their_file() {
        let tensors = file(0, 1032, &[MIB, 256, 0, 3 * MIB, 512]);
        let layout = Layout::of(&tensors);
        assert_eq!((layout.alignment, &*layout.buffers), (Some(256), &[4 * MIB + 768][..]));
        assert_read(&layout, &tensors, MIB);
        let pieces = layout.pieces(&tensors, MIB);
        assert!(pieces[0].iter().all(|piece| piece.parts.len() == 1), "all is one run");
        assert_eq!(pieces[0].len(), 5, "it begins at 1032");
    }

    #[test]
    fn alignment_costs_no_more_than_a_thousandth_or_a_page() {
        // One odd byte each: with 256 that is 255 lost.
        for (lines, expected) in [(1000, Some(256)), (400, Some(64)), (80, Some(16))] {
            let bytes = 256 * lines + 1;
            let sizes = vec![bytes; 100];
            let tensors = file(0, 100, &sizes);
            let layout = Layout::of(&tensors);
            assert_eq!(layout.alignment, expected, "{bytes}");
            let lost = layout.bytes() - total(&tensors);
            assert!(lost <= (total(&tensors) / 1000).max(4096), "{lost}");
            assert_read(&layout, &tensors, MIB);
        }
        // Of a few small ones no alignment takes another page.
        assert_eq!(Layout::of(&file(0, 100, &[1; 16])).alignment, Some(256));
    }

    #[test]
    fn without_room_for_alignment_each_type_has_its_own() {
        let mut tensors = file(0, 101, &[1; 30_000]);
        for (nth, tensor) in tensors.iter_mut().enumerate() {
            if nth % 2 == 0 {
                (tensor.dtype, tensor.bytes) = (Dtype::F32, 4);
            }
        }
        let mut offset = 101;
        for tensor in &mut tensors {
            tensor.offset = offset;
            offset += tensor.bytes;
        }
        let layout = Layout::of(&tensors);
        assert_eq!((layout.alignment, layout.buffers[0]), (None, 8 * 15_000 - 3));
        let is_aligned = |(tensor, place): (&Tensor, &Option<Place>)| {
            place.unwrap().offset.is_multiple_of(element_bytes(tensor.dtype))
        };
        assert!(tensors.iter().zip(&layout.places).all(is_aligned));
        assert_read(&layout, &tensors, 4096);
    }

    #[test]
    fn no_tensor_lies_in_two_buffers() {
        let mut tensors = file(0, 8, &[3 * MIB, 2 * MIB, 9 * MIB, 1, 4 * MIB, 0]);
        tensors.extend(file(1, 4099, &[5, MIB, 4 * MIB - 300, 4 * MIB]));
        let layout = Layout::with_target(&tensors, 4 * MIB);
        assert_eq!(layout.buffers[0], 3 * MIB);
        assert!(layout.buffers.iter().all(|bytes| *bytes <= 4 * MIB || *bytes == 9 * MIB));
        for piece_bytes in [4096, 65536, MIB, 3 * 4096] {
            assert_read(&layout, &tensors, piece_bytes);
        }
        assert_eq!(Layout::of(&[]).buffers, [] as [u64; 0]);
        assert_eq!(Layout::of(&file(0, 8, &[0, 0])).places, [None, None]);
    }

    #[test]
    fn a_hole_in_a_file_ends_a_piece() {
        let mut tensors = file(0, 0, &[1000, 500]);
        tensors[1].offset = 2000;
        let layout = Layout::of(&tensors);
        assert_read(&layout, &tensors, 4096);
        assert_eq!(layout.pieces(&tensors, 4096)[0].len(), 2);
    }

    #[test]
    fn buffers_grow_with_the_checkpoint() {
        let sizes = |count: usize| {
            let tensors = file(0, 8, &vec![64 * MIB; count]);
            Layout::of(&tensors).buffers
        };
        assert_eq!(sizes(8), [256 * MIB, 256 * MIB]);
        assert_eq!(sizes(64 * 16).len(), 64);
        assert_eq!(sizes(64 * 80)[0], 1024 * MIB);
    }
}
