//! The memory of all regions of this process: arenas by device, and the allocations in them.
//!
//! Promises:
//!
//! - An allocation keeps its address until it is freed, paused or not.
//! - A pause or resume that fails has changed nothing that lasts, and no byte with a backup is lost.
//! - In a forked child no lock is taken: every call on memory is [`Failure::Forked`], before the runtime is called.
//!   Outside of regions pointers are the runtime's.

mod arenas;
mod owner;
mod settings;
mod table;
mod transition;

use std::time::Duration;

use poorwill::{AllocRequest, Block, DeviceRange, PoolError, Tag, chain};

use self::arenas::{Arenas, Opened};
pub(crate) use self::owner::Claim;
use self::owner::Owner;
pub(crate) use self::settings::Settings;
use self::table::{Allocation, Table};
use self::transition::Transitions;
use crate::backup::BackupKind;
use crate::code::{Failure, Result};
use crate::message::note;
use crate::thread::{self, Region};

pub(crate) struct Saver {
    owner: Owner,
    settings: Settings,
    arenas: Arenas,
    table: Table,
    transitions: Transitions,
}

/// Never dropped: memory is freed until the process ends.
static SAVER: Saver = Saver::new();

pub(crate) fn saver() -> &'static Saver {
    &SAVER
}

impl Saver {
    const fn new() -> Self {
        Self {
            owner: Owner::new(),
            settings: Settings::new(),
            arenas: Arenas::new(),
            table: Table::new(),
            transitions: Transitions::new(),
        }
    }

    pub(crate) fn settings(&self) -> Result<&Settings> {
        self.has_memory().map(|_| &self.settings)
    }

    /// Before the runtime is called: an error in a forked child, and in those that are forked until it is dropped.
    pub(crate) fn claim(&self) -> Result<Claim<'_>> {
        self.owner.claim()
    }

    pub(crate) fn alloc(&self, claim: &Claim<'_>, region: &Region, ordinal: u32, bytes: u64) -> Result<u64> {
        let opened = self.arenas.open(ordinal, region.kind, &self.settings)?;
        claim.keep();
        self.check_margin(&opened, bytes)?;
        let (block, tag) = alloc_awake(&opened, region, bytes)?;
        let addr = block.range.addr;
        self.table.add(Allocation { opened, block, kind: region.kind, tag });
        Ok(addr)
    }

    fn check_margin(&self, opened: &Opened, bytes: u64) -> Result<()> {
        let margin_bytes = self.settings.margin_bytes();
        if margin_bytes == 0 {
            return Ok(());
        }
        let driver = opened.arena().driver();
        let failed = |source| PoolError::Driver { op: "measure free memory", source };
        let free_bytes = driver.memory_info().map_err(failed)?.free_bytes;
        let taken_bytes = bytes.checked_next_multiple_of(driver.info().granule_bytes).unwrap_or(bytes);
        if free_bytes < taken_bytes.saturating_add(margin_bytes) {
            return Err(Failure::Margin { bytes, free_bytes, margin_bytes });
        }
        Ok(())
    }

    /// Returns whether the pointer is of a region. Waits for the device, as the runtime does.
    pub(crate) fn free(&self, addr: u64) -> Result<bool> {
        match self.has_memory() {
            Ok(true) => {}
            // A child's copy of the table is of no use there. In a region all memory is the parent's.
            Err(forked) if thread::is_interesting()? => return Err(forked),
            Ok(false) | Err(_) => return Ok(false),
        }
        // Taken first: once it is free, another thread may get the same address.
        let Some(allocation) = self.table.take(addr) else { return Ok(false) };
        let arena = allocation.opened.arena().clone();
        let op = "wait for the device before memory is freed";
        let waited = arena.driver().synchronize().map_err(|source| PoolError::Driver { op, source });
        if let Err(error) = waited.and_then(|()| arena.free(allocation.block.id)) {
            self.table.add(allocation);
            return Err(error.into());
        }
        // All work is done. What a pause under way keeps, it releases itself.
        match arena.trim_within(Duration::ZERO) {
            Ok(_) | Err(PoolError::TimedOut { .. }) => {}
            Err(error) => note(&format!("freed memory stays cached: {}", chain(&error))),
        }
        Ok(true)
    }

    /// Declares what the next pause need not keep.
    pub(crate) fn set_unused(&self, ranges: Vec<DeviceRange>) -> Result<()> {
        self.has_memory()?;
        self.transitions.set_unused(ranges);
        Ok(())
    }

    /// The bytes from `addr` to the end of its allocation; 0 for other memory.
    pub(crate) fn owned_bytes(&self, addr: u64) -> Result<u64> {
        if !self.has_memory()? {
            return Ok(0);
        }
        Ok(self.table.find(addr).map_or(0, |allocation| allocation.range().end() - addr))
    }

    /// Where the host has the bytes of paused memory; `None` where it has none.
    pub(crate) fn backup(&self, range: DeviceRange) -> Result<Option<*const u8>> {
        if !self.has_memory()? {
            return Err(not_ours(range));
        }
        let found = self.table.find(range.addr).filter(|allocation| allocation.range().contains(&range));
        let Some(Allocation { opened, block, kind, tag }) = found else { return Err(not_ours(range)) };
        if !matches!(kind, BackupKind::Cpu(_)) {
            return Ok(None);
        }
        let is_readable = opened.arena().tag_state(&tag)?.is_asleep() || opened.is_retained(&tag);
        if !is_readable {
            return Ok(None);
        }
        self.transitions.backup(opened.arena(), block.id, range).map(Some)
    }

    /// Puts the memory of a tag to sleep, or all.
    pub(crate) fn pause(&self, name: Option<&str>) -> Result<()> {
        if self.has_memory()? { self.transitions.pause(&self.arenas, name) } else { Ok(()) }
    }

    /// Wakes the memory of a tag, or all.
    pub(crate) fn resume(&self, name: Option<&str>) -> Result<()> {
        if !self.has_memory()? {
            return Ok(());
        }
        self.transitions.resume(&self.arenas, name, self.settings.retains()?)
    }

    /// The reports of the last pause and resume, as JSON.
    pub(crate) fn report(&self) -> Result<String> {
        self.has_memory()?;
        self.transitions.report()
    }

    fn has_memory(&self) -> Result<bool> {
        self.owner.is_this_process()
    }
}

/// Memory that is allocated while its tag is paused is active: it gets a tag of its own.
fn alloc_awake(opened: &Opened, region: &Region, bytes: u64) -> Result<(Block, Tag)> {
    let granule_bytes = opened.arena().driver().info().granule_bytes;
    for nth in 0.. {
        let tag = opened.part(&region.tag, region.kind, nth)?;
        let request = AllocRequest::new(bytes, tag.clone());
        let request = if bytes >= granule_bytes { request.aligned_to(granule_bytes) } else { request };
        match opened.arena().alloc(&request) {
            Err(PoolError::Asleep { .. }) => {}
            block => return Ok((block?, tag)),
        }
    }
    Err(Failure::Argument(format!("`{}` has been paused too often", region.tag)))
}

fn not_ours(range: DeviceRange) -> Failure {
    Failure::Argument(format!("{range} is not within one allocation of a region"))
}

#[cfg(test)]
mod tests {
    use poorwill::{Arena, Config};

    use super::*;

    #[test]
    fn memory_that_cannot_be_freed_stays_known() {
        let arena = Arena::open(Config::on("host:64MiB".parse().unwrap())).unwrap();
        let block = arena.alloc(&AllocRequest::new(100, Tag::weights())).unwrap();
        let (addr, bytes) = (block.range.addr, block.requested_bytes);
        let saver = Saver::new();
        saver.claim().unwrap().keep();
        let opened = Opened::of(arena.clone(), 0, true).into();
        saver.table.add(Allocation { opened, block, kind: BackupKind::None, tag: Tag::weights() });
        arena.close().unwrap();
        for _ in 0..2 {
            assert!(matches!(saver.free(addr), Err(Failure::Pool(_))));
            assert_eq!(saver.owned_bytes(addr).unwrap(), bytes);
        }
    }
}
