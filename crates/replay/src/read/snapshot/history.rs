//! What a snapshot says of one device.

use super::events::Entry;
use crate::read::fault::Location;
use crate::read::value::Value;

/// What a snapshot says of one device.
#[derive(Default)]
pub(super) struct History {
    pub(super) entries: Vec<Entry>,
    /// By address. `None` where the snapshot has no segments at all.
    pub(super) areas: Option<Vec<Area>>,
    pub(super) live: Vec<Live>,
}

/// Addresses of one pool.
#[derive(Debug)]
pub(super) struct Area {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) pool: (u64, u64),
    pub(super) is_expandable: bool,
    /// The first entry that can be about it.
    pub(super) since: usize,
}

/// A block that lives at the end.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) stream: u64,
    pub(super) frames: Value,
    /// Otherwise its free waits for a stream.
    pub(super) is_allocated: bool,
    pub(super) place: Location,
}
