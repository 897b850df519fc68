//! Slabs, and who uses them. Pure: what is decided here, others carry out.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::SURPLUS_BYTES;
use super::extents::{Extents, Plan, SlabId, UNIT_BYTES};
use super::region::Region;

/// A piece of memory that several buffers may lie in.
#[derive(Debug)]
pub(super) struct Slab {
    pub(super) id: SlabId,
    pub(super) bytes: u64,
    /// Whether it is to be page-locked, where the device does that.
    pub(super) is_locked: bool,
    phase: Mutex<Phase>,
    turned: Condvar,
}

#[derive(Debug, Clone)]
enum Phase {
    Announced,
    /// It begins at this address.
    Ready(usize),
    /// Why there is none.
    Failed(String),
}

/// The memory of a slab.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) region: Region,
    /// Where the device sees it, if it is page-locked.
    pub(super) device: Option<u64>,
}

/// Where a buffer lies, or will lie.
#[derive(Debug, Clone)]
pub(super) struct Spot {
    pub(super) slab: Arc<Slab>,
    pub(super) offset: u64,
    /// As asked for; it takes whole units.
    pub(super) bytes: u64,
}

/// A slab that nobody uses, taken out of the books.
#[derive(Debug)]
pub(super) struct Unused {
    pub(super) slab: Arc<Slab>,
    pub(super) made: Made,
}

#[derive(Debug)]
struct Known {
    slab: Arc<Slab>,
    /// Buffers that lie in it.
    users: usize,
    used_bytes: u64,
    is_begun: bool,
    /// While it is made: bytes that the machine has not given yet.
    to_come: u64,
    made: Option<Made>,
    /// Places that are free once it is made. Until then nobody else is given one: it may come to nothing.
    free_later: Vec<(u64, u64)>,
}

/// Free places, by whether their slabs are to be page-locked: nobody gets one of the other kind.
#[derive(Debug, Default)]
struct Free {
    locked: Extents,
    pageable: Extents,
}

/// All slabs. The figures are in bytes.
#[derive(Debug, Default)]
pub(super) struct Books {
    slabs: BTreeMap<SlabId, Known>,
    by_addr: BTreeMap<usize, SlabId>,
    /// Of slabs that are to be page-locked, and of others.
    free: Free,
    last_id: SlabId,
    /// Of slabs that are there, announced, or on their way out.
    pub(super) held: u64,
    /// Of slabs that were taken out of the books to be given back, and may be there yet.
    pub(super) leaving: u64,
    /// How many of those have gone.
    pub(super) gone: u64,
    /// Of buffers, as they were asked for.
    pub(super) used: u64,
    pub(super) pinned: u64,
    /// Of slabs that are announced and not made yet: they take memory soon.
    pub(super) unmade: u64,
    /// Of slabs that are being made now: what the machine has not given yet.
    pub(super) to_come: u64,
    /// May be taken without asking the system again.
    pub(super) credit: u64,
    /// Registered by halves: of no use, and held until the device lets go of them.
    stuck: Vec<Region>,
    pub(super) workers: Vec<JoinHandle<()>>,
    pub(super) is_closed: bool,
}

impl Slab {
    /// Waits until it is made: where it begins, or why it does not.
    pub(super) fn wait(&self) -> Result<usize, String> {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*phase {
                Phase::Announced => {}
                Phase::Ready(start) => return Ok(*start),
                Phase::Failed(reason) => return Err(reason.clone()),
            }
            phase = self.turned.wait(phase).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn turn(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
        self.turned.notify_all();
    }
}

/// Bytes that a buffer takes from its slab.
pub(super) fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(UNIT_BYTES)
}

impl Free {
    fn of(&mut self, is_locked: bool) -> &mut Extents {
        if is_locked { &mut self.locked } else { &mut self.pageable }
    }
}

impl Books {
    pub(super) fn slabs(&self) -> usize {
        self.slabs.len()
    }

    /// Places for sizes among what is free, large ones first; `None` where nothing is free for one.
    pub(super) fn take_free(&mut self, sizes: &[u64], is_locked: bool) -> Vec<Option<Spot>> {
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|nth| std::cmp::Reverse(sizes[*nth]));
        let mut spots = vec![None; sizes.len()];
        for nth in order {
            let found = self.free.of(is_locked).take(rounded(sizes[nth]));
            spots[nth] = found.and_then(|(id, offset)| self.spot(id, offset, sizes[nth]));
        }
        spots
    }

    fn spot(&mut self, id: SlabId, offset: u64, bytes: u64) -> Option<Spot> {
        let known = self.slabs.get_mut(&id)?;
        known.users += 1;
        known.used_bytes += bytes;
        self.used += bytes;
        Some(Spot { slab: Arc::clone(&known.slab), offset, bytes })
    }

    /// Announces the slabs of a plan; a place in them for each size that it was made for.
    pub(super) fn announce(
        &mut self,
        plan: &Plan,
        sizes: &[u64],
        is_locked: bool,
    ) -> (Vec<Arc<Slab>>, Vec<Spot>) {
        let mut slabs = Vec::with_capacity(plan.slabs.len());
        for planned in &plan.slabs {
            self.last_id += 1;
            let (phase, turned) = (Mutex::new(Phase::Announced), Condvar::new());
            let slab = Arc::new(Slab { id: self.last_id, bytes: planned.bytes, is_locked, phase, turned });
            let mut known = Known::new(&slab);
            known.free_later.push((planned.used_bytes, planned.bytes - planned.used_bytes));
            self.slabs.insert(slab.id, known);
            self.held += planned.bytes;
            self.unmade += planned.bytes;
            slabs.push(slab);
        }
        let places = plan.places.iter().zip(sizes);
        let spots = places.filter_map(|((nth, offset), bytes)| self.spot(slabs[*nth].id, *offset, *bytes));
        let spots = spots.collect();
        (slabs, spots)
    }

    /// A buffer has gone. A slab that is announced only and that nobody waits for any more is forgotten.
    pub(super) fn give_back(&mut self, spot: &Spot) {
        let id = spot.slab.id;
        // Slabs that failed have gone with all their buffers.
        let Some(known) = self.slabs.get_mut(&id) else { return };
        known.users -= 1;
        known.used_bytes -= spot.bytes;
        self.used -= spot.bytes;
        if known.users == 0 && !known.is_begun {
            self.forget(id);
        } else if known.made.is_none() {
            known.free_later.push((spot.offset, rounded(spot.bytes)));
        } else {
            self.free.of(spot.slab.is_locked).insert(id, spot.offset, rounded(spot.bytes));
        }
    }

    /// Whether the slab is to be made, now.
    pub(super) fn begin(&mut self, slab: &Slab) -> bool {
        match self.slabs.get_mut(&slab.id) {
            Some(known) if !self.is_closed => {
                known.is_begun = true;
                true
            }
            _ => false,
        }
    }

    /// A slab that was begun takes memory from now on.
    pub(super) fn expect(&mut self, slab: &Slab) {
        if let Some(known) = self.slabs.get_mut(&slab.id) {
            self.to_come += slab.bytes - known.to_come;
            known.to_come = slab.bytes;
        }
    }

    /// So much of it has come.
    pub(super) fn came(&mut self, slab: &Slab, bytes: u64) {
        if let Some(known) = self.slabs.get_mut(&slab.id) {
            let bytes = bytes.min(known.to_come);
            known.to_come -= bytes;
            self.to_come -= bytes;
        }
    }

    pub(super) fn finish(&mut self, slab: &Slab, made: Made) {
        let start = made.region.start();
        self.came(slab, slab.bytes);
        if self.slabs.contains_key(&slab.id) {
            self.unmade -= slab.bytes;
            self.enter(slab.id, made);
        }
        slab.turn(Phase::Ready(start));
    }

    fn enter(&mut self, id: SlabId, made: Made) {
        let Some(known) = self.slabs.get_mut(&id) else { return };
        self.by_addr.insert(made.region.start(), id);
        if made.device.is_some() {
            self.pinned += known.slab.bytes;
        }
        known.made = Some(made);
        let free = self.free.of(known.slab.is_locked);
        for (offset, bytes) in std::mem::take(&mut known.free_later) {
            free.insert(id, offset, bytes);
        }
    }

    /// It cannot be made; so say all that lie in it.
    pub(super) fn fail(&mut self, slab: &Slab, reason: String) {
        self.came(slab, slab.bytes); // Nor is anything still to come.
        if let Some(known) = self.slabs.get(&slab.id) {
            self.used -= known.used_bytes;
            self.forget(slab.id);
        }
        slab.turn(Phase::Failed(reason));
    }

    fn forget(&mut self, id: SlabId) {
        let Some(known) = self.slabs.remove(&id) else { return };
        self.free.of(known.slab.is_locked).remove(id);
        self.held -= known.slab.bytes;
        match known.made {
            None => self.unmade -= known.slab.bytes,
            Some(made) => {
                self.by_addr.remove(&made.region.start());
                if made.device.is_some() {
                    self.pinned -= known.slab.bytes;
                }
            }
        }
    }

    /// Bytes in slabs that are made and that nobody uses.
    pub(super) fn unused(&self) -> u64 {
        self.slabs.values().filter(|known| known.is_unused()).map(|known| known.slab.bytes).sum()
    }

    /// Slabs that are being made and that nobody waits for any more.
    pub(super) fn abandoned(&self) -> Vec<Arc<Slab>> {
        let is_abandoned = |known: &&Known| known.users == 0 && known.is_begun && known.made.is_none();
        self.slabs.values().filter(is_abandoned).map(|known| Arc::clone(&known.slab)).collect()
    }

    /// Takes slabs that nobody uses, old ones first, until they have `bytes` or more.
    pub(super) fn take_unused(&mut self, bytes: u64) -> Vec<Unused> {
        let (mut ids, mut sum) = (Vec::new(), 0u64);
        for (id, known) in self.slabs.iter().filter(|(_, known)| known.is_unused()) {
            if sum >= bytes {
                break;
            }
            sum = sum.saturating_add(known.slab.bytes);
            ids.push(*id);
        }
        ids.into_iter().filter_map(|id| self.take_slab(id)).collect()
    }

    /// Takes slabs that nobody uses, new ones first, of `bytes` together at most, as long as more lies unused than is
    /// kept.
    pub(super) fn take_surplus(&mut self, bytes: u64) -> Vec<Unused> {
        let (mut unused, mut left, mut ids) = (self.unused(), bytes, Vec::new());
        for (id, known) in self.slabs.iter().rev().filter(|(_, known)| known.is_unused()) {
            if unused > SURPLUS_BYTES && known.slab.bytes <= left {
                unused -= known.slab.bytes;
                left -= known.slab.bytes;
                ids.push(*id);
            }
        }
        ids.into_iter().filter_map(|id| self.take_slab(id)).collect()
    }

    /// They are held until [`Books::left`].
    fn take_slab(&mut self, id: SlabId) -> Option<Unused> {
        let known = self.slabs.get_mut(&id)?;
        let (slab, made) = (Arc::clone(&known.slab), known.made.take()?);
        self.by_addr.remove(&made.region.start());
        if made.device.is_some() {
            self.pinned -= slab.bytes;
        }
        self.unmade += slab.bytes; // What `forget` takes off for slabs without memory.
        self.forget(id);
        self.held += slab.bytes;
        self.leaving += slab.bytes;
        Some(Unused { slab, made })
    }

    /// A slab that was taken has gone, or is back.
    pub(super) fn left(&mut self, bytes: u64) {
        self.held -= bytes;
        self.leaving -= bytes;
        self.gone += 1;
    }

    /// Puts back what could not be given back.
    pub(super) fn put_back(&mut self, unused: Unused) {
        let Unused { slab, made } = unused;
        let (id, bytes) = (slab.id, slab.bytes);
        let mut known = Known::new(&slab);
        known.is_begun = true;
        known.free_later.push((0, bytes));
        self.slabs.insert(id, known);
        self.held += bytes;
        self.enter(id, made);
    }

    /// Keeps what is of no use and cannot be given back yet.
    pub(super) fn stick(&mut self, region: Region) {
        self.held += region.bytes() as u64;
        self.stuck.push(region);
    }

    /// Takes it, to try again.
    pub(super) fn take_stuck(&mut self) -> Vec<Region> {
        let stuck = std::mem::take(&mut self.stuck);
        self.held -= stuck.iter().map(|region| region.bytes() as u64).sum::<u64>();
        stuck
    }

    /// The slab that these addresses lie in, and how far from its beginning.
    pub(super) fn at(&self, addr: usize, len: usize) -> Option<(&Made, usize)> {
        let (start, id) = self.by_addr.range(..=addr).next_back()?;
        let made = self.slabs.get(id)?.made.as_ref()?;
        let (offset, end) = (addr - start, addr.checked_add(len)?);
        (end <= start + made.region.bytes()).then_some((made, offset))
    }
}

impl Known {
    fn new(slab: &Arc<Slab>) -> Self {
        let (slab, free_later) = (Arc::clone(slab), Vec::new());
        Self { slab, users: 0, used_bytes: 0, is_begun: false, to_come: 0, made: None, free_later }
    }

    fn is_unused(&self) -> bool {
        self.users == 0 && self.made.is_some()
    }
}
