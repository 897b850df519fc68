//! What the host device knows: backings, reservations, mappings, and work in flight on them.
//!
//! All bookkeeping is here, under one lock of the device's; system calls that must agree with it are made
//! while the lock is held. Every function either does all it says or nothing.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use poorwill_core::{BackingId, ByteSize, DeviceRange, DriverErrorKind, Op};
use rustix::fs::{self, FallocateFlags, MemfdFlags};
use rustix::process::{Resource, getrlimit};

use super::stream::system;
use super::vm::Region;
use crate::process::Owner;

type Result<T> = std::result::Result<T, DriverErrorKind>;

/// Logical size of the sparse file. Ranges are handed out once and never again, which at 10 GiB/s of
/// creation lasts thirteen years; physical memory is only ever what is created, touched and not released.
const FILE_BYTES: u64 = 1 << 62;

/// Physical memory: ranges of one sparse memfd.
#[derive(Debug)]
pub(super) struct State {
    pub(super) file: Arc<OwnedFd>,
    pub(super) capacity_bytes: u64,
    pub(super) granule_bytes: u64,
    held_bytes: u64,
    next_offset: u64,
    next_backing: u64,
    /// Released and unmapped, but the system refused to take the memory back; still counted as held.
    unpunched: Vec<u64>,
    backings: HashMap<u64, Backing>,
    reservations: BTreeMap<u64, Reservation>,
}

#[derive(Debug)]
struct Backing {
    offset: u64,
    bytes: u64,
    mappings: u32,
    released: bool,
}

#[derive(Debug)]
struct Reservation {
    bytes: u64,
    region: Arc<Region>,
    mappings: BTreeMap<u64, Mapping>,
}

#[derive(Debug)]
struct Mapping {
    bytes: u64,
    backing: u64,
    open: bool,
    in_flight: u32,
}

/// A mapped piece of a device range: where it is in the addresses, and where in the file.
#[derive(Debug, Clone)]
pub(super) struct Span {
    pub(super) region: Arc<Region>,
    pub(super) region_offset: usize,
    pub(super) file_offset: u64,
    pub(super) bytes: usize,
    /// Address of the reservation and of the mapping, to count the work in flight.
    key: (u64, u64),
}

impl State {
    pub(super) fn new(capacity_bytes: u64, granule_bytes: u64) -> io::Result<Self> {
        let file = fs::memfd_create("poorwill-host-device", MemfdFlags::CLOEXEC)?;
        // Growing a file beyond this limit is a signal, not an error.
        if let Some(limit) = getrlimit(Resource::Fsize).current.filter(|limit| *limit < FILE_BYTES) {
            let limit = ByteSize(limit);
            let reason = format!("files may not exceed {limit} here; lift the limit (ulimit -f unlimited)");
            return Err(io::Error::other(reason));
        }
        fs::ftruncate(&file, FILE_BYTES)?;
        Ok(Self {
            file: Arc::new(file),
            capacity_bytes,
            granule_bytes,
            held_bytes: 0,
            next_offset: 0,
            next_backing: 1,
            unpunched: Vec::new(),
            backings: HashMap::new(),
            reservations: BTreeMap::new(),
        })
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.capacity_bytes - self.held_bytes
    }

    /// Bytes of the file that really have memory behind them.
    pub(super) fn resident_bytes(&self) -> io::Result<u64> {
        let blocks = fs::fstat(&self.file)?.st_blocks;
        Ok(u64::try_from(blocks).unwrap_or(0) * 512)
    }

    pub(super) fn reserve(&mut self, bytes: u64, owner: Owner) -> Result<DeviceRange> {
        self.check_size(bytes)?;
        let exhausted = |reason: String| DriverErrorKind::OutOfAddressSpace { asked_bytes: bytes, reason };
        let len = usize::try_from(bytes).map_err(|error| exhausted(error.to_string()))?;
        let align = usize::try_from(self.granule_bytes).map_err(|error| exhausted(error.to_string()))?;
        let region = Region::reserve(len, align, owner).map_err(|error| exhausted(error.to_string()))?;
        let addr = region.addr();
        let mappings = BTreeMap::new();
        self.reservations.insert(addr, Reservation { bytes, region: Arc::new(region), mappings });
        Ok(DeviceRange::new(addr, bytes))
    }

    /// The region is unmapped when the last job that holds it lets go.
    pub(super) fn unreserve(&mut self, range: DeviceRange) -> Result<Arc<Region>> {
        match self.reservations.get(&range.addr) {
            Some(reservation) if reservation.bytes == range.bytes => {
                if !reservation.mappings.is_empty() {
                    return Err(DriverErrorKind::AlreadyMapped { range });
                }
            }
            _ => return Err(invalid(format!("{range} is not a reservation"))),
        }
        let reservation = self.reservations.remove(&range.addr);
        reservation.map(|r| r.region).ok_or_else(|| invalid(format!("{range} is not a reservation")))
    }

    pub(super) fn create(&mut self, bytes: u64) -> Result<BackingId> {
        self.check_size(bytes)?;
        let unpunched = std::mem::take(&mut self.unpunched);
        self.unpunched = unpunched.into_iter().filter(|id| self.give_memory_back(*id).is_err()).collect();
        let free_bytes = self.free_bytes();
        if bytes > free_bytes || bytes > FILE_BYTES - self.next_offset {
            return Err(DriverErrorKind::OutOfMemory { asked_bytes: bytes, free_bytes });
        }
        let id = self.next_backing;
        self.backings.insert(id, Backing { offset: self.next_offset, bytes, mappings: 0, released: false });
        self.next_backing += 1;
        self.next_offset += bytes;
        self.held_bytes += bytes;
        Ok(BackingId(id))
    }

    pub(super) fn release(&mut self, id: BackingId) -> Result<()> {
        let backing = self.live_backing(id)?;
        if backing.mappings > 0 {
            self.backings.entry(id.0).and_modify(|backing| backing.released = true);
            return Ok(());
        }
        self.give_memory_back(id.0)
    }

    pub(super) fn map(&mut self, range: DeviceRange, id: BackingId) -> Result<()> {
        self.check_range(range)?;
        let backing = self.live_backing(id)?;
        let (offset, bytes) = (backing.offset, backing.bytes);
        if bytes != range.bytes {
            return Err(invalid(format!("{id} has {bytes} bytes and {range} has {}", range.bytes)));
        }
        let file = Arc::clone(&self.file);
        let reservation = self.reservation_of(range)?;
        if reservation.mappings_touching(range).next().is_some() {
            return Err(DriverErrorKind::AlreadyMapped { range });
        }
        let (at, len) = reservation.place(range)?;
        reservation.region.map(at, len, file.as_fd(), offset).map_err(|error| map_error(&error, bytes))?;
        let mapping = Mapping { bytes, backing: id.0, open: false, in_flight: 0 };
        reservation.mappings.insert(range.addr, mapping);
        self.backings.entry(id.0).and_modify(|backing| backing.mappings += 1);
        Ok(())
    }

    pub(super) fn set_access(&mut self, range: DeviceRange) -> Result<()> {
        self.check_range(range)?;
        let reservation = self.reservation_of(range)?;
        reservation.check_run(range)?;
        let closed: Vec<DeviceRange> = reservation.closed_runs(range);
        for (done, run) in closed.iter().enumerate() {
            let (at, len) = reservation.place(*run)?;
            if let Err(error) = reservation.region.open(at, len) {
                for run in &closed[..=done] {
                    let (at, len) = reservation.place(*run)?;
                    // Already failing: what stays open is memory of ours that nothing uses.
                    let _ = reservation.region.close(at, len);
                }
                return Err(system("open a range with mprotect", &error));
            }
        }
        reservation.mappings.range_mut(range.addr..range.end()).for_each(|(_, mapping)| mapping.open = true);
        Ok(())
    }

    pub(super) fn unmap(&mut self, range: DeviceRange) -> Result<()> {
        self.check_range(range)?;
        let reservation = self.reservation_of(range)?;
        reservation.check_run(range)?;
        if reservation.mappings.range(range.addr..range.end()).any(|(_, mapping)| mapping.in_flight > 0) {
            return Err(DriverErrorKind::Busy { range });
        }
        let (at, len) = reservation.place(range)?;
        reservation.region.unmap(at, len).map_err(|error| system("unmap a range", &error))?;
        let gone: Vec<u64> =
            reservation.mappings.range(range.addr..range.end()).map(|(addr, _)| *addr).collect();
        let backings: Vec<u64> =
            gone.iter().filter_map(|addr| reservation.mappings.remove(addr)).map(|m| m.backing).collect();
        for id in backings {
            let Some(backing) = self.backings.get_mut(&id) else { continue };
            backing.mappings -= 1;
            // The unmap itself is done; a refusal here is tried again before the next create.
            if backing.mappings == 0 && backing.released && self.give_memory_back(id).is_err() {
                self.unpunched.push(id);
            }
        }
        Ok(())
    }

    /// Where the bytes of an open range are; counts one piece of work in flight on each mapping, until
    /// [`State::land`].
    pub(super) fn take_off(&mut self, range: DeviceRange) -> Result<Vec<Span>> {
        if range.bytes == 0 {
            return Ok(Vec::new()); // No bytes are anywhere.
        }
        let not_mapped = DriverErrorKind::NotMapped { range };
        let (base, reservation) =
            self.reservations.range_mut(..=range.addr).next_back().ok_or(not_mapped.clone())?;
        let mut spans = Vec::new();
        let mut addr = range.addr;
        while addr < range.end() {
            let (start, mapping) =
                reservation.mappings.range(..=addr).next_back().ok_or(not_mapped.clone())?;
            let inside = addr - start;
            if inside >= mapping.bytes || !mapping.open {
                return Err(not_mapped);
            }
            let bytes = (mapping.bytes - inside).min(range.end() - addr);
            let backing = self.backings.get(&mapping.backing).ok_or(not_mapped.clone())?;
            spans.push(Span {
                region: Arc::clone(&reservation.region),
                region_offset: to_usize(addr - base)?,
                file_offset: backing.offset + inside,
                bytes: to_usize(bytes)?,
                key: (*base, *start),
            });
            addr += bytes;
        }
        for span in &spans {
            reservation.mappings.entry(span.key.1).and_modify(|mapping| mapping.in_flight += 1);
        }
        Ok(spans)
    }

    /// The work counted by [`State::take_off`] has finished.
    pub(super) fn land(&mut self, spans: &[Span]) {
        for (base, start) in spans.iter().map(|span| span.key) {
            let mapping = self.reservations.get_mut(&base).and_then(|r| r.mappings.get_mut(&start));
            if let Some(mapping) = mapping {
                mapping.in_flight -= 1;
            }
        }
    }

    fn give_memory_back(&mut self, id: u64) -> Result<()> {
        let Some(backing) = self.backings.get(&id) else {
            return Err(DriverErrorKind::unknown_backing(BackingId(id)));
        };
        punch(&self.file, backing.offset, backing.bytes)
            .map_err(|error| system("give memory of the device back", &error))?;
        self.held_bytes -= backing.bytes;
        self.backings.remove(&id);
        Ok(())
    }

    fn live_backing(&self, id: BackingId) -> Result<&Backing> {
        self.backings.get(&id.0).filter(|b| !b.released).ok_or_else(|| DriverErrorKind::unknown_backing(id))
    }

    fn reservation_of(&mut self, range: DeviceRange) -> Result<&mut Reservation> {
        self.reservations
            .range_mut(..=range.addr)
            .next_back()
            .filter(|(addr, reservation)| DeviceRange::new(**addr, reservation.bytes).contains(&range))
            .map(|(_, reservation)| reservation)
            .ok_or_else(|| invalid(format!("{range} does not lie inside one reservation")))
    }

    fn check_size(&self, bytes: u64) -> Result<()> {
        if bytes == 0 || !bytes.is_multiple_of(self.granule_bytes) {
            return Err(invalid(format!(
                "{bytes} bytes are no multiple of the granule of {}",
                self.granule_bytes
            )));
        }
        Ok(())
    }

    fn check_range(&self, range: DeviceRange) -> Result<()> {
        self.check_size(range.bytes)?;
        if !range.addr.is_multiple_of(self.granule_bytes) || range.addr.checked_add(range.bytes).is_none() {
            return Err(invalid(format!("{range} does not begin on a granule of {}", self.granule_bytes)));
        }
        Ok(())
    }
}

impl Reservation {
    /// Offset into the region and length, for system calls.
    fn place(&self, range: DeviceRange) -> Result<(usize, usize)> {
        Ok((to_usize(range.addr - self.region.addr())?, to_usize(range.bytes)?))
    }

    fn mappings_touching(&self, range: DeviceRange) -> impl Iterator<Item = (&u64, &Mapping)> {
        self.mappings
            .range(..range.end())
            .rev()
            .take(1)
            .filter(move |(addr, mapping)| DeviceRange::new(**addr, mapping.bytes).overlaps(&range))
    }

    /// Whether the range is exactly a run of mappings without a gap.
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

    /// The parts of a run of mappings that are not open yet, adjoining ones joined.
    fn closed_runs(&self, range: DeviceRange) -> Vec<DeviceRange> {
        let mut runs: Vec<DeviceRange> = Vec::new();
        for (addr, mapping) in
            self.mappings.range(range.addr..range.end()).filter(|(_, mapping)| !mapping.open)
        {
            match runs.last_mut() {
                Some(last) if last.end() == *addr => last.bytes += mapping.bytes,
                _ => runs.push(DeviceRange::new(*addr, mapping.bytes)),
            }
        }
        runs
    }
}

/// Gives the memory behind a range of the file back; it reads as zeros afterwards.
pub(super) fn punch(file: &OwnedFd, offset: u64, bytes: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::io::retry_on_intr(|| fs::fallocate(file, flags, offset, bytes))?)
}

fn invalid(reason: String) -> DriverErrorKind {
    DriverErrorKind::InvalidArgument { reason }
}

fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| invalid(format!("{bytes} bytes do not fit this machine's addresses")))
}

fn map_error(error: &io::Error, bytes: u64) -> DriverErrorKind {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => DriverErrorKind::OutOfHostMemory {
            asked_bytes: bytes,
            reason: format!("{error}; the limit vm.max_map_count on mappings may be reached"),
        },
        _ => system("map a range", error),
    }
}

/// Names the operation of an error.
pub(super) fn of(op: Op) -> impl Fn(DriverErrorKind) -> poorwill_core::DriverError {
    move |kind| poorwill_core::DriverError::new(op, kind)
}
