//! PyTorch's snapshots: `torch.cuda.memory._snapshot`, of any version.
//!
//! - Blocks that lived before the trace begins come first. Their allocation is lost, or was before the recording.
//! - A block is free when its free is completed. Sizes are those that were asked for.
//! - What was mapped is counted back from the segments at the end.
//! - A phase begins with the first entry at its time or later. The first one has the blocks that lived before.
//! - A call of `torch.cuda.empty_cache` leaves no entry. It is seen by its frames, or by segments that go back while
//!   nothing is asked for.
//!
//! Promises: what contradicts itself is an error with its device and entry. Keys may be missing where they may be.

mod additions;
mod events;
mod frames;
mod history;
mod segments;
mod settings;
mod view;

use std::collections::{BTreeMap, HashMap};

use self::additions::{Additions, Mark};
use self::events::{Action, Entry};
use self::frames::{FrameTexts, Stacks};
use self::history::{Area, History, Live};
use self::view::View;
use super::fault::{DUMP, Fault, Location, lived_before, why};
use super::refusals::{self, Refusals, SeenMemory};
use super::value::{Arena, Value};
use crate::card::Card;
use crate::trace::{Block, Recorded, StackNumber, Trace, TraceBuilder};

const RECORD: &str = "call `torch.cuda.memory._record_memory_history()` before what is to be seen";

/// A trace for each device that has anything.
pub(super) fn traces(name: &str, arena: &Arena, root: Value) -> Result<Vec<Trace>, Fault> {
    let view = View::new(arena);
    let mut snapshot = Snapshot::of(&view, root)?;
    let settings = settings::text(&view, snapshot.settings)?;
    let mut frames = FrameTexts::new(&view);
    let Additions { phases, cards } = additions::read(&view, snapshot.added)?;
    let bytes: usize = phases.iter().map(Mark::bytes).sum();
    if !frames.has_space(bytes.saturating_mul(snapshot.devices.len())) {
        return Err(Fault::new(Location::Key(additions::KEY), "there are too many phases"));
    }
    let mut found = Vec::new();
    for (device, history) in std::mem::take(&mut snapshot.devices) {
        let building = Building::new(name, device, &mut frames, &phases);
        found.extend(building.trace(history, &settings, cards.get(&device).copied())?);
    }
    if let [_, _, ..] = &found[..] {
        for trace in &mut found {
            trace.name = format!("{name}, device {}", trace.device.unwrap_or_default());
        }
    }
    if snapshot.has_annotations {
        for trace in &mut found {
            trace.notes.push("Annotations of the snapshot are ignored.".to_owned());
        }
    }
    if found.is_empty() {
        return Err(Fault::new(Location::Key("device_traces"), "nothing was recorded").with_next(RECORD));
    }
    Ok(found)
}

/// A snapshot, device by device.
struct Snapshot {
    devices: BTreeMap<usize, History>,
    settings: Value,
    /// By Poorwill's recorder.
    added: Value,
    has_annotations: bool,
}

impl Snapshot {
    fn of(view: &View<'_>, root: Value) -> Result<Self, Fault> {
        let keys = view.keys([
            "segments",
            "device_traces",
            "allocator_settings",
            "external_annotations",
            additions::KEY,
        ]);
        let [segments, traces, settings, annotations, added] = match root {
            // As PyTorch 1 wrote it: segments alone.
            Value::List(_) | Value::Tuple(_) => [root, Value::None, Value::None, Value::None, Value::None],
            Value::Dict(_) => {
                let found = view.fields(root, &keys, Location::Key("segments"))?;
                if let [Value::None, Value::None, ..] = found {
                    let [segments, traces, ..] = keys.names;
                    let what = format!("this is no snapshot, it has neither `{segments}` nor `{traces}`");
                    return Err(Fault::new(Location::Key("segments"), what).with_next(DUMP));
                }
                found
            }
            _ => {
                let what = "this is no snapshot, but a single value";
                return Err(Fault::new(Location::Key("segments"), what).with_next(DUMP));
            }
        };
        let mut devices = BTreeMap::<usize, History>::new();
        let place = Location::Key("device_traces");
        for (device, trace) in view.items(traces, place)?.enumerate() {
            let entries = events::read(view, device, trace)?;
            if !entries.is_empty() {
                devices.entry(device).or_default().entries = entries;
            }
        }
        if segments != Value::None {
            segments::read(view, segments, &mut devices)?;
            for history in devices.values_mut() {
                history.areas.get_or_insert_default();
            }
        }
        let has_annotations = match annotations {
            Value::List(all) | Value::Tuple(all) => view.arena().items(all).next().is_some(),
            _ => false,
        };
        Ok(Self { devices, settings, added, has_annotations })
    }
}

/// A block whose allocation is not in the trace.
struct Earlier {
    address: u64,
    bytes: u64,
    stream: u64,
    frames: Value,
    /// An entry at which it is where it is.
    seen_at: usize,
    place: Location,
}

/// The trace of one device, in the making.
struct Building<'f, 'v> {
    device: usize,
    builder: TraceBuilder,
    frames: &'f mut FrameTexts<'v>,
    /// Those that have not begun.
    phases: &'f [Mark<'v>],
    stacks: Stacks,
    streams: HashMap<u64, u32>,
    pools: HashMap<(u64, u64), u32>,
    refusals: Refusals,
}

impl<'f, 'v> Building<'f, 'v> {
    fn new(name: &str, device: usize, frames: &'f mut FrameTexts<'v>, phases: &'f [Mark<'v>]) -> Self {
        Self {
            device,
            builder: TraceBuilder::new(name),
            frames,
            phases,
            stacks: Stacks::default(),
            streams: HashMap::new(),
            pools: HashMap::from([((0, 0), 0)]),
            refusals: Refusals::default(),
        }
    }

    const fn place(&self, entry: usize) -> Location {
        Location::Entry { device: self.device, entry }
    }

    /// `None` if nothing happened and nothing lives.
    fn trace(mut self, history: History, settings: &str, card: Option<Card>) -> Result<Option<Trace>, Fault> {
        let History { entries, areas, live } = history;
        let free = self.frees(&entries);
        let earlier = self.earlier(&entries, &live, free)?;
        let areas = areas.map(|areas| segments::since(areas, &entries));
        let known = areas.as_deref().unwrap_or_default();
        if !self.phases.is_empty() && !entries.is_empty() && entries.iter().all(|entry| entry.time_us == 0) {
            self.builder.note("Phases are left out: no entry has its time.".to_owned());
            self.phases = &[];
        }
        if !self.phases.is_sorted_by_key(|phase| phase.time_us) {
            self.builder.note("The clock was set back meanwhile: phases may begin too late.".to_owned());
        }
        let first_us = entries.first().map_or(u64::MAX, |entry| entry.time_us);
        self.begin_phases(self.phases.len().min(1), first_us);
        for block in &earlier {
            let stack = self.frames.stack(block.frames, &mut self.stacks, &mut self.builder, block.place)?;
            let pool = segments::pool_at(known, block.address, block.seen_at);
            self.alloc(block.address, block.bytes, block.stream, pool, stack, block.place)?;
        }
        if !earlier.is_empty() {
            self.builder.note(lived_before(earlier.iter().map(|block| block.bytes)));
        }
        let mapped = areas.as_deref().map(|areas| self.mapped_first(areas, &entries));
        let mapped = match mapped {
            Some(Ok(first)) => Some(Mapped::new(first, self.builder.len())),
            Some(Err(what)) => {
                self.builder.note(what);
                None
            }
            None => None,
        };
        let recorded = self.replay(&entries, known, free, mapped)?;
        self.begin_phases(self.phases.len(), u64::MAX);
        self.ignored(&entries);
        if self.builder.is_empty() {
            return Ok(None);
        }
        self.stacks.note().into_iter().for_each(|note| self.builder.note(note));
        let recorded = Recorded { settings: settings.to_owned(), ..recorded };
        let device = Some(self.device);
        let mut trace = Trace { device, ..self.builder.finish(Some(recorded)) };
        self.refusals.describe(&mut trace, card);
        Ok(Some(trace))
    }

    /// Which entry ends a block: recorders may leave out the completion.
    fn frees(&mut self, entries: &[Entry]) -> Action {
        let has = |action| entries.iter().any(|entry| entry.action == action);
        if has(Action::FreeRequested) && !has(Action::FreeCompleted) {
            self.builder.note("Frees count when they were asked for: none was completed.".to_owned());
            return Action::FreeRequested;
        }
        Action::FreeCompleted
    }

    /// Blocks that are freed or live without an allocation, by address.
    fn earlier(&self, entries: &[Entry], live: &[Live], free: Action) -> Result<Vec<Earlier>, Fault> {
        let mut is_live = HashMap::<u64, (bool, usize)>::new();
        let mut earlier = Vec::new();
        for (at, entry) in entries.iter().enumerate() {
            let place = self.place(at);
            let address = entry.address;
            if entry.action == Action::Alloc {
                if let Some((true, _)) = is_live.insert(address, (true, at)) {
                    return Err(Fault::new(place, format!("{address:#x} is allocated, and was not freed")));
                }
            } else if entry.action == free {
                match is_live.insert(address, (false, at)) {
                    Some((true, _)) => {}
                    Some((false, _)) => {
                        return Err(Fault::new(place, format!("{address:#x} is freed, and is not live")));
                    }
                    None => earlier.push(Earlier {
                        address,
                        bytes: entry.bytes,
                        stream: entry.stream,
                        frames: Value::None,
                        seen_at: at,
                        place,
                    }),
                }
            }
        }
        for block in live {
            match is_live.insert(block.address, (true, 0)) {
                Some((true, _)) => {}
                // It waits for a stream: its free was asked for, and ended it.
                Some((false, _)) if free == Action::FreeRequested && !block.is_allocated => {}
                Some((false, at)) => {
                    let what = format!("{:#x} is freed, and `segments` has it live", block.address);
                    return Err(Fault::new(self.place(at), what));
                }
                None => earlier.push(Earlier {
                    address: block.address,
                    bytes: block.bytes,
                    stream: block.stream,
                    frames: block.frames,
                    seen_at: usize::MAX,
                    place: block.place,
                }),
            }
        }
        earlier.sort_by_key(|block| block.address);
        Ok(earlier)
    }

    /// What was mapped before the first entry.
    fn mapped_first(&self, areas: &[Area], entries: &[Entry]) -> Result<u64, String> {
        let unknown = |what: &str| Err(format!("What was mapped is not known: {what}."));
        let mut change = 0_i128;
        let (mut lowest, mut highest) = ((0_i128, 0), 0_i128);
        for (at, entry) in entries.iter().enumerate() {
            change += entry.mapped_change();
            lowest = lowest.min((change, at));
            highest = highest.max(change);
        }
        let at_end: i128 = areas.iter().map(|area| i128::from(area.bytes)).sum();
        let first = at_end - change;
        if first + lowest.0 < 0 {
            let place = self.place(lowest.1);
            return unknown(&format!("{place} has less than nothing, counted back from `segments`"));
        }
        match (u64::try_from(first), u64::try_from(first + highest)) {
            (Ok(first), Ok(_)) => Ok(first),
            _ => unknown("segments have more bytes than can be"),
        }
    }

    fn replay(
        &mut self,
        entries: &[Entry],
        areas: &[Area],
        free: Action,
        mut mapped: Option<Mapped>,
    ) -> Result<Recorded, Fault> {
        let mut emptied = 0_usize;
        let mut run = None;
        let requests = entries.iter().enumerate();
        let ending = refusals::ending(requests.filter_map(|(at, entry)| Some((at, entry.request()?))));
        for (at, entry) in entries.iter().enumerate() {
            let place = self.place(at);
            self.begin_phases(self.phases.len(), entry.time_us);
            if let Some(mapped) = &mut mapped {
                mapped.change(entry);
            }
            if entry.action.gives_back() {
                let first = *run.get_or_insert(at);
                let next =
                    entries[at + 1..].iter().map(|next| next.action).find(|next| next.is_of_allocator());
                if next.is_some_and(Action::gives_back) {
                    continue;
                }
                run = None;
                if self.is_emptied(entries[first].frames, self.place(first), next)? {
                    self.builder.empty_cache();
                    emptied += 1;
                }
            } else if entry.action == Action::Alloc {
                let stack = self.frames.stack(entry.frames, &mut self.stacks, &mut self.builder, place)?;
                let pool = segments::pool_at(areas, entry.address, at);
                self.alloc(entry.address, entry.bytes, entry.stream, pool, stack, place)?;
            } else if entry.action == free {
                self.builder.free(entry.address).map_err(|error| Fault::new(place, why(&error)))?;
            } else if entry.action == Action::OutOfMemory {
                let mapped_bytes = mapped.as_ref().map(|mapped| mapped.now);
                self.ask_in_vain(entry, mapped_bytes, place, ending == Some(at))?;
            }
            if let Some(mapped) = &mut mapped {
                mapped.fill(self.builder.len());
            }
        }
        if emptied > 0 {
            let seen = "Calls of `torch.cuda.empty_cache` that were seen by what went back";
            self.builder.note(format!("{seen}: {emptied}."));
        }
        let mapped_bytes = mapped.map(Mapped::finish).unwrap_or_default();
        Ok(Recorded { settings: String::new(), mapped_bytes, refused: self.refusals.ended() })
    }

    /// Whether segments that go back, the first with these frames, mean that the cache is emptied.
    fn is_emptied(&mut self, frames: Value, place: Location, next: Option<Action>) -> Result<bool, Fault> {
        let is_asked_for =
            matches!(next, Some(Action::SegmentAlloc | Action::SegmentMap | Action::OutOfMemory));
        let is_emptied = !is_asked_for || self.frames.empties_cache(frames, place)?;
        Ok(is_emptied && !self.frames.are_own(frames, place)?)
    }

    /// Where that ended the load, what was asked for is a part of what it needs.
    fn ask_in_vain(
        &mut self,
        entry: &Entry,
        mapped_bytes: Option<u64>,
        place: Location,
        is_end: bool,
    ) -> Result<(), Fault> {
        let stack = self.frames.stack(entry.frames, &mut self.stacks, &mut self.builder, place)?;
        let block = self.block(entry.bytes, entry.stream, (0, 0), stack);
        let free_bytes = Some(entry.address).filter(|bytes| *bytes != u64::MAX);
        let seen = mapped_bytes.zip(free_bytes);
        let seen = seen.map(|(mapped_bytes, free_bytes)| SeenMemory { mapped_bytes, free_bytes });
        let added = self.refusals.add(&mut self.builder, block, seen, is_end);
        added.map_err(|error| Fault::new(place, why(&error)))
    }

    /// As many of them at most, and only what has begun by then.
    fn begin_phases(&mut self, most: usize, by_us: u64) {
        let begun = self.phases[..most].iter().take_while(|phase| phase.time_us <= by_us).count();
        let (begun, left) = self.phases.split_at(begun);
        begun.iter().for_each(|phase| self.builder.phase(phase.name));
        self.phases = left;
    }

    fn alloc(
        &mut self,
        address: u64,
        bytes: u64,
        stream: u64,
        pool: (u64, u64),
        stack: StackNumber,
        place: Location,
    ) -> Result<(), Fault> {
        let block = self.block(bytes, stream, pool, stack);
        self.builder.alloc(address, block).map_err(|error| Fault::new(place, why(&error)))
    }

    fn block(&mut self, bytes: u64, stream: u64, pool: (u64, u64), stack: StackNumber) -> Block {
        let numbered = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        let streams = numbered(self.streams.len());
        let stream = *self.streams.entry(stream).or_insert(streams);
        let pools = numbered(self.pools.len());
        let pool = *self.pools.entry(pool).or_insert(pools);
        Block { bytes, stream, pool, stack }
    }

    fn ignored(&mut self, entries: &[Entry]) {
        let count = entries.iter().filter(|entry| entry.action == Action::Other).count();
        if count > 0 {
            self.builder.note(format!("Entries that are no allocations, and are ignored: {count}."));
        }
    }
}

/// What is mapped after each step.
struct Mapped {
    now: u64,
    after: Vec<u64>,
}

impl Mapped {
    /// With as many steps before the first entry.
    fn new(first: u64, steps: usize) -> Self {
        Self { now: first, after: vec![first; steps] }
    }

    fn change(&mut self, entry: &Entry) {
        let now = i128::from(self.now) + entry.mapped_change();
        self.now = u64::try_from(now).unwrap_or(0);
    }

    fn fill(&mut self, steps: usize) {
        self.after.resize(steps, self.now);
    }

    /// The last step has what came after it.
    fn finish(mut self) -> Vec<u64> {
        if let Some(last) = self.after.last_mut() {
            *last = self.now;
        }
        self.after
    }
}
