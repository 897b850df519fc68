//! Where a checkpoint's bytes go: the buffer of each tensor, and the ranges to read.
//!
//! Tensors keep their order in the files, with only alignment gaps between them. Each lies in one buffer.

use crate::checkpoint::{Dtype, Tensor};
use crate::reader::{self, FileRange, TensorPart};

/// Alignments of tensors, best first. Kernels that read host memory in place load 16 bytes at once. PyTorch
/// aligns memory to 64 on CPUs, and to 256 or more on GPUs.
const ALIGNMENTS: [u64; 3] = [256, 64, 16];

/// Alignment may cost this share of the bytes, or the rest of a page.
const PADDING_SHARE: u64 = 1000;
const PADDING_MIN: u64 = 4096;

/// Buffer sizes, unless a tensor is larger. Reading starts with the first buffer.
const BUFFER_BYTES_MIN: u64 = 256 << 20;
const BUFFER_BYTES_MAX: u64 = 1 << 30;

const BUFFERS_AIM: u64 = 64;

/// Where a tensor lies.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use poorwill::Device;
/// use poorwill::checkpoint::Checkpoint;
/// use poorwill::offload::{HostCheckpoint, LoadOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # let file = folder.path().join("m.safetensors");
/// # std::fs::write(&file, [&length, header.as_bytes(), &[7; 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let checkpoint = Checkpoint::open(&[folder])?;
/// let device = Device::open(&"host:64MiB".parse()?)?;
/// let mut observer = |_| ControlFlow::Continue(());
/// let loaded = HostCheckpoint::load(&device, &checkpoint, &LoadOptions::default(), &mut observer)?;
/// let location = loaded.tensors()[0].location.ok_or("it is not empty")?;
/// assert!(location.offset + 4 <= loaded.buffers()[location.buffer].bytes());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorLocation {
    /// An index into [`HostCheckpoint::buffers`](super::HostCheckpoint::buffers).
    pub buffer: usize,
    /// Its first byte there.
    pub offset: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    /// Common alignment, if above that of the element types.
    pub(super) alignment: Option<u64>,
    pub(super) buffers: Vec<u64>,
    /// By tensor; `None` for an empty tensor.
    pub(super) locations: Vec<Option<TensorLocation>>,
}

impl Layout {
    pub(super) fn of(tensors: &[Tensor]) -> Self {
        let bytes = total(tensors);
        let target = (bytes / BUFFERS_AIM).clamp(BUFFER_BYTES_MIN, BUFFER_BYTES_MAX);
        Self::with_target(tensors, target)
    }

    pub(super) fn with_target(tensors: &[Tensor], target: u64) -> Self {
        let bytes = total(tensors);
        let allowed = (bytes / PADDING_SHARE).max(PADDING_MIN);
        let aligned = |alignment| Self::aligned(tensors, target, Some(alignment));
        let fits = |layout: &Self| layout.bytes() - bytes <= allowed;
        ALIGNMENTS.into_iter().map(aligned).find(fits).unwrap_or_else(|| Self::aligned(tensors, target, None))
    }

    fn aligned(tensors: &[Tensor], target: u64, alignment: Option<u64>) -> Self {
        let (mut buffers, mut locations, mut open) = (Vec::new(), Vec::new(), 0u64);
        for tensor in tensors {
            if tensor.bytes == 0 {
                locations.push(None);
                continue;
            }
            let mut offset = open.next_multiple_of(alignment.unwrap_or_else(|| element_bytes(tensor.dtype)));
            if open > 0 && offset + tensor.bytes > target {
                buffers.push(open);
                offset = 0;
            }
            locations.push(Some(TensorLocation { buffer: buffers.len(), offset }));
            open = offset + tensor.bytes;
        }
        buffers.extend((open > 0).then_some(open));
        Self { alignment, buffers, locations }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.buffers.iter().sum()
    }

    /// Each range goes to one buffer, in their order.
    pub(super) fn ranges(&self, tensors: &[Tensor], range_bytes: u64) -> Vec<FileRange> {
        let buffer = |tensor: usize| self.locations[tensor].map(|location| location.buffer);
        reader::ranges(tensors, range_bytes, |before, tensor| buffer(before) == buffer(tensor))
    }

    pub(super) fn location(&self, part: &TensorPart) -> TensorLocation {
        let location = self.locations[part.tensor].unwrap_or(TensorLocation { buffer: 0, offset: 0 });
        TensorLocation { offset: location.offset + part.offset, ..location }
    }

    pub(super) fn span(&self, range: &FileRange) -> (usize, u64, u64) {
        let location = |part: Option<&TensorPart>| {
            part.map_or((0, 0, 0), |part| {
                let TensorLocation { buffer, offset } = self.location(part);
                (buffer, offset, offset + part.bytes)
            })
        };
        let ((buffer, begin, _), (_, _, end)) = (location(range.parts.first()), location(range.parts.last()));
        (buffer, begin, end)
    }
}

/// Each tensor lies in a real file, so the sum does not overflow.
fn total(tensors: &[Tensor]) -> u64 {
    tensors.iter().map(|tensor| tensor.bytes).sum()
}

fn element_bytes(dtype: Dtype) -> u64 {
    (dtype.bits() / 8).max(1).next_power_of_two()
}

#[cfg(test)]
mod tests {

    use super::*;

    const MIB: u64 = 1 << 20;

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

    /// Every byte of every tensor is in exactly one range, and reaches its location.
    fn assert_read(layout: &Layout, tensors: &[Tensor], range_bytes: u64) {
        let (mut found, mut ends) = (Vec::new(), vec![0; layout.buffers.len()]);
        for range in layout.ranges(tensors, range_bytes) {
            let (buffer, begin, end) = layout.span(&range);
            assert!(begin >= ends[buffer] && end <= layout.buffers[buffer]);
            assert!(ends[buffer + 1..].iter().all(|end| *end == 0), "one buffer after the other");
            ends[buffer] = end;
            assert!(range.bytes > 0 && range.offset % range_bytes + range.bytes <= range_bytes);
            assert_eq!(range.bytes, range.parts.iter().map(|part| part.bytes).sum::<u64>());
            let mut from = range.offset;
            for part in &range.parts {
                let location = layout.location(part);
                assert_eq!(location.buffer, buffer);
                found.push((range.file, from, part.bytes, buffer, location.offset));
                from += part.bytes;
            }
        }
        let mut count = 0;
        for (tensor, location) in tensors.iter().zip(&layout.locations) {
            let Some(location) = location else {
                assert_eq!(tensor.bytes, 0);
                continue;
            };
            assert!(location.offset + tensor.bytes <= layout.buffers[location.buffer]);
            assert!(location.offset.is_multiple_of(layout.alignment.unwrap_or(1)));
            count += tensor.bytes;
            for nth in [0, tensor.bytes / 2, tensor.bytes - 1] {
                let byte = tensor.offset + nth;
                let nth_part = found.partition_point(|part| (part.0, part.1) <= (tensor.file, byte)) - 1;
                let (file, from, bytes, buffer, at) = found[nth_part];
                assert!(file == tensor.file && byte < from + bytes);
                assert_eq!((buffer, at + byte - from), (location.buffer, location.offset + nth));
            }
        }
        assert_eq!(count, found.iter().map(|(_, _, bytes, ..)| bytes).sum::<u64>());
    }

    #[test]
    fn tensors_of_whole_lines_lie_as_in_their_file() {
        let tensors = file(0, 1032, &[MIB, 256, 0, 3 * MIB, 512]);
        let layout = Layout::of(&tensors);
        assert_eq!((layout.alignment, &*layout.buffers), (Some(256), &[4 * MIB + 768][..]));
        assert_read(&layout, &tensors, MIB);
        let ranges = layout.ranges(&tensors, MIB);
        let is_gapless = |range: &FileRange| {
            let (_, begin, end) = layout.span(range);
            end - begin == range.bytes
        };
        assert!(ranges.iter().all(is_gapless), "all is one run");
        assert_eq!(ranges.len(), 5, "it begins at 1032");
    }

    #[test]
    fn alignment_costs_no_more_than_a_thousandth_or_a_page() {
        // Aligning each odd byte to 256 costs 255.
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
        assert_eq!(Layout::of(&file(0, 100, &[1; 16])).alignment, Some(256));
    }

    #[test]
    fn without_headroom_for_alignment_each_type_has_its_own() {
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
        let is_aligned = |(tensor, location): (&Tensor, &Option<TensorLocation>)| {
            location.unwrap().offset.is_multiple_of(element_bytes(tensor.dtype))
        };
        assert!(tensors.iter().zip(&layout.locations).all(is_aligned));
        assert_read(&layout, &tensors, 4096);
    }

    #[test]
    fn no_tensor_lies_in_two_buffers() {
        let mut tensors = file(0, 8, &[3 * MIB, 2 * MIB, 9 * MIB, 1, 4 * MIB, 0]);
        tensors.extend(file(1, 4099, &[5, MIB, 4 * MIB - 300, 4 * MIB]));
        let layout = Layout::with_target(&tensors, 4 * MIB);
        assert_eq!(layout.buffers[0], 3 * MIB);
        assert!(layout.buffers.iter().all(|bytes| *bytes <= 4 * MIB || *bytes == 9 * MIB));
        for range_bytes in [4096, 65536, MIB, 3 * 4096] {
            assert_read(&layout, &tensors, range_bytes);
        }
        assert_eq!(Layout::of(&[]).buffers, [] as [u64; 0]);
        assert_eq!(Layout::of(&file(0, 8, &[0, 0])).locations, [None, None]);
    }

    #[test]
    fn a_hole_in_a_file_ends_a_piece() {
        let mut tensors = file(0, 0, &[1000, 500]);
        tensors[1].offset = 2000;
        let layout = Layout::of(&tensors);
        assert_read(&layout, &tensors, 4096);
        assert_eq!(layout.ranges(&tensors, 4096).len(), 2);
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
