//! Segments of a snapshot: what is mapped and live at its end.
//!
//! Promises: an address belongs to a segment only for as long as that is known to be there.

use std::collections::{BTreeMap, HashMap};

use super::events::{Action, Entry};
use super::history::{Area, History, Live};
use super::view::{Keys, View};
use crate::read::fault::{Fault, Location};
use crate::read::value::Value;

/// Where blocks lie.
struct SegmentRange {
    address: u64,
    bytes: u64,
    stream: u64,
    place: Location,
}

/// Adds the segments to their devices.
pub(super) fn read(
    view: &View<'_>,
    segments: Value,
    devices: &mut BTreeMap<usize, History>,
) -> Result<(), Fault> {
    let keys = view.keys([
        "device",
        "address",
        "total_size",
        "stream",
        "segment_pool_id",
        "is_expandable",
        "blocks",
    ]);
    // Recorders may share one tuple.
    let mut pools = HashMap::new();
    let block_keys = view.keys(["address", "size", "requested_size", "state", "frames"]);
    for (segment, value) in view.items(segments, Location::Key("segments"))?.enumerate() {
        let place = Location::Segment(segment);
        let [device, address, bytes, stream, pool, is_expandable, blocks] =
            view.fields(value, &keys, place)?;
        let device = if device == Value::None { 0 } else { view.unsigned(device, "device", place)? };
        let device = usize::try_from(device).map_err(|_| Fault::new(place, "`device` is too large"))?;
        let address = view.unsigned(address, "address", place)?;
        let bytes = view.unsigned(bytes, "total_size", place)?;
        let history = devices.entry(device).or_default();
        history.areas.get_or_insert_default().push(Area {
            address,
            bytes,
            pool: match pools.get(&pool) {
                Some(known) => *known,
                None => *pools.entry(pool).or_insert(pool_of(view, pool, place)?),
            },
            is_expandable: is_expandable == Value::Bool(true),
            since: 0,
        });
        let segment = SegmentRange { address, bytes, stream: view.stream(stream), place };
        segment.read(view, blocks, &block_keys, &mut history.live)?;
    }
    for history in devices.values_mut() {
        history.areas.iter_mut().for_each(|areas| areas.sort_by_key(|area| area.address));
        history.live.sort_by_key(|block| block.address);
        if let Some(pair) = history.live.windows(2).find(|pair| pair[0].address == pair[1].address) {
            let what = format!("its block at {:#x} is in another segment, too", pair[1].address);
            return Err(Fault::new(pair[1].place, what));
        }
    }
    Ok(())
}

impl SegmentRange {
    /// Adds the blocks that live.
    fn read(
        &self,
        view: &View<'_>,
        blocks: Value,
        keys: &Keys<5>,
        live: &mut Vec<Live>,
    ) -> Result<(), Fault> {
        let &Self { address, bytes, stream, place } = self;
        let mut next = address;
        for block in view.items(blocks, place)? {
            let [at, size, requested, state, frames] = view.fields(block, keys, place)?;
            let size = view.unsigned(size, "size", place)?;
            let at = if at == Value::None { next } else { view.unsigned(at, "address", place)? };
            let end = at.checked_add(size).filter(|_| at >= address);
            let end = end.filter(|end| end.checked_sub(address).is_some_and(|len| len <= bytes));
            next = end.ok_or_else(|| Fault::new(place, format!("its block at {at:#x} is outside of it")))?;
            let is_allocated = match view.arena().as_text(state) {
                Some("active_allocated") => true,
                Some("active_awaiting_free" | "active_pending_free") => false,
                Some("inactive") => continue,
                _ => {
                    let what = format!("its block at {at:#x} has no state that is known");
                    return Err(Fault::new(place, what));
                }
            };
            let requested = view.arena().as_unsigned(requested).filter(|bytes| *bytes > 0).unwrap_or(size);
            live.push(Live { address: at, bytes: requested, stream, frames, is_allocated, place });
        }
        Ok(())
    }
}

/// A pair of numbers; none is the allocator's own.
fn pool_of(view: &View<'_>, pool: Value, place: Location) -> Result<(u64, u64), Fault> {
    let mut numbers = view.items(pool, place)?.map(|number| view.stream(number));
    Ok((numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)))
}

/// The areas, with the entries that allocated them.
pub(super) fn since(mut areas: Vec<Area>, entries: &[Entry]) -> Vec<Area> {
    let mut allocated = HashMap::new();
    for (at, entry) in entries.iter().enumerate() {
        if entry.action == Action::SegmentAlloc {
            allocated.insert(entry.address, at);
        }
    }
    // Expandable segments keep their addresses while memory comes and goes.
    for area in areas.iter_mut().filter(|area| !area.is_expandable) {
        area.since = allocated.get(&area.address).copied().unwrap_or(0);
    }
    areas
}

/// The pool of an address when an entry was written. What no segment has is taken for the allocator's own.
pub(super) fn pool_at(areas: &[Area], address: u64, entry: usize) -> (u64, u64) {
    let after = areas.partition_point(|area| area.address <= address);
    let area = after.checked_sub(1).map(|at| &areas[at]);
    let area = area.filter(|area| address - area.address < area.bytes && entry >= area.since);
    area.map_or((0, 0), |area| area.pool)
}
