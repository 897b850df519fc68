//! How blocks that sleep are laid out anew: a wake brings memory in pieces as large as fit.
//!
//! While a model loads, blocks are cut up and freed, and small pieces keep what is mapped close to what is live
//! ([`super::place`]). What lives when it wakes has proved to stay, and all of its memory is brought in anyway: so what
//! lies wholly in one live block comes back as spans, in few calls of the driver, and the next sleep has little to give
//! back one by one. A span of which a part was freed comes back as those of its chunks in which something lives.

use std::collections::BTreeSet;

use super::segment::{Chunk, Segment};
use super::state::State;
use super::tags::TagKey;
use super::vm::Backing;
use super::{Shape, blocks};
use crate::driver::DeviceRange;

impl Shape {
    /// Sizes of pieces larger than a granule, the largest first: a span, every power of two chunks below it, and a chunk.
    pub(super) fn sizes(&self) -> impl Iterator<Item = u64> + Clone + use<> {
        let Self { granule_bytes, chunk_bytes, span_bytes, .. } = *self;
        let largest = (chunk_bytes > granule_bytes).then_some(span_bytes);
        std::iter::successors(largest, move |bytes| {
            let chunks = bytes / chunk_bytes;
            (chunks > 1).then(|| chunk_bytes << (chunks - 1).ilog2())
        })
    }

    /// `range` in pieces of at most `largest_bytes`, each as large as fits; its end in granules.
    pub(super) fn pieces(&self, range: DeviceRange, largest_bytes: u64) -> impl Iterator<Item = DeviceRange> {
        let (sizes, granule_bytes) = (self.sizes(), self.granule_bytes);
        let piece_at = move |at: u64| {
            let fits = |bytes: &u64| *bytes <= largest_bytes && *bytes <= range.end() - at;
            let bytes = sizes.clone().find(fits).unwrap_or(granule_bytes);
            DeviceRange::new(at, bytes)
        };
        let first = (range.bytes > 0).then(|| piece_at(range.addr));
        std::iter::successors(first, move |piece| (piece.end() < range.end()).then(|| piece_at(piece.end())))
    }
}

impl State {
    /// Lays out what has no memory of sleeping tags, which the caller has to itself: spans where a live block holds all of
    /// them, chunks where none does.
    pub(super) fn lay_out(&mut self, tags: &[TagKey]) {
        self.cut_spans(tags, |whole, at| !whole.contains(&at));
        let Self { blocks, segments, shape, .. } = self;
        for segment in segments.values_mut().filter(|segment| tags.contains(&segment.tag)) {
            for block in live(blocks, segment) {
                join_chunks(shape, segment, block);
            }
        }
    }

    /// Makes chunks of the spans of sleeping tags that have no memory.
    pub(super) fn split_spans(&mut self, tags: &[TagKey]) {
        self.cut_spans(tags, |_, _| true);
    }

    /// Of the spans that have no memory, makes chunks of those that are `wanted`, by their addresses and those of all
    /// that lie wholly in a live block.
    fn cut_spans(&mut self, tags: &[TagKey], wanted: impl Fn(&BTreeSet<u64>, u64) -> bool) {
        let Self { blocks, segments, shape, .. } = self;
        let chunk_bytes = shape.chunk_bytes;
        let mut cut = Vec::new();
        for segment in segments.values_mut().filter(|segment| tags.contains(&segment.tag)) {
            let is_span = |chunk: &Chunk| chunk.bytes > chunk_bytes && chunk.backing == Backing::Absent;
            if !segment.chunks.values().any(is_span) {
                continue;
            }
            let whole: BTreeSet<u64> =
                live(blocks, segment).into_iter().flat_map(|block| whole_chunks(segment, block)).collect();
            let spans = segment.chunks.extract_if(.., |at, chunk| is_span(chunk) && wanted(&whole, *at));
            let spans: Vec<DeviceRange> = spans.map(|(at, span)| DeviceRange::new(at, span.bytes)).collect();
            for span in spans {
                insert_absent(segment, shape.pieces(span, chunk_bytes));
                cut.push((segment.first, span));
            }
        }
        if cut.is_empty() {
            return;
        }
        cut.into_iter().for_each(|(first, span)| self.rebind(first, span));
        // What was freed of them does not come back, though it may not be known to be quiet: it has no memory.
        tags.iter().for_each(|tag| self.tidy_absent(*tag));
    }
}

/// Live blocks of a segment.
fn live(blocks: &blocks::Blocks, segment: &Segment) -> Vec<DeviceRange> {
    let live = blocks.walk(segment.first).filter(|(kind, _)| *kind == blocks::Kind::Live);
    live.map(|(_, block)| DeviceRange::new(block.addr, block.bytes())).collect()
}

/// Addresses of the chunks that lie in a block from end to end.
fn whole_chunks(segment: &Segment, block: DeviceRange) -> impl Iterator<Item = u64> {
    let chunks = segment.chunks.range(block.addr..block.end());
    chunks.filter(move |(at, chunk)| **at + chunk.bytes <= block.end()).map(|(at, _)| *at)
}

/// Joins the chunks in a live block that have no memory, as far as they touch.
fn join_chunks(shape: &Shape, segment: &mut Segment, block: DeviceRange) {
    let mut runs: Vec<DeviceRange> = Vec::new();
    for at in whole_chunks(segment, block) {
        let Some(chunk) = segment.chunks.get(&at) else { continue };
        if chunk.backing != Backing::Absent || chunk.bytes <= shape.granule_bytes {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.end() == at => run.bytes += chunk.bytes,
            _ => runs.push(DeviceRange::new(at, chunk.bytes)),
        }
    }
    for run in runs {
        segment.chunks.extract_if(run.addr..run.end(), |_, _| true).for_each(drop);
        insert_absent(segment, shape.pieces(run, shape.span_bytes));
    }
}

fn insert_absent(segment: &mut Segment, pieces: impl Iterator<Item = DeviceRange>) {
    let absent = |bytes| Chunk { bytes, backing: Backing::Absent };
    segment.chunks.extend(pieces.map(|piece| (piece.addr, absent(piece.bytes))));
}
