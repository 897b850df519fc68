//! Who has what, by the frames that matter.

use std::collections::HashMap;

use serde::Serialize;

use crate::frames;
use crate::trace::{Step, Trace};

/// So many of the largest are distinguished, and no more are shown.
const HOLDERS_MAX: usize = 20;
const SHOWN_MAX: usize = 3;

/// What one caller has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// The frames that matter, the innermost first, and those that set it apart from others; empty if none are known.
    pub shown: Vec<String>,
    /// All frames of its largest stack.
    pub frames: Vec<String>,
    /// Its live bytes.
    pub bytes: u64,
    /// Its live blocks.
    pub blocks: u64,
}

/// Who has most after so many steps, the largest first.
#[must_use]
pub fn holders(trace: &Trace, steps: usize) -> Vec<Holder> {
    let mut of_program: HashMap<Vec<String>, Holder> = HashMap::new();
    // The largest stacks come first, and give their frames.
    for (stack, (bytes, blocks)) in by_stack(trace, steps) {
        let frames = usize::try_from(stack).ok().and_then(|stack| trace.stacks.get(stack));
        let frames = frames.map(Vec::as_slice).unwrap_or_default();
        let holder = of_program.entry(frames::of_program(frames)).or_insert_with(|| Holder {
            shown: Vec::new(),
            frames: frames.to_vec(),
            bytes: 0,
            blocks: 0,
        });
        (holder.bytes, holder.blocks) = (holder.bytes + bytes, holder.blocks + blocks);
    }
    let mut all: Vec<(Vec<String>, Holder)> = of_program.into_iter().collect();
    all.sort_by(|(one, first), (other, second)| (second.bytes, one).cmp(&(first.bytes, other)));
    all.truncate(HOLDERS_MAX);
    let chains: Vec<&[String]> = all.iter().map(|(chain, _)| &**chain).collect();
    let shown = distinguished(&chains);
    all.into_iter().zip(shown).map(|((_, holder), shown)| Holder { shown, ..holder }).collect()
}

/// Bytes and blocks of each stack, the largest first.
fn by_stack(trace: &Trace, steps: usize) -> Vec<(u32, (u64, u64))> {
    let mut is_live = vec![false; trace.blocks.len()];
    for step in trace.steps.iter().take(steps) {
        let (number, lives) = match step {
            Step::Alloc(number) => (number, true),
            Step::Free(number) => (number, false),
            Step::EmptyCache => continue,
        };
        if let Some(live) = usize::try_from(*number).ok().and_then(|number| is_live.get_mut(number)) {
            *live = lives;
        }
    }
    let mut by_stack: HashMap<u32, (u64, u64)> = HashMap::new();
    for (block, _) in trace.blocks.iter().zip(&is_live).filter(|(_, live)| **live) {
        let (bytes, blocks) = by_stack.entry(block.stack).or_default();
        (*bytes, *blocks) = (*bytes + block.bytes, *blocks + 1);
    }
    let mut all: Vec<(u32, (u64, u64))> = by_stack.into_iter().collect();
    all.sort_by_key(|(stack, (bytes, _))| (u64::MAX - bytes, *stack));
    all
}

/// The first frames of each chain, and the frame where it parts from those that look the same so far.
fn distinguished(chains: &[&[String]]) -> Vec<Vec<String>> {
    let mut depths: Vec<Vec<usize>> =
        chains.iter().map(|chain| (0..chain.len().min(SHOWN_MAX)).collect()).collect();
    let shown = |chain: &[String], depths: &[usize]| -> Vec<String> {
        let frame = |at: &usize| chain.get(*at).map_or("(outermost)", String::as_str).to_owned();
        depths.iter().map(frame).collect()
    };
    // Each turn parts at least two of a group, so the number of chains bounds the turns.
    for _ in chains {
        let mut groups: HashMap<Vec<String>, Vec<usize>> = HashMap::new();
        for (at, chain) in chains.iter().enumerate() {
            groups.entry(shown(chain, &depths[at])).or_default().push(at);
        }
        let mut is_done = true;
        for group in groups.values().filter(|group| group.len() > 1) {
            let first = chains[group[0]];
            let same = |depth: &usize| group.iter().all(|at| chains[*at].get(*depth) == first.get(*depth));
            let longest = group.iter().map(|at| chains[*at].len()).max().unwrap_or(0);
            if let Some(parts_at) = (0..longest).find(|depth| !same(depth)) {
                is_done = false;
                group.iter().for_each(|at| depths[*at].push(parts_at));
            }
        }
        if is_done {
            break;
        }
    }
    chains.iter().zip(&depths).map(|(chain, depths)| shown(chain, depths)).collect()
}

#[test]
fn rows_differ_in_what_is_shown() {
    let chains: Vec<Vec<String>> = ["eeeax", "eeeb", "eeeay", "eee"]
        .iter()
        .map(|chain| chain.chars().map(String::from).collect())
        .collect();
    let chains: Vec<&[String]> = chains.iter().map(Vec::as_slice).collect();
    let shown: Vec<String> = distinguished(&chains).iter().map(|frames| frames.join(" < ")).collect();
    assert_eq!(shown, ["e < e < e < a < x", "e < e < e < b", "e < e < e < a < y", "e < e < e < (outermost)"]);
}
