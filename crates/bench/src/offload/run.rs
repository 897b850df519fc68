//! Runs a plan in an arena.

use std::iter;
use std::num::NonZeroUsize;
use std::sync::Arc;

use poorwill::driver::Result as DriverResult;
use poorwill::offload::{Prefetcher, Slots, Stream};
use poorwill::{
    Arena, DeviceRange, Digest, Driver, DriverError, HostBuffer, Pending, PoolError, StreamId, Tag,
};
use poorwill_driver::system::System;

use super::choice::{SLOTS_MAX, SLOTS_MIN, Times, choose_repeats, choose_slots};
use super::layers::{Layers, Source};
use super::plan::{OffloadError, OffloadPlan, OffloadStage};
use super::report::{OffloadReport, overlap_of};
use crate::figures::{Spread, as_float, rate, timed};

/// Counted passes of each kind.
const PASSES: usize = 5;

/// Layers that are timed to choose slots and repeats.
const CHOICE_LAYERS: usize = 16;

/// Enough for the repeats to grow to the maximum.
const CORRECTIONS: usize = 9;

/// Repeats that differ by less than 1 in this many take the same time.
const CLOSE: u32 = 50;

/// The part that is computed again stays in a GPU's caches and keeps few processors busy, as a matrix product
/// does. Reading more would take the bandwidth that copies need. On an H200, copies and computing of 0.47 s
/// each take 0.63 s together if computing reads device memory, 0.75 s from caches.
const PART_BYTES: u64 = 16 << 20;

/// Runs a plan in an otherwise unused arena, then frees and trims everything.
///
/// # Errors
/// See [`OffloadError`]; all memory is released where possible.
pub fn run(
    arena: &Arena,
    source: &Source,
    plan: &OffloadPlan,
    observer: &mut dyn FnMut(OffloadStage),
) -> Result<OffloadReport, OffloadError> {
    arena.trim()?;
    arena.driver().host_trim()?;
    let fit = Fit::of(arena, plan)?;
    let outcome = measure(arena, source, plan, fit, observer);
    let trimmed = arena.trim();
    let host_trimmed = arena.driver().host_trim();
    let report = outcome?;
    trimmed?;
    host_trimmed?;
    Ok(report)
}

#[derive(Debug, Clone, Copy)]
struct Fit {
    layer_bytes: u64,
    slots: usize,
}

impl Fit {
    fn of(arena: &Arena, plan: &OffloadPlan) -> Result<Self, OffloadError> {
        let (driver, asked_bytes, layers) = (arena.driver(), plan.bytes.get(), plan.layers.get());
        let granule_bytes = driver.info().granule_bytes;
        let layer_bytes = asked_bytes / u64::from(layers) / granule_bytes * granule_bytes;
        if layer_bytes == 0 {
            return Err(OffloadError::LayerTooSmall { asked_bytes, layers, granule_bytes });
        }
        let (free_bytes, limit_bytes) = (driver.memory_info()?.free_bytes, arena.limit_bytes());
        let slots = usize::try_from(free_bytes.min(limit_bytes) / layer_bytes).unwrap_or(usize::MAX);
        if slots < SLOTS_MIN {
            return Err(OffloadError::Slots { layer_bytes, free_bytes, limit_bytes });
        }
        let asked_bytes = layer_bytes * u64::from(layers);
        let limit = driver.host_memory().limit_bytes.map(|most_bytes| (most_bytes, true));
        let available = System::here().available_bytes().map(|most_bytes| (most_bytes, false));
        for (most_bytes, is_limit) in limit.into_iter().chain(available) {
            if asked_bytes > most_bytes {
                return Err(OffloadError::HostMemory { asked_bytes, most_bytes, is_limit });
            }
        }
        Ok(Self { layer_bytes, slots })
    }
}

fn measure(
    arena: &Arena,
    source: &Source,
    plan: &OffloadPlan,
    fit: Fit,
    observer: &mut dyn FnMut(OffloadStage),
) -> Result<OffloadReport, OffloadError> {
    let driver = &**arena.driver();
    observer(OffloadStage::Memory);
    let layers = Layers::make(driver, source, plan.layers.get(), fit.layer_bytes)?;
    let uva = Uva::of(driver, source, &layers);
    let mut run = OffloadRun {
        arena,
        layers,
        part_granules: part_of(fit, driver.info().granule_bytes),
        repeats: 0,
        mismatch: None,
    };
    observer(OffloadStage::Choice);
    let probe = run.prefetcher(fit, SLOTS_MIN)?;
    let (copying, computing) = run.choose(&probe)?;
    probe.close()?;
    let slots = choose_slots(copying, computing, run.layers.memory.len(), fit.slots.min(SLOTS_MAX));
    let times = run.times(fit, slots, uva.read, observer)?;
    Ok(run.report(plan, fit, slots, uva.how, &times))
}

/// Of whole passes.
struct PassTimes {
    transfer_s: f64,
    /// Copies by a kernel, and computing in place, where the device can.
    kernel_s: Option<f64>,
    uva_s: Option<f64>,
    compute_s: f64,
    side_by_side_s: f64,
    prefetch: Spread,
}

#[derive(Debug, Clone, Copy)]
enum InPlaceRead {
    Kernel,
    Copy,
}

struct Uva {
    read: Option<InPlaceRead>,
    how: String,
}

impl Uva {
    fn of(driver: &dyn Driver, source: &Source, layers: &Layers) -> Self {
        let info = driver.info();
        let (read, how) = match (source.switches().uva_off, &layers.pageable_because) {
            (Some(name), _) => {
                (None, format!("{name}=1 is set, so the device reads no host memory in place"))
            }
            _ if info.id == "host" => {
                let how = "the host device reads all memory of the process in place: an ordinary copy is the same thing";
                (Some(InPlaceRead::Copy), how.to_owned())
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
            _ => (Some(InPlaceRead::Kernel), "a kernel of the device reads the layers in place".to_owned()),
        };
        Self { read, how }
    }
}

/// Digests of one layer: of all of it, then of its part.
#[derive(Debug)]
struct PendingDigests(Vec<Pending<Vec<Digest>>>);

impl PendingDigests {
    /// Waits for all, also after a failure.
    fn wait(self) -> DriverResult<Vec<Digest>> {
        let digests: Vec<_> = self.0.into_iter().map(Pending::wait).collect();
        digests.into_iter().collect::<DriverResult<Vec<_>>>().map(|digests| digests.concat())
    }
}

struct OffloadRun<'a> {
    arena: &'a Arena,
    layers: Layers,
    part_granules: u64,
    repeats: u32,
    mismatch: Option<String>,
}

impl<'a> OffloadRun<'a> {
    fn prefetcher(&self, fit: Fit, slots: usize) -> Result<Prefetcher<'a>, PoolError> {
        let count = NonZeroUsize::new(slots).unwrap_or(NonZeroUsize::MIN);
        Prefetcher::new(self.arena, &Slots::new(Tag::weights(), count, fit.layer_bytes))
    }

    fn choose(&mut self, probe: &Prefetcher<'_>) -> Result<(Times, Times), OffloadError> {
        let layers = self.layers.memory.len();
        let copy = |layer: usize| {
            let memory = &self.layers.memory[layer % layers];
            let copy = || wait_all(vec![self.copy(probe, probe.copy_stream(), layer % SLOTS_MIN, memory)?]);
            seconds_of(copy)
        };
        // Warm-up: untouched memory, and one-time work of the device.
        for slot in 0..SLOTS_MIN {
            copy(slot)?;
        }
        let copying = times_of((0..CHOICE_LAYERS).map(copy))?;
        self.repeats = 0;
        let once = self.computing(probe)?;
        let mut computing = once;
        // First guess: as long as one full computation.
        let mut next = u32::try_from(range(probe, 0).bytes / self.part_bytes()).unwrap_or(u32::MAX);
        for _ in 0..CORRECTIONS {
            if once.median_s >= copying.median_s || next.abs_diff(self.repeats) <= self.repeats / CLOSE {
                break;
            }
            self.repeats = next;
            computing = self.computing(probe)?;
            next = choose_repeats(copying.median_s, once.median_s, self.repeats, computing.median_s);
        }
        Ok((copying, computing))
    }

    /// Pass after pass, each of its own kind.
    fn times(
        &mut self,
        fit: Fit,
        slots: usize,
        read: Option<InPlaceRead>,
        observer: &mut dyn FnMut(OffloadStage),
    ) -> Result<PassTimes, OffloadError> {
        let mut prefetcher = self.prefetcher(fit, slots)?;
        observer(OffloadStage::Copies);
        let transfer_s = self.median_of(|run| run.copies(&prefetcher, prefetcher.copy_stream()))?;
        let kernel = match read {
            None => None,
            Some(InPlaceRead::Copy) => Some(Stream::new(self.arena.driver())?),
            Some(InPlaceRead::Kernel) => Some(Stream::with_kernel_copies(self.arena.driver())?),
        };
        observer(OffloadStage::KernelCopies);
        let mut kernel_s = None;
        if let Some(kernel) = &kernel {
            kernel_s = Some(self.median_of(|run| run.copies(&prefetcher, kernel.id()))?);
        }
        observer(OffloadStage::Resident);
        let residents = self.fill(&prefetcher)?;
        let compute_s = self.median_of(|run| run.resident(&prefetcher, residents))?;
        observer(OffloadStage::InPlace);
        let mut uva_s = None;
        if let Some(kernel) = &kernel {
            uva_s = Some(self.median_of(|run| run.in_place(&prefetcher, kernel))?);
        }
        observer(OffloadStage::SideBySide);
        self.fill(&prefetcher)?;
        let side_by_side_s = self.median_of(|run| run.side_by_side(&prefetcher))?;
        observer(OffloadStage::Prefetch);
        let prefetch = self.spread_of(|run| run.prefetched(&mut prefetcher))?;
        prefetcher.close()?;
        if let Some(mut kernel) = kernel {
            kernel.close()?;
        }
        Ok(PassTimes { transfer_s, kernel_s, uva_s, compute_s, side_by_side_s, prefetch })
    }

    fn report(
        self,
        plan: &OffloadPlan,
        fit: Fit,
        slots: usize,
        uva_how: String,
        times: &PassTimes,
    ) -> OffloadReport {
        let part_bytes = self.part_bytes();
        let Self { arena, layers, repeats, mismatch, .. } = self;
        let info = arena.driver().info();
        let bytes = fit.layer_bytes * u64::from(plan.layers.get());
        let gib_per_s = |seconds| rate(bytes, seconds) / as_float(1 << 30);
        let &PassTimes { transfer_s, compute_s, prefetch, .. } = times;
        OffloadReport {
            host_bytes_asked: bytes,
            host_bytes_used: layers.used_bytes,
            pin_gib_per_s: gib_per_s(layers.allocate_s),
            uva_gib_per_s: times.kernel_s.map(gib_per_s),
            explicit_gib_per_s: gib_per_s(transfer_s),
            prefetch_gib_per_s: gib_per_s(prefetch.median),
            compute_s,
            uva_s: times.uva_s,
            prefetch_s: prefetch.median,
            overlap: overlap_of(compute_s, transfer_s, prefetch.median),
            verified: mismatch.is_none(),
            mismatch,
            device: info.id.clone(),
            device_name: info.name.clone(),
            fast_digests: info.fast_digests,
            layers: plan.layers.get(),
            layer_bytes: fit.layer_bytes,
            slots,
            part_bytes,
            repeats,
            compute_transfer_ratio: compute_s / transfer_s.max(1e-9),
            transfer_s,
            side_by_side_s: times.side_by_side_s,
            passes: PASSES,
            prefetch_spread_s: prefetch,
            pinned: layers.pageable_because.is_none(),
            pageable_because: layers.pageable_because,
            uva_how,
        }
    }

    fn computing(&self, probe: &Prefetcher<'_>) -> Result<Times, OffloadError> {
        let compute = |nth: usize| {
            seconds_of(|| {
                let digests = self.compute(probe.compute_stream(), range(probe, nth % SLOTS_MIN));
                digests.and_then(PendingDigests::wait).map(drop).map_err(failed("compute a layer"))
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

    fn compute(&self, stream: StreamId, range: DeviceRange) -> DriverResult<PendingDigests> {
        let part = DeviceRange { bytes: self.part_bytes(), ..range };
        let parts = (0..self.repeats).map(|_| part);
        let queued = iter::once(range).chain(parts).map(|range| self.arena.driver().digest(stream, &[range]));
        queued.collect::<DriverResult<_>>().map(PendingDigests)
    }

    /// Ordered by `stream` alone.
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

    fn synchronize(&self, prefetcher: &Prefetcher<'_>) -> Result<(), PoolError> {
        let wait = |stream| self.arena.driver().stream_synchronize(stream);
        let (copied, computed) = (wait(prefetcher.copy_stream()), wait(prefetcher.compute_stream()));
        copied.and(computed).map_err(failed("wait for a pass"))
    }

    fn copies(&mut self, prefetcher: &Prefetcher<'_>, stream: StreamId) -> Result<f64, OffloadError> {
        let slots = prefetcher.slots().len();
        seconds_of(|| {
            let mut copies = Vec::new();
            let queued = self.layers.memory.iter().enumerate().try_for_each(|(layer, memory)| {
                copies.push(self.copy(prefetcher, stream, layer % slots, memory)?);
                Ok(())
            });
            let copied = wait_all(copies);
            queued.and(copied)
        })
    }

    fn fill(&self, prefetcher: &Prefetcher<'_>) -> Result<usize, OffloadError> {
        let residents = prefetcher.slots().len().min(self.layers.memory.len());
        for (slot, memory) in self.layers.memory[..residents].iter().enumerate() {
            wait_all(vec![self.copy(prefetcher, prefetcher.copy_stream(), slot, memory)?])?;
        }
        Ok(residents)
    }

    /// Computes as many layers as there are, from the resident ones.
    fn resident(&mut self, prefetcher: &Prefetcher<'_>, residents: usize) -> Result<f64, OffloadError> {
        let mut digests = Vec::new();
        let seconds = seconds_of(|| {
            let queued = (0..self.layers.memory.len()).try_for_each(|layer| {
                let slot = layer % residents;
                digests.push((slot, self.compute(prefetcher.compute_stream(), range(prefetcher, slot))?));
                Ok(())
            });
            let ended = self.arena.driver().stream_synchronize(prefetcher.compute_stream());
            queued.and(ended).map_err(failed("compute resident layers"))
        })?;
        self.check("with resident layers", digests)?;
        Ok(seconds)
    }

    /// Neither stream waits for the other.
    fn side_by_side(&mut self, prefetcher: &Prefetcher<'_>) -> Result<f64, OffloadError> {
        let others = prefetcher.slots().len() - 1;
        let (mut copies, mut digests) = (Vec::new(), Vec::new());
        let seconds = seconds_of(|| {
            let queued = self.layers.memory.iter().enumerate().try_for_each(|(layer, memory)| {
                copies.push(self.copy(prefetcher, prefetcher.copy_stream(), 1 + layer % others, memory)?);
                let computed = self.compute(prefetcher.compute_stream(), range(prefetcher, 0));
                digests.push((0, computed.map_err(failed("compute a resident layer"))?));
                Ok(())
            });
            queued.and(self.synchronize(prefetcher))
        })?;
        wait_all(copies)?;
        self.check("beside copies", digests)?;
        Ok(seconds)
    }

    fn in_place(&mut self, prefetcher: &Prefetcher<'_>, kernel: &Stream) -> Result<f64, OffloadError> {
        self.overwrite_slots(prefetcher)?;
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
        wait_all(copies)?;
        self.check("that reads in place", digests)?;
        Ok(seconds)
    }

    fn prefetched(&mut self, prefetcher: &mut Prefetcher<'_>) -> Result<f64, OffloadError> {
        self.overwrite_slots(prefetcher)?;
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

    /// Fills slots with other layers, so that a missing copy is found.
    fn overwrite_slots(&self, prefetcher: &Prefetcher<'_>) -> Result<(), OffloadError> {
        let layers = &self.layers.memory;
        for slot in 0..prefetcher.slots().len() {
            let stream = prefetcher.copy_stream();
            if layers.len() == 1 {
                self.arena.driver().zero(stream, range(prefetcher, slot))?.wait()?;
            } else {
                wait_all(vec![self.copy(prefetcher, stream, slot, &layers[(slot + 1) % layers.len()])?])?;
            }
        }
        Ok(())
    }

    fn check(&mut self, pass: &str, digests: Vec<(usize, PendingDigests)>) -> Result<(), OffloadError> {
        let part = usize::try_from(self.part_granules).unwrap_or(usize::MAX);
        for (layer, digests) in digests {
            let (digests, expected) = (digests.wait()?, &self.layers.digests[layer]);
            if self.mismatch.is_none() {
                self.mismatch = first_wrong(&digests, expected, part, self.repeats).map(|what| {
                    format!(
                        "in a pass {pass}, layer {layer} was computed of other bytes than its own: {what}"
                    )
                });
            }
        }
        Ok(())
    }

    fn median_of(
        &mut self,
        pass: impl FnMut(&mut Self) -> Result<f64, OffloadError>,
    ) -> Result<f64, OffloadError> {
        self.spread_of(pass).map(|spread| spread.median)
    }

    fn spread_of(
        &mut self,
        mut pass: impl FnMut(&mut Self) -> Result<f64, OffloadError>,
    ) -> Result<Spread, OffloadError> {
        pass(self)?;
        let mut seconds = [0.0; PASSES];
        for second in &mut seconds {
            *second = pass(self)?;
        }
        let [first, ..] = seconds;
        Ok(Spread::of(seconds).unwrap_or(Spread { min: first, median: first, max: first }))
    }
}

fn part_of(fit: Fit, granule_bytes: u64) -> u64 {
    (PART_BYTES.min(fit.layer_bytes) / granule_bytes).max(1)
}

/// `digests` are of all granules, then of the first `part` granules `repeats` times.
fn first_wrong(digests: &[Digest], expected: &[Digest], part: usize, repeats: u32) -> Option<String> {
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

fn range(prefetcher: &Prefetcher<'_>, slot: usize) -> DeviceRange {
    let block = &prefetcher.slots()[slot];
    DeviceRange::new(block.range.addr, block.requested_bytes)
}

/// Waits for all, also after a failure.
fn wait_all(copies: Vec<Pending<()>>) -> Result<(), PoolError> {
    let outcomes = copies.into_iter().map(Pending::wait);
    outcomes.fold(Ok(()), Result::and).map_err(failed("copy a layer"))
}

fn failed(op: &'static str) -> impl Fn(DriverError) -> PoolError {
    move |source| PoolError::Driver { op, source }
}

fn seconds_of(action: impl FnOnce() -> Result<(), PoolError>) -> Result<f64, OffloadError> {
    Ok(timed(action)?.0)
}

fn times_of(seconds: impl Iterator<Item = Result<f64, OffloadError>>) -> Result<Times, OffloadError> {
    let spread = Spread::of(seconds.collect::<Result<Vec<f64>, OffloadError>>()?);
    let (median_s, slowest_s) = spread.map_or((0.0, 0.0), |spread| (spread.median, spread.max));
    Ok(Times { median_s, slowest_s })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_digests_are_found_everywhere() {
        let digest = |nth: u64| Digest::of(&nth.to_le_bytes());
        let expected: Vec<Digest> = (0..3).map(digest).collect();
        for part in 1..=3 {
            let right = [&expected[..], &expected[..part].repeat(4)].concat();
            assert_eq!(first_wrong(&right, &expected, part, 4), None);
            for at in 0..right.len() {
                let mut digests = right.clone();
                digests[at] = digest(9);
                let what = first_wrong(&digests, &expected, part, 4).unwrap();
                let (granule, time) = if at < 3 { (at, 1) } else { ((at - 3) % part, (at - 3) / part + 2) };
                assert_eq!(what, format!("granule {granule} of 3, time {time}"));
                assert!(first_wrong(&right[..at], &expected, part, 4).unwrap().contains("instead of"));
            }
        }
        assert_eq!(first_wrong(&expected, &expected, 2, 0), None);
        // A layer in the place of another.
        assert!(first_wrong(&expected, &[digest(1), digest(0), digest(2)], 1, 0).is_some());
    }
}
