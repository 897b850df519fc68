//! A driver's record of its device: reservations, backings, and the mappings between them.
//!
//! It checks the contract's rules on sizes, ranges and handles for all drivers. A change is a check, the
//! driver's own step, and an entry; a failed step leaves the ledger as it was. A method may take the step as
//! a closure. A driver with slow steps calls `check_…`, the step and the entry method itself, and allows no
//! other change meanwhile. `R` is the driver's data of a reservation, `B` that of a backing.

use std::collections::{BTreeMap, HashMap};

use poorwill_core::{BackingId, DeviceRange, DriverError, DriverErrorKind, Op};

/// A result whose error does not name its operation yet.
pub(crate) type Result<T> = std::result::Result<T, DriverErrorKind>;

#[derive(Debug)]
pub(crate) struct Ledger<R, B> {
    granule_bytes: u64,
    next_backing: u64,
    backings: HashMap<u64, Backing<B>>,
    reservations: BTreeMap<u64, Reservation<R>>,
}

#[derive(Debug)]
struct Backing<B> {
    bytes: u64,
    mappings: u32,
    released: bool,
    machine: B,
}

#[derive(Debug)]
struct Reservation<R> {
    bytes: u64,
    machine: R,
    mappings: BTreeMap<u64, Mapping>,
}

#[derive(Debug)]
struct Mapping {
    bytes: u64,
    backing: u64,
    open: bool,
    in_flight: u32,
}

/// The addresses of a mapping's reservation and of itself.
pub(crate) type MappingKey = (u64, u64);

/// The part of a range in one mapping.
#[derive(Debug)]
pub(crate) struct Located<'a, R, B> {
    pub(crate) key: MappingKey,
    pub(crate) reservation: &'a R,
    pub(crate) backing: &'a B,
    /// Offset from the start of the reservation; next, from that of the backing.
    pub(crate) in_reservation: u64,
    pub(crate) in_backing: u64,
    pub(crate) bytes: u64,
}

impl<R, B> Ledger<R, B> {
    pub(crate) fn new(granule_bytes: u64) -> Self {
        let (backings, reservations) = Default::default();
        Self { granule_bytes, next_backing: 1, backings, reservations }
    }

    pub(crate) fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }

    pub(crate) fn check_size(&self, bytes: u64) -> Result<()> {
        check_size(self.granule_bytes, bytes)
    }

    fn check_range(&self, range: DeviceRange) -> Result<()> {
        self.check_size(range.bytes)?;
        if !range.addr.is_multiple_of(self.granule_bytes) || range.addr.checked_add(range.bytes).is_none() {
            return Err(invalid(format!("{range} does not begin on a granule of {}", self.granule_bytes)));
        }
        Ok(())
    }

    pub(crate) fn reserved(&mut self, range: DeviceRange, machine: R) {
        let mappings = BTreeMap::new();
        self.reservations.insert(range.addr, Reservation { bytes: range.bytes, machine, mappings });
    }

    pub(crate) fn unreserve(&mut self, range: DeviceRange, step: impl FnOnce(&R) -> Result<()>) -> Result<R> {
        step(self.check_unreserve(range)?)?;
        self.unreserved(range)
    }

    /// Requires a whole reservation without mappings.
    pub(crate) fn check_unreserve(&self, range: DeviceRange) -> Result<&R> {
        let found = self.reservations.get(&range.addr).filter(|found| found.bytes == range.bytes);
        let found = found.ok_or_else(|| not_a_reservation(range))?;
        if !found.mappings.is_empty() {
            return Err(DriverErrorKind::AlreadyMapped { range });
        }
        Ok(&found.machine)
    }

    pub(crate) fn unreserved(&mut self, range: DeviceRange) -> Result<R> {
        let gone = self.reservations.remove(&range.addr);
        gone.map(|found| found.machine).ok_or_else(|| not_a_reservation(range))
    }

    pub(crate) fn created(&mut self, bytes: u64, machine: B) -> BackingId {
        let id = self.next_backing;
        self.next_backing += 1;
        self.backings.insert(id, Backing { bytes, mappings: 0, released: false, machine });
        BackingId(id)
    }

    /// One that is not released.
    pub(crate) fn backing(&self, id: BackingId) -> Result<&B> {
        self.live_backing(id).map(|backing| &backing.machine)
    }

    /// All that exist.
    pub(crate) fn backings(&self) -> impl Iterator<Item = &B> {
        self.backings.values().map(|backing| &backing.machine)
    }

    /// The step learns whether the backing is still mapped.
    pub(crate) fn release(&mut self, id: BackingId, step: impl FnOnce(&B, bool) -> Result<()>) -> Result<()> {
        let (machine, mapped) = self.check_release(id)?;
        step(machine, mapped)?;
        self.released(id);
        Ok(())
    }

    /// Returns whether the backing is mapped.
    pub(crate) fn check_release(&self, id: BackingId) -> Result<(&B, bool)> {
        self.live_backing(id).map(|backing| (&backing.machine, backing.mappings > 0))
    }

    /// The backing goes now, or with its last mapping.
    pub(crate) fn released(&mut self, id: BackingId) {
        match self.backings.get_mut(&id.0) {
            Some(backing) if backing.mappings > 0 => backing.released = true,
            _ => drop(self.backings.remove(&id.0)),
        }
    }

    pub(crate) fn map(
        &mut self,
        range: DeviceRange,
        id: BackingId,
        step: impl FnOnce(&R, &B) -> Result<()>,
    ) -> Result<()> {
        let (reservation, backing) = self.check_map(range, id)?;
        step(reservation, backing)?;
        self.mapped(range, id)
    }

    /// Requires an unmapped range of the backing's size in one reservation.
    pub(crate) fn check_map(&self, range: DeviceRange, id: BackingId) -> Result<(&R, &B)> {
        self.check_range(range)?;
        let backing = self.live_backing(id)?;
        let bytes = backing.bytes;
        if bytes != range.bytes {
            return Err(invalid(format!("{id} has {bytes} bytes and {range} has {}", range.bytes)));
        }
        let reservation = self.reservation_of(range)?;
        if reservation.touches_a_mapping(range) {
            return Err(DriverErrorKind::AlreadyMapped { range });
        }
        Ok((&reservation.machine, &backing.machine))
    }

    /// The mapping has no access yet.
    pub(crate) fn mapped(&mut self, range: DeviceRange, id: BackingId) -> Result<()> {
        let base = self.base_of(range)?;
        let (Some(reservation), Some(backing)) =
            (self.reservations.get_mut(&base), self.backings.get_mut(&id.0))
        else {
            return Err(DriverErrorKind::unknown_backing(id));
        };
        let mapping = Mapping { bytes: range.bytes, backing: id.0, open: false, in_flight: 0 };
        reservation.mappings.insert(range.addr, mapping);
        backing.mappings += 1;
        Ok(())
    }

    /// The step receives the closed parts, adjoining ones joined, and is skipped without any.
    pub(crate) fn set_access(
        &mut self,
        range: DeviceRange,
        open: impl FnOnce(&R, &[DeviceRange]) -> Result<()>,
    ) -> Result<()> {
        let (machine, closed) = self.check_access(range)?;
        if closed.is_empty() {
            return Ok(());
        }
        open(machine, &closed)?;
        self.opened(range)
    }

    /// Returns the closed parts of a run of mappings, adjoining ones joined.
    pub(crate) fn check_access(&self, range: DeviceRange) -> Result<(&R, Vec<DeviceRange>)> {
        let reservation = self.run(range)?;
        Ok((&reservation.machine, reservation.closed_runs(range)))
    }

    pub(crate) fn opened(&mut self, range: DeviceRange) -> Result<()> {
        let mappings = &mut self.reservation_mut(range)?.mappings;
        mappings.range_mut(range.addr..range.end()).for_each(|(_, mapping)| mapping.open = true);
        Ok(())
    }

    /// Closes a run of idle mappings before its unmap, so that look-ups fail. Returns the open parts, to
    /// reopen if the unmap fails.
    pub(crate) fn close(&mut self, range: DeviceRange) -> Result<Vec<DeviceRange>> {
        self.check_unmap(range)?;
        let mut open = Vec::new();
        let mappings = &mut self.reservation_mut(range)?.mappings;
        for (addr, mapping) in mappings.range_mut(range.addr..range.end()).filter(|(_, mapping)| mapping.open)
        {
            mapping.open = false;
            open.push(DeviceRange::new(*addr, mapping.bytes));
        }
        Ok(open)
    }

    /// Returns the same as [`Ledger::unmapped`].
    pub(crate) fn unmap(
        &mut self,
        range: DeviceRange,
        remove: impl FnOnce(&R) -> Result<()>,
    ) -> Result<Vec<B>> {
        remove(self.check_unmap(range)?)?;
        self.unmapped(range)
    }

    /// Requires a run of mappings without work in flight.
    fn check_unmap(&self, range: DeviceRange) -> Result<&R> {
        let reservation = self.run(range)?;
        if reservation.mappings.range(range.addr..range.end()).any(|(_, mapping)| mapping.in_flight > 0) {
            return Err(DriverErrorKind::Busy { range });
        }
        Ok(&reservation.machine)
    }

    /// Returns the released backings that went with the mappings.
    pub(crate) fn unmapped(&mut self, range: DeviceRange) -> Result<Vec<B>> {
        let reservation = self.reservation_mut(range)?;
        let at: Vec<u64> = reservation.mappings.range(range.addr..range.end()).map(|(at, _)| *at).collect();
        let unmapped: Vec<u64> = at
            .iter()
            .filter_map(|at| reservation.mappings.remove(at))
            .map(|mapping| mapping.backing)
            .collect();
        let mut gone = Vec::new();
        for id in unmapped {
            let Some(backing) = self.backings.get_mut(&id) else { continue };
            backing.mappings -= 1;
            if backing.mappings == 0 && backing.released {
                gone.extend(self.backings.remove(&id).map(|backing| backing.machine));
            }
        }
        Ok(gone)
    }

    /// The mappings of an open range, which may begin and end at any byte.
    pub(crate) fn locate(&self, range: DeviceRange) -> Result<Vec<Located<'_, R, B>>> {
        let mut located = Vec::new();
        if range.bytes == 0 {
            return Ok(located);
        }
        let not_mapped = DriverErrorKind::NotMapped { range };
        let (base, reservation) =
            self.reservations.range(..=range.addr).next_back().ok_or(not_mapped.clone())?;
        let mut addr = range.addr;
        while addr < range.end() {
            let (start, mapping) =
                reservation.mappings.range(..=addr).next_back().ok_or(not_mapped.clone())?;
            let in_backing = addr - start;
            if in_backing >= mapping.bytes || !mapping.open {
                return Err(not_mapped);
            }
            let bytes = (mapping.bytes - in_backing).min(range.end() - addr);
            let backing = self.backings.get(&mapping.backing).ok_or(not_mapped.clone())?;
            located.push(Located {
                key: (*base, *start),
                reservation: &reservation.machine,
                backing: &backing.machine,
                in_reservation: addr - base,
                in_backing,
                bytes,
            });
            addr += bytes;
        }
        Ok(located)
    }

    /// Prevents unmapping until [`Ledger::end_work`].
    pub(crate) fn begin_work(&mut self, key: MappingKey) {
        self.mapping_mut(key).into_iter().for_each(|mapping| mapping.in_flight += 1);
    }

    pub(crate) fn end_work(&mut self, key: MappingKey) {
        self.mapping_mut(key).into_iter().for_each(|mapping| mapping.in_flight -= 1);
    }

    fn mapping_mut(&mut self, (base, at): MappingKey) -> Option<&mut Mapping> {
        self.reservations.get_mut(&base)?.mappings.get_mut(&at)
    }

    fn live_backing(&self, id: BackingId) -> Result<&Backing<B>> {
        let live = self.backings.get(&id.0).filter(|backing| !backing.released);
        live.ok_or_else(|| DriverErrorKind::unknown_backing(id))
    }

    fn base_of(&self, range: DeviceRange) -> Result<u64> {
        let below = self.reservations.range(..=range.addr).next_back();
        below
            .filter(|(addr, reservation)| DeviceRange::new(**addr, reservation.bytes).contains(&range))
            .map(|(addr, _)| *addr)
            .ok_or_else(|| not_inside(range))
    }

    fn reservation_of(&self, range: DeviceRange) -> Result<&Reservation<R>> {
        let found = self.reservations.get(&self.base_of(range)?);
        found.ok_or_else(|| not_inside(range))
    }

    fn reservation_mut(&mut self, range: DeviceRange) -> Result<&mut Reservation<R>> {
        let base = self.base_of(range)?;
        self.reservations.get_mut(&base).ok_or_else(|| not_inside(range))
    }

    /// Requires exactly a run of mappings without a gap.
    fn run(&self, range: DeviceRange) -> Result<&Reservation<R>> {
        self.check_range(range)?;
        let reservation = self.reservation_of(range)?;
        reservation.check_run(range)?;
        Ok(reservation)
    }
}

fn not_a_reservation(range: DeviceRange) -> DriverErrorKind {
    invalid(format!("{range} is not a reservation"))
}

fn not_inside(range: DeviceRange) -> DriverErrorKind {
    invalid(format!("{range} does not lie inside one reservation"))
}

impl<R> Ledger<R, u64> {
    /// For a device that closes.
    pub(crate) fn take_all(&mut self) -> Leftovers<R> {
        let reservations = std::mem::take(&mut self.reservations).into_iter().map(|(addr, found)| {
            let mapped = found.mappings.iter().map(|(at, mapping)| DeviceRange::new(*at, mapping.bytes));
            (DeviceRange::new(addr, found.bytes), mapped.collect(), found.machine)
        });
        let held = std::mem::take(&mut self.backings).into_values().filter(|backing| !backing.released);
        Leftovers {
            reservations: reservations.collect(),
            backings: held.map(|backing| backing.machine).collect(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Leftovers<R> {
    pub(crate) reservations: Vec<(DeviceRange, Vec<DeviceRange>, R)>,
    pub(crate) backings: Vec<u64>,
}

impl<R> Reservation<R> {
    fn touches_a_mapping(&self, range: DeviceRange) -> bool {
        let last = self.mappings.range(..range.end()).next_back();
        last.is_some_and(|(addr, mapping)| DeviceRange::new(*addr, mapping.bytes).overlaps(&range))
    }

    fn check_run(&self, range: DeviceRange) -> Result<()> {
        let mut at = range.addr;
        for (addr, mapping) in self.mappings.range(range.addr..range.end()) {
            if *addr != at {
                break;
            }
            at += mapping.bytes;
        }
        if at == range.end() { Ok(()) } else { Err(DriverErrorKind::NotMapped { range }) }
    }

    fn closed_runs(&self, range: DeviceRange) -> Vec<DeviceRange> {
        let mut runs: Vec<DeviceRange> = Vec::new();
        let closed = self.mappings.range(range.addr..range.end()).filter(|(_, mapping)| !mapping.open);
        for (addr, mapping) in closed {
            match runs.last_mut() {
                Some(last) if last.end() == *addr => last.bytes += mapping.bytes,
                _ => runs.push(DeviceRange::new(*addr, mapping.bytes)),
            }
        }
        runs
    }
}

pub(crate) fn check_size(granule_bytes: u64, bytes: u64) -> Result<()> {
    if bytes == 0 || !bytes.is_multiple_of(granule_bytes) {
        return Err(invalid(format!("{bytes} bytes are no multiple of the granule of {granule_bytes}")));
    }
    Ok(())
}

pub(crate) fn check_granules(granule_bytes: u64, ranges: &[DeviceRange]) -> Result<()> {
    let is_whole = |range: &&DeviceRange| {
        range.addr.is_multiple_of(granule_bytes) && range.bytes.is_multiple_of(granule_bytes)
    };
    match ranges.iter().find(|range| !is_whole(range)) {
        None => Ok(()),
        Some(range) => {
            Err(invalid(format!("{range} does not begin and end on granules of {granule_bytes} bytes")))
        }
    }
}

pub(crate) fn invalid(reason: String) -> DriverErrorKind {
    DriverErrorKind::InvalidArgument { reason }
}

pub(crate) fn of(op: Op) -> impl Fn(DriverErrorKind) -> DriverError {
    move |kind| DriverError::new(op, kind)
}
