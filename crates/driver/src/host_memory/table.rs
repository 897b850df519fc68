//! Slabs and their users. Pure: it decides, callers act.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::SURPLUS_BYTES;
use super::extents::{FreeExtents, Plan, SlabId, UNIT_BYTES};
use super::region::Region;

/// Memory that several buffers may share.
#[derive(Debug)]
pub(super) struct Slab {
    pub(super) id: SlabId,
    pub(super) bytes: u64,
    /// Whether to page-lock it, where the device does that.
    pub(super) is_locked: bool,
    progress: SlabProgress,
}

/// How far a slab is.
#[derive(Debug, Default)]
struct SlabProgress {
    phase: Mutex<Phase>,
    changed: Condvar,
}

#[derive(Debug, Clone, Default)]
enum Phase {
    #[default]
    Announced,
    /// The start address.
    Ready(usize),
    Failed(String),
}

#[derive(Debug)]
pub(super) struct SlabMemory {
    pub(super) region: Region,
    /// Its device address, if it is page-locked.
    pub(super) device: Option<u64>,
}

#[derive(Debug, Clone)]
pub(super) struct SlabRange {
    pub(super) slab: Arc<Slab>,
    pub(super) offset: u64,
    /// As requested; rounded up to whole units.
    pub(super) bytes: u64,
}

/// An unused slab, taken out of the table.
#[derive(Debug)]
pub(super) struct Unused {
    pub(super) slab: Arc<Slab>,
    pub(super) made: SlabMemory,
}

#[derive(Debug)]
struct SlabEntry {
    slab: Arc<Slab>,
    users: usize,
    used_bytes: u64,
    is_begun: bool,
    /// While it is made.
    unpopulated_bytes: u64,
    made: Option<SlabMemory>,
    /// Free once it is made; not assigned before, since making it may fail.
    free_later: Vec<(u64, u64)>,
}

/// Free ranges, by whether their slabs are to be page-locked. The kinds never mix.
#[derive(Debug, Default)]
struct Free {
    locked: FreeExtents,
    pageable: FreeExtents,
}

#[derive(Debug, Default)]
pub(super) struct SlabTable {
    slabs: BTreeMap<SlabId, SlabEntry>,
    by_addr: BTreeMap<usize, SlabId>,
    free: Free,
    last_id: SlabId,
    /// Of slabs that exist, are announced, or are being released.
    pub(super) held_bytes: u64,
    pub(super) releasing_bytes: u64,
    pub(super) release_count: u64,
    /// Of buffers, as requested.
    pub(super) used_bytes: u64,
    pub(super) pinned_bytes: u64,
    /// Of slabs that are announced and not made yet.
    pub(super) unmade_bytes: u64,
    /// Of slabs in the making, not populated yet.
    pub(super) unpopulated_bytes: u64,
    /// Bytes that may be allocated without checking the system's limits again.
    pub(super) credit_bytes: u64,
    /// Page-locking failed halfway: unusable, and held until the device unregisters them.
    half_registered: Vec<Region>,
    pub(super) workers: Vec<JoinHandle<()>>,
    /// Growths under way of what is made ahead.
    pub(super) ahead: usize,
    pub(super) is_closed: bool,
}

impl Slab {
    pub(super) fn wait(&self) -> Result<usize, String> {
        let mut phase = self.progress.phase.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*phase {
                Phase::Announced => {}
                Phase::Ready(start) => return Ok(*start),
                Phase::Failed(reason) => return Err(reason.clone()),
            }
            phase = self.progress.changed.wait(phase).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn set_phase(&self, phase: Phase) {
        *self.progress.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
        self.progress.changed.notify_all();
    }
}

pub(super) fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(UNIT_BYTES)
}

impl Free {
    fn of(&mut self, is_locked: bool) -> &mut FreeExtents {
        if is_locked { &mut self.locked } else { &mut self.pageable }
    }
}

impl SlabTable {
    pub(super) fn slabs(&self) -> usize {
        self.slabs.len()
    }

    /// Serves large sizes first; `None` for sizes without a free range.
    pub(super) fn take_free(&mut self, sizes: &[u64], is_locked: bool) -> Vec<Option<SlabRange>> {
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|nth| std::cmp::Reverse(sizes[*nth]));
        let mut ranges = vec![None; sizes.len()];
        for nth in order {
            let found = self.free.of(is_locked).take(rounded(sizes[nth]));
            ranges[nth] = found.and_then(|(id, offset)| self.occupy(id, offset, sizes[nth]));
        }
        ranges
    }

    fn occupy(&mut self, id: SlabId, offset: u64, bytes: u64) -> Option<SlabRange> {
        let entry = self.slabs.get_mut(&id)?;
        entry.users += 1;
        entry.used_bytes += bytes;
        self.used_bytes += bytes;
        Some(SlabRange { slab: Arc::clone(&entry.slab), offset, bytes })
    }

    pub(super) fn announce(
        &mut self,
        plan: &Plan,
        sizes: &[u64],
        is_locked: bool,
    ) -> (Vec<Arc<Slab>>, Vec<SlabRange>) {
        let mut slabs = Vec::with_capacity(plan.slabs.len());
        for planned in &plan.slabs {
            self.last_id += 1;
            let (id, bytes, progress) = (self.last_id, planned.bytes, SlabProgress::default());
            let slab = Arc::new(Slab { id, bytes, is_locked, progress });
            let mut entry = SlabEntry::new(&slab);
            entry.free_later.push((planned.used_bytes, planned.bytes - planned.used_bytes));
            self.slabs.insert(slab.id, entry);
            self.held_bytes += planned.bytes;
            self.unmade_bytes += planned.bytes;
            slabs.push(slab);
        }
        let positions = plan.positions.iter().zip(sizes);
        let ranges =
            positions.filter_map(|((nth, offset), bytes)| self.occupy(slabs[*nth].id, *offset, *bytes));
        let ranges = ranges.collect();
        (slabs, ranges)
    }

    /// Removes an announced slab that is not begun with its last user.
    pub(super) fn free_range(&mut self, range: &SlabRange) {
        let id = range.slab.id;
        // A failed slab went with all its buffers.
        let Some(entry) = self.slabs.get_mut(&id) else { return };
        entry.users -= 1;
        entry.used_bytes -= range.bytes;
        self.used_bytes -= range.bytes;
        if entry.users == 0 && !entry.is_begun {
            self.forget(id);
        } else if entry.made.is_none() {
            entry.free_later.push((range.offset, rounded(range.bytes)));
        } else {
            self.free.of(range.slab.is_locked).insert(id, range.offset, rounded(range.bytes));
        }
    }

    /// Whether the slab is still wanted.
    pub(super) fn begin(&mut self, slab: &Slab) -> bool {
        match self.slabs.get_mut(&slab.id) {
            Some(entry) if !self.is_closed => {
                entry.is_begun = true;
                true
            }
            _ => false,
        }
    }

    pub(super) fn begin_populating(&mut self, slab: &Slab) {
        if let Some(entry) = self.slabs.get_mut(&slab.id) {
            self.unpopulated_bytes += slab.bytes - entry.unpopulated_bytes;
            entry.unpopulated_bytes = slab.bytes;
        }
    }

    pub(super) fn add_populated(&mut self, slab: &Slab, bytes: u64) {
        if let Some(entry) = self.slabs.get_mut(&slab.id) {
            let bytes = bytes.min(entry.unpopulated_bytes);
            entry.unpopulated_bytes -= bytes;
            self.unpopulated_bytes -= bytes;
        }
    }

    pub(super) fn finish(&mut self, slab: &Slab, made: SlabMemory) {
        let start = made.region.start();
        self.add_populated(slab, slab.bytes);
        if self.slabs.contains_key(&slab.id) {
            self.unmade_bytes -= slab.bytes;
            self.enter(slab.id, made);
        }
        slab.set_phase(Phase::Ready(start));
    }

    fn enter(&mut self, id: SlabId, made: SlabMemory) {
        let Some(entry) = self.slabs.get_mut(&id) else { return };
        self.by_addr.insert(made.region.start(), id);
        if made.device.is_some() {
            self.pinned_bytes += entry.slab.bytes;
        }
        entry.made = Some(made);
        let free = self.free.of(entry.slab.is_locked);
        for (offset, bytes) in std::mem::take(&mut entry.free_later) {
            free.insert(id, offset, bytes);
        }
    }

    pub(super) fn fail(&mut self, slab: &Slab, reason: String) {
        self.add_populated(slab, slab.bytes); // Nothing remains to populate.
        if let Some(entry) = self.slabs.get(&slab.id) {
            self.used_bytes -= entry.used_bytes;
            self.forget(slab.id);
        }
        slab.set_phase(Phase::Failed(reason));
    }

    fn forget(&mut self, id: SlabId) {
        let Some(entry) = self.slabs.remove(&id) else { return };
        self.free.of(entry.slab.is_locked).remove(id);
        self.held_bytes -= entry.slab.bytes;
        match entry.made {
            None => self.unmade_bytes -= entry.slab.bytes,
            Some(made) => {
                self.by_addr.remove(&made.region.start());
                if made.device.is_some() {
                    self.pinned_bytes -= entry.slab.bytes;
                }
            }
        }
    }

    pub(super) fn unused(&self) -> u64 {
        self.slabs.values().filter(|entry| entry.is_unused()).map(|entry| entry.slab.bytes).sum()
    }

    pub(super) fn abandoned(&self) -> Vec<Arc<Slab>> {
        let is_abandoned = |entry: &&SlabEntry| entry.users == 0 && entry.is_begun && entry.made.is_none();
        self.slabs.values().filter(is_abandoned).map(|entry| Arc::clone(&entry.slab)).collect()
    }

    /// Oldest first, until they total `bytes` or more.
    pub(super) fn take_unused(&mut self, bytes: u64) -> Vec<Unused> {
        let (mut ids, mut sum) = (Vec::new(), 0u64);
        for (id, entry) in self.slabs.iter().filter(|(_, entry)| entry.is_unused()) {
            if sum >= bytes {
                break;
            }
            sum = sum.saturating_add(entry.slab.bytes);
            ids.push(*id);
        }
        ids.into_iter().filter_map(|id| self.take_slab(id)).collect()
    }

    /// Newest first, at most `bytes` together, as long as more than the allowed surplus is unused.
    pub(super) fn take_surplus(&mut self, bytes: u64) -> Vec<Unused> {
        let (mut unused, mut left, mut ids) = (self.unused(), bytes, Vec::new());
        for (id, entry) in self.slabs.iter().rev().filter(|(_, entry)| entry.is_unused()) {
            if unused > SURPLUS_BYTES && entry.slab.bytes <= left {
                unused -= entry.slab.bytes;
                left -= entry.slab.bytes;
                ids.push(*id);
            }
        }
        ids.into_iter().filter_map(|id| self.take_slab(id)).collect()
    }

    /// Its bytes count as held until [`SlabTable::release_ended`].
    fn take_slab(&mut self, id: SlabId) -> Option<Unused> {
        let entry = self.slabs.get_mut(&id)?;
        let (slab, made) = (Arc::clone(&entry.slab), entry.made.take()?);
        self.by_addr.remove(&made.region.start());
        if made.device.is_some() {
            self.pinned_bytes -= slab.bytes;
        }
        self.unmade_bytes += slab.bytes; // `forget` subtracts this for slabs without memory.
        self.forget(id);
        self.held_bytes += slab.bytes;
        self.releasing_bytes += slab.bytes;
        Some(Unused { slab, made })
    }

    /// It was released, or put back.
    pub(super) fn release_ended(&mut self, bytes: u64) {
        self.held_bytes -= bytes;
        self.releasing_bytes -= bytes;
        self.release_count += 1;
    }

    pub(super) fn put_back(&mut self, unused: Unused) {
        let Unused { slab, made } = unused;
        let (id, bytes) = (slab.id, slab.bytes);
        let mut entry = SlabEntry::new(&slab);
        entry.is_begun = true;
        entry.free_later.push((0, bytes));
        self.slabs.insert(id, entry);
        self.held_bytes += bytes;
        self.enter(id, made);
    }

    /// Keeps an unusable region that cannot be released yet.
    pub(super) fn keep_half_registered(&mut self, region: Region) {
        self.held_bytes += region.bytes() as u64;
        self.half_registered.push(region);
    }

    pub(super) fn take_half_registered(&mut self) -> Vec<Region> {
        let half_registered = std::mem::take(&mut self.half_registered);
        self.held_bytes -= half_registered.iter().map(|region| region.bytes() as u64).sum::<u64>();
        half_registered
    }

    pub(super) fn at(&self, addr: usize, len: usize) -> Option<(&SlabMemory, usize)> {
        let (start, id) = self.by_addr.range(..=addr).next_back()?;
        let made = self.slabs.get(id)?.made.as_ref()?;
        let (offset, end) = (addr - start, addr.checked_add(len)?);
        (end <= start + made.region.bytes()).then_some((made, offset))
    }
}

impl SlabEntry {
    fn new(slab: &Arc<Slab>) -> Self {
        let (slab, free_later) = (Arc::clone(slab), Vec::new());
        Self { slab, users: 0, used_bytes: 0, is_begun: false, unpopulated_bytes: 0, made: None, free_later }
    }

    fn is_unused(&self) -> bool {
        self.users == 0 && self.made.is_some()
    }
}
