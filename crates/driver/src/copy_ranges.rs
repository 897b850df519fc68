//! Byte ranges of a copy's parts in its host buffer.

use std::ops::Range;

use poorwill_core::CopyPart;

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
