//! What [`super::Driver::save`] promises, for drivers that compute the digests in `wait`.

use super::{CopyPart, DriverError, Op};
use crate::digest::Digest;

/// Checks that every part begins and ends on granules of the device.
///
/// # Errors
/// `InvalidArgument`.
pub fn check(granule_bytes: u64, parts: &[CopyPart]) -> Result<(), DriverError> {
    let is_whole = |part: &&CopyPart| {
        part.device.addr.is_multiple_of(granule_bytes) && part.device.bytes.is_multiple_of(granule_bytes)
    };
    match parts.iter().find(|part| !is_whole(part)) {
        None => Ok(()),
        Some(part) => {
            let reason =
                format!("{} does not begin and end on granules of {granule_bytes} bytes", part.device);
            Err(DriverError::invalid(Op::Save, reason))
        }
    }
}

/// Digests of the granules of `parts` as stored in `bytes`.
///
/// # Errors
/// `InvalidArgument` when a part is not inside.
pub fn digests(bytes: &[u8], granule_bytes: u64, parts: &[CopyPart]) -> Result<Vec<Digest>, DriverError> {
    let outside = |part: &CopyPart| {
        let (offset, len) = (part.host_offset, bytes.len());
        DriverError::invalid(Op::Save, format!("offset {offset} is not inside a buffer of {len} bytes"))
    };
    let mut digests = Vec::new();
    for part in parts {
        let stored = || {
            let start = usize::try_from(part.host_offset).ok()?;
            let end = start.checked_add(usize::try_from(part.device.bytes).ok()?)?;
            Some((bytes.get(start..end)?, usize::try_from(granule_bytes).ok()?))
        };
        let (stored, granule) = stored().ok_or_else(|| outside(part))?;
        digests.extend(stored.chunks(granule).map(Digest::of));
    }
    Ok(digests)
}
