//! The GPU's memory: what is reserved, created and mapped, and how it changes.
//!
//! Two locks, in this order: `turn`, then `ledger`. A change of mappings holds `turn` during the driver's
//! call; the driver makes such calls one at a time anyway. The ledger is not locked meanwhile, so that each
//! copy's check of its ranges returns at once.
//!
//! The ledger lists only what is certainly mapped. A mapping is entered after the driver's map, and closed
//! before its unmap. It is reopened if the driver refuses; after a panic it stays closed.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use poorwill_core::{BackingId, DeviceRange};
use rustix::fs::{MemfdFlags, memfd_create};

use super::peers::Reach;
use super::vm::Vm;
use crate::ledger::{Ledger, Result, check_size, invalid};
use crate::parents_only::ParentsOnly;

/// The name of a file in memory that a process has while it holds imported memory.
pub(super) const IMPORTS_MARK: &str = "poorwill-imported-memory";

/// The context is entered for all calls.
#[derive(Debug)]
pub(super) struct CudaState {
    granule_bytes: u64,
    vm: Vm,
    turn: Mutex<()>,
    /// Reservations, and backings by the driver's handle.
    ledger: Mutex<Ledger<(), u64>>,
    imports: Mutex<Imports>,
}

/// Memory that came from descriptors. While there is some, a restore of this process fails.
#[derive(Debug, Default)]
struct Imports {
    /// With the descriptors that they came from: the driver exports no imported handle.
    backings: HashMap<BackingId, ParentsOnly>,
    /// Those that inspect the process see it by its name.
    mark: Option<OwnedFd>,
}

impl Imports {
    fn add(&mut self, backing: BackingId, memory: BorrowedFd<'_>) -> io::Result<()> {
        if self.mark.is_none() {
            self.mark = Some(memfd_create(IMPORTS_MARK, MemfdFlags::CLOEXEC)?);
        }
        self.backings.insert(backing, ParentsOnly::new(memory.try_clone_to_owned()?)?);
        Ok(())
    }

    fn remove(&mut self, backing: BackingId) {
        self.backings.remove(&backing);
        if self.backings.is_empty() {
            self.mark = None;
        }
    }
}

impl CudaState {
    pub(super) fn new(granule_bytes: u64, vm: Vm) -> Self {
        let (turn, ledger) = (Mutex::default(), Mutex::new(Ledger::new(granule_bytes)));
        Self { granule_bytes, vm, turn, ledger, imports: Mutex::default() }
    }

    pub(super) fn shares_memory(&self) -> bool {
        self.vm.shares_memory()
    }

    pub(super) fn peers(&self) -> &[u32] {
        self.vm.peers()
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger<(), u64>> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn reserve(&self, bytes: u64) -> Result<DeviceRange> {
        check_size(self.granule_bytes, bytes)?;
        let range = self.vm.reserve(bytes, self.granule_bytes)?;
        // A thread that has just freed these addresses keeps their entry until its turn ends.
        let _turn = self.turn();
        self.ledger().reserved(range, ());
        Ok(range)
    }

    pub(super) fn unreserve(&self, range: DeviceRange) -> Result<()> {
        let _turn = self.turn();
        self.ledger().check_unreserve(range).copied()?;
        self.vm.free(range)?;
        self.ledger().unreserved(range)
    }

    /// Takes no turn: the driver may have to clean memory first.
    pub(super) fn create(&self, bytes: u64) -> Result<BackingId> {
        check_size(self.granule_bytes, bytes)?;
        let handle = self.vm.create(bytes)?;
        Ok(self.ledger().created(bytes, handle))
    }

    pub(super) fn create_shared(&self, bytes: u64) -> Result<BackingId> {
        check_size(self.granule_bytes, bytes)?;
        let handle = self.vm.create_shared(bytes)?;
        Ok(self.ledger().created(bytes, handle))
    }

    pub(super) fn export(&self, backing: BackingId) -> Result<OwnedFd> {
        let _turn = self.turn();
        let handle = *self.ledger().backing(backing)?;
        match self.imports().backings.get(&backing) {
            Some(memory) => memory.as_fd().try_clone_to_owned().map_err(|error| {
                invalid(format!("the descriptor of imported memory cannot be doubled: {error}"))
            }),
            None => self.vm.export(handle),
        }
    }

    pub(super) fn import(&self, memory: BorrowedFd<'_>, bytes: u64) -> Result<BackingId> {
        check_size(self.granule_bytes, bytes)?;
        let handle = self.vm.import(memory)?;
        let backing = self.ledger().created(bytes, handle);
        // A release needs the same lock.
        let added = self.imports().add(backing, memory);
        if let Err(error) = added {
            self.release(backing)?;
            return Err(invalid(format!(
                "imported memory cannot be marked and kept: {error}; raise `ulimit -n`"
            )));
        }
        Ok(backing)
    }

    fn imports(&self) -> MutexGuard<'_, Imports> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Mapped or not: the driver keeps the memory until the last unmap.
    pub(super) fn release(&self, backing: BackingId) -> Result<()> {
        let _turn = self.turn();
        let handle = *self.ledger().check_release(backing)?.0;
        self.vm.release(handle)?;
        self.ledger().released(backing);
        self.imports().remove(backing);
        Ok(())
    }

    pub(super) fn map(&self, range: DeviceRange, backing: BackingId) -> Result<()> {
        let _turn = self.turn();
        let handle = *self.ledger().check_map(range, backing)?.1;
        self.vm.map(range, handle)?;
        self.ledger().mapped(range, backing)
    }

    /// One driver call for the range; parts already open stay open.
    pub(super) fn set_access(&self, range: DeviceRange, reach: Reach) -> Result<()> {
        let _turn = self.turn();
        if self.ledger().check_access(range)?.1.is_empty() {
            return Ok(());
        }
        self.vm.open(range, reach)?;
        self.ledger().opened(range)
    }

    pub(super) fn unmap(&self, range: DeviceRange) -> Result<()> {
        let _turn = self.turn();
        let open = self.ledger().close(range)?;
        if let Err(error) = self.vm.unmap(range) {
            let mut ledger = self.ledger();
            open.into_iter().try_for_each(|open| ledger.opened(open))?;
            return Err(error);
        }
        self.ledger().unmapped(range).map(drop)
    }

    /// Waits for no driver call.
    pub(super) fn check_open(&self, ranges: impl IntoIterator<Item = DeviceRange>) -> Result<()> {
        let ledger = self.ledger();
        ranges.into_iter().try_for_each(|range| ledger.locate(range).map(drop))
    }

    /// As far as the driver allows. Nothing is in flight.
    pub(super) fn clear(&self) {
        let _turn = self.turn();
        let left = self.ledger().take_all();
        for (range, mapped, ()) in left.reservations {
            for mapping in mapped {
                let _ = self.vm.unmap(mapping);
            }
            let _ = self.vm.free(range);
        }
        for handle in left.backings {
            let _ = self.vm.release(handle);
        }
    }

    /// For a forked child: a thread of the parent's may have been changing these.
    pub(super) fn forget(&mut self) {
        let ledger = self.ledger.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::replace(ledger, Ledger::new(self.granule_bytes)));
        std::mem::forget(std::mem::take(self.imports.get_mut().unwrap_or_else(PoisonError::into_inner)));
    }
}
