//! Filling what a wake maps: copies of backups, zeros, and the check of the copied bytes.
//!
//! A [`Filler`] queues work on another thread than the one that maps. Copies thus run while the next mappings
//! are mapped, and a slow driver or storage delays no allocation. The copied granules are compared with their
//! digests: all of them or a sample, and all whose backups are released. Where digests are fast, they are computed while
//! the rest is copied. What differs then, and all where they are slow, is compared at the end ([`super::verify`]).
//!
//! Promise: when [`Filler::finish`] returns, nothing that was queued is in flight; when it succeeds,
//! everything in the plan has arrived.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::copy_paths::{CopyPath, CopyPaths};
use super::filling::{Filling, With};
use super::read_ahead::ReadAhead;
use super::verify::{Arrival, Verified};
use super::woken::Woken;
use crate::backup::BackupBuffer;
use crate::digest::Digest;
use crate::driver::{CopyPart, DeviceRange, DriverError, Op, Pending, Scratch, StreamId};
use crate::pool::parts::backups::sample::Sample;
use crate::pool::parts::backups::{Stored, runs};
use crate::pool::parts::open_copies::OpenCopies;
use crate::pool::parts::scratch::Loan;
use crate::pool::shared::Shared;
use crate::pool::tools::cancel::{self, CancellationToken};
use crate::pool::tools::error::{Phase, PoolError, Result};
use crate::pool::tools::report::{Verify, WakeProgress, WakeRequest, add};
use crate::tag::Tag;

/// Pause between two polls of copies in flight; short beside the time that a full path takes.
const CAPACITY_POLL: Duration = Duration::from_micros(100);

/// Digests in flight: each holds page-locked memory for its results.
const DIGESTS_MAX: usize = 64;

/// What is in place is compared by so much at a time: each call to the driver holds up those that map.
const IN_PLACE_BYTES: u64 = 2 << 30;

/// What a wake may use beside its own link and streams.
pub(super) struct Means<'a> {
    /// For codes by copy engine.
    pub(super) scratch: Option<&'a Loan<'a>>,
    /// Numbers of other devices' links.
    pub(super) links: Vec<usize>,
    /// Copies in their memory.
    pub(super) peers: &'a [Arc<OpenCopies>],
}

pub(super) struct Filler<'a> {
    shared: &'a Shared,
    fillings: &'a [Filling],
    request: &'a WakeRequest,
    /// For codes by copy engine.
    scratch: Option<&'a Loan<'a>>,
    /// Copies in other devices' memory, and those that are still read: none once one has failed.
    copies: &'a [Arc<OpenCopies>],
    peers: &'a [Arc<OpenCopies>],
    parts: ScratchParts,
    /// Numbers of other devices' links.
    links: Vec<usize>,
    verify: Verify,
    /// By tag: which granules are compared, and how many were counted so far. Tags may wake separately, so each has turns
    /// of its own.
    samples: BTreeMap<Tag, (Sample, u64)>,
    /// The first filling that was not looked at.
    next: usize,
    /// How many are queued.
    filled: usize,
    total_bytes: u64,
    /// In place, and not yet queued to be compared.
    in_place: Vec<(Arrival<'a>, bool)>,
    returned_bytes: u64,
    copied_bytes: u64,
    read_bytes: u64,
    zeroed_bytes: u64,
    linked_bytes: u64,
    peer_bytes: u64,
    /// Copies queued on the own path, and on each link.
    turns_of_paths: Vec<usize>,
    /// Whether a link has failed.
    has_lost: bool,
    /// Whether links are left alone.
    are_links_left: bool,
    /// Turns whose copies from or over another device have failed, and what each is to bring.
    again: Vec<(usize, Vec<(Arrival<'a>, bool)>)>,
    started: Option<Instant>,
    /// Cleared when filling is of no more use.
    goes_on: Arc<AtomicBool>,
    /// The waking thread's, which filling may leave.
    cancellation: CancellationToken,
    queued: Vec<Work<'a>>,
    /// Of what the ended ones among these have written, the oldest first.
    digests: VecDeque<Arriving>,
    paths: CopyPaths,
    read_ahead: ReadAhead<'a>,
    /// Copies in flight of what was read, the oldest first: number, and bytes in host memory.
    fetched: VecDeque<(usize, u64)>,
    filled_bytes: u64,
    failed: Option<PoolError>,
}

/// How many parts of scratch memory each path has.
#[derive(Debug, Clone, Copy)]
struct ScratchParts {
    own: usize,
    of_link: usize,
}

impl ScratchParts {
    fn new(parts: usize, links: usize) -> Self {
        if links == 0 {
            return Self { own: parts, of_link: 0 };
        }
        let of_link = (parts / 2 / links).max(1);
        Self { own: parts.saturating_sub(of_link * links).max(1), of_link }
    }
}

/// How scratch memory is shared out, and the paths with these bounds.
fn paths_of(
    shared: &Shared,
    has_scratch: bool,
    links: usize,
    stored_bytes: u64,
) -> (ScratchParts, CopyPaths) {
    let parts = ScratchParts::new(shared.scratch_parts(), links);
    let paths = CopyPaths::new(shared.streams().kernel().is_some(), links, shared.shape().granule_bytes);
    let paths = if shared.links().are_unknown() { paths.comparing(stored_bytes) } else { paths };
    let is_bounded = has_scratch && links > 0;
    (parts, if is_bounded { paths.at_most(parts.own, parts.of_link) } else { paths })
}

/// Granules in flight, with the digests that the copy finds.
type Load = Pending<Vec<Option<Digest>>>;

struct Work<'a> {
    phase: Phase,
    bytes: u64,
    /// What it copies, and whether that is to be compared.
    arrivals: Vec<(Arrival<'a>, bool)>,
    /// `None` once its outcome is known.
    pending: Option<Pending<Vec<Option<Digest>>>>,
    /// By arrival, after a success.
    found: Vec<Option<Digest>>,
    /// The turn, and which other device's means it used.
    over: Option<(usize, Over)>,
}

#[derive(Debug, Clone, Copy)]
enum Over {
    /// By its number in this wake.
    Link(usize),
    /// By its number among the copies.
    Memory(usize),
}

/// Digests of what a copy has written, by number among its arrivals.
struct Arriving {
    copy: usize,
    arrivals: Vec<usize>,
    digests: Pending<Vec<Digest>>,
}

impl<'a> Filler<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        fillings: &'a [Filling],
        request: &'a WakeRequest,
        turns: &BTreeMap<Tag, u64>,
        Means { scratch, links, peers }: Means<'a>,
    ) -> Self {
        let granule_bytes = shared.shape().granule_bytes;
        let stored = |filling: &Filling| match &filling.with {
            With::Zeros => 0,
            With::Backup { granules, .. } => granules.iter().flatten().count() as u64,
        };
        let stored_granules: u64 = fillings.iter().map(stored).sum();
        let mut of_tags: BTreeMap<&Tag, u64> = BTreeMap::new();
        fillings.iter().for_each(|filling| *of_tags.entry(&filling.tag).or_default() += stored(filling));
        let sample = |(tag, turn): (&Tag, &u64)| {
            let of_tag = of_tags.get(tag).copied().unwrap_or_default();
            (tag.clone(), (Sample::of(*turn, of_tag), 0))
        };
        let zeros = fillings.iter().filter(|filling| matches!(filling.with, With::Zeros));
        let zeroed_bytes: u64 = zeros.map(|filling| filling.range.bytes).sum();
        let stored_bytes = stored_granules * granule_bytes;
        let (parts, paths) = paths_of(shared, scratch.is_some(), links.len(), stored_bytes);
        Self {
            shared,
            fillings,
            request,
            scratch,
            copies: peers,
            peers,
            parts,
            turns_of_paths: vec![0; links.len() + 1],
            links,
            verify: request.verify_on(shared.driver().info()),
            samples: turns.iter().map(sample).collect(),
            next: 0,
            filled: 0,
            total_bytes: stored_bytes + zeroed_bytes,
            in_place: Vec::new(),
            returned_bytes: 0,
            copied_bytes: 0,
            read_bytes: 0,
            zeroed_bytes: 0,
            linked_bytes: 0,
            peer_bytes: 0,
            again: Vec::new(),
            has_lost: false,
            are_links_left: false,
            started: None,
            goes_on: Arc::new(AtomicBool::new(true)),
            cancellation: CancellationToken::current().unwrap_or_default(),
            queued: Vec::with_capacity(fillings.len()),
            digests: VecDeque::new(),
            paths,
            read_ahead: ReadAhead::new(shared, fillings),
            fetched: VecDeque::new(),
            filled_bytes: 0,
            failed: None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.fillings.is_empty()
    }

    /// Clearing it ends filling.
    pub(super) fn switch(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.goes_on)
    }

    /// Queues the fillings of the first `mappings` mappings, which are mapped. Reports failures early, so that no more is
    /// mapped in vain.
    pub(super) fn fill_up_to(&mut self, mappings: usize) -> Result<()> {
        while self.is_of_use()
            && let Some(filling) = self.fillings.get(self.next).filter(|filling| filling.mapping < mappings)
        {
            self.started.get_or_insert_with(Instant::now);
            let turn = self.next;
            self.next += 1;
            self.fill(filling, turn).map_err(|(phase, source)| PoolError::WakeFailed { phase, source })?;
            self.fill_again();
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    fn fill(&mut self, filling: &'a Filling, turn: usize) -> Result<(), (Phase, DriverError)> {
        let driver = self.shared.driver();
        let engine_stream = self.shared.streams().copy(turn);
        if matches!(filling.with, With::Zeros) {
            let zeros = driver.zero(engine_stream, filling.range).map_err(|source| (Phase::Zero, source))?;
            self.zeroed_bytes += filling.range.bytes;
            let zeros = zeros.then(|zeroed| zeroed.map(|()| Vec::new()));
            self.queue(Phase::Zero, filling.range.bytes, Vec::new(), zeros);
            self.filled += 1;
            return Ok(());
        }
        self.compare_in_place(filling);
        let stored = filling.stored_granules(false);
        if stored.is_empty() {
            self.filled += 1;
            return Ok(());
        }
        let arrivals = self.arrivals(filling, &stored);
        let bytes = match self.copy_from_peers(filling, turn, &stored) {
            Some((nth, copy)) => {
                let bytes = stored.len() as u64 * self.shared.shape().granule_bytes;
                // Whatever the sample: what differs is no change of the owner's.
                let arrivals = arrivals.into_iter().map(|(arrival, _)| (arrival, true)).collect();
                self.queue(Phase::Copy, bytes, arrivals, copy);
                self.note_over(turn, Over::Memory(nth), bytes);
                bytes
            }
            None => self.copy(filling, turn, &stored, arrivals)?,
        };
        self.copied_bytes += bytes;
        self.filled += usize::from(bytes > 0);
        Ok(())
    }

    /// Queues copies from other devices' memory, if one has all of it. Returns which.
    fn copy_from_peers(&mut self, filling: &Filling, turn: usize, stored: &[usize]) -> Option<(usize, Load)> {
        if self.peers.is_empty() {
            return None;
        }
        let granule_bytes = self.shared.shape().granule_bytes;
        let wanted = filling.wanted_of_peers(granule_bytes, stored)?;
        let (driver, stream) = (self.shared.driver(), self.shared.streams().copy(turn));
        let queue = |open: &Arc<OpenCopies>| {
            open.read(granule_bytes, &wanted, stream, |parts| driver.copy_within(stream, parts))
        };
        let (nth, copy) = (0..).zip(self.peers).find_map(|(nth, open)| Some((nth, queue(open)?)))?;
        let count = stored.len();
        match copy {
            Ok(copy) => Some((nth, copy.then(move |copied| copied.map(|()| vec![None; count])))),
            Err(_) => {
                self.peers = &[];
                None
            }
        }
    }

    /// Copies that gave other bytes are not kept.
    fn spoil_what_differs(&self) {
        for work in &self.queued {
            let Some((_, Over::Memory(nth))) = work.over else { continue };
            let arrivals = work.arrivals.iter().map(|(arrival, _)| arrival);
            let different = arrivals
                .zip(&work.found)
                .filter(|(arrival, found)| found.is_some_and(|found| found != arrival.expected));
            self.spoil(nth, different.map(|(arrival, _)| arrival));
        }
    }

    /// Copies of these granules did not arrive, or as something else.
    fn spoil<'b>(&self, nth: usize, granules: impl Iterator<Item = &'b Arrival<'b>>) {
        if let Some(open) = self.copies.get(nth) {
            granules.for_each(|arrival| open.spoil(arrival.granule.addr));
        }
    }

    /// Fails where something may still be in flight there.
    fn lose_copy(&mut self, nth: usize) -> Result<(), DriverError> {
        self.peers = &[];
        self.copies.get(nth).map_or(Ok(()), |open| open.settle(self.shared.driver()))
    }

    /// What was queued last uses this.
    fn note_over(&mut self, turn: usize, over: Over, bytes: u64) {
        *self.bytes_over(over) += bytes;
        if let Some(work) = self.queued.last_mut() {
            work.over = Some((turn, over));
        }
    }

    fn bytes_over(&mut self, over: Over) -> &mut u64 {
        match over {
            Over::Link(_) => &mut self.linked_bytes,
            Over::Memory(_) => &mut self.peer_bytes,
        }
    }

    /// Queues the copy, and returns its bytes: none where filling is of no more use.
    fn copy(
        &mut self,
        filling: &'a Filling,
        turn: usize,
        stored: &[usize],
        arrivals: Vec<(Arrival<'a>, bool)>,
    ) -> Result<u64, (Phase, DriverError)> {
        let With::Backup { buffer, first, .. } = &filling.with else { return Ok(0) };
        let granule_bytes = self.shared.shape().granule_bytes;
        let part = |run: Range<usize>| {
            let device = self.shared.shape().granule_range(filling.range.addr, run.start, run.len());
            CopyPart { device, host_offset: (first + run.start) as u64 * granule_bytes }
        };
        let parts: Vec<CopyPart> = runs(stored).into_iter().map(part).collect();
        let bytes = stored.len() as u64 * granule_bytes;
        let fetched = self.fetched(turn).map_err(|source| (Phase::Copy, source))?;
        let source = (fetched.as_ref().unwrap_or(buffer), filling.code_bytes().is_some());
        let (path, copy) = loop {
            let Some(path) = self.path_with_capacity() else { return Ok(0) };
            let (taken, copy) = self.load(path, turn, source, &parts);
            // Without scratch memory no link is of use to this wake.
            self.are_links_left |= taken != path;
            match (copy, taken) {
                (Ok(copy), taken) => break (taken, copy),
                (Err(source), CopyPath::Link(link)) => {
                    self.lose(link).map_err(|_| (Phase::Copy, source))?;
                }
                (Err(source), _) => return Err((Phase::Copy, source)),
            }
        };
        if fetched.is_some() {
            self.fetched.push_back((self.queued.len(), filling.fetch_bytes()));
        }
        self.paths.queued(self.shared.driver().now(), path, self.queued.len(), bytes);
        let link = if let CopyPath::Link(link) = path { Some(link) } else { None };
        self.turns_of_paths[link.map_or(0, |link| link + 1)] += 1;
        self.read_bytes += buffer.read_bytes(&parts);
        self.queue(Phase::Copy, bytes, arrivals, copy);
        link.into_iter().for_each(|link| self.note_over(turn, Over::Link(link), bytes));
        Ok(bytes)
    }

    /// Queues the copy on this path, or the engine's where scratch memory has gone. Codes that a copy engine carries pass
    /// through that.
    fn load(
        &self,
        path: CopyPath,
        turn: usize,
        (source, is_encoded): (&BackupBuffer, bool),
        parts: &[CopyPart],
    ) -> (CopyPath, Result<Load, DriverError>) {
        let streams = self.shared.streams();
        let link = match path {
            CopyPath::Kernel => {
                return (path, source.load(streams.kernel().unwrap_or(streams.copy(turn)), parts, None));
            }
            CopyPath::Engine => None,
            CopyPath::Link(link) => match self.link_stream(link) {
                Ok(stream) => Some((link, stream)),
                Err(gone) => return (path, Err(gone)),
            },
        };
        let Some(loan) = self.scratch.filter(|_| is_encoded) else {
            let stream = link.map_or(streams.copy(turn), |(_, stream)| stream);
            return (path, source.load(stream, parts, None));
        };
        // Decoded on a stream of saves. Kernels there run beside the copies of others.
        let part = match link {
            None => self.turns_of_paths[0] % self.parts.own,
            Some((link, _)) => {
                self.parts.own
                    + link * self.parts.of_link
                    + self.turns_of_paths[link + 1] % self.parts.of_link
            }
        };
        let stream = streams.save(part);
        loan.queue(part, stream, |range| {
            let path = if range.is_some() { path } else { CopyPath::Engine };
            let copies = link.map_or(stream, |(_, stream)| stream);
            (path, source.load(stream, parts, range.map(|range| Scratch { range, copies })))
        })
    }

    fn link_stream(&self, link: usize) -> Result<StreamId, DriverError> {
        let number = self.links[link];
        let gone = || DriverError::invalid(Op::CopyToDevice, format!("link {number} has gone"));
        self.shared.links().stream(number).ok_or_else(gone)
    }

    /// Fails where something may still be in flight there.
    fn lose(&mut self, link: usize) -> Result<(), DriverError> {
        self.paths.set_open(link, false);
        self.has_lost = true;
        let stream = self.link_stream(link);
        self.shared.links().lose(self.links[link]);
        stream.map_or(Ok(()), |stream| self.shared.driver().stream_synchronize(stream))
    }

    /// What has failed over another device's link, or from its memory, comes over the others.
    fn fill_again(&mut self) {
        while self.failed.is_none()
            && let Some((turn, arrivals)) = self.again.pop()
        {
            let filling = &self.fillings[turn];
            match self.copy(filling, turn, &filling.stored_granules(false), arrivals) {
                Ok(bytes) => self.filled += usize::from(bytes > 0),
                Err((phase, source)) => self.fail(phase, source),
            }
        }
    }

    /// What is in place is compared as what is copied, and copied once more where it differs.
    fn compare_in_place(&mut self, filling: &'a Filling) {
        let in_place = filling.stored_granules(true);
        if in_place.is_empty() {
            return;
        }
        let granule_bytes = self.shared.shape().granule_bytes;
        self.returned_bytes += in_place.len() as u64 * granule_bytes;
        let arrivals = self.arrivals(filling, &in_place);
        self.in_place.extend(arrivals);
        if self.in_place.len() as u64 * granule_bytes >= IN_PLACE_BYTES {
            self.queue_in_place();
        }
    }

    fn queue_in_place(&mut self) {
        let arrivals = std::mem::take(&mut self.in_place);
        if arrivals.is_empty() {
            return;
        }
        let bytes = arrivals.len() as u64 * self.shared.shape().granule_bytes;
        let unknown = vec![None; arrivals.len()];
        self.queue(Phase::Verify, bytes, arrivals, Pending::new(|| Ok(unknown)));
        self.complete(self.queued.len() - 1);
    }

    fn arrivals(&mut self, filling: &'a Filling, granules: &[usize]) -> Vec<(Arrival<'a>, bool)> {
        let With::Backup { buffer, first, granules: stored, is_last, .. } = &filling.with else {
            return Vec::new();
        };
        let shape = *self.shared.shape();
        let mut arrivals = Vec::with_capacity(granules.len());
        for nth in granules {
            let Some(Stored { digest: expected, .. }) = stored[*nth] else { continue };
            let offset = (first + nth) as u64 * shape.granule_bytes;
            let granule = shape.granule_range(filling.range.addr, *nth, 1);
            let is_chosen = self.is_chosen(&filling.tag) || *is_last;
            arrivals.push((Arrival { granule, buffer, offset, expected }, is_chosen));
        }
        arrivals
    }

    /// What was read from disk for this filling, if it had to be.
    fn fetched(&mut self, nth: usize) -> Result<Option<BackupBuffer>, DriverError> {
        while self.read_ahead.is_full() && self.end_copy_of_fetched() {}
        while !self.read_ahead.reaches(nth)? {
            if !self.end_copy_of_fetched() {
                self.read_ahead.fetch_next_by_force()?;
            }
        }
        self.read_ahead.take(nth)
    }

    /// Waits for the oldest copy that holds what was read; false where there is none.
    fn end_copy_of_fetched(&mut self) -> bool {
        let Some((copy, bytes)) = self.fetched.pop_front() else { return false };
        self.complete(copy);
        self.read_ahead.copied(bytes);
        true
    }

    fn is_of_use(&self) -> bool {
        self.failed.is_none() && self.goes_on.load(Ordering::Relaxed) && !self.cancellation.is_cancelled()
    }

    fn queue(
        &mut self,
        phase: Phase,
        bytes: u64,
        arrivals: Vec<(Arrival<'a>, bool)>,
        pending: Pending<Vec<Option<Digest>>>,
    ) {
        self.queued.push(Work {
            phase,
            bytes,
            arrivals,
            pending: Some(pending),
            found: Vec::new(),
            over: None,
        });
    }

    /// `None` when filling is of no more use.
    fn path_with_capacity(&mut self) -> Option<CopyPath> {
        while self.is_of_use() {
            for link in 0..self.turns_of_paths.len() - 1 {
                let is_open = !self.are_links_left && self.link_stream(link).is_ok();
                self.paths.set_open(link, is_open);
            }
            let (queued, mut ended) = (&self.queued, Vec::new());
            let path = self.paths.with_capacity(self.shared.driver().now(), |copy| {
                let pending = queued[copy].pending.as_ref();
                let has_ended = pending.map_or(Some(true), Pending::has_ended);
                ended.extend(has_ended.filter(|has_ended| *has_ended).map(|_| copy));
                has_ended
            });
            ended.into_iter().for_each(|copy| self.complete(copy));
            if path.is_some() {
                return path.filter(|_| self.is_of_use());
            }
            thread::sleep(CAPACITY_POLL);
        }
        None
    }

    /// Waits once, and reports progress.
    fn complete(&mut self, nth: usize) {
        let Work { phase, bytes, arrivals, pending, found, over } = &mut self.queued[nth];
        let Some(pending) = pending.take() else { return };
        match pending.wait().and_then(|found| as_many_as(arrivals.len(), found)) {
            Ok(digests) => {
                *found = digests;
                self.filled_bytes += *bytes;
                self.digest(nth);
            }
            Err(source) => match *over {
                Some((turn, over)) => {
                    let (bytes, arrivals) = (*bytes, std::mem::take(arrivals));
                    if let Over::Memory(nth) = over {
                        self.spoil(nth, arrivals.iter().map(|(arrival, _)| arrival));
                    }
                    self.again.push((turn, arrivals));
                    *self.bytes_over(over) -= bytes;
                    self.filled -= 1;
                    let lost = match over {
                        Over::Link(link) => self.lose(link),
                        Over::Memory(nth) => self.lose_copy(nth),
                    };
                    if lost.is_err() {
                        self.fail(Phase::Copy, source);
                    }
                }
                None => {
                    let phase = *phase;
                    self.fail(phase, source);
                }
            },
        }
        if self.failed.is_none() {
            let progress = WakeProgress { filled_bytes: self.filled_bytes, total_bytes: self.total_bytes };
            self.request.progress.iter().for_each(|on_progress| on_progress.call(progress));
        }
    }

    fn fail(&mut self, phase: Phase, source: DriverError) {
        self.failed.get_or_insert(PoolError::WakeFailed { phase, source });
    }

    /// Queues digests of what this copy has written, beside the copies in flight.
    fn digest(&mut self, nth: usize) {
        let Work { arrivals, found, .. } = &self.queued[nth];
        let is_due = |nth: &usize| arrivals[*nth].1 && found[*nth].is_none();
        let due: Vec<usize> = (0..arrivals.len()).filter(is_due).collect();
        if due.is_empty() || self.failed.is_some() || !self.shared.driver().info().fast_digests {
            return;
        }
        // Of one backup, so that a range lies in one reservation.
        let is_next = |a: &Arrival<'_>, b: &Arrival<'_>| {
            a.granule.end() == b.granule.addr && std::ptr::eq(a.buffer, b.buffer)
        };
        let touching = due.chunk_by(|a, b| is_next(&arrivals[*a].0, &arrivals[*b].0));
        let range = |run: &[usize]| {
            let (first, last) = (arrivals[run[0]].0.granule, arrivals[run[run.len() - 1]].0.granule);
            DeviceRange::new(first.addr, last.end() - first.addr)
        };
        let ranges: Vec<DeviceRange> = touching.map(range).collect();
        match self.shared.driver().digest(self.shared.streams().save(nth), &ranges) {
            Ok(digests) => self.digests.push_back(Arriving { copy: nth, arrivals: due, digests }),
            Err(source) => self.fail(Phase::Verify, source),
        }
        self.await_digests(DIGESTS_MAX);
    }

    /// Waits for the oldest digests, until `most` are left.
    fn await_digests(&mut self, most: usize) {
        while self.digests.len() > most
            && let Some(Arriving { copy, arrivals, digests }) = self.digests.pop_front()
        {
            match digests.wait() {
                Ok(digests) => {
                    let found = arrivals.into_iter().zip(digests);
                    found.for_each(|(nth, digest)| self.queued[copy].found[nth] = Some(digest));
                }
                Err(source) => self.fail(Phase::Verify, source),
            }
        }
    }

    /// Whether the next stored granule of the tag is compared.
    fn is_chosen(&mut self, tag: &Tag) -> bool {
        let takes = self.samples.get_mut(tag).is_none_or(|(sample, seen)| {
            *seen += 1;
            sample.takes(*seen - 1)
        });
        takes || self.verify == Verify::All
    }

    /// Waits for everything. Returns the first failure, `failed` before all others, or the outcome of the check.
    pub(super) fn finish(mut self, failed: Option<PoolError>, woken: &mut Woken) -> Result<Verified> {
        (woken.copied_bytes, woken.read_bytes) = (self.copied_bytes, self.read_bytes);
        woken.returned_bytes = self.returned_bytes;
        woken.disk_read_bytes = self.read_ahead.read_bytes();
        woken.zeroed_bytes = self.zeroed_bytes;
        self.failed = failed.or(self.failed);
        self.queue_in_place();
        (0..self.queued.len()).for_each(|nth| self.complete(nth));
        while self.failed.is_none() && !self.again.is_empty() && self.is_of_use() {
            self.fill_again();
            (0..self.queued.len()).for_each(|nth| self.complete(nth));
        }
        if let Some(pays) = self.paths.links_pay().filter(|_| self.failed.is_none() && !self.has_lost) {
            self.shared.links().judge(pays);
        }
        if self.failed.is_none() && self.filled < self.fillings.len() {
            // The rest does not have the caller's bytes.
            let reason = format!("only {} of {} chunks were filled", self.filled, self.fillings.len());
            let source = DriverError::invalid(Op::CopyToDevice, reason);
            let incomplete = PoolError::WakeFailed { phase: Phase::Copy, source };
            self.failed = Some(cancel::check(&"wake").err().unwrap_or(incomplete));
        }
        if let Some(started) = self.started {
            add(&mut woken.phases.copy_s, started.elapsed());
        }
        let started = Instant::now();
        self.await_digests(0);
        self.spoil_what_differs();
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        (woken.linked_bytes, woken.peer_bytes) = (self.linked_bytes, self.peer_bytes);
        let Arrived { equal, chosen, others } = arrived(self.queued);
        let mut verified = self.shared.verify(&chosen, &others)?;
        verified.equal_bytes += equal * self.shared.shape().granule_bytes;
        add(&mut woken.phases.verify_s, started.elapsed());
        Ok(verified)
    }
}

/// What has been copied.
#[derive(Default)]
struct Arrived<'a> {
    /// Granules whose digests the copies have found as expected.
    equal: u64,
    /// To compare, and the rest.
    chosen: Vec<Arrival<'a>>,
    others: Vec<Arrival<'a>>,
}

fn arrived(ended: Vec<Work<'_>>) -> Arrived<'_> {
    let mut all = Arrived::default();
    for ((arrival, is_chosen), found) in
        ended.into_iter().flat_map(|work| work.arrivals.into_iter().zip(work.found))
    {
        match found {
            Some(found) if found == arrival.expected => all.equal += 1,
            // Known to differ, so it is looked at, whatever the sample.
            Some(_) => all.chosen.push(arrival),
            None if is_chosen => all.chosen.push(arrival),
            None => all.others.push(arrival),
        }
    }
    all
}

fn as_many_as(count: usize, found: Vec<Option<Digest>>) -> Result<Vec<Option<Digest>>, DriverError> {
    if found.len() == count {
        return Ok(found);
    }
    let reason = format!("{count} granules were loaded, and {} digests came back", found.len());
    Err(DriverError::invalid(Op::CopyToDevice, reason))
}
