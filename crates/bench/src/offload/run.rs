//! Taking an arena through a plan.

use std::iter;
use std::num::NonZeroUsize;
use std::sync::Arc;

use poorwill::driver::Result as DriverResult;
use poorwill::offload::{Prefetcher, Slots, Stream};
use poorwill::{
    Arena, DeviceRange, Digest, Driver, DriverError, HostBuffer, Pending, PoolError, StreamId, Tag,
};
use poorwill_driver::system::System;

use super::choice::{SLOTS_MAX, SLOTS_MIN, Times, repeats_of, slots_of};
use super::layers::{Layers, Source};
use super::plan::{Error, Plan, Stage};
use super::report::{Report, overlap_of};
use crate::figures::{Spread, as_float, rate, timed};

/// How many passes of a kind are counted, behind one that is not.
const PASSES: usize = 5;

/// Of how many single layers the times are that slots and repeats are chosen by.
const CHOICE_LAYERS: usize = 16;

/// How often the repeats are corrected by what they took, at most: enough to grow to the most there are.
const CORRECTIONS: usize = 9;

/// Repeats that differ by less than this part of them take as long, as far as can be measured.
const CLOSE: u32 = 50;

/// What is computed again of a layer: so little that it stays in the caches of a GPU, as what a matrix product works on
/// does, and keeps few of its processors busy. Computing that does nothing but read takes all that memory and caches
/// give, and copies to that memory need a part of it (measured on an H200: 0.63 s for copies and computing of 0.47 s
/// each that read the device's memory, 0.75 s if they read its caches).
const PART_BYTES: u64 = 16 << 20;

/// Takes an arena that is used for nothing else through a plan. At its end everything is freed and trimmed.
///
/// # Errors
/// See [`Error`]. Everything that can be given back is given back also then.
pub fn run(
    arena: &Arena,
    source: &Source,
    plan: &Plan,
    observer: &mut dyn FnMut(Stage),
) -> Result<Report, Error> {
    arena.trim()?;
    arena.driver().host_trim()?;
    let room = Room::of(arena, plan)?;
    let outcome = measure(arena, source, plan, room, observer);
    let trimmed = arena.trim();
    let host_trimmed = arena.driver().host_trim();
    let report = outcome?;
    trimmed?;
    host_trimmed?;
    Ok(report)
}

/// The size of a layer for which there is room, and for how many slots of it.
#[derive(Debug, Clone, Copy)]
struct Room {
    layer_bytes: u64,
    slots: usize,
}

impl Room {
    fn of(arena: &Arena, plan: &Plan) -> Result<Self, Error> {
        let (driver, asked_bytes, layers) = (arena.driver(), plan.bytes.get(), plan.layers.get());
        let granule_bytes = driver.info().granule_bytes;
        let layer_bytes = asked_bytes / u64::from(layers) / granule_bytes * granule_bytes;
        if layer_bytes == 0 {
            return Err(Error::LayerTooSmall { asked_bytes, layers, granule_bytes });
        }
        let (free_bytes, limit_bytes) = (driver.memory_info()?.free_bytes, arena.limit_bytes());
        let slots = usize::try_from(free_bytes.min(limit_bytes) / layer_bytes).unwrap_or(usize::MAX);
        if slots < SLOTS_MIN {
            return Err(Error::Slots { layer_bytes, free_bytes, limit_bytes });
        }
        let asked_bytes = layer_bytes * u64::from(layers);
        let limit = driver.host_memory().limit_bytes.map(|most_bytes| (most_bytes, true));
        let available = System::here().available_bytes().map(|most_bytes| (most_bytes, false));
        for (most_bytes, is_limit) in limit.into_iter().chain(available) {
            if asked_bytes > most_bytes {
                return Err(Error::HostMemory { asked_bytes, most_bytes, is_limit });
            }
        }
        Ok(Self { layer_bytes, slots })
    }
}

fn measure(
    arena: &Arena,
    source: &Source,
    plan: &Plan,
    room: Room,
    observer: &mut dyn FnMut(Stage),
) -> Result<Report, Error> {
    let driver = &**arena.driver();
    observer(Stage::Memory);
    let layers = Layers::make(driver, source, plan.layers.get(), room.layer_bytes)?;
    let uva = Uva::of(driver, source, &layers);
    let mut run = Run {
        arena,
        layers,
        part_granules: part_of(room, driver.info().granule_bytes),
        repeats: 0,
        mismatch: None,
    };

    observer(Stage::Choice);
    let probe = run.prefetcher(room, SLOTS_MIN)?;
    let (copying, computing) = run.choose(&probe)?;
    probe.close()?;
    let slots = slots_of(copying, computing, run.layers.memory.len(), room.slots.min(SLOTS_MAX));
    let mut prefetcher = run.prefetcher(room, slots)?;

    observer(Stage::Copies);
    let transfer_s = run.median_of(|run| run.copies(&prefetcher, prefetcher.copying()))?;
    let kernel = match uva.way {
        None => None,
        Some(Way::Copy) => Some(Stream::new(arena.driver())?),
        Some(Way::Kernel) => Some(Stream::with_kernel_copies(arena.driver())?),
    };
    observer(Stage::KernelCopies);
    let mut kernel_s = None;
    if let Some(kernel) = &kernel {
        kernel_s = Some(run.median_of(|run| run.copies(&prefetcher, kernel.id()))?);
    }
    observer(Stage::Resident);
    let residents = run.fill(&prefetcher)?;
    let compute_s = run.median_of(|run| run.resident(&prefetcher, residents))?;
    observer(Stage::InPlace);
    let mut uva_s = None;
    if let Some(kernel) = &kernel {
        uva_s = Some(run.median_of(|run| run.in_place(&prefetcher, kernel))?);
    }
    observer(Stage::SideBySide);
    run.fill(&prefetcher)?;
    let side_by_side_s = run.median_of(|run| run.side_by_side(&prefetcher))?;
    observer(Stage::Prefetch);
    let prefetch = run.spread_of(|run| run.prefetched(&mut prefetcher))?;
    prefetcher.close()?;
    if let Some(mut kernel) = kernel {
        kernel.close()?;
    }

    let part_bytes = run.part_bytes();
    let Run { layers, repeats, mismatch, .. } = run;
    let (info, bytes) = (driver.info(), room.layer_bytes * u64::from(plan.layers.get()));
    let gib_per_s = |seconds| rate(bytes, seconds) / as_float(1 << 30);
    Ok(Report {
        host_bytes_asked: bytes,
        host_bytes_used: layers.used_bytes,
        pin_gib_per_s: gib_per_s(layers.made_s),
        uva_gib_per_s: kernel_s.map(gib_per_s),
        explicit_gib_per_s: gib_per_s(transfer_s),
        prefetch_gib_per_s: gib_per_s(prefetch.median),
        compute_s,
        uva_s,
        prefetch_s: prefetch.median,
        overlap: overlap_of(compute_s, transfer_s, prefetch.median),
        verified: mismatch.is_none(),
        mismatch,
        device: info.id.clone(),
        device_name: info.name.clone(),
        fast_digests: info.fast_digests,
        layers: plan.layers.get(),
        layer_bytes: room.layer_bytes,
        slots,
        part_bytes,
        repeats,
        compute_transfer_ratio: compute_s / transfer_s.max(1e-9),
        transfer_s,
        side_by_side_s,
        passes: PASSES,
        prefetch_spread_s: prefetch,
        pinned: layers.pageable_because.is_none(),
        pageable_because: layers.pageable_because.clone(),
        uva_how: uva.how,
    })
}

/// What reads host memory where it is.
#[derive(Debug, Clone, Copy)]
enum Way {
    Kernel,
    Copy,
}

struct Uva {
    way: Option<Way>,
    how: String,
}

impl Uva {
    fn of(driver: &dyn Driver, source: &Source, layers: &Layers) -> Self {
        let info = driver.info();
        let (way, how) = match (source.switches().uva_off, &layers.pageable_because) {
            (Some(name), _) => {
                (None, format!("{name}=1 is set, so the device reads no host memory in place"))
            }
            _ if info.id == "host" => {
                let how = "the host device reads all memory of the process in place: an ordinary copy is the same thing";
                (Some(Way::Copy), how.to_owned())
            }
            (_, Some(because)) => (
                None,
                format!(
                    "the layers are pageable ({because}), so no kernel of the device reads them in place"
                ),
            ),
            _ if !info.kernel_copies => {
                (None, "the driver has no kernel here that copies from host memory".to_owned())
            }
            _ => (Some(Way::Kernel), "a kernel of the device reads the layers in place".to_owned()),
        };
        Self { way, how }
    }
}

/// Digests of one layer that are on their way: of all of it, then of a part again and again.
#[derive(Debug)]
struct Computed(Vec<Pending<Vec<Digest>>>);

impl Computed {
    /// Waits for all of them.
    fn wait(self) -> DriverResult<Vec<Digest>> {
        let digests: Vec<_> = self.0.into_iter().map(Pending::wait).collect();
        digests.into_iter().collect::<DriverResult<Vec<_>>>().map(|digests| digests.concat())
    }
}

struct Run<'a> {
    arena: &'a Arena,
    layers: Layers,
    /// How many granules of a layer are computed again.
    part_granules: u64,
    /// How often.
    repeats: u32,
    /// What was wrong first.
    mismatch: Option<String>,
}

impl<'a> Run<'a> {
    fn prefetcher(&self, room: Room, slots: usize) -> Result<Prefetcher<'a>, PoolError> {
        let count = NonZeroUsize::new(slots).unwrap_or(NonZeroUsize::MIN);
        Prefetcher::new(self.arena, &Slots::new(Tag::weights(), count, room.layer_bytes))
    }

    /// Times of single layers, each waited for, and the repeats that go with them.
    fn choose(&mut self, probe: &Prefetcher<'_>) -> Result<(Times, Times), Error> {
        let layers = self.layers.memory.len();
        let copy = |layer: usize| {
            let memory = &self.layers.memory[layer % layers];
            let copy = || waited_for(vec![self.copy(probe, probe.copying(), layer % SLOTS_MIN, memory)?]);
            seconds_of(copy)
        };
        // The first is slower: memory that was never touched, and whatever a device does once.
        for slot in 0..SLOTS_MIN {
            copy(slot)?;
        }
        let copying = times_of((0..CHOICE_LAYERS).map(copy))?;
        self.repeats = 0;
        let once = self.computing(probe)?;
        let mut computing = once;
        // At first, as much again as is computed once.
        let mut next = u32::try_from(range(probe, 0).bytes / self.part_bytes()).unwrap_or(u32::MAX);
        for _ in 0..CORRECTIONS {
            if once.median_s >= copying.median_s || next.abs_diff(self.repeats) <= self.repeats / CLOSE {
                break;
            }
            self.repeats = next;
            computing = self.computing(probe)?;
            next = repeats_of(copying.median_s, once.median_s, self.repeats, computing.median_s);
        }
        Ok((copying, computing))
    }

    /// How long computing a layer takes with the repeats of now.
    fn computing(&self, probe: &Prefetcher<'_>) -> Result<Times, Error> {
        let compute = |nth: usize| {
            seconds_of(|| {
                let digests = self.compute(probe.computing(), range(probe, nth % SLOTS_MIN));
                digests.and_then(Computed::wait).map(drop).map_err(failed("compute a layer"))
            })
        };
        for slot in 0..SLOTS_MIN {
            compute(slot)?;
        }
        times_of((0..CHOICE_LAYERS).map(compute))
    }

    fn part_bytes(&self) -> u64 {
        self.part_granules * self.arena.driver().info().granule_bytes
    }

    /// Queues the computing of what is in a range.
    fn compute(&self, stream: StreamId, range: DeviceRange) -> DriverResult<Computed> {
        let part = DeviceRange { bytes: self.part_bytes(), ..range };
        let parts = (0..self.repeats).map(|_| part);
        let queued = iter::once(range).chain(parts).map(|range| self.arena.driver().digest(stream, &[range]));
        queued.collect::<DriverResult<_>>().map(Computed)
    }

    /// Copies a layer to a slot, in the order of a stream and no other.
    fn copy(
        &self,
        prefetcher: &Prefetcher<'_>,
        stream: StreamId,
        slot: usize,
        memory: &Arc<HostBuffer>,
    ) -> Result<Pending<()>, PoolError> {
        let (slot, bytes) = (prefetcher.slots()[slot].id, memory.len() as u64);
        self.arena.pool().write(stream, slot, 0, Arc::clone(memory), 0, bytes)
    }

    /// Waits for both streams, and says what was said first.
    fn settle(&self, prefetcher: &Prefetcher<'_>) -> Result<(), PoolError> {
        let wait = |stream| self.arena.driver().stream_synchronize(stream);
        let (copied, computed) = (wait(prefetcher.copying()), wait(prefetcher.computing()));
        copied.and(computed).map_err(failed("wait for a pass"))
    }

    /// All layers copied on a stream.
    fn copies(&mut self, prefetcher: &Prefetcher<'_>, stream: StreamId) -> Result<f64, Error> {
        let slots = prefetcher.slots().len();
        seconds_of(|| {
            let mut copies = Vec::new();
            let queued = self.layers.memory.iter().enumerate().try_for_each(|(layer, memory)| {
                copies.push(self.copy(prefetcher, stream, layer % slots, memory)?);
                Ok(())
            });
            let copied = waited_for(copies);
            queued.and(copied)
        })
    }

    /// Fills the slots with the first layers, as many as there are of both.
    fn fill(&self, prefetcher: &Prefetcher<'_>) -> Result<usize, Error> {
        let residents = prefetcher.slots().len().min(self.layers.memory.len());
        for (slot, memory) in self.layers.memory[..residents].iter().enumerate() {
            waited_for(vec![self.copy(prefetcher, prefetcher.copying(), slot, memory)?])?;
        }
        Ok(residents)
    }

    /// A pass over layers that are there: as many as there are layers, though only some of them.
    fn resident(&mut self, prefetcher: &Prefetcher<'_>, residents: usize) -> Result<f64, Error> {
        let mut digests = Vec::new();
        let seconds = seconds_of(|| {
            let queued = (0..self.layers.memory.len()).try_for_each(|layer| {
                let slot = layer % residents;
                digests.push((slot, self.compute(prefetcher.computing(), range(prefetcher, slot))?));
                Ok(())
            });
            let ended = self.arena.driver().stream_synchronize(prefetcher.computing());
            queued.and(ended).map_err(failed("compute resident layers"))
        })?;
        self.check("with resident layers", digests)?;
        Ok(seconds)
    }

    /// All layers copied, and as many computed that are there, on a stream each and in slots that the other does not
    /// touch: neither waits for the other.
    fn side_by_side(&mut self, prefetcher: &Prefetcher<'_>) -> Result<f64, Error> {
        let others = prefetcher.slots().len() - 1;
        let (mut copies, mut digests) = (Vec::new(), Vec::new());
        let seconds = seconds_of(|| {
            let queued = self.layers.memory.iter().enumerate().try_for_each(|(layer, memory)| {
                copies.push(self.copy(prefetcher, prefetcher.copying(), 1 + layer % others, memory)?);
                let computed = self.compute(prefetcher.computing(), range(prefetcher, 0));
                digests.push((0, computed.map_err(failed("compute a resident layer"))?));
                Ok(())
            });
            queued.and(self.settle(prefetcher))
        })?;
        waited_for(copies)?;
        self.check("beside copies", digests)?;
        Ok(seconds)
    }

    /// A pass in which the kernel's stream does everything.
    fn in_place(&mut self, prefetcher: &Prefetcher<'_>, kernel: &Stream) -> Result<f64, Error> {
        self.spoil(prefetcher)?;
        let (mut copies, mut digests) = (Vec::new(), Vec::new());
        let slots = prefetcher.slots().len();
        let seconds = seconds_of(|| {
            let queued = self.layers.memory.iter().enumerate().try_for_each(|(layer, memory)| {
                let slot = layer % slots;
                copies.push(self.copy(prefetcher, kernel.id(), slot, memory)?);
                let computed = self.compute(kernel.id(), range(prefetcher, slot));
                digests.push((layer, computed.map_err(failed("compute a layer"))?));
                Ok(())
            });
            let ended = kernel.wait().map_err(failed("wait for a pass"));
            queued.and(ended)
        })?;
        waited_for(copies)?;
        self.check("that reads in place", digests)?;
        Ok(seconds)
    }

    fn prefetched(&mut self, prefetcher: &mut Prefetcher<'_>) -> Result<f64, Error> {
        self.spoil(prefetcher)?;
        let mut digests = Vec::new();
        let seconds = seconds_of(|| {
            prefetcher.forward(&self.layers.memory, &mut |turn| {
                digests.push((turn.layer, self.compute(turn.stream, turn.range)?));
                Ok(())
            })
        })?;
        self.check("with prefetching", digests)?;
        Ok(seconds)
    }

    /// Sees to it that no slot holds the layer that comes to it first, so that one that does not come is noticed.
    fn spoil(&self, prefetcher: &Prefetcher<'_>) -> Result<(), Error> {
        let layers = &self.layers.memory;
        for slot in 0..prefetcher.slots().len() {
            let stream = prefetcher.copying();
            if layers.len() == 1 {
                self.arena.driver().zero(stream, range(prefetcher, slot))?.wait()?;
            } else {
                waited_for(vec![self.copy(prefetcher, stream, slot, &layers[(slot + 1) % layers.len()])?])?;
            }
        }
        Ok(())
    }

    /// Holds digests against those of the layers, and remembers the first that are others.
    fn check(&mut self, pass: &str, digests: Vec<(usize, Computed)>) -> Result<(), Error> {
        let part = usize::try_from(self.part_granules).unwrap_or(usize::MAX);
        for (layer, digests) in digests {
            let (digests, expected) = (digests.wait()?, &self.layers.digests[layer]);
            if self.mismatch.is_none() {
                self.mismatch = wrong(&digests, expected, part, self.repeats).map(|what| {
                    format!(
                        "in a pass {pass}, layer {layer} was computed of other bytes than its own: {what}"
                    )
                });
            }
        }
        Ok(())
    }

    fn median_of(&mut self, pass: impl FnMut(&mut Self) -> Result<f64, Error>) -> Result<f64, Error> {
        self.spread_of(pass).map(|spread| spread.median)
    }

    fn spread_of(&mut self, mut pass: impl FnMut(&mut Self) -> Result<f64, Error>) -> Result<Spread, Error> {
        pass(self)?;
        let mut seconds = [0.0; PASSES];
        for place in &mut seconds {
            *place = pass(self)?;
        }
        let [first, ..] = seconds;
        Ok(Spread::of(seconds).unwrap_or(Spread { min: first, median: first, max: first }))
    }
}

/// How many granules of a layer of a room are computed again: one at least.
fn part_of(room: Room, granule_bytes: u64) -> u64 {
    (PART_BYTES.min(room.layer_bytes) / granule_bytes).max(1)
}

/// What is wrong about the digests of a layer, of which the first `part` granules were computed `repeats` times behind
/// all of them, if anything is.
fn wrong(digests: &[Digest], expected: &[Digest], part: usize, repeats: u32) -> Option<String> {
    let (granules, part) = (expected.len(), part.min(expected.len()));
    let again = usize::try_from(repeats).unwrap_or(usize::MAX).saturating_mul(part);
    let all = granules.saturating_add(again);
    if digests.len() != all {
        return Some(format!("{} digests came instead of {all}", digests.len()));
    }
    let granule_of = |nth: usize| if nth < granules { nth } else { (nth - granules) % part.max(1) };
    let nth = (0..).zip(digests).find(|(nth, digest)| expected.get(granule_of(*nth)) != Some(*digest))?.0;
    let time = if nth < granules { 1 } else { (nth - granules) / part.max(1) + 2 };
    Some(format!("granule {} of {granules}, time {time}", granule_of(nth)))
}

/// Where a slot is.
fn range(prefetcher: &Prefetcher<'_>, slot: usize) -> DeviceRange {
    let block = &prefetcher.slots()[slot];
    DeviceRange::new(block.range.addr, block.requested_bytes)
}

/// Waits for all of them, and says what the first said that failed.
fn waited_for(copies: Vec<Pending<()>>) -> Result<(), PoolError> {
    let outcomes = copies.into_iter().map(Pending::wait);
    outcomes.fold(Ok(()), Result::and).map_err(failed("bring in a layer"))
}

/// An error of the driver's in an operation.
fn failed(op: &'static str) -> impl Fn(DriverError) -> PoolError {
    move |source| PoolError::Driver { op, source }
}

/// How many seconds something took.
fn seconds_of(action: impl FnOnce() -> Result<(), PoolError>) -> Result<f64, Error> {
    Ok(timed(action)?.0)
}

fn times_of(seconds: impl Iterator<Item = Result<f64, Error>>) -> Result<Times, Error> {
    let spread = Spread::of(seconds.collect::<Result<Vec<f64>, Error>>()?);
    let (median_s, slowest_s) = spread.map_or((0.0, 0.0), |spread| (spread.median, spread.max));
    Ok(Times { median_s, slowest_s })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_digests_are_found_wherever_they_are() {
        let digest = |nth: u64| Digest::of(&nth.to_le_bytes());
        let expected: Vec<Digest> = (0..3).map(digest).collect();
        for part in 1..=3 {
            let right = [&expected[..], &expected[..part].repeat(4)].concat();
            assert_eq!(wrong(&right, &expected, part, 4), None);
            for at in 0..right.len() {
                let mut digests = right.clone();
                digests[at] = digest(9);
                let what = wrong(&digests, &expected, part, 4).unwrap();
                let (granule, time) = if at < 3 { (at, 1) } else { ((at - 3) % part, (at - 3) / part + 2) };
                assert_eq!(what, format!("granule {granule} of 3, time {time}"));
                assert!(wrong(&right[..at], &expected, part, 4).unwrap().contains("instead of"));
            }
        }
        assert_eq!(wrong(&expected, &expected, 2, 0), None);
        // A layer in the place of another.
        assert!(wrong(&expected, &[digest(1), digest(0), digest(2)], 1, 0).is_some());
    }
}
