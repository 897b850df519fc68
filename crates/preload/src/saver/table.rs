//! The allocations of all regions, by address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use poorwill::{Block, DeviceRange, Tag};

use super::arenas::Opened;
use crate::backup::BackupKind;
use crate::sync::lock;

#[derive(Debug, Clone)]
pub(super) struct Allocation {
    pub(super) opened: Arc<Opened>,
    pub(super) block: Block,
    pub(super) kind: BackupKind,
    pub(super) tag: Tag,
}

impl Allocation {
    /// As it was requested.
    pub(super) fn range(&self) -> DeviceRange {
        DeviceRange::new(self.block.range.addr, self.block.requested_bytes)
    }
}

#[derive(Debug)]
pub(super) struct Table(Mutex<BTreeMap<u64, Allocation>>);

impl Table {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    pub(super) fn add(&self, allocation: Allocation) {
        lock(&self.0).insert(allocation.block.range.addr, allocation);
    }

    /// The allocation that begins at `addr`.
    pub(super) fn take(&self, addr: u64) -> Option<Allocation> {
        lock(&self.0).remove(&addr)
    }

    /// The allocation that has the byte at `addr`.
    pub(super) fn find(&self, addr: u64) -> Option<Allocation> {
        let table = lock(&self.0);
        let (_, allocation) = table.range(..=addr).next_back()?;
        (addr < allocation.range().end()).then(|| allocation.clone())
    }
}
