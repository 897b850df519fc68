//! How an extent is stored: raw, or as codes of its granules.
//!
//! An extent is stored as codes where these save at least a tenth of all its live granules. Its granules are then
//! in *slots*, one behind the other. Others lie where they lie in the extent.
//!
//! Footprints come in classes, so that one that is given back fits the next of about its size. A class wastes less
//! than a hundredth.

use std::borrow::Cow;
use std::ops::Range;

use crate::codec;
use crate::digest::Digest;
use crate::driver::{CodePart, CopyPart, DeviceRange, DriverError, Op, Result};

/// Slots begin at multiples of this, so that a GPU reads whole lines over its link.
const SLOT_ALIGNMENT_BYTES: u64 = 128;

/// The part of a code that its slot has besides. Other weights of the same distribution take a few hundred bytes more.
const SLACK_PART: u64 = 1024;

/// Classes of sizes up to twice a size.
const CLASSES: u32 = 128;

/// The smallest class, in bytes; also the unit of host memory.
const CLASS_BYTES_MIN: u64 = 512;

/// Consecutive granules with one backup.
///
/// ```
/// use poorwill::DeviceRange;
/// use poorwill::backup::Extent;
///
/// let extent = Extent { range: DeviceRange::new(0x7000_0000, 8 << 20), live: &[0, 3] };
/// assert_eq!(extent.live.len(), 2);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Extent<'a> {
    /// All of it.
    pub range: DeviceRange,
    /// Numbers of the granules to be stored, ascending.
    pub live: &'a [usize],
}

/// What one extent takes of a storage, and how it lies there.
///
/// ```
/// use poorwill::backup::Footprint;
///
/// assert_eq!(Footprint::raw(8 << 20).bytes(), 8 << 20);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    bytes: u64,
    pub(super) layout: Layout,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Layout {
    Raw,
    /// By granule of the extent; `None` for those that are not live.
    Codes(Vec<Option<Slot>>),
}

/// Bytes of one granule to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// Where they are stored, with all of their code.
    pub(super) place: Range<u64>,
    /// Raw bytes before them.
    skip: usize,
    /// How many.
    pub(super) bytes: usize,
}

/// The place of one granule's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) offset: u64,
    pub(super) slot_bytes: u64,
    /// The part that is a code; less than measured after a change.
    pub(super) code_bytes: u64,
}

impl Footprint {
    /// As the bytes are.
    #[must_use]
    pub fn raw(extent_bytes: u64) -> Self {
        Self { bytes: extent_bytes, layout: Layout::Raw }
    }

    /// `code_bytes` are of the live granules, in order.
    pub(super) fn measured(extent: &Extent<'_>, granule_bytes: u64, code_bytes: &[u64]) -> Self {
        let raw_bytes = extent.live.len() as u64 * granule_bytes;
        let count = usize::try_from(extent.range.bytes / granule_bytes).unwrap_or(0);
        let mut slots = vec![None; count];
        let mut offset = 0;
        for (granule, code_bytes) in extent.live.iter().zip(code_bytes) {
            let slot_bytes = (code_bytes + code_bytes / SLACK_PART).next_multiple_of(SLOT_ALIGNMENT_BYTES);
            if let Some(slot) = slots.get_mut(*granule) {
                *slot = Some(Slot { offset, slot_bytes, code_bytes: *code_bytes });
            }
            offset += slot_bytes;
        }
        let bytes = class_of(offset);
        // A tenth of what is stored raw otherwise.
        if offset > raw_bytes / 10 * 9 || bytes > extent.range.bytes / 10 * 9 {
            return Self::raw(extent.range.bytes);
        }
        Self { bytes, layout: Layout::Codes(slots) }
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The largest buffer that is taken for it: a hundredth more, or the smallest class.
    fn bytes_max(&self) -> u64 {
        self.bytes + (self.bytes / 100).max(CLASS_BYTES_MIN)
    }

    /// Whether the extent is stored as codes.
    #[must_use]
    pub fn is_encoded(&self) -> bool {
        matches!(self.layout, Layout::Codes(_))
    }
}

impl Layout {
    /// How a buffer of `held_bytes` with this layout is laid out after saving `fresh` as `footprint` says. `None` where
    /// that does not fit, or where nothing of it stays and it is too large.
    pub(super) fn with(&self, held_bytes: u64, footprint: &Footprint, fresh: &[usize]) -> Option<Self> {
        match (self, &footprint.layout) {
            (Self::Raw, Self::Raw) => (footprint.bytes == held_bytes).then_some(Self::Raw),
            (Self::Codes(held), Self::Codes(wanted)) => {
                let live = wanted.iter().flatten().count();
                if live == fresh.len() {
                    let fits = (footprint.bytes..=footprint.bytes_max()).contains(&held_bytes);
                    return fits.then(|| footprint.layout.clone());
                }
                let mut slots = held.clone();
                for granule in fresh {
                    let wanted = (*wanted.get(*granule)?)?;
                    let slot = slots.get_mut(*granule)?.as_mut()?;
                    if wanted.code_bytes > slot.slot_bytes {
                        return None;
                    }
                    slot.code_bytes = wanted.code_bytes;
                }
                Some(Self::Codes(slots))
            }
            _ => None,
        }
    }
}

impl Layout {
    /// Bytes that a load of these granules reads.
    pub(super) fn read_bytes(&self, granules: impl Iterator<Item = (usize, DeviceRange)>) -> u64 {
        match self {
            Self::Raw => granules.map(|(_, granule)| granule.bytes).sum(),
            Self::Codes(slots) => granules
                .filter_map(|(number, _)| slots.get(number).copied().flatten())
                .map(|slot| slot.code_bytes)
                .sum(),
        }
    }

    /// Where the `bytes` at `offset` of the extent are in a buffer of `held_bytes`: for codes, one granule's.
    pub(super) fn place(
        &self,
        held_bytes: u64,
        offset: u64,
        bytes: u64,
        granule_bytes: u64,
    ) -> Result<Range<u64>> {
        let outside = |len: u64| {
            DriverError::invalid(Op::Digest, format!("{bytes} bytes at {offset} leave a buffer of {len}"))
        };
        let place = |start: u64, len: u64| {
            start.checked_add(len).filter(|end| *end <= held_bytes).map(|end| start..end)
        };
        let Self::Codes(slots) = self else {
            return place(offset, bytes).ok_or_else(|| outside(held_bytes));
        };
        let is_granule = offset.is_multiple_of(granule_bytes) && bytes == granule_bytes;
        let number = usize::try_from(offset / granule_bytes).ok().filter(|_| is_granule);
        let slot = number.and_then(|number| slots.get(number).copied().flatten());
        let place = slot.and_then(|slot| place(slot.offset, slot.code_bytes));
        place.ok_or_else(|| outside(slots.len() as u64 * granule_bytes))
    }

    /// Where `len` raw bytes at `offset` are in a buffer of `held_bytes`: in order, each of one granule at most.
    pub(super) fn pieces(
        &self,
        held_bytes: u64,
        offset: u64,
        len: usize,
        granule_bytes: u64,
    ) -> Result<Vec<Piece>> {
        let end = offset.saturating_add(len as u64);
        let (mut pieces, mut at) = (Vec::new(), offset);
        while at < end {
            let granule = at - at % granule_bytes;
            let to = end.min(granule + granule_bytes);
            let (place, skip) = match self {
                Self::Raw => (self.place(held_bytes, at, to - at, granule_bytes)?, 0),
                Self::Codes(_) => {
                    (self.place(held_bytes, granule, granule_bytes, granule_bytes)?, at - granule)
                }
            };
            let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
            pieces.push(Piece { place, skip: index(skip), bytes: index(to - at) });
            at = to;
        }
        Ok(pieces)
    }

    /// The digest of what is stored in a [`Self::place`].
    pub(super) fn digest(&self, stored: &[u8], granule_bytes: u64) -> Result<Digest> {
        match self {
            Self::Raw => Ok(Digest::of(stored)),
            Self::Codes(_) => Ok(Digest::of(&decoded(stored, granule_bytes)?)),
        }
    }
}

fn decoded(stored: &[u8], granule_bytes: u64) -> Result<Vec<u8>> {
    let granule_bytes = usize::try_from(granule_bytes).map_err(|_| {
        DriverError::invalid(Op::Decode, format!("{granule_bytes} bytes are more than can be addressed"))
    })?;
    let mut granule = vec![0; granule_bytes];
    codec::decode(stored, &mut granule);
    Ok(granule)
}

impl Piece {
    /// Copies its raw bytes from what is `stored` in its place.
    pub(super) fn copy(
        &self,
        stored: &[u8],
        into: &mut [u8],
        layout: &Layout,
        granule_bytes: u64,
    ) -> Result<()> {
        let raw = match layout {
            Layout::Raw => Cow::Borrowed(stored),
            Layout::Codes(_) if into.len() as u64 == granule_bytes => {
                codec::decode(stored, into);
                return Ok(());
            }
            Layout::Codes(_) => Cow::Owned(decoded(stored, granule_bytes)?),
        };
        let wanted = raw.get(self.skip..).and_then(|raw| raw.get(..into.len())).ok_or_else(|| {
            let reason = format!("{} bytes came back, and {} were to be read", raw.len(), into.len());
            DriverError::invalid(Op::CopyToHost, reason)
        })?;
        into.copy_from_slice(wanted);
        Ok(())
    }
}

/// The granules of `parts`, with the numbers that they have in their extent.
pub(super) fn granules(parts: &[CopyPart], granule_bytes: u64) -> impl Iterator<Item = (usize, DeviceRange)> {
    parts.iter().flat_map(move |part| {
        (0..part.device.bytes / granule_bytes).map(move |nth| {
            let offset = nth * granule_bytes;
            let number = usize::try_from((part.host_offset + offset) / granule_bytes).unwrap_or(usize::MAX);
            (number, DeviceRange::new(part.device.addr + offset, granule_bytes))
        })
    })
}

impl Slot {
    pub(super) fn whole(&self, granule: DeviceRange) -> CodePart {
        CodePart { granule: granule.addr, host_offset: self.offset, slot_bytes: self.slot_bytes }
    }

    pub(super) fn code(&self, granule: DeviceRange) -> CodePart {
        CodePart { granule: granule.addr, host_offset: self.offset, slot_bytes: self.code_bytes }
    }
}

/// The smallest class that holds `bytes`.
fn class_of(bytes: u64) -> u64 {
    let below = bytes.max(1).ilog2().saturating_sub(CLASSES.ilog2());
    bytes.next_multiple_of((1 << below).max(CLASS_BYTES_MIN)).max(CLASS_BYTES_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 2 << 20;

    fn extent(live: &[usize]) -> Extent<'_> {
        Extent { range: DeviceRange::new(0, 16 * GRANULE), live }
    }

    #[test]
    fn classes_waste_less_than_a_hundredth() {
        for bytes in (1..100_000).chain((0..1000).map(|nth| (17 << 20) + nth * 7919)) {
            let class = class_of(bytes);
            assert!(class >= bytes && class - bytes < (bytes / 100).max(CLASS_BYTES_MIN), "{bytes}: {class}");
            assert_eq!(class_of(class), class);
        }
    }

    #[test]
    fn codes_are_used_where_they_save_a_tenth() {
        let live: Vec<usize> = (0..16).collect();
        let footprint =
            |share: u64| Footprint::measured(&extent(&live), GRANULE, &[GRANULE * share / 100; 16]);
        assert!(footprint(71).is_encoded() && footprint(71).bytes() < 16 * GRANULE * 72 / 100);
        assert!(footprint(89).is_encoded());
        assert_eq!(footprint(91), Footprint::raw(16 * GRANULE));
        assert_eq!(footprint(101), Footprint::raw(16 * GRANULE));
        // Zeros cost their heads, and one step of alignment.
        let zeros = Footprint::measured(&extent(&live), GRANULE, &[4096; 16]);
        assert_eq!(zeros.bytes(), class_of(16 * (4096 + SLOT_ALIGNMENT_BYTES)));
    }

    #[test]
    fn a_changed_granule_stays_in_its_slot_where_it_fits() {
        let live = [1, 4];
        let footprint = |sizes: &[u64]| Footprint::measured(&extent(&live), GRANULE, sizes);
        let (held, same) = (footprint(&[1000, 2000]), footprint(&[1020, 1500]));
        let bytes = held.bytes();
        assert!(held.layout.with(bytes, &same, &[1]).is_some(), "slots are multiples of 128");
        assert!(held.layout.with(bytes, &same, &[4]).is_some());
        let grown = footprint(&[1000, 2100]);
        assert!(held.layout.with(bytes, &grown, &[4]).is_none());
        assert!(held.layout.with(bytes, &grown, &[1]).is_some());
        // With all of them, the slots move.
        assert_eq!(
            held.layout.with(bytes, &footprint(&[1400, 1600]), &[1, 4]).as_ref(),
            Some(&footprint(&[1400, 1600]).layout)
        );
        assert!(held.layout.with(bytes, &footprint(&[1400, 2100]), &[1, 4]).is_none());
        assert!(held.layout.with(bytes, &Footprint::raw(16 * GRANULE), &[1]).is_none());
        assert!(held.layout.with(bytes, &footprint(&[10, 10]), &[2]).is_none(), "it has no slot");
    }

    #[test]
    fn a_buffer_that_is_much_too_large_is_kept_for_what_it_still_holds_only() {
        let live: Vec<usize> = (0..16).collect();
        let footprint = |thousandths: u64| {
            Footprint::measured(&extent(&live), GRANULE, &[GRANULE * thousandths / 1000; 16])
        };
        for thousandths in 600..=850 {
            let held = footprint(thousandths);
            let kept = |less: u64, fresh: &[usize]| {
                held.layout.with(held.bytes(), &footprint(thousandths - less), fresh).is_some()
            };
            assert!(kept(0, &live) && kept(1, &live), "{thousandths}");
            // Less by a class, at least, than a hundredth less.
            assert!(!kept(20, &live) && !kept(500, &live), "{thousandths}");
            assert!(kept(20, &live[1..]) && kept(500, &live[1..]), "{thousandths}");
            for less in (0..30).filter(|less| kept(*less, &live)) {
                let stored_bytes = 16 * (GRANULE * (thousandths - less) / 1000);
                assert!(held.bytes() <= stored_bytes * 102 / 100, "{thousandths} - {less}");
            }
        }
    }
}
