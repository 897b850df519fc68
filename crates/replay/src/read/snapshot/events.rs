//! Entries of a device's trace.
//!
//! Promises: an entry of the allocator has what it needs, or is an error.

use super::view::View;
use crate::read::fault::{Fault, Location};
use crate::read::refusals::Request;
use crate::read::value::{Text, Value};

/// What an entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    OutOfMemory,
    /// A snapshot was taken.
    Snapshot,
    /// Marks of users and of what newer versions add.
    Other,
}

impl Action {
    const ALL: [(&'static str, Self); 9] = [
        ("alloc", Self::Alloc),
        ("free_requested", Self::FreeRequested),
        ("free_completed", Self::FreeCompleted),
        ("segment_alloc", Self::SegmentAlloc),
        ("segment_free", Self::SegmentFree),
        ("segment_map", Self::SegmentMap),
        ("segment_unmap", Self::SegmentUnmap),
        ("oom", Self::OutOfMemory),
        ("snapshot", Self::Snapshot),
    ];

    /// Whether memory goes back to the card.
    pub(super) const fn gives_back(self) -> bool {
        matches!(self, Self::SegmentFree | Self::SegmentUnmap)
    }

    pub(super) const fn is_of_allocator(self) -> bool {
        !matches!(self, Self::Other)
    }
}

/// What happened.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) action: Action,
    /// Where memory lacked, what the card had free; `u64::MAX` if that is not known. PyTorch keeps it there, too.
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) stream: u64,
    /// 0 where it is not known.
    pub(super) time_us: u64,
    pub(super) frames: Value,
}

impl Entry {
    /// By how much it changes what is mapped.
    pub(super) fn mapped_change(&self) -> i128 {
        match self.action {
            Action::SegmentAlloc | Action::SegmentMap => self.bytes.into(),
            Action::SegmentFree | Action::SegmentUnmap => -i128::from(self.bytes),
            _ => 0,
        }
    }

    /// What was asked for.
    pub(super) const fn request(&self) -> Option<Request> {
        match self.action {
            Action::Alloc => Some(Request::Allocated(self.bytes)),
            Action::OutOfMemory => Some(Request::Refused(self.bytes)),
            _ => None,
        }
    }
}

/// The entries of one device.
pub(super) fn read(view: &View<'_>, device: usize, trace: Value) -> Result<Vec<Entry>, Fault> {
    let keys = view.keys(["action", "addr", "size", "stream", "time_us", "frames", "device_free"]);
    let actions: [(Option<Text>, Action); 9] =
        Action::ALL.map(|(name, action)| (view.arena().find(name), action));
    let mut entries = Vec::new();
    for (entry, value) in view.items(trace, Location::Entry { device, entry: 0 })?.enumerate() {
        let place = Location::Entry { device, entry };
        let [action, address, bytes, stream, time, frames, free] = view.fields(value, &keys, place)?;
        let Value::Text(action) = action else { return Err(Fault::new(place, "`action` is no text")) };
        let found = actions.iter().find(|(name, _)| *name == Some(action));
        let action = found.map_or(Action::Other, |(_, action)| *action);
        let time_us = view.arena().as_unsigned(time).unwrap_or(0);
        let mut new = Entry { action, address: 0, bytes: 0, stream: view.stream(stream), time_us, frames };
        match action {
            Action::Snapshot | Action::Other => {}
            Action::OutOfMemory => {
                new.address = view.arena().as_unsigned(free).unwrap_or(u64::MAX);
                new.bytes = view.unsigned(bytes, "size", place)?;
            }
            _ => {
                new.address = view.unsigned(address, "addr", place)?;
                new.bytes = view.unsigned(bytes, "size", place)?;
            }
        }
        entries.push(new);
    }
    Ok(entries)
}
