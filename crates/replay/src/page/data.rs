//! The numbers of a page, as JSON that may stand in a script.

use std::iter;

use serde::Serialize;

use super::addresses::Map;
use super::claims::{self, Shelf};
use super::frames::Frames;
use super::holders::{self, Holders, Owners};
use super::looks::{ceiling, looks};
use super::shown::PageTrace;
use super::{chosen, curves};
use crate::replay::{ReplayError, Run, moments};
use crate::side_by_side::side_by_side;
use crate::trace::Trace;

/// Steps of a curve.
const POINTS_MAX: usize = 2000;
/// A row of the map has so many bytes that the largest of all has about this many rows.
const ROWS: u64 = 40;
const ROW_BYTES_MIN: u64 = 2 << 20;
/// What a wide screen shows of a row.
const ROW_PIXELS: u64 = 1024;
/// Of one map, and of all but those at peaks; they bound the page's size.
const MAP_WEIGHT_MAX: usize = 4000;
const MAPS_WEIGHT_MAX: usize = 130_000;
const LETTERS_MAX: usize = 20_000;

#[derive(Serialize)]
struct Data<'a> {
    name: &'a str,
    answer: &'a str,
    notes: &'a [String],
    steps: usize,
    /// The step at which memory lacked when it was recorded, if that is the end; from 1.
    ended: Option<usize>,
    total: u64,
    usable: u64,
    /// The top of the chart, and whether the usable bytes are below it.
    ceiling: (u64, bool),
    phases: Vec<(&'a str, usize)>,
    /// Steps of all curves, then differences of live bytes.
    points: Vec<usize>,
    live: Vec<i64>,
    runs: Vec<RunData>,
    claims: Vec<ClaimData<'a>>,
    moments: Vec<(usize, Vec<String>)>,
    row: u64,
    unit: u64,
    /// For each run and moment; a run that failed has fewer.
    maps: Vec<Vec<Vec<i64>>>,
    owners: Vec<String>,
    frames: Vec<String>,
    stacks: Vec<Vec<usize>>,
    holders: Vec<HoldersData>,
}

#[derive(Serialize)]
struct RunData {
    name: String,
    look: usize,
    /// Differences at the points, as far as it went.
    mapped: Vec<i64>,
    /// Step, mapped, live.
    peak: (usize, u64, u64),
    held: u64,
    live: u64,
    /// Step, asked, mapped, live.
    failure: Option<(usize, u64, u64, u64)>,
    retries: Option<u64>,
    usable: u64,
}

#[derive(Serialize)]
struct ClaimData<'a> {
    name: &'a str,
    bytes: u64,
    shelves: Vec<Shelf>,
}

#[derive(Serialize)]
struct HoldersData {
    /// Stack, bytes, blocks, owner, one after the other.
    rows: Vec<u64>,
    /// Stacks, bytes, blocks.
    rest: (usize, u64, u64),
}

pub(super) fn json(shown: &PageTrace<'_>) -> Result<String, ReplayError> {
    let PageTrace { trace, runs, answer, notes } = *shown;
    let live = trace.live_bytes();
    let chosen = chosen::chosen(trace, &live, runs);
    let steps: Vec<usize> = chosen.keys().copied().collect();
    let (holders, owners) = holders::holders(trace, &steps);

    let claims: Vec<Vec<Shelf>> = claims::shelves(&trace.claims, trace.steps.len());
    let always = always(trace, &steps);
    let lines = runs.iter().map(|run| run.mapped_bytes.as_slice());
    let all: Vec<&[u64]> = iter::once(live.as_slice()).chain(lines).collect();
    let curves = curves::curves(&all, &always, POINTS_MAX);

    let peak = runs.iter().map(|run| run.peak.mapped_bytes).max().unwrap_or(0);
    let row = row_bytes(peak);
    let mut maps = maps(trace, runs, &steps, &owners, (row / ROW_PIXELS).max(1))?;
    lighten_but_peaks(&mut maps, runs, &steps, row / ROW_PIXELS);
    let unit = maps.iter().flatten().flat_map(Map::sizes).fold(0, gcd).max(1);

    let usable = runs.iter().map(|run| run.card.usable_bytes()).max().unwrap_or(0);
    let highest = live.iter().copied().max().unwrap_or(0).max(peak);
    let highest = highest.max(claims::top_bytes(&trace.claims, &claims));
    let mut frames = Frames::of(trace);
    // What is shown first has its frames first.
    let first = runs.first().and_then(|run| steps.iter().position(|step| *step == run.peak.step));
    for (stack, _) in first.iter().flat_map(|at| &holders[*at].rows) {
        frames.stack(*stack);
    }
    let holders: Vec<HoldersData> =
        holders.iter().map(|holders| HoldersData::of(holders, &mut frames, &owners)).collect();
    let (frames, stacks) = frames.finish();
    let mut values = curves.values.iter().map(|values| differences(values));
    let data = Data {
        name: &trace.name,
        answer: shortened(answer),
        notes,
        steps: trace.steps.len(),
        ended: trace.ended_by().map(|refusal| refusal.step + 1),
        total: runs.iter().map(|run| run.card.total_bytes).max().unwrap_or(0),
        usable,
        ceiling: ceiling(highest, usable),
        phases: trace.phases.iter().take(POINTS_MAX).map(|phase| (&*phase.name, phase.from)).collect(),
        live: values.next().unwrap_or_default(),
        runs: RunData::all(runs, values),
        points: curves.steps,
        claims: ClaimData::of(trace, claims),
        moments: chosen.into_iter().collect(),
        row,
        unit,
        maps: maps.iter().map(|maps| maps.iter().map(|map| map.numbers(unit)).collect()).collect(),
        owners: owners.names,
        frames,
        stacks,
        holders,
    };
    // Plain structures always become JSON. Only strings have the sign that ends a script.
    Ok(serde_json::to_string(&data).unwrap_or_default().replace('<', "\\u003c"))
}

impl<'a> ClaimData<'a> {
    fn of(trace: &'a Trace, shelves: Vec<Vec<Shelf>>) -> Vec<Self> {
        let claims = trace.claims.iter().zip(shelves);
        claims.map(|(claim, shelves)| Self { name: &claim.name, bytes: claim.bytes, shelves }).collect()
    }
}

impl RunData {
    fn all(runs: &[Run], mapped: impl Iterator<Item = Vec<i64>>) -> Vec<Self> {
        runs.iter()
            .zip(looks(runs))
            .zip(mapped)
            .map(|((run, look), mapped)| Self::of(run, look, mapped))
            .collect()
    }

    fn of(run: &Run, look: usize, mapped: Vec<i64>) -> Self {
        let failure = run.failure.map(|failure| {
            (failure.step, failure.asked_bytes, failure.at.mapped_bytes, failure.at.live_bytes)
        });
        Self {
            name: run.setup.to_string(),
            look,
            mapped,
            peak: (run.peak.step, run.peak.mapped_bytes, run.peak.live_bytes),
            held: run.held_bytes,
            live: run.live_bytes,
            failure,
            retries: run.retries,
            usable: run.card.usable_bytes(),
        }
    }
}

impl HoldersData {
    fn of<'t>(holders: &Holders, frames: &mut Frames<'t>, owners: &Owners) -> Self {
        let rows = holders.rows.iter().flat_map(|(stack, holding)| {
            let number = u64::try_from(frames.stack(*stack)).unwrap_or(u64::MAX);
            [number, holding.bytes, holding.blocks, u64::from(owners.of(*stack))]
        });
        let (stacks, rest) = holders.rest;
        Self { rows: rows.collect(), rest: (stacks, rest.bytes, rest.blocks) }
    }
}

/// For each run and step, as far as the run goes.
fn maps(
    trace: &Trace,
    runs: &[Run],
    steps: &[usize],
    owners: &Owners,
    grain: u64,
) -> Result<Vec<Vec<Map>>, ReplayError> {
    let of = |run: &Run| {
        let owner_of = |number| owners.of(trace.block(number).stack);
        let found = moments(trace, &run.setup, run.card, steps)?;
        let map = |moment: crate::replay::Moment| {
            let mut map = Map::of(&moment.segments, owner_of, grain);
            for grain in doublings(grain) {
                if map.weight() <= MAP_WEIGHT_MAX {
                    break;
                }
                map.coarsen(grain);
            }
            map
        };
        Ok(found.into_iter().map(map).collect::<Vec<Map>>())
    };
    side_by_side(runs, |run| &run.setup, of)
}

/// Steps at which curves have a point in any case: there may be a phase for each step.
fn always(trace: &Trace, steps: &[usize]) -> Vec<usize> {
    let phases = trace.phases.iter().map(|phase| phase.from);
    let claims = trace.claims.iter().flat_map(|claim| [claim.from_step, claim.to_step.saturating_sub(1)]);
    steps.iter().copied().chain(phases).chain(claims).take(POINTS_MAX / 2).collect()
}

/// Peaks are looked at most, and keep what a map may have.
fn lighten_but_peaks(maps: &mut [Vec<Map>], runs: &[Run], steps: &[usize], grain: u64) {
    let at_peak = |run: &Run| steps.iter().position(|step| *step == run.peak.step);
    let taken =
        runs.iter().zip(&mut *maps).map(|(run, maps)| maps.get_mut(at_peak(run)?).map(std::mem::take));
    let peaks: Vec<Option<Map>> = taken.collect();
    lighten(maps, grain);
    for ((run, maps), peak) in runs.iter().zip(maps).zip(peaks) {
        if let (Some(peak), Some(place)) = (peak, at_peak(run).and_then(|at| maps.get_mut(at))) {
            *place = peak;
        }
    }
}

/// Merges until all maps together are small enough.
fn lighten(maps: &mut [Vec<Map>], grain: u64) {
    for grain in doublings(grain) {
        if maps.iter().flatten().map(Map::weight).sum::<usize>() <= MAPS_WEIGHT_MAX {
            return;
        }
        maps.iter_mut().flatten().for_each(|map| map.coarsen(grain));
    }
}

fn doublings(grain: u64) -> impl Iterator<Item = u64> {
    iter::successors(grain.max(1).checked_mul(2), |grain| grain.checked_mul(2))
}

fn row_bytes(peak_bytes: u64) -> u64 {
    (peak_bytes / ROWS).max(ROW_BYTES_MIN).checked_next_power_of_two().unwrap_or(u64::MAX)
}

fn gcd(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { gcd(other, one % other) }
}

/// Most are short where values are long.
fn differences(values: &[u64]) -> Vec<i64> {
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let mut before = 0;
    values.iter().map(|bytes| signed(*bytes) - std::mem::replace(&mut before, signed(*bytes))).collect()
}

fn shortened(text: &str) -> &str {
    text.char_indices().nth(LETTERS_MAX).map_or(text, |(at, _)| &text[..at])
}

#[test]
fn rows_and_units_are_round() {
    assert_eq!([0, 80 << 20, 24 << 30, 81 << 30].map(row_bytes), [2 << 20, 2 << 20, 1 << 30, 4 << 30]);
    assert_eq!([0, 512, 1024, 0, 1536].into_iter().fold(0, gcd), 512);
    assert_eq!(differences(&[5, 5, 3, 9]), [5, 0, -2, 6]);
}
