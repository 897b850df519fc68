//! Who held what at each moment, by stack, and who of all gets a colour.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::AddAssign;

use super::frames;
use crate::trace::{StackNumber, Step, Trace};

/// Stacks of a moment beyond these are summed.
pub(super) const ROWS_MAX: usize = 200;
/// Own frames with a colour; all others share one.
pub(super) const OWNERS_MAX: usize = 8;

/// What a stack held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Holding {
    pub(super) bytes: u64,
    pub(super) blocks: u64,
}

impl AddAssign for Holding {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.blocks += other.blocks;
    }
}

/// All holdings at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Holders {
    /// The largest, in their order.
    pub(super) rows: Vec<(StackNumber, Holding)>,
    /// The sum of all others, and how many stacks they are.
    pub(super) rest: (usize, Holding),
}

/// Own frames, those first that held most.
#[derive(Debug)]
pub(super) struct Owners {
    /// For each stack, its own frame's place in the order; [`OWNERS_MAX`] for one of the others.
    of_stack: Vec<u8>,
    pub(super) names: Vec<String>,
}

impl Owners {
    pub(super) fn of(&self, stack: StackNumber) -> u8 {
        let at = usize::try_from(stack).unwrap_or(usize::MAX);
        self.of_stack.get(at).copied().unwrap_or(OTHERS)
    }
}

#[allow(clippy::cast_possible_truncation, reason = "there are few")]
const OTHERS: u8 = OWNERS_MAX as u8;

/// What was held after each of these steps, which rise.
pub(super) fn holders(trace: &Trace, steps: &[usize]) -> (Vec<Holders>, Owners) {
    let mut held = vec![Holding::default(); trace.stacks.len().max(1)];
    let place =
        |stack: StackNumber| usize::try_from(stack).ok().filter(|at| *at < trace.stacks.len()).unwrap_or(0);
    let (owner_of, texts) = own_frames(trace);
    let mut most = vec![0_u64; texts.len()];
    let mut found = Vec::with_capacity(steps.len());
    let mut wanted = steps.iter().peekable();
    for (at, step) in trace.steps.iter().enumerate() {
        match *step {
            Step::Alloc(number) => {
                let block = trace.block(number);
                held[place(block.stack)] += Holding { bytes: block.bytes, blocks: 1 };
            }
            Step::Free(number) => {
                let block = trace.block(number);
                let held = &mut held[place(block.stack)];
                *held = Holding { bytes: held.bytes - block.bytes, blocks: held.blocks - 1 };
            }
            Step::EmptyCache => {}
        }
        while wanted.next_if(|wanted| **wanted == at).is_some() {
            let mut sums = vec![0_u64; texts.len()];
            for (holding, owner) in held.iter().zip(&owner_of) {
                sums[*owner] += holding.bytes;
            }
            for (most, sum) in most.iter_mut().zip(sums) {
                *most = sum.max(*most);
            }
            found.push(Holders::of(&held));
        }
        if wanted.peek().is_none() {
            break;
        }
    }
    (found, ordered(&owner_of, &texts, &most))
}

/// For each stack the number of its own frame, and the texts of these.
fn own_frames(trace: &Trace) -> (Vec<usize>, Vec<&str>) {
    let (mut numbers, mut texts) = (HashMap::new(), Vec::new());
    if trace.stacks.is_empty() {
        return (vec![0], vec![frames::own(&[])]);
    }
    let mut owner_of = Vec::with_capacity(trace.stacks.len());
    for stack in &trace.stacks {
        let text = frames::own(stack);
        let next = texts.len();
        let known = *numbers.entry(text).or_insert(next);
        if known == next {
            texts.push(text);
        }
        owner_of.push(known);
    }
    (owner_of, texts)
}

fn ordered(owner_of: &[usize], texts: &[&str], most: &[u64]) -> Owners {
    let mut order: Vec<usize> = (0..texts.len()).filter(|owner| most[*owner] > 0).collect();
    order.sort_by_key(|owner| (Reverse(most[*owner]), *owner));
    order.truncate(OWNERS_MAX);
    let mut places = vec![OTHERS; texts.len()];
    for (place, owner) in (0..).zip(&order) {
        places[*owner] = place;
    }
    Owners {
        of_stack: owner_of.iter().map(|owner| places[*owner]).collect(),
        names: order.iter().map(|owner| frames::shortened(texts[*owner])).collect(),
    }
}

impl Holders {
    fn of(held: &[Holding]) -> Self {
        let mut rows: Vec<(StackNumber, Holding)> =
            (0..).zip(held.iter().copied()).filter(|(_, holding)| holding.blocks > 0).collect();
        rows.sort_by_key(|(stack, holding)| (Reverse(holding.bytes), *stack));
        let others = rows.split_off(rows.len().min(ROWS_MAX));
        let mut rest = (others.len(), Holding::default());
        others.iter().for_each(|(_, holding)| rest.1 += *holding);
        Self { rows, rest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Block, TraceBuilder};

    #[test]
    fn holdings_are_by_stack_and_the_largest_first() {
        let mut trace = TraceBuilder::new("a");
        let mut random = fastrand::Rng::with_seed(3);
        for key in 0..2000 {
            let line = random.u32(0..500);
            let stack = trace.stack(vec!["torch/x.py:1 y".into(), format!("m{}.py:{line} load", line % 20)]);
            trace.alloc(key, Block { bytes: random.u64(1..1 << 30), stream: 0, pool: 0, stack }).unwrap();
            if key % 3 == 2 {
                trace.free(random.u64(key - 2..=key)).unwrap();
            }
        }
        let trace = trace.finish(None);
        let live = trace.live_bytes();
        let steps = [0, 5, 1000, trace.steps.len() - 1];
        let (found, owners) = holders(&trace, &steps);
        assert_eq!(found.len(), steps.len());
        for (holders, step) in found.iter().zip(steps) {
            let sum: u64 = holders.rows.iter().map(|(_, holding)| holding.bytes).sum();
            assert_eq!(sum + holders.rest.1.bytes, live[step], "{step}");
            assert!(holders.rows.is_sorted_by(|one, other| one.1.bytes >= other.1.bytes));
            assert!(
                holders.rows.len() <= ROWS_MAX && (holders.rest.0 == 0 || holders.rows.len() == ROWS_MAX)
            );
        }
        assert_eq!(found[0].rows[0].1, Holding { bytes: live[0], blocks: 1 });
        assert!(found[3].rest.0 > 0);
        assert_eq!(owners.names.len(), OWNERS_MAX);
        assert!(owners.names.iter().all(|name| name.starts_with('m')), "{:?}", owners.names);
        assert_eq!((owners.of(0), owners.of(u32::MAX)), (OTHERS, OTHERS));
    }
}
