//! The ranges of a copy's parts: in its host buffer, and beside each other.

use std::ops::Range;

use poorwill_core::CopyPart;
use poorwill_core::driver::MovePart;

use crate::ledger::{Result, invalid};

pub(crate) fn in_buffer(len: usize, parts: &[CopyPart]) -> Result<Vec<Range<usize>>> {
    let range = |part: &CopyPart| {
        let start = usize::try_from(part.host_offset).ok()?;
        let end = start.checked_add(usize::try_from(part.device.bytes).ok()?)?;
        (end <= len).then_some(start..end)
    };
    let outside = |part: &CopyPart| {
        let (bytes, offset) = (part.device.bytes, part.host_offset);
        invalid(format!("{bytes} bytes at {offset} leave a host buffer of {len} bytes"))
    };
    parts.iter().map(|part| range(part).ok_or_else(|| outside(part))).collect()
}

pub(crate) fn check_moves(parts: &[MovePart]) -> Result<()> {
    let overlapping = parts.iter().find(|part| part.to.overlaps(&part.source()));
    overlapping.map_or(Ok(()), |part| {
        let reason = format!("{} is to be copied to {}, which shares bytes with it", part.source(), part.to);
        Err(invalid(reason))
    })
}
